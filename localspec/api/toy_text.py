"""The byte tokenizer and the phases that the engines without weights share.

Knows UTF-8 and four tags; knows nothing of real vocabularies. One token is one byte, or one whole tag.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable

from localspec.api.types import EngineError, GenerateRequest, Phase

TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
VOCAB_SIZE = 256 + len(TAGS)

_TAG_PATTERN = re.compile("|".join(re.escape(tag) for tag in TAGS))


def encode(text: str) -> tuple[int, ...]:
    """Token ids of a text: a tag is one id from 256 up, everything else its UTF-8 bytes."""
    token_ids: list[int] = []
    end = 0
    for match in _TAG_PATTERN.finditer(text):
        token_ids.extend(text[end : match.start()].encode("utf-8", "replace"))
        token_ids.append(256 + TAGS.index(match.group()))
        end = match.end()
    token_ids.extend(text[end:].encode("utf-8", "replace"))
    return tuple(token_ids)


def decode(token_ids: Iterable[int]) -> str:
    """Text of token ids. Raises EngineError (`bad_request`) for an id outside the vocabulary."""
    decoder = Decoder()
    return "".join(decoder.feed(token_id) for token_id in token_ids) + decoder.finish()


class Decoder:
    """Token ids to text, one at a time; a character appears when its last byte does."""

    def __init__(self) -> None:
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Text that this token completes. Raises EngineError (`bad_request`) for an id outside the vocabulary."""
        if not 0 <= token_id < VOCAB_SIZE:
            raise EngineError("bad_request", f"Token id {token_id} is outside 0..{VOCAB_SIZE - 1}.")
        if token_id < 256:
            return self._bytes.decode(bytes((token_id,)))
        return self.finish() + TAGS[token_id - 256]

    def finish(self) -> str:
        """What an unfinished character at the end stands for."""
        rest = self._bytes.decode(b"", final=True)
        self._bytes.reset()
        return rest


class PhaseTracker:
    """Phase of each token: tags belong to the phase that they open or close."""

    def __init__(self, thought_is_open: bool) -> None:
        self.phase = Phase.THINKING if thought_is_open else Phase.ANSWER

    def step(self, token_id: int) -> Phase:
        """Phase of this token; later tokens follow from it."""
        tag = TAGS[token_id - 256] if token_id >= 256 else ""
        if tag == "<think>":
            self.phase = Phase.THINKING
        elif tag == "<tool_call>":
            self.phase = Phase.TOOL_CALL
        phase = self.phase
        if tag in ("</think>", "</tool_call>"):
            self.phase = Phase.ANSWER
        return phase


def render_prompt(request: GenerateRequest) -> tuple[int, ...]:
    """Token ids of the prompt in a made-up template, close enough to count and to overflow a context."""
    if request.prompt_token_ids:
        return request.prompt_token_ids
    if request.prompt is not None:
        return encode(request.prompt)
    parts = [f"[tool]{dict(tool)}\n" for tool in request.tools]
    for message in request.messages:
        calls = "".join(f"[call]{call.name}{call.arguments}" for call in message.tool_calls)
        parts.append(f"[{message.role}]{message.reasoning or ''}{message.content}{calls}\n")
    return encode("".join(parts) + "[assistant]")

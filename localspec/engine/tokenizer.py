"""Text to token ids and back, by the model's own tokenizer.json. Knows nothing of templates or requests."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from localspec.engine.token_bound import token_bound

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 16
"""Tokens in front that a decoder sees: enough that the first of what follows is not the first of a text."""
_CONTINUATION_BYTES = range(0x80, 0xC0)


class TokenMemory:
    """Remembers which token ids a text had when it was generated, so that history keeps its tokens.

    A tokenizer may split a text otherwise than the model wrote it; then the next turn would miss the cache from the
    answer on. Entries are whole texts (prompt and answer); a later prompt that begins with one takes its ids.
    Private texts are remembered like others: this lives in memory only. Any thread may ask.
    """

    def __init__(self, max_entries: int = 64) -> None:
        self._entries: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._max_entries = max_entries
        self._lock = Lock()

    def remember(self, text: str, token_ids: tuple[int, ...]) -> None:
        with self._lock:
            self._entries.pop(text, None)
            self._entries[text] = token_ids
            while len(self._entries) > self._max_entries:
                self._entries.popitem(last=False)

    def longest_prefix(self, text: str) -> tuple[str, tuple[int, ...]]:
        """The longest remembered text that `text` begins with, and its ids; empty if none."""
        with self._lock:
            best = max((known for known in self._entries if text.startswith(known)), key=len, default="")
            return best, self._entries.get(best, ())

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()


class Tokenizer:
    """Tokenizer of one model folder. Raises ValueError if tokenizer.json is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            self._fast = FastTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a missing or damaged file
            raise ValueError(f"{path} is missing or damaged ({error}); pull the model again") from error
        self.config: dict[str, Any] = _read_json(folder / "tokenizer_config.json")
        rules = _read_json(path)
        self.bound = token_bound(rules)
        self.memory = TokenMemory()
        # Byte-level decoders put the bytes of tokens behind each other; others look at what is in front.
        decoder = rules.get("decoder")
        self._decodes_alone = isinstance(decoder, dict) and decoder.get("type") == "ByteLevel"
        self._encodes_alone = self._decodes_alone and not _adds_space(rules.get("pre_tokenizer"))
        self._special_ids = {i for i, token in self._fast.get_added_tokens_decoder().items() if token.special}
        self._continuation_ids = {self._fast.token_to_id(f"<0x{byte:02X}>") for byte in _CONTINUATION_BYTES}

    @property
    def vocab_size(self) -> int:
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Id of a token by its exact text."""
        found: int | None = self._fast.token_to_id(text)
        return found

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token and the like, as templates read them."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        values = {name: self.config.get(name) for name in names}
        return {
            name: value["content"] if isinstance(value, dict) else value
            for name, value in values.items()
            if isinstance(value, (str, dict))
        }

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a text in which special tokens are recognised; no tokens are added."""
        # A batch of one: for a batch the library lets other threads run, for a single text it does not.
        return tuple(self._fast.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_keeping_history(self, text: str) -> tuple[int, ...]:
        """Like `encode`, but a beginning that was generated before keeps the ids that it had then."""
        known, ids = self.memory.longest_prefix(text)
        if not known:
            return self.encode(text)
        rest = text[len(known) :]
        rest_ids = self.encode(rest)
        if rest and not self._encodes_alone and not self._joins(ids, rest_ids, rest):
            return self.encode(text)
        return (*ids, *rest_ids)

    def decode(self, token_ids: tuple[int, ...] | list[int], skip_special: bool = True) -> str:
        """Text of ids; bytes that form no character yet come as replacement characters."""
        return str(self._fast.decode(list(token_ids), skip_special_tokens=skip_special))

    def context(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        """The last of some ids, to be decoded in front of what follows them; empty where that changes nothing.

        Behind a special token a text begins anew. Half a character in front would spoil the bytes behind it.
        """
        if self._decodes_alone:
            return ()
        tail = token_ids[-CONTEXT_TOKENS:]
        begin = max((index + 1 for index, token_id in enumerate(tail) if token_id in self._special_ids), default=0)
        while begin < len(tail) and tail[begin] in self._continuation_ids:
            begin += 1
        return tail[begin:]

    def continuation(self, before_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> str:
        """Text, special tokens too, that ids are behind others: alone, some decoders drop a space of it."""
        context = self.context(before_ids)
        text = self.decode((*context, *token_ids), skip_special=False)
        return text[len(self.decode(context, skip_special=False)) :] if context else text

    def _joins(self, ids: tuple[int, ...], rest_ids: tuple[int, ...], rest: str) -> bool:
        """Whether ids of a text that was encoded alone say the same behind others, up to where a text begins anew."""
        end = next((index for index, token_id in enumerate(rest_ids) if token_id in self._special_ids), len(rest_ids))
        seam = self.continuation(ids, rest_ids[:end])
        if end == len(rest_ids):
            return seam == rest
        return rest.startswith(seam + self.decode(rest_ids[end : end + 1], skip_special=False))


def _adds_space(rule: Any) -> bool:
    """Whether a pre-tokenizer puts a space before a text that begins with none."""
    if not isinstance(rule, dict):
        return False
    return bool(rule.get("add_prefix_space")) or any(map(_adds_space, rule.get("pretokenizers") or ()))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); pull the model again") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} does not hold an object; pull the model again")
    return value

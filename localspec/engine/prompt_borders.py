"""Where the part of a prompt ends that other conversations have too: system message and tools.

Found by rendering the template with another question, so it holds for any template; knows nothing of caches.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from localspec.api.types import EngineError, GenerateRequest, Message
from localspec.engine.template import ChatTemplate
from localspec.engine.tokenizer import Tokenizer

REMEMBERED = 16
SYSTEM_ROLES = ("system", "developer")
PROBE = "\u2045 another question"
"""Begins with a character that no question does, so that what is common ends before it."""


class SharedBeginnings:
    """For the prompts of one model. Safe for threads."""

    def __init__(self, template: ChatTemplate | None, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._known: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def tokens(self, request: GenerateRequest, text: str | None, ids: tuple[int, ...]) -> int:
        """How many of the prompt's tokens any conversation with this system message and these tools begins with; 0
        where there is neither."""
        system = [message for message in request.messages if message.role in SYSTEM_ROLES]
        if self._template is None or text is None or not (system or request.tools):
            return 0
        probe = [*system, Message("user", PROBE)]
        try:
            other = self._template.render(probe, request.tools, request.template_options, add_generation_prompt=False)
        except EngineError:
            return 0
        return _num_common(self._ids(text[: _num_common(text, other)]), ids)

    def _ids(self, text: str) -> tuple[int, ...]:
        with self._lock:
            known = self._known.get(text)
        ids = known if known is not None else self._tokenizer.encode(text)
        with self._lock:
            self._known[text] = ids
            self._known.move_to_end(text)
            if len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return ids


def _num_common(left: Sequence[object], right: Sequence[object]) -> int:
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))

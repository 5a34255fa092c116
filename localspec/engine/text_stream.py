"""Tokens to visible text, piece by piece: never half a character, never a part of a stop string.

One object per request. Knows the tokenizer and the stop strings; nothing of steps or slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.api.types import Phase, Span
from localspec.engine.tokenizer import REPLACEMENT, Tokenizer

# A token may be the middle of a character for at most this many tokens before its bytes are given up as they are.
MAX_HELD_TOKENS = 16
MAX_WINDOW_TOKENS = 16 * MAX_HELD_TOKENS


@dataclass(frozen=True)
class Piece:
    """Text that became final, the tokens that completed it, and what each character came from."""

    text: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    stop_text: str | None = None


class PhaseTracker:
    """Phase of the text from markers in it: thinking between the think markers, tool calls after theirs."""

    def __init__(
        self, thinking_open: bool, think_ids: tuple[int | None, int | None], tool_ids: tuple[int | None, int | None]
    ):
        self._phase = Phase.THINKING if thinking_open else Phase.ANSWER
        self._think_start, self._think_end = think_ids
        self._tool_start, self._tool_end = tool_ids
        self.thinking_tokens = 0

    @property
    def phase(self) -> Phase:
        return self._phase

    def see(self, token_id: int) -> Phase:
        """Phase of this token; markers belong to what they open or close."""
        if token_id == self._think_start:
            self._phase = Phase.THINKING
        elif token_id == self._tool_start:
            self._phase = Phase.TOOL_CALL
        phase = self._phase
        if phase is Phase.THINKING:
            self.thinking_tokens += 1
        if token_id in (self._think_end, self._tool_end):
            self._phase = Phase.ANSWER
        return phase


class TextStream:
    """Turns emitted tokens into pieces. `hidden_ids` (stop ids) never show as text; the prompt's ids stand before."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        hidden_ids: Sequence[int],
        phases: PhaseTracker,
        prompt_ids: tuple[int, ...] = (),
    ):
        self._tokenizer = tokenizer
        self._stops = tuple(stop for stop in stops if stop)
        self._hidden_ids = frozenset(hidden_ids)
        self._phases = phases
        self._ids = list(tokenizer.context(prompt_ids))
        self._window_start = 0
        self._window_shown = self._window_text() if self._ids else ""
        # Numbers of tokens after which every character was whole, from the last one that a window may begin with.
        self._borders: deque[int] = deque((0,))
        self._held_text = ""
        self._held_spans: list[Span] = []
        self._held_ids: list[int] = []
        self._pending_tokens = 0

    def push(self, token_ids: Sequence[int], origins: Sequence[str]) -> Piece:
        """New tokens in order. After a piece with `stop_text`, nothing more may be pushed.

        The token that completes a stop string is the last of the piece: what a run brought behind it does not count, so
        that counts and log-probabilities are the same whatever was drafted.
        """
        for token_id, origin in zip(token_ids, origins, strict=True):
            phase = self._phases.see(token_id)
            self._held_ids.append(token_id)
            if token_id in self._hidden_ids:
                continue
            text = self._complete_text(token_id)
            if text:
                self._held_text += text
                self._held_spans.append(Span(len(text), origin, phase))
                if self._stops and self._find_stop()[1] is not None:
                    break
        return self._release(final=False)

    def finish(self) -> Piece:
        """Everything that was held back, at the end of the answer."""
        if self._pending_tokens:
            rest = self._new_text(self._window_text())
            if rest:
                self._held_text += rest
                self._held_spans.append(Span(len(rest), "target", self._phases.phase))
            self._pending_tokens = 0
        return self._release(final=True)

    def _complete_text(self, token_id: int) -> str:
        """Characters that this token completed.

        The window is decoded again with each token (a decoder may look back), from a point where all was shown.
        """
        self._ids.append(token_id)
        self._pending_tokens += 1
        text = self._window_text()
        if text.endswith(REPLACEMENT) and self._pending_tokens < MAX_HELD_TOKENS:
            return ""
        new = self._new_text(text)
        self._window_shown = text
        self._pending_tokens = 0
        if not text.endswith(REPLACEMENT):
            self._borders.append(len(self._ids))
        if len(self._ids) - self._window_start > 2 * MAX_HELD_TOKENS:
            self._move_window()
        return new

    def _new_text(self, window_text: str) -> str:
        """What the pending tokens added. One bad byte may spoil a decoder's whole run of bytes, shown ones too; then
        they are decoded for themselves."""
        if window_text.startswith(self._window_shown):
            return window_text[len(self._window_shown) :]
        return self._tokenizer.decode(self._ids[-self._pending_tokens :])

    def _move_window(self) -> None:
        """Begin where a character begins: behind half of one, a decoder would not know the bytes that follow."""
        latest = len(self._ids) - MAX_HELD_TOKENS
        while len(self._borders) > 1 and self._borders[1] <= latest:
            self._borders.popleft()
        start = self._borders[0]
        if len(self._ids) - start > MAX_WINDOW_TOKENS:
            start = latest
        if start > self._window_start:
            self._window_start = start
            self._window_shown = self._window_text()

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._ids[self._window_start :])

    def _release(self, final: bool) -> Piece:
        cut, stop_text = self._find_stop()
        if stop_text is None:
            cut = len(self._held_text) if final else len(self._held_text) - self._stop_overlap()
        text = self._held_text[:cut]
        spans, self._held_spans = _split_spans(self._held_spans, cut)
        self._held_text = self._held_text[cut:]
        ids = tuple(self._held_ids)
        self._held_ids = []
        return Piece(text, ids, tuple(spans), stop_text)

    def _find_stop(self) -> tuple[int, str | None]:
        found = [(self._held_text.find(stop), stop) for stop in self._stops]
        hits = [(index, stop) for index, stop in found if index >= 0]
        return min(hits) if hits else (0, None)

    def _stop_overlap(self) -> int:
        """Length of the longest end of the held text that may become a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held_text)), longest, -1):
                if self._held_text.endswith(stop[:size]):
                    longest = size
                    break
        return longest


def _split_spans(spans: Sequence[Span], cut: int) -> tuple[list[Span], list[Span]]:
    """Spans of the first `cut` characters (neighbours of one kind joined), and the rest."""
    head: list[Span] = []
    tail: list[Span] = []
    position = 0
    for span in spans:
        taken = max(0, min(span.n_chars, cut - position))
        position += span.n_chars
        if taken:
            if head and (head[-1].origin, head[-1].phase) == (span.origin, span.phase):
                head[-1] = Span(head[-1].n_chars + taken, span.origin, span.phase)
            else:
                head.append(Span(taken, span.origin, span.phase))
        if span.n_chars > taken:
            tail.append(Span(span.n_chars - taken, span.origin, span.phase))
    return head, tail

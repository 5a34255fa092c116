"""What a text's own n-grams would draft, looked up on the host while the text is written, and whether it came true.

So the tuner knows what n-gram drafts would be worth without verifying any, and where a text repeats itself. A few
microseconds a token; the device's drafter looks the same things up in its own way. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

ORDERS = (12, 8, 5, 3, 2, 1)
"""Lengths of the n-grams that are remembered, the longest first."""
LONGEST_MATCH_TOKENS = 12
SURE_TOKENS = 8
DRAFTS_PER_MATCHED_TOKEN = 2
"""As the drafter has it: a match of n tokens allows twice as many drafts."""
PROMPT_TAIL_TOKENS = 8192
TOKENS_A_CALL = 512
"""A long prompt is read a piece at a time, so that no step waits for it."""
BORDER = -1


@dataclass(frozen=True)
class ShadowWindow:
    """A window that might have been: `run` of its drafts came true; `is_sure`: its match was long; `is_echo`: that is
    what was known when it would have been planned."""

    run: int
    is_sure: bool
    is_echo: bool


class TextShadow:
    """Follows one text."""

    def __init__(self, prediction: Sequence[int], prompt: Sequence[int], lag: int) -> None:
        """prediction: more text that drafts may come from; lag: windows between a result and the plan that knows it."""
        self._waiting: deque[int] = deque((*prediction, BORDER, *prompt[-PROMPT_TAIL_TOKENS:]))
        self._unread_prompt = len(self._waiting)
        self._tokens: list[int] = []
        self._last: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in ORDERS)
        self._lag = lag
        self._drafts: list[int] | None = None
        self._run = 0
        self._is_sure = self._was_sure = False
        self.told: list[tuple[bool, bool]] = []
        """Of each token that was followed last: the one before ended a long match, and the match said this one next."""

    @property
    def repeats(self) -> bool:
        """Whether the text ends in a long match."""
        return not self._waiting and self._match()[1] >= SURE_TOKENS

    def follow(self, came: Sequence[int], room: int) -> list[ShadowWindow]:
        """New tokens of the text; windows that they have decided. room: drafts that a window may hold."""
        self._waiting.extend(came)
        self.told = []
        found = []
        for _ in range(min(len(self._waiting), TOKENS_A_CALL)):
            token = self._waiting.popleft()
            if self._unread_prompt:
                self._unread_prompt -= 1
                self._append(token)
                continue
            if self._drafts is None:
                self._begin(room)
            place, length = self._match()
            self.told.append((length >= SURE_TOKENS, length > 0 and self._tokens[place] == token))
            window = self._see(token)
            self._append(token)
            if window is not None:
                found.append(window)
                self._begin(room)
        return found

    def _see(self, token: int) -> ShadowWindow | None:
        """The window in question stands or ends with this token."""
        assert self._drafts is not None
        if self._run < len(self._drafts) and self._drafts[self._run] == token:
            self._run += 1
            return None
        return ShadowWindow(self._run, self._is_sure, self._was_sure if self._lag else self._is_sure)

    def _begin(self, room: int) -> None:
        """A window begins behind the last token."""
        place, length = self._match()
        self._was_sure, self._is_sure = self._is_sure, length >= SURE_TOKENS
        self._run = 0
        count = min(room, DRAFTS_PER_MATCHED_TOKEN * length)
        self._drafts = []
        while len(self._drafts) < count:
            # The text ends with the match itself, so its continuation repeats.
            source = place + len(self._drafts) % max(len(self._tokens) - place, 1)
            if self._tokens[source] == BORDER:
                break
            self._drafts.append(self._tokens[source])

    def _match(self) -> tuple[int, int]:
        """Place behind the longest remembered match of the last tokens, and its length in tokens; (0, 0) for none."""
        tokens = self._tokens
        for order, last in zip(ORDERS, self._last, strict=True):
            place = last.get(tuple(tokens[-order:])) if len(tokens) >= order else None
            if place is not None:
                length = order
                while (
                    length < LONGEST_MATCH_TOKENS
                    and place > length
                    and tokens[place - 1 - length] == tokens[-1 - length] != BORDER
                ):
                    length += 1
                return place, length
        return 0, 0

    def _append(self, token: int) -> None:
        """Remember the n-grams that end before this token: it is what followed them."""
        tokens = self._tokens
        if token != BORDER:
            for order, last in zip(ORDERS, self._last, strict=True):
                if len(tokens) >= order:
                    last[tuple(tokens[-order:])] = len(tokens)
        tokens.append(token)

"""What a choice of drafter would have done with the text that was just written, window by window.

Methods that copy have runs, and where their windows begin depends on who drafted before: shares and means of windows
that were planned by somebody else mislead. So the last few hundred tokens are gone through again for each choice:
copies are known to be right or wrong at every token, other drafters advance by what they bring on average. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from localspec.core.records import MAX_ROWS
from localspec.engine.knowledge import COPYING
from localspec.engine.step_costs import OFF, Arm

KEPT_TOKENS = 400
ENOUGH_TOKENS = 96
"""Fewer tell too little."""
ENOUGH_OF_A_KIND = 24
AFTER_CHANGE_TOKENS = 160
"""Kept when the work has changed: those that told of it."""


@dataclass
class RecentText:
    """sure: behind this token the text's own n-grams have a long match; runs are read off `right`: their next token is
    the text's next. Of several sequences the tokens lie in the order in which they landed."""

    sure: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT_TOKENS))
    right: deque[bool] = field(default_factory=lambda: deque(maxlen=KEPT_TOKENS))

    def see(self, sure: bool, right: bool) -> None:
        self.sure.append(sure)
        self.right.append(right)

    def is_enough(self, echo: bool | None) -> bool:
        """Whether it tells of choices for text that repeats itself, for other text, or (None) for both alike."""
        own = len(self.sure) if echo is None else sum(1 for each in self.sure if each == echo)
        return len(self.right) >= ENOUGH_TOKENS and own >= ENOUGH_OF_A_KIND

    def forget_old(self) -> None:
        """The work has changed."""
        while len(self.right) > AFTER_CHANGE_TOKENS:
            self.sure.popleft()
            self.right.popleft()


@dataclass(frozen=True)
class Policy:
    """A choice for text as it comes and one for text that repeats itself. cost_ms: of a step; tokens: that the part
    with weights brings to a window of a depth; late: a window is planned before the one before it is known."""

    usual: Arm
    echo: Arm
    cost_ms: Callable[[Arm], float]
    tokens: Callable[[str, int], float]
    late: bool


def replayed_rate(text: RecentText, policy: Policy) -> float:
    """Tokens per millisecond over the text."""
    sure, right = list(text.sure), list(text.right)
    runs = [0] * (len(right) + 1)
    for place in range(len(right) - 1, -1, -1):
        runs[place] = runs[place + 1] + 1 if right[place] else 0
    moves = {arm: _Move.of(arm, policy) for arm in (policy.usual, policy.echo)}
    at, ms, owed, known = 0, 0.0, 0.0, sure[0]
    unread = last = 0
    is_ready = True
    while at < len(right):
        move = moves[policy.echo if known else policy.usual]
        known = sure[at]
        # A drafter with weights has at most one pass of rows behind it when it speaks.
        if move.reads or unread - last >= MAX_ROWS:
            is_ready, unread = unread <= MAX_ROWS, max(0, unread - MAX_ROWS)
        if move.copies and (sure[at] or move.copies_always):
            last = 1 + min(runs[at], move.depth)
        elif move.reads and not is_ready:
            last = 1
        else:
            owed += move.others
            last = int(owed)
            owed -= last
        at += last
        unread += last
        ms += move.ms
        if not policy.late:
            known = sure[min(at, len(sure) - 1)]
    return len(right) / ms


@dataclass(frozen=True)
class _Move:
    """One window of a choice. reads: a drafter with weights takes part; others: tokens where nothing is copied."""

    copies: bool
    copies_always: bool
    reads: bool
    depth: int
    others: float
    ms: float

    @classmethod
    def of(cls, arm: Arm, policy: Policy) -> _Move:
        method, depth = arm
        parts = method.split("+")
        copies = parts[0] == "ngram"
        others = parts[1] if len(parts) > 1 and copies else method
        brought = 1.0 if not depth or (copies and len(parts) == 1) else policy.tokens(others, depth)
        alone = copies and len(parts) == 1
        reads = depth > 0 and not alone
        return cls(copies and depth > 0, alone, reads, depth, max(brought, 1.0), policy.cost_ms(arm))


def in_question(rates: Mapping[Arm, float], current: Arm) -> list[Arm]:
    """Plain, what is in use, every depth of a method that copies, and of the others the best."""
    found = {arm for arm in rates if arm[0].split("+")[0] in COPYING} | {arm for arm in (OFF, current) if arm in rates}
    for method in {method for method, _ in rates}:
        found.add(max((arm for arm in rates if arm[0] == method), key=lambda arm: rates[arm]))
    return sorted(found)

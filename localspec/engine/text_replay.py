"""What a choice of drafter would have done with the text that was just written, window by window.

Methods that copy have runs, and where their windows begin depends on who drafted before: shares and means of windows
that were planned by somebody else mislead. So the last tokens are gone through again for each choice: copies are known
to be right or wrong at every token without drafting them, other drafters advance by what they bring on average. Each
choice goes on where it stopped, so a token is gone through once. Torch-free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from localspec.core.records import MAX_ROWS
from localspec.engine.acceptance import Acceptance
from localspec.engine.knowledge import COPYING
from localspec.engine.step_costs import OFF, Arm

BLOCK_TOKENS = 16
"""Text is gone through in pieces of one sequence, and forgotten in pieces."""
KEPT_BLOCKS = 100
"""Runs of copies are long: over fewer, what is best of choices that are nearly equal is chance."""
ENOUGH_TOKENS = 96
"""Fewer tell too little."""
ENOUGH_OF_A_KIND = 24
AFTER_CHANGE_BLOCKS = 1
"""Kept when the work has changed: those that told of it."""
LOOKAHEAD_TOKENS = MAX_ROWS - 1
MAX_TALLIES = 64
MAX_SEQUENCES = 16
KEPT_BEHIND_COPIES = 2


@dataclass(frozen=True, order=True)
class Policy:
    """A choice for text as it comes and one for text that repeats itself."""

    usual: Arm
    echo: Arm


@dataclass(frozen=True)
class _Block:
    """A piece of one text. sure, runs: by token; see `RecentText.see`."""

    sequence_id: int
    sure: tuple[bool, ...]
    runs: tuple[int, ...]
    """Copies right from here on, counted to LOOKAHEAD_TOKENS."""


@dataclass
class _Waiting:
    """Tokens of a sequence that are no block yet; was_right: of the token before the last one."""

    sure: list[bool] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    was_right: bool = False


@dataclass
class RecentText:
    """late: a window is planned before the one before it is known."""

    late: bool = False
    blocks: deque[_Block] = field(default_factory=deque)
    first: int = 0
    """Number of the oldest block."""
    num_sure: int = 0
    """Tokens of the blocks behind which a match is long."""
    _waiting: dict[int, _Waiting] = field(default_factory=dict)
    _tallies: dict[Policy, _Tally] = field(default_factory=dict)
    _enter: Acceptance = field(default_factory=Acceptance)
    _stay: Acceptance = field(default_factory=Acceptance)

    def see(self, sequence_id: int, sure: bool, right: bool) -> bool:
        """A token of a sequence. sure: behind the one before it the text's own n-grams have a long match; right: their
        next token is the text's next. Tells whether the work has changed: runs begin or end more often or less."""
        waiting = self._waiting.get(sequence_id)
        if waiting is None:
            if len(self._waiting) >= MAX_SEQUENCES:
                self._waiting.pop(next(iter(self._waiting)))
            waiting = self._waiting[sequence_id] = _Waiting()
        changed = (self._stay if waiting.was_right else self._enter).see(1, int(right))
        waiting.was_right = right
        waiting.sure.append(sure)
        waiting.right.append(right)
        ahead = waiting.right[BLOCK_TOKENS:]
        if len(waiting.sure) >= BLOCK_TOKENS and (len(ahead) >= LOOKAHEAD_TOKENS or not all(ahead) or not right):
            self._close(sequence_id, waiting)
        return changed

    def _close(self, sequence_id: int, waiting: _Waiting) -> None:
        runs, run = [], 0
        for right in reversed(waiting.right):
            run = min(run + 1, LOOKAHEAD_TOKENS) if right else 0
            runs.append(run)
        runs.reverse()
        block = _Block(sequence_id, tuple(waiting.sure[:BLOCK_TOKENS]), tuple(runs[:BLOCK_TOKENS]))
        del waiting.sure[:BLOCK_TOKENS], waiting.right[:BLOCK_TOKENS]
        self.blocks.append(block)
        self.num_sure += sum(block.sure)
        self._keep(KEPT_BLOCKS)

    def _keep(self, count: int) -> None:
        while len(self.blocks) > count:
            self.num_sure -= sum(self.blocks.popleft().sure)
            self.first += 1

    @property
    def num_tokens(self) -> int:
        return BLOCK_TOKENS * len(self.blocks)

    def is_enough(self, echo: bool | None) -> bool:
        """Whether it tells of choices for text that repeats itself, for other text, or (None) for both alike."""
        own = self.num_tokens if echo is None else self.num_sure if echo else self.num_tokens - self.num_sure
        return self.num_tokens >= ENOUGH_TOKENS and own >= ENOUGH_OF_A_KIND

    def forget_old(self) -> None:
        """The work has changed."""
        self._keep(AFTER_CHANGE_BLOCKS * max(len(self._waiting), 1))

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended."""
        self._waiting.pop(sequence_id, None)
        for tally in self._tallies.values():
            tally.cursors.pop(sequence_id, None)

    def rates(
        self, policies: Iterable[Policy], cost_ms: Mapping[Arm, float], tokens: Callable[[str, int], float]
    ) -> dict[Policy, float]:
        """Tokens per millisecond over the text. cost_ms: of a step; tokens: that a part with weights brings to a window
        of a depth, as it is known now. Where windows of the others began keeps to what was known then."""
        moves: dict[Arm, _Move] = {}
        found = {}
        for policy in policies:
            for arm in (policy.usual, policy.echo):
                if arm not in moves:
                    moves[arm] = _Move.of(arm, tokens)
            usual, echo = moves[policy.usual], moves[policy.echo]
            if self._is_even(policy, usual):
                found[policy] = usual.others / cost_ms[policy.usual]
            else:
                found[policy] = self._rate(policy, cost_ms, (usual, echo))
        return found

    def _is_even(self, policy: Policy, usual: _Move) -> bool:
        """Whether a choice copies nothing in this text, and is the same all over it: then nothing is gone through."""
        if not self.num_sure:
            return not usual.copies_always
        return policy.usual == policy.echo and not usual.copies

    def _rate(self, policy: Policy, cost_ms: Mapping[Arm, float], moves: tuple[_Move, _Move]) -> float:
        tally = self._tallies.pop(policy, None)
        if tally is None or tally.next < self.first:
            tally = _Tally(self.first)
            if len(self._tallies) >= MAX_TALLIES:
                self._tallies.pop(next(iter(self._tallies)))
        self._tallies[policy] = tally
        tally.go_on(self, moves)
        windows, others = tally.sums[:2], tally.sums[2:]
        ms = 0.0
        for arm, move, count, brought in zip((policy.usual, policy.echo), moves, windows, others, strict=True):
            ms += cost_ms[arm] * (count + brought / move.others)
        return self.num_tokens / max(ms, 1e-9)


@dataclass(frozen=True)
class _Move:
    """One window of a choice. reads: a drafter with weights takes part; others: tokens where nothing is copied."""

    copies: bool
    copies_always: bool
    reads: bool
    depth: int
    others: float

    @classmethod
    def of(cls, arm: Arm, tokens: Callable[[str, int], float]) -> _Move:
        method, depth = arm
        parts = method.split("+")
        copies = parts[0] == "ngram"
        alone = copies and len(parts) == 1
        others = parts[1] if len(parts) > 1 and copies else method
        brought = 1.0 if not depth or alone else tokens(others, depth)
        return cls(copies and depth > 0, alone, depth > 0 and not alone, depth, max(brought, 1.0))


@dataclass
class _Cursor:
    """Where a choice stands in one text. at: in the block that comes; owed: fractions of tokens; unread: tokens that
    the drafter with weights has not run; last: of the window before."""

    at: int = 0
    owed: float = 0.0
    known: bool = False
    unread: int = 0
    last: int = 0
    is_ready: bool = True

    def walk(self, block: _Block, moves: tuple[_Move, _Move], late: bool) -> tuple[int, int, int, int]:
        """Go through a block. Windows that the choice for usual text and that for echo had in it, those without what
        others brought, and the tokens that they brought."""
        count, brought = [0, 0], [0, 0]
        at, size = self.at, len(block.sure)
        while at < size:
            sure = block.sure[at]
            is_echo = self.known if late else sure
            self.known = sure
            move = moves[is_echo]
            # A drafter with weights has at most one pass of rows behind it when it speaks.
            if move.reads or self.unread - self.last >= MAX_ROWS:
                self.is_ready, self.unread = self.unread <= MAX_ROWS, max(0, self.unread - MAX_ROWS)
            if move.copies and (sure or move.copies_always):
                self.last = 1 + min(block.runs[at], move.depth)
                count[is_echo] += 1
            elif move.reads and not self.is_ready:
                self.last = 1
                count[is_echo] += 1
            else:
                self.owed += move.others
                self.last = int(self.owed)
                self.owed -= self.last
                brought[is_echo] += self.last
            at += self.last
            self.unread += self.last
        self.at = at - size
        return count[0], count[1], brought[0], brought[1]


@dataclass
class _Tally:
    """What `_Cursor.walk` counted for one choice, by block and in all. next: number of the block that comes."""

    next: int
    cursors: dict[int, _Cursor] = field(default_factory=dict)
    by_block: deque[tuple[int, int, int, int]] = field(default_factory=deque)
    sums: list[int] = field(default_factory=lambda: [0, 0, 0, 0])

    def go_on(self, text: RecentText, moves: tuple[_Move, _Move]) -> None:
        while self.next - len(self.by_block) < text.first:
            self._add(self.by_block.popleft(), -1)
        for place in range(self.next - text.first, len(text.blocks)):
            block = text.blocks[place]
            cursor = self.cursors.setdefault(block.sequence_id, _Cursor())
            self.by_block.append(cursor.walk(block, moves, text.late))
            self._add(self.by_block[-1], 1)
        self.next = text.first + len(text.blocks)

    def _add(self, counts: tuple[int, int, int, int], sign: int) -> None:
        self.sums = [total + sign * count for total, count in zip(self.sums, counts, strict=True)]


def in_question(rates: Mapping[Arm, float], current: Arm, most: int | None = None) -> list[Arm]:
    """Plain, what is in use, every depth of a method that copies, and of the others the best. Behind copies only those
    two of the others that do best alone: each choice costs a walk over the text. most: beside plain and what is in use,
    those of the best rates; None: all."""
    ranked = sorted(rates, key=rates.__getitem__, reverse=True)
    best: dict[str, Arm] = {}
    for arm in ranked:
        best.setdefault(arm[0], arm)
    alone = [arm for arm in best.values() if arm[1] and "+" not in arm[0] and arm[0] not in COPYING]
    behind = COPYING | {method for method, _ in alone[:KEPT_BEHIND_COPIES]}
    found = set(alone)
    for arm in ranked:
        first, _, second = arm[0].partition("+")
        if first in COPYING and (not second or second in behind):
            found.add(arm)
    kept = [arm for arm in ranked if arm in found][:most]
    return sorted({arm for arm in (OFF, current) if arm in rates} | set(kept))

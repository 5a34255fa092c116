"""How much a drafter's own confidence is worth, and how many drafts of a step are worth verifying. Torch-free.

Acceptance of a draft at position k is estimated as sigmoid(w * logit(confidence) + b_k), learnt online from what was
accepted: accepted drafts and the first refused one teach, those behind it say nothing. The product up to a position is
the chance that it stands. Of b drafts in all, the b likeliest are verified: products never rise along a window, so
those are beginnings of windows whatever b is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from localspec.core.records import GRAPH_ROWS, MAX_ROWS

PRIOR_WEIGHT = 8.0
"""Observations that the identity (w = 1, b = 0) stands for."""
MOST_CURVATURE = 500.0
"""The memory of a coordinate: some 2,500 drafts, after which an estimate still follows the work."""
LOGIT_LIMIT = 6.0
RETAINED = 0.8
"""Of the smoothed counters, each step."""
SURE = 0.995
KNOWN_STEPS = 8
"""Before so many every row is used."""
BUDGET_MARGIN = 0.015
"""A number of rows that is so little better is not worth another captured step."""


@dataclass
class Calibration:
    """Of one method. `slope` and `offsets` [MAX_ROWS - 1] are moved by Newton steps on their own coordinate."""

    slope: float = 1.0
    offsets: list[float] = field(default_factory=lambda: [0.0] * (MAX_ROWS - 1))
    _curvature: float = PRIOR_WEIGHT
    _curvatures: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT / 4] * (MAX_ROWS - 1))
    seen: int = 0

    def see(self, confidence: Sequence[float], accepted: int) -> None:
        """Drafts with these confidences were verified, and the first `accepted` stood."""
        for position, value in enumerate(confidence[: accepted + 1]):
            x = logit(value)
            chance = self.chance(value, position)
            error, curvature = chance - float(position < accepted), max(chance * (1.0 - chance), 0.01)
            self._curvature = min(self._curvature + curvature * x * x, MOST_CURVATURE)
            self._curvatures[position] = min(self._curvatures[position] + curvature, MOST_CURVATURE)
            self.slope -= error * x / self._curvature
            self.offsets[position] -= error / self._curvatures[position]
            self.seen += 1
        self.slope = max(self.slope, 0.0)

    def chance(self, confidence: float, position: int) -> float:
        """That the draft at this position is accepted if those before it were."""
        return 1.0 / (1.0 + math.exp(-self.slope * logit(confidence) - self.offsets[position]))

    def survivals(self, confidence: Sequence[float]) -> list[float]:
        """Of each draft of a window: the chance that it stands."""
        found, survival = [], 1.0
        for position, value in enumerate(confidence):
            survival *= self.chance(value, position)
            found.append(survival)
        return found


@dataclass
class ExpectedTokens:
    """Smoothed over steps: tokens that the b likeliest drafts of a step would add, for b = 0 .. MAX_ROWS - 1."""

    added: list[float] = field(default_factory=lambda: [0.0] * MAX_ROWS)
    steps: int = 0

    def see(self, windows: Sequence[Sequence[float]]) -> None:
        """The survivals of all windows of a step."""
        told = added_tokens(windows)
        retained = min(RETAINED, self.steps / (self.steps + 1))
        self.added = [retained * old + (1.0 - retained) * new for old, new in zip(self.added, told, strict=True)]
        self.steps += 1


@dataclass
class RowBudget:
    """How many rows the next step gets, where that must be settled before its drafts are known.

    verify_ms: by rows, empty until something was measured; draft_ms: of the step that is planned; by_windows: what the
    likeliest drafts were worth lately, by number of sequences.
    """

    verify_ms: Sequence[float] = ()
    draft_ms: float = 0.0
    by_windows: dict[int, ExpectedTokens] = field(default_factory=dict)
    _last: dict[int, int] = field(default_factory=dict)

    def see(self, windows: Sequence[Sequence[float]]) -> None:
        """The survivals of the drafts that all windows of a step offered."""
        self.by_windows.setdefault(len(windows), ExpectedTokens()).see(windows)

    def rows(self, num_windows: int) -> int:
        """A number that steps are captured for: where the rate is greatest, the last one while it is nearly as good."""
        known = self.by_windows.get(num_windows)
        if known is None or known.steps < KNOWN_STEPS or not self.verify_ms:
            return MAX_ROWS
        sizes = [rows for rows in GRAPH_ROWS if rows > num_windows]
        rates = {
            rows: (num_windows + known.added[rows - num_windows]) / (self.draft_ms + self.verify_ms[rows])
            for rows in sizes
        }
        best = max(sizes, key=lambda rows: rates[rows])
        last = self._last.get(num_windows, best)
        if rates[best] < rates[last] * (1.0 + BUDGET_MARGIN):
            best = last
        self._last[num_windows] = best
        return best


def added_tokens(windows: Sequence[Sequence[float]]) -> list[float]:
    """[MAX_ROWS]: the sum of the b largest survivals."""
    ranked = sorted((value for window in windows for value in window), reverse=True)[: MAX_ROWS - 1]
    sums = [0.0]
    for value in ranked:
        sums.append(sums[-1] + value)
    return sums + [sums[-1]] * (MAX_ROWS - len(sums))


def best_budget(added: Sequence[float], num_windows: int, verify_ms: Sequence[float], draft_ms: float) -> int:
    """How many drafts to verify in all: where (windows + added tokens) / milliseconds is greatest. The cost is a
    staircase, so every number is looked at; of equals the smallest.

    added: [MAX_ROWS]; verify_ms: [MAX_ROWS + 1] by rows.
    """
    room = MAX_ROWS - num_windows
    rates = [(num_windows + added[drafts]) / (draft_ms + verify_ms[num_windows + drafts]) for drafts in range(room + 1)]
    return max(range(room + 1), key=lambda drafts: rates[drafts])


def logit(confidence: float) -> float:
    """Of a probability, within limits."""
    value = min(max(confidence, 1.0 - SURE), SURE)
    return min(max(math.log(value / (1.0 - value)), -LOGIT_LIMIT), LOGIT_LIMIT)

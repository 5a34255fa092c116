"""What a step costs on this machine: milliseconds to verify so many rows, and to draft with a method to a depth.

Measured while answers are written; what was not measured is told from neighbours. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from localspec.core.records import GRAPH_ROWS, MAX_ROWS

SMOOTHING = 0.05
OUTLIER = 3.0
"""A step this many times as long as its like (a first run, another program) counts as so long at most."""
NOISE = 0.03
"""A mean that moves by a smaller share of itself tells nothing new."""
SETTLED_COUNT = 2
LEAST_MS = 1e-3
"""No time counts as less: a clock hardly tells it from none, and to a mean of 0 every time would be an outlier."""
ROWS_OF_GRAPHS = tuple(next((size for size in GRAPH_ROWS if size >= rows), MAX_ROWS) for rows in range(MAX_ROWS + 1))
Arm = tuple[str, int]
OFF: Arm = ("off", 0)


@dataclass
class Mean:
    """A smoothed value; the first ones weigh alike."""

    value: float = 0.0
    count: int = 0
    seen_at: int | None = None
    """Number of the engine's step that was measured last, in this run."""
    told: float = 0.0
    """The value when `see` last said that it had moved."""

    def see(self, value_ms: float, step: int) -> bool:
        """A finite time, of which some may be outliers. Tells whether the mean has moved by more than noise."""
        value_ms = max(value_ms, LEAST_MS)
        if self.count > 1:
            value_ms = min(value_ms, OUTLIER * self.value)
        elif self.count == 1:
            # The first time may hold a compilation.
            self.value = min(self.value, OUTLIER * value_ms)
        self.average(value_ms, step)
        # The second time says that the first was no compilation.
        if self.count > SETTLED_COUNT and abs(self.value - self.told) <= NOISE * self.told:
            return False
        self.told = self.value
        return True

    def average(self, value: float, step: int) -> None:
        """An amount that may be 0, and has no outliers."""
        self.count += 1
        self.seen_at = step
        self.value += max(SMOOTHING, 1.0 / self.count) * (value - self.value)


@dataclass
class StepCosts:
    """Costs in one bucket of context lengths. `verify` by rows of the whole step; `draft` by method and depth; `wait`
    by rows: what the device waits for the host before a step."""

    verify: dict[int, Mean] = field(default_factory=dict)
    draft: dict[Arm, Mean] = field(default_factory=dict)
    wait: dict[int, Mean] = field(default_factory=dict)

    def verify_curve(self) -> list[float]:
        """Milliseconds to verify 0, 1, ... MAX_ROWS rows: on the line between the nearest measured ones, never falling;
        empty if nothing was measured. Beyond the widest it stays: a hope that a few steps at that width settle, where
        the fear of it would never be."""
        known = _rising(_settled(self.verify))
        if not known:
            return []
        return _line([(0, known[0][1]), *known], MAX_ROWS, flat_end=True)

    def wait_ms(self, rows: int) -> float:
        """Before a step of so many rows, or as many as were measured; 0 where none were."""
        return self.wait[min(self.wait, key=lambda known: abs(known - rows))].value if self.wait else 0.0

    def draft_curve(self, method: str) -> list[float]:
        """Milliseconds to draft to depth 0, 1, ... MAX_ROWS - 1; empty if this method was never measured."""
        known = _rising(_settled({depth: mean for (name, depth), mean in self.draft.items() if name == method}))
        return _line([(0, 0.0), *known], MAX_ROWS - 1, flat_end=False) if known else []


def graph_rows(rows: int) -> int:
    """The rows that a captured step has for so many."""
    return ROWS_OF_GRAPHS[min(rows, MAX_ROWS)]


def _settled(means: Mapping[int, Mean]) -> dict[int, float]:
    """Without those that ran only once, if any ran more often: the first time may hold a compilation or a capture."""
    often = {key: mean.value for key, mean in means.items() if mean.count > 1}
    return often or {key: mean.value for key, mean in means.items()}


def _rising(known: dict[int, float]) -> list[tuple[int, float]]:
    """Pairs in order, each value at least the mean of what it would undercut (pool adjacent violators)."""
    blocks: list[tuple[float, list[int]]] = []
    for key in sorted(known):
        value, keys = known[key], [key]
        while blocks and blocks[-1][0] > value:
            before, earlier = blocks.pop()
            value = (before * len(earlier) + value * len(keys)) / (len(earlier) + len(keys))
            keys = earlier + keys
        blocks.append((value, keys))
    return [(key, value) for value, keys in blocks for key in keys]


def _line(known: list[tuple[int, float]], last: int, flat_end: bool) -> list[float]:
    """Values at 0 .. last on the lines between known places, the first of which is 0."""
    values: list[float] = []
    for (begin, low), (end, high) in pairwise(known):
        slope = (high - low) / (end - begin)
        values += [low + slope * (place - begin) for place in range(begin, end)]
    slope = 0.0 if flat_end else slope
    end, high = known[-1]
    return [*values, *(high + slope * (place - end) for place in range(end, last + 1))]

"""Rows that drafters with caches of their own have not run, counted on the host, and when they are run.

While another method drafts such rows wait. They are run before a drafter would lose them, and before a sequence leaves
its slot, so that its next turn finds whole what it takes from the cache. Counts are upper bounds: what has landed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from localspec.core.records import MAX_ROWS, MAX_SLOTS
from localspec.drafters import Drafter, Waiter

MAX_LAST_PASSES = 16
"""Before a sequence leaves its slot; a drafter that has more unread by then keeps it so."""


@dataclass
class UnreadRows:
    """By drafter and slot. `waiters`: those that have any."""

    waiters: Mapping[str, Waiter]
    rows: dict[str, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, drafters: Mapping[str, Drafter]) -> UnreadRows:
        waiters = {name: each for name, each in drafters.items() if isinstance(each, Waiter)}
        return cls(waiters, {name: [0] * MAX_SLOTS for name in waiters})

    def admit(self, slot: int) -> None:
        """The slot has a new text."""
        for rows in self.rows.values():
            rows[slot] = 0

    def landed(self, slot: int, num_tokens: int) -> None:
        """A step of the slot brought so many tokens."""
        for rows in self.rows.values():
            rows[slot] += num_tokens

    def ran(self, name: str, slots: Sequence[int], num_rows: int) -> None:
        """A pass of this drafter took the oldest rows of these slots, shared as the drafters share them; num_rows: at
        most."""
        rows = self.rows.get(name)
        if rows is None:
            return
        cap = max(cap for cap in range(num_rows + 1) if sum(min(rows[slot], cap) for slot in slots) <= num_rows)
        for slot in slots:
            rows[slot] -= min(rows[slot], cap)

    def due(self) -> list[str]:
        """Drafters that would lose rows before long: a whole pass waits."""
        return [name for name, rows in self.rows.items() if self.waiters[name].loses_rows and sum(rows) >= MAX_ROWS]

    def last_passes(self, slot: int) -> list[str]:
        """Drafters by name, as often as they have to run before the slot is left."""
        passes = {name: min(-(-rows[slot] // MAX_ROWS), MAX_LAST_PASSES) for name, rows in self.rows.items()}
        return [name for name, count in passes.items() for _ in range(count)]

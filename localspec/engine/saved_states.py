"""States of running sequences: taken on the way, kept by the prefix tree, found again when the sequence ends.

Rooms for them are few (`CachePool.room`): who gives one up first is decided here. On the decode thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

from localspec.cache.pool import StateSnapshot
from localspec.runner.runner import Runner
from localspec.scheduler.scheduler import Scheduler
from localspec.scheduler.sequence import Sequence


class SavedStates:
    """What was taken of each sequence so far."""

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._taken: dict[int, list[tuple[int, Callable[[], StateSnapshot | None]]]] = {}
        self._held: list[tuple[int, StateSnapshot]] = []
        """Of a sequence that outgrew the device, which the tree does not hold, by its id; oldest first."""

    def save(self, sequence: Sequence) -> StateSnapshot | None:
        """The state of a sequence now; None if nobody gives room up, or if its chat was forgotten."""
        if sequence.forgotten:
            return None
        return self._runner.save_states(sequence.slot, self._give_up)

    def remember(self, sequence: Sequence, ids: tuple[int, ...]) -> None:
        """Take the state after `ids`, which are in the tree as far as it can hold them."""
        snapshot = self.save(sequence)
        if snapshot is None:
            return
        self._scheduler.prefix.add_snapshot(ids, snapshot, sequence.request.cache_salt)
        if sequence.outgrown:
            self._held.append((sequence.id, snapshot))
        self._taken.setdefault(sequence.id, []).append((len(ids), weakref.ref(snapshot)))

    def pop(self, sequence: Sequence) -> list[tuple[int, StateSnapshot]]:
        """Those that are still there, by number of tokens; they are forgotten here."""
        taken = self._taken.pop(sequence.id, [])
        found = [(tokens, state) for tokens, kept in taken if (state := kept()) is not None]
        self._held = [each for each in self._held if each[0] != sequence.id]
        return found

    def _give_up(self) -> bool:
        """What the tree keeps, then the last sequence that outgrew the device, then the oldest of one that runs."""
        if self._scheduler.prefix.give_up_snapshot() or self._scheduler.give_up_parked():
            return True
        if not self._held:
            return False
        del self._held[0]
        return True

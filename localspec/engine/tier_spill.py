"""From pages to disk, behind the decode thread's back: copies a finished turn segment by segment and writes it.

Runs on a thread of its own. The decode thread only holds four pages at a time while they are copied; a page that was
evicted before its turn came is not written, and the chain ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localspec.cache.pool import StateSnapshot
from localspec.cache.spill import SpillStore
from localspec.cache.spill_keys import Place
from localspec.cache.spill_write import TurnWriter
from localspec.core.records import PAGE_TOKENS, SEGMENT_TOKENS
from localspec.engine.tier_bytes import BlockBytes
from localspec.engine.tier_restore import Call
from localspec.scheduler.scheduler import Scheduler


@dataclass(eq=False)
class Turn:
    """A finished turn: its tokens in the cache, and the states taken on the way by position."""

    token_ids: tuple[int, ...]
    states: Sequence[tuple[int, StateSnapshot]] = ()
    salt: str = ""
    chat_id: str | None = None
    since: Any = None
    """The device's mark after the states were taken."""
    dropped: bool = False
    """Set when the chat was forgotten meanwhile."""


class Spiller:
    """Writes one turn at a time."""

    def __init__(self, store: SpillStore, copies: BlockBytes, scheduler: Scheduler, call: Call) -> None:
        self._store = store
        self._copies = copies
        self._scheduler = scheduler
        self._call = call
        self._segment_buffer: Tensor | None = None
        self._state_buffer: Tensor | None = None

    def spill(self, turn: Turn, hurry: Callable[[], bool]) -> int:
        """Write what the tier lacks; returns bytes. Stops at the next block once `hurry` says so."""
        if turn.dropped or not self._store.may_write:
            return 0
        writer = TurnWriter(self._store, turn.token_ids, turn.salt, turn.chat_id)
        for place in writer.missing:
            payload = None if turn.dropped or hurry() else self._copied(turn, place)
            if payload is None or not writer.add_segment(place, [payload.numpy().data]):
                break
        for position, snapshot in turn.states:
            if turn.dropped or hurry() or not self._store.may_write:
                break
            if writer.wants_state(position):
                writer.add_state(position, [self._copied_state(snapshot, turn.since).numpy().data])
        writer.finish()
        return writer.written_bytes

    def _copied(self, turn: Turn, place: Place) -> Tensor | None:
        """The bytes of a segment, or None when its pages are not in the tree any more."""
        held: list[Any] = []
        self._call(lambda: held.append(self._hold(turn, place))).result()
        pages, since = held[0]
        if not pages:
            return None
        if self._segment_buffer is None:
            self._segment_buffer = self._copies.host_memory(SEGMENT_TOKENS * self._copies.token_bytes)
        target = self._segment_buffer[: place.num_tokens * self._copies.token_bytes]
        try:
            self._copies.save_pages(pages, place.num_tokens, target, since)
        finally:
            self._call(lambda: self._scheduler.pool.release(pages)).result()
        return target

    def _hold(self, turn: Turn, place: Place) -> tuple[list[int], Any]:
        """Decode thread: keep the pages of a segment from being given to others."""
        match = self._scheduler.prefix.match(turn.token_ids[: place.end], False, turn.salt)
        if match.total_tokens != place.end:
            return [], None
        pages = [*match.pages, *([match.partial_page] if match.partial_page is not None else [])]
        pages = pages[place.begin // PAGE_TOKENS :]
        self._scheduler.pool.retain(pages)
        return pages, self._copies.moment()

    def _copied_state(self, snapshot: StateSnapshot, since: Any) -> Tensor:
        if self._state_buffer is None:
            self._state_buffer = self._copies.host_memory(self._copies.state_bytes)
        self._copies.save_state(snapshot, self._state_buffer, since)
        return self._state_buffer

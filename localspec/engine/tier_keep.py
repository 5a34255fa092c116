"""From pages to host memory, as soon as a turn ends: after that the pages and states may be given to others.

Runs on a thread of its own. What is written to disk is written from these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from localspec.cache.host_pool import HostPool
from localspec.cache.pool import StateSnapshot
from localspec.cache.spill_index import SEGMENT, STATE
from localspec.cache.spill_keys import Place, id_bytes, root_key, segment_places, state_place
from localspec.core.records import PAGE_TOKENS, SEGMENT_TOKENS
from localspec.engine.tier_bytes import BlockBytes
from localspec.engine.tier_memory import HostMemory
from localspec.engine.tier_restore import Call
from localspec.scheduler.scheduler import Scheduler

NEWEST_STATES = 2
"""States kept of a chain beside its first, which is the one that other conversations share."""


@dataclass(eq=False)
class Turn:
    """A finished turn: its tokens in the cache, and the states taken on the way by position."""

    token_ids: tuple[int, ...]
    states: Sequence[tuple[int, StateSnapshot | None]] = ()
    """None once host memory has it."""
    salt: str = ""
    chat_id: str | None = None
    private: bool = False
    """Stays in memory."""
    since: Any = None
    """The device's mark after the states were taken."""
    dropped: bool = False
    """Set when the chat was forgotten meanwhile."""


class PageCopier:
    """Copies segments and states of a turn from the device, behind the decode thread's back.

    The decode thread only holds four pages at a time while they are copied; pages that were evicted before their turn
    came are not there any more.
    """

    def __init__(self, copies: BlockBytes, scheduler: Scheduler, call: Call) -> None:
        self.copies = copies
        self._scheduler = scheduler
        self._call = call
        self._segment_ring: Tensor | None = None
        self._state_ring: Tensor | None = None

    def segment(self, turn: Turn, place: Place, target: Tensor | None = None) -> Tensor | None:
        """The bytes of a segment in `target` or a buffer of our own; None when its pages are not in the tree."""
        held: list[Any] = []
        self._call(lambda: held.append(self._hold(turn, place))).result()
        pages, since = held[0]
        if not pages:
            return None
        try:
            if target is None:
                target = self.segment_ring()[: place.num_tokens * self.copies.token_bytes]
            self.copies.save_pages(pages, place.num_tokens, target, since)
        finally:
            self._call(lambda: self._scheduler.pool.release(pages)).result()
        return target

    def state(self, snapshot: StateSnapshot, since: Any, target: Tensor | None = None) -> Tensor:
        """The bytes of a snapshot in `target` or a buffer of our own."""
        if target is None:
            target = self.state_ring()
        self.copies.save_state(snapshot, target, since)
        return target

    def segment_ring(self) -> Tensor:
        """A pinned buffer for one segment."""
        if self._segment_ring is None:
            self._segment_ring = self.copies.host_memory(SEGMENT_TOKENS * self.copies.token_bytes)
        return self._segment_ring

    def state_ring(self) -> Tensor:
        """A pinned buffer for one state."""
        if self._state_ring is None:
            self._state_ring = self.copies.host_memory(self.copies.state_bytes)
        return self._state_ring

    def _hold(self, turn: Turn, place: Place) -> tuple[list[int], Any]:
        """Decode thread: keep the pages of a segment from being given to others."""
        match = self._scheduler.prefix.match(turn.token_ids[: place.end], False, turn.salt)
        if match.total_tokens != place.end:
            return [], None
        pages = [*match.pages, *([match.partial_page] if match.partial_page is not None else [])]
        pages = pages[place.begin // PAGE_TOKENS :]
        self._scheduler.pool.retain(pages)
        return pages, self.copies.moment()


class Keeper:
    """Copies what host memory lacks of one turn at a time."""

    def __init__(self, pool: HostPool, memory: HostMemory, copier: PageCopier) -> None:
        self._pool = pool
        self._memory = memory
        self._copier = copier

    def keep(self, turn: Turn, hurry: Callable[[], bool]) -> int:
        """Copy what fits; returns bytes. The newest state's memory is set aside first: without it nothing is of use."""
        pool, ids = self._pool, id_bytes(turn.token_ids)
        root = root_key(pool.identity.fingerprint, turn.salt)
        places = segment_places(root, ids)
        own = frozenset(place.key for place in places)
        pool.use((place.key for place in places), turn.chat_id)
        states = [(p, s) for p, s in turn.states if s is not None and not pool.has(state_place(places, ids, p).key)]
        newest = pool.reserve(pool.identity.state_bytes, True, own) if states else None
        if states and newest is None:
            return 0
        copied_bytes = 0
        for place in places:
            if pool.has(place.key) or (place is places[-1] and pool.covers(place, ids)):
                continue
            if turn.dropped or hurry():
                break
            payload = self._segment(turn, place, own)
            part = ids[4 * place.begin : 4 * place.end]
            if payload is None or not pool.add(place, SEGMENT, part, payload, turn.chat_id, root):
                break
            copied_bytes += payload.numel()
        for position, snapshot in reversed(states):
            place = state_place(places, ids, position)
            covered = Place(place.key, place.parent, place.begin, position)
            if turn.dropped or hurry() or not pool.covers(covered, ids):
                continue
            payload = newest if newest is not None else pool.reserve(pool.identity.state_bytes, True, own)
            if payload is None:
                break
            newest = None
            pool.add(place, STATE, b"", self._state(snapshot, turn.since, payload), turn.chat_id, root)
            copied_bytes += payload.numel()
        turn.states = [(p, None if pool.has(state_place(places, ids, p).key) else s) for p, s in turn.states]
        pool.settle(places, ids, NEWEST_STATES)
        pool.prune(next((p.parent for p in reversed(places) if pool.has(p.key)), root))
        if turn.dropped and turn.chat_id is not None:
            pool.forget_chat(turn.chat_id)
        return copied_bytes

    def _segment(self, turn: Turn, place: Place, own: frozenset[bytes]) -> Tensor | None:
        target: Tensor | None = self._pool.reserve(place.num_tokens * self._copier.copies.token_bytes, False, own)
        if target is None:
            return None
        if not self._memory.needs_ring:
            return self._copier.segment(turn, place, target)
        ring = self._copier.segment(turn, place)
        if ring is not None:
            np.copyto(target.numpy(), ring.numpy())
        return target if ring is not None else None

    def _state(self, snapshot: StateSnapshot, since: Any, target: Tensor) -> Tensor:
        if not self._memory.needs_ring:
            return self._copier.state(snapshot, since, target)
        np.copyto(target.numpy(), self._copier.state(snapshot, since).numpy())
        return target

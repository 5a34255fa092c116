"""From host memory to disk, in the background: writes of a finished turn what the disk lacks, block by block.

Runs on a thread of its own. A block that host memory has lost, or never had room for, is copied from its pages if they
are still in the tree; if not, the chain on disk ends there.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from localspec.cache.host_pool import HostPool
from localspec.cache.pool import StateSnapshot
from localspec.cache.spill import SpillStore
from localspec.cache.spill_keys import id_bytes, root_key, segment_places, state_place
from localspec.cache.spill_write import TurnWriter
from localspec.engine.tier_keep import PageCopier, Turn


class Spiller:
    """Writes one turn at a time."""

    def __init__(self, store: SpillStore, host: HostPool, copier: PageCopier) -> None:
        self._store = store
        self._host = host
        self._copier = copier

    def spill(self, turn: Turn, hurry: Callable[[], bool]) -> int:
        """Write what the tier lacks; returns bytes. Stops at the next block once `hurry` says so."""
        if turn.dropped or not self._store.may_write:
            return 0
        self._store.come_back()
        writer = TurnWriter(self._store, turn.token_ids, turn.salt, turn.chat_id)
        for place in writer.missing:
            payload: Tensor | None = None
            if not turn.dropped and not hurry():
                payload = self._host.payload(place.key)
                payload = payload if payload is not None else self._copier.segment(turn, place)
            if payload is None or not writer.add_segment(place, [payload.numpy().data]):
                break
        for position, snapshot in turn.states:
            if turn.dropped or hurry() or not self._store.may_write:
                break
            if writer.wants_state(position) and (payload := self._state(turn, position, snapshot)) is not None:
                writer.add_state(position, [payload.numpy().data])
        writer.finish()
        return writer.written_bytes

    def _state(self, turn: Turn, position: int, snapshot: StateSnapshot | None) -> Tensor | None:
        ids = id_bytes(turn.token_ids)
        places = segment_places(root_key(self._store.identity.fingerprint, turn.salt), ids)
        payload: Tensor | None = self._host.payload(state_place(places, ids, position).key)
        if payload is None and snapshot is not None:
            payload = self._copier.state(snapshot, turn.since)
        return payload

"""The buffers behind cache specs: pages of planes, per-slot states and rooms for snapshots of them, made once."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from localspec.core.cache_spec import CacheSpec, PlaneSpec, StateSpec
from localspec.core.memory_budget import MAX_SNAPSHOTS
from localspec.core.records import PAGE_TOKENS
from localspec.core.state import Cache
from localspec.storage.buffers import aligned_memory

ALIGNMENT_BYTES = 256


class StateSnapshot(dict[str, torch.Tensor]):
    """The states of one sequence at one moment, by `owner/name`, in a room of the pool.

    The room is free again once nobody holds the snapshot, so who reads it on another stream holds it until then.
    """


class CachePool:
    """Caches of the target and the drafters over one page numbering.

    Zero-filled: on a CPU the zeros cost no memory until a page is touched.
    """

    def __init__(
        self,
        specs: Iterable[CacheSpec],
        num_pages: int,
        num_slots: int,
        device: torch.device,
        cold_pages: int = 0,
        num_snapshots: int = MAX_SNAPSHOTS,
    ) -> None:
        """`cold_pages`: room for twice as many pages of one layer of the target, where pages from host memory land."""
        self.device = device
        self._specs = {spec.owner: spec for spec in specs}
        self._caches = {
            owner: Cache(
                planes=self._planes(spec, num_pages, 2 * cold_pages if owner == "target" else 0),
                states={
                    state.name: torch.zeros((num_slots, *state.shape), dtype=getattr(torch, state.dtype), device=device)
                    for state in spec.states
                },
            )
            for owner, spec in self._specs.items()
        }
        self._rooms = torch.zeros(num_snapshots, self._room_bytes, dtype=torch.uint8, device=device)
        self._free_rooms = list(range(num_snapshots))

    @property
    def _room_bytes(self) -> int:
        return sum(-(-state.total_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for _, state in self._saved())

    def _saved(self) -> Iterator[tuple[str, StateSpec]]:
        """What a snapshot holds: record rings are left out."""
        for owner, spec in self._specs.items():
            yield from ((f"{owner}/{state.name}", state) for state in spec.states if not state.ring_rows)

    def _planes(self, spec: CacheSpec, num_pages: int, landing_pages: int) -> dict[str, torch.Tensor]:
        """A buffer for each plane; with a landing ground, one for all keys and one for all values, each ending in it.

        A plane then reaches from its own first page to the end of the buffer, and keys and values of a layer reach the
        ground by the same page numbers.
        """
        if not landing_pages:
            return {plane.name: self._buffer(plane, num_pages) for plane in spec.planes}
        planes: dict[str, torch.Tensor] = {}
        for kind in ("k.", "v."):
            group = [plane for plane in spec.planes if plane.name.startswith(kind)]
            if len({(plane.shape, plane.dtype) for plane in group}) != 1:
                raise ValueError(f"layers of {spec.owner} keep keys of several sizes; none of them can lie elsewhere")
            buffer = self._buffer(group[0], len(group) * num_pages + landing_pages)
            planes |= {plane.name: buffer[index * num_pages :] for index, plane in enumerate(group)}
        return planes

    def _buffer(self, plane: PlaneSpec, num_pages: int) -> torch.Tensor:
        shape, dtype = (num_pages, PAGE_TOKENS, *plane.shape), getattr(torch, plane.dtype)
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        # On whole pages of memory, where a disk can read to directly.
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(aligned_memory(max(num_bytes, 1)))[:num_bytes].view(dtype).view(shape)

    def cache(self, owner: str) -> Cache:
        """The buffers of one owner. Raises KeyError for an owner that declared nothing."""
        return self._caches[owner]

    @property
    def has_states(self) -> bool:
        return any(cache.states for cache in self._caches.values())

    @property
    def state_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for cache in self._caches.values() for t in cache.states.values())

    def copy_page(self, source: int, target: int) -> None:
        """Copy one page of every plane."""
        for cache in self._caches.values():
            for plane in cache.planes.values():
                plane[target].copy_(plane[source])

    def reset_states(self, slot: int) -> None:
        """Set every state of a slot to zero, as at the beginning of a sequence."""
        for cache in self._caches.values():
            for state in cache.states.values():
                state[slot].zero_()

    def room(self, give_up: Callable[[], bool]) -> StateSnapshot | None:
        """Room for a snapshot, its values undefined; None if all is held.

        give_up: lets go of a snapshot that is only kept, False when there is none left. On the decode thread.
        """
        while not self._free_rooms and give_up():
            pass
        if not self._free_rooms:
            return None
        number = self._free_rooms.pop()
        snapshot, offset = StateSnapshot(), 0
        for key, state in self._saved():
            part = self._rooms[number, offset : offset + state.total_bytes]
            snapshot[key] = part.view(getattr(torch, state.dtype)).view(state.shape)
            offset += -(-state.total_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        weakref.finalize(snapshot, self._free_rooms.append, number).atexit = False
        return snapshot

    def save_states(self, slot: int, give_up: Callable[[], bool]) -> StateSnapshot | None:
        """A copy of every folded state of a slot, or None where there is no room for it, see `room`."""
        snapshot = self.room(give_up)
        for key, value in (snapshot or {}).items():
            owner, name = key.split("/", 1)
            value.copy_(self._caches[owner].states[name][slot])
        return snapshot

    def restore_states(self, slot: int, snapshot: StateSnapshot) -> None:
        """Put a snapshot back; record rings start empty."""
        self.reset_states(slot)
        for key, value in snapshot.items():
            owner, name = key.split("/", 1)
            self._caches[owner].states[name][slot].copy_(value)

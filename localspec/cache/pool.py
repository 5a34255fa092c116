"""The buffers behind cache specs: pages of planes and per-slot states, one allocation each, made once."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from localspec.core.cache_spec import CacheSpec, PlaneSpec
from localspec.core.records import PAGE_TOKENS
from localspec.core.state import Cache

StateSnapshot = dict[str, torch.Tensor]


class CachePool:
    """Caches of the target and the drafters over one page numbering.

    Zero-filled: on a CPU the zeros cost no memory until a page is touched.
    """

    def __init__(
        self, specs: Iterable[CacheSpec], num_pages: int, num_slots: int, device: torch.device, cold_pages: int = 0
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
        shape = (num_pages, PAGE_TOKENS, *plane.shape)
        return torch.zeros(shape, dtype=getattr(torch, plane.dtype), device=self.device)

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

    def save_states(self, slot: int) -> StateSnapshot:
        """A copy of every folded state of a slot; record rings are left out."""
        return {
            f"{owner}/{state.name}": self._caches[owner].states[state.name][slot].clone()
            for owner, spec in self._specs.items()
            for state in spec.states
            if not state.ring_rows
        }

    def restore_states(self, slot: int, snapshot: StateSnapshot) -> None:
        """Put a snapshot back; record rings start empty."""
        self.reset_states(slot)
        for key, value in snapshot.items():
            owner, name = key.split("/", 1)
            self._caches[owner].states[name][slot].copy_(value)

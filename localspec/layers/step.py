"""What every layer of a forward pass shares: the rows, where their keys lie, and the cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from localspec.core.cache_spec import PlaneSpec, StateSpec
from localspec.core.records import Rows
from localspec.core.state import Cache
from localspec.kernels.ops import Norm, Ops, Paging


@dataclass(frozen=True)
class LayerStep:
    """Made once a forward pass. key_begin, key_end: [R] int64, the keys that each row sees."""

    rows: Rows
    cache: Cache
    paging: Paging
    key_begin: Tensor
    key_end: Tensor

    @classmethod
    def of(cls, rows: Rows, cache: Cache) -> LayerStep:
        """Rows see all keys up to their own position."""
        paging = Paging.up_to(rows.block_tables, rows.slots, rows.max_position_bound, rows.slot_rows_bound)
        return cls(rows, cache, paging, torch.zeros_like(rows.positions), rows.positions + 1)

    def paging_of(self, plane: PlaneSpec) -> Paging:
        """Where rows find the keys of one layer, named by its plane of keys; its pages are on the device then."""
        if self.cache.cold is None:
            return self.paging
        return replace(self.paging, block_tables=self.cache.cold.tables(plane.name, self.paging.block_tables))


class Mixer(Protocol):
    """The part of a layer that mixes rows of a sequence: attention or a recurrence, with its input norm."""

    planes: tuple[PlaneSpec, ...]
    states: tuple[StateSpec, ...]
    read_bytes: int
    input_norm: Norm

    def forward(self, ops: Ops, x: Tensor, step: LayerStep, then: Norm | None = None) -> Tensor:
        """Residual stream x [R, D] -> x + mixed [R, D]. `then`: the norm that the result meets next."""
        ...

    def fold(self, ops: Ops, cache: Cache, pending_rows: Tensor) -> None:
        """Commit pending rows of recurrent state; nothing to do for attention."""
        ...

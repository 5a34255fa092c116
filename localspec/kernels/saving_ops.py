"""The Triton back end as a packer only: each packed weight goes to a sink and is forgotten, so that one is in memory.

Meets what loading a model asks of `Ops`; nothing that it loads can run. Needs no card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from localspec.kernels.backends.triton_sm80 import TritonOps
from localspec.kernels.ops import PackedWeight
from localspec.kernels.packed_forms import PackedForm
from localspec.kernels.weights import LogicalWeight

Sink = Callable[[Sequence[LogicalWeight], PackedForm], None]


@dataclass(frozen=True)
class ShapeOnly:
    """Meets `PackedWeight` in place of one that was handed to the sink."""

    shape: tuple[int, int]
    read_bytes: int


class SavingOps(TritonOps):
    """Packs on `device`, for `sink`."""

    def __init__(self, device: torch.device, sink: Sink) -> None:
        super().__init__(device)
        self._sink = sink

    def pack(self, parts: Sequence[LogicalWeight], gated: bool = False) -> PackedWeight:
        """Hands the packed weight to the sink and returns its shape."""
        packed = self.packed_form(parts, gated)
        self._sink(parts, packed)
        return ShapeOnly(packed.shape, packed.read_bytes)

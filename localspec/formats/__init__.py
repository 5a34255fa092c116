"""Weight formats, one file each, found by the quantisation method. This file holds the Checkpoint.

A checkpoint is a folder of safetensors files with a config.json. It hands out logical weights by name, decides the
form of each from the tensors that are present, and accounts for every tensor.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from localspec.kernels.weights import LogicalWeight


class Checkpoint(Protocol):
    """Named tensors of one model or drafter. `fingerprint` identifies the bytes."""

    fingerprint: str

    def names(self) -> tuple[str, ...]:
        """Every stored tensor."""
        ...

    def has(self, name: str) -> bool:
        """Whether a weight or vector of that (logical) name is present in any form."""
        ...

    def weight(self, name: str) -> LogicalWeight:
        """The matrix `name` (e.g. "model.layers.0.mlp.up_proj.weight"). Raises ValueError if missing or malformed."""
        ...

    def vector(self, name: str) -> Tensor:
        """An unquantised tensor of any rank. Raises ValueError if missing."""
        ...

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Raise ValueError naming tensors that nobody asked for and no prefix in `ignore` covers."""
        ...

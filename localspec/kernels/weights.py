"""Logical weights: what a checkpoint holds, before a back end packs it for its own kernels.

Every class can say what it means in float32 (`dequantise`); that meaning is what all back ends must compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class LogicalWeight(Protocol):
    """A matrix [N, K] in some storage form."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def dequantise(self) -> Tensor:
        """[N, K] float32 on the device of the stored tensors."""
        ...


@dataclass(frozen=True)
class DenseWeight:
    """[N, K] float32, bfloat16 or float16."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.tensor.shape[0], self.tensor.shape[1]

    def dequantise(self) -> Tensor:
        return self.tensor.to(torch.float32)

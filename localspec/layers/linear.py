"""Projections that share an input, packed together where their weights have one form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops, PackedWeight
from localspec.kernels.weights import LogicalWeight


@dataclass(frozen=True)
class Projections:
    """Several projections of one input. Weights of different forms stay apart: one pass for each group of equal form.

    biases: one [N of the group] float32 for each group, or None. sizes: output columns of each projection.
    """

    weights: tuple[PackedWeight, ...]
    biases: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]

    @property
    def read_bytes(self) -> int:
        return sum(weight.read_bytes for weight in self.weights)

    def __call__(self, ops: Ops, x: Tensor, norm: Norm | None) -> Tensor:
        """x [R, K] -> the projections side by side, [R, sum of sizes]."""
        pairs = zip(self.weights, self.biases, strict=True)
        outputs = [ops.linear(x, weight, norm=norm, bias=bias) for weight, bias in pairs]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def load_projections(ops: Ops, checkpoint: Checkpoint, names: tuple[str, ...], bias: bool = False) -> Projections:
    """Read `<name>.weight` (and `<name>.bias`) for each name and pack neighbours of equal form together.

    Raises ValueError for what is missing or does not fit.
    """
    weights = tuple(checkpoint.weight(f"{name}.weight") for name in names)
    projections = pack_projections(ops, weights)
    if not bias:
        return projections
    vectors = [
        load_vector(ops, checkpoint, f"{name}.bias", (size,))
        for name, size in zip(names, projections.sizes, strict=True)
    ]
    by_rows = torch.split(torch.cat(vectors), [weight.shape[0] for weight in projections.weights])
    return replace(projections, biases=tuple(each.contiguous() for each in by_rows))


def pack_projections(ops: Ops, weights: tuple[LogicalWeight, ...]) -> Projections:
    """Pack neighbours of equal form together. Raises ValueError for what does not fit."""
    packed = tuple(ops.pack(list(members)) for _, members in groupby(weights, key=type))
    return Projections(packed, (None,) * len(packed), tuple(weight.shape[0] for weight in weights))


def load_vector(ops: Ops, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
    """An unquantised tensor as float32 on the device. Raises ValueError unless it has `shape`."""
    vector = checkpoint.vector(name)
    if tuple(vector.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(vector.shape)}, the config asks for {shape}")
    return vector.to(ops.device, torch.float32)


def check_shape(weight: LogicalWeight, name: str, shape: tuple[int, int]) -> LogicalWeight:
    """Returns the weight. Raises ValueError naming it unless it has the shape that the config asks for."""
    if weight.shape != shape:
        raise ValueError(f"{name} has shape {weight.shape}, the config asks for {shape}")
    return weight

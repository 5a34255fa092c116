"""Scales that a checkpoint gives for keys and values in FP8, moved into the weights around the cache.

The cache holds key / k_scale and value / v_scale. Both divisions are linear, so they go into the projections (or the
norm after one) at load: kernels and cache know no scale, and a scale of one, the usual case, costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localspec.formats import Checkpoint
from localspec.kernels.fp8_pack import Fp8Weight
from localspec.kernels.nvfp4_pack import Nvfp4Weight
from localspec.kernels.ops import Ops
from localspec.kernels.weights import DenseWeight, LogicalWeight


@dataclass(frozen=True)
class KvScales:
    """What multiplies the cached keys and values of one layer."""

    k: float = 1.0
    v: float = 1.0


def read_kv_scales(ops: Ops, checkpoint: Checkpoint, prefix: str) -> KvScales:
    """Scales under `prefix` ("model.layers.0.self_attn."), of use only for a cache in FP8; one where there is none.

    Raises ValueError for a scale that is not one positive finite number.
    """
    if ops.cache_dtype != torch.float8_e4m3fn:
        return KvScales()
    return KvScales(_scale(checkpoint, prefix, "k"), _scale(checkpoint, prefix, "v"))


def _scale(checkpoint: Checkpoint, prefix: str, part: str) -> float:
    for name in (f"{prefix}{part}_proj.{part}_scale", f"{prefix}{part}_scale"):
        if checkpoint.has(name):
            tensor = checkpoint.vector(name)
            value = float(tensor) if tensor.numel() == 1 else math.nan
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be one positive number")
            return value
    return 1.0


def with_kv_scales(checkpoint: Checkpoint, prefix: str, scales: KvScales, norm_offset: float | None) -> Checkpoint:
    """The checkpoint with the scales in its attention weights under `prefix`.

    `norm_offset`: what the per-head norm of keys adds to its weight (0 or 1), None where keys have no norm. Whoever
    attends multiplies scores by `scales.k`; values are made good by o_proj.
    """
    if scales == KvScales():
        return checkpoint
    factors = {f"{prefix}v_proj.weight": 1 / scales.v, f"{prefix}v_proj.bias": 1 / scales.v}
    factors[f"{prefix}o_proj.weight"] = scales.v
    if norm_offset is None:
        factors |= {f"{prefix}k_proj.weight": 1 / scales.k, f"{prefix}k_proj.bias": 1 / scales.k}
        return _Scaled(checkpoint, factors, 0.0)
    return _Scaled(checkpoint, {**factors, f"{prefix}k_norm.weight": 1 / scales.k}, norm_offset)


class _Scaled:
    """Meets `Checkpoint`: another one with some tensors multiplied. Vectors are multiplied with `offset` added."""

    def __init__(self, checkpoint: Checkpoint, factors: Mapping[str, float], offset: float) -> None:
        self.fingerprint = checkpoint.fingerprint
        self._checkpoint, self._factors, self._offset = checkpoint, factors, offset

    def names(self) -> tuple[str, ...]:
        return self._checkpoint.names()

    def has(self, name: str) -> bool:
        return self._checkpoint.has(name)

    def weight(self, name: str) -> LogicalWeight:
        return scaled(self._checkpoint.weight(name), self._factors.get(name, 1.0))

    def vector(self, name: str) -> Tensor:
        values, factor = self._checkpoint.vector(name), self._factors.get(name, 1.0)
        offset = 0.0 if name.endswith(".bias") else self._offset
        return values if factor == 1.0 else (values.float() + offset) * factor - offset

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        self._checkpoint.finish(ignore)


def scaled(weight: LogicalWeight, factor: float) -> LogicalWeight:
    """The weight times a factor, in its own form where that has a scale a row."""
    if factor == 1.0:
        return weight
    if isinstance(weight, Nvfp4Weight | Fp8Weight):
        return replace(weight, row_scale=weight.row_scale * factor)
    return DenseWeight(weight.dequantise() * factor)

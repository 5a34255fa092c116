"""Checkpoints of the compressed-tensors library: NVFP4, MXFP4 and FP8 weights, mixed in one checkpoint.

What a weight is follows from its tensors: `weight_packed` with e4m3 scales is NVFP4 (its global scale is a reciprocal
and already multiplied into the block scales), with u8 scales MXFP4; an e4m3 `weight` with `weight_scale` is FP8.
Integer formats, sparsity and rotations are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localspec.formats._parts import fp8, mxfp4, nvfp4
from localspec.kernels.weights import LogicalWeight

QUANT_METHODS = ("compressed-tensors",)
IGNORED_SUFFIXES = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale")
FORMATS = (
    "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense",
)  # fmt: skip


def is_stored(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether `name` is packed, or has a scale beside it."""
    return f"{name}_packed" in tensors or (name in tensors and f"{name}_scale" in tensors)


def weight(tensors: Mapping[str, Tensor], name: str, quantisation: Mapping[str, Any]) -> LogicalWeight:
    """The weight `name` ("....weight"). Raises KeyError for a missing part, ValueError for what is not supported."""
    _check_settings(quantisation)
    scale = tensors[f"{name}_scale"]
    if f"{name}_packed" not in tensors:
        return fp8(name, tensors[name], scale)
    codes = tensors[f"{name}_packed"]
    if scale.dtype == torch.uint8:
        return mxfp4(name, codes, scale)
    global_scale = tensors[f"{name}_global_scale"].float()
    if not bool(((global_scale > 0) & global_scale.isfinite()).all()):
        raise ValueError(f"{name}_global_scale is not positive and finite, so it has no reciprocal")
    return nvfp4(name, codes, scale, 1.0 / global_scale)


def _check_settings(quantisation: Mapping[str, Any]) -> None:
    """Raise ValueError naming a setting that would change what the tensors mean."""
    groups = quantisation.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError("quantization_config.config_groups must be an object of objects")
    formats = [quantisation.get("format"), *(group.get("format") for group in groups.values())]
    unknown = sorted({str(each) for each in formats if each is not None and each not in FORMATS})
    if unknown:
        raise ValueError(
            f"compressed-tensors format {', '.join(unknown)} is not supported; known: {', '.join(FORMATS)}"
        )
    for group in groups.values():
        weights = group.get("weights")
        if isinstance(weights, Mapping) and weights.get("type", "float") != "float":
            raise ValueError(
                f"compressed-tensors weights of type {weights.get('type')!r} are not supported; only float"
            )
    sparsity = quantisation.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ValueError(f"sparsity format {sparsity.get('format')!r} is not supported; use a dense export")
    transforms = quantisation.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ValueError("transform_config rotates weights, which is not supported; use an export without it")

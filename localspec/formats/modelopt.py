"""Checkpoints of NVIDIA ModelOpt: NVFP4 and FP8 weights, mixed in one checkpoint; read for their weights only.

What a weight is follows from its tensors, not from the recipe: codes in u8 with `weight_scale` and `weight_scale_2`
are NVFP4, e4m3 with `weight_scale` is FP8. Scales of activations and of the KV cache are left alone: activations stay
in 16 bits here and the cache has a form of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localspec.formats._parts import fp8, nvfp4
from localspec.kernels.weights import DenseWeight, LogicalWeight

QUANT_METHODS = ("modelopt", "modelopt_fp4", "modelopt_mixed")
IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale")
ALGORITHMS = (
    "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8",
)  # fmt: skip
MIXED = "MIXED_PRECISION"


def is_stored(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether `name` has a scale beside it."""
    return name in tensors and f"{name}_scale" in tensors


def weight(tensors: Mapping[str, Tensor], name: str, quantisation: Mapping[str, Any]) -> LogicalWeight:
    """The weight `name` ("....weight"). Raises KeyError for a missing part, ValueError for what is not supported."""
    _check_algorithms(quantisation)
    module = name.removesuffix(".weight")
    if f"{module}.svdquant_lora_a" in tensors:
        raise ValueError(f"{name} has a low-rank part (NVFP4_SVD), which is not supported; use another export")
    codes = tensors[name]
    if codes.dtype == torch.uint8:
        found: LogicalWeight = nvfp4(name, codes, tensors[f"{name}_scale"], tensors[f"{name}_scale_2"])
    else:
        found = fp8(name, codes, tensors[f"{name}_scale"])
    if f"{module}.pre_quant_scale" not in tensors:
        return found
    # AWQ multiplies the input by this vector; on the columns of the weight it means the same.
    columns = tensors[f"{module}.pre_quant_scale"].float()
    if columns.numel() != found.shape[1]:
        raise ValueError(f"{module}.pre_quant_scale has {columns.numel()} values for {found.shape[1]} columns")
    if not bool(columns.isfinite().all()):
        raise ValueError(f"{module}.pre_quant_scale holds a value that is no finite number")
    return DenseWeight(found.dequantise() * columns.reshape(-1))


def _check_algorithms(quantisation: Mapping[str, Any]) -> None:
    """Raise ValueError naming an algorithm that this reader does not know."""
    layers = quantisation.get("quantized_layers") or {}
    if not isinstance(layers, Mapping):
        raise ValueError("quantization_config.quantized_layers must be an object")
    used = [each.get("quant_algo") if isinstance(each, Mapping) else each for each in layers.values()]
    algorithm = quantisation.get("quant_algo")
    if algorithm not in (None, MIXED):
        used.append(algorithm)
    unknown = sorted({str(each) for each in used if each not in ALGORITHMS})
    if unknown:
        raise ValueError(f"ModelOpt algorithm {', '.join(unknown)} is not supported; known are {', '.join(ALGORITHMS)}")

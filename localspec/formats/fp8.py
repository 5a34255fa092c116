"""Official FP8 checkpoints: e4m3 weights with one scale for each block of 128 x 128 values, `weight_scale_inv`.

The name is historical: the value is multiplied, not divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from localspec.formats._parts import FP8_BLOCK, fp8
from localspec.kernels.weights import LogicalWeight

QUANT_METHODS = ("fp8",)
IGNORED_SUFFIXES = (".input_scale", ".k_scale", ".v_scale")


def is_stored(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether `name` has block scales beside it."""
    return name in tensors and f"{name}_scale_inv" in tensors


def weight(tensors: Mapping[str, Tensor], name: str, quantisation: Mapping[str, Any]) -> LogicalWeight:
    """The weight `name`. Raises ValueError for another number format or block size."""
    number = quantisation.get("fmt", "e4m3")
    block = quantisation.get("weight_block_size", [FP8_BLOCK, FP8_BLOCK])
    if number != "e4m3" or block != [FP8_BLOCK, FP8_BLOCK]:
        raise ValueError(f"fp8 weights of {number!r} in blocks of {block!r} are not supported; e4m3 in 128 x 128 is")
    return fp8(name, tensors[name], tensors[f"{name}_scale_inv"])

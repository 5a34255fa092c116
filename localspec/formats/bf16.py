"""Unquantised weights: a tensor of the weight's own name in float32, bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localspec.kernels.weights import DenseWeight, LogicalWeight

QUANT_METHODS: tuple[str, ...] = ()
"""Served by no quantisation method: every checkpoint may keep some weights like this."""
IGNORED_SUFFIXES: tuple[str, ...] = ()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_stored(tensors: Mapping[str, Tensor], name: str) -> bool:
    """Whether `name` is there as a plain tensor."""
    return name in tensors


def weight(tensors: Mapping[str, Tensor], name: str, quantisation: Mapping[str, Any]) -> LogicalWeight:
    """The matrix. Raises ValueError for another rank or dtype."""
    del quantisation
    tensor = tensors[name]
    if tensor.ndim != 2 or tensor.dtype not in DTYPES:
        raise ValueError(f"{name} is a {tensor.dtype} of rank {tensor.ndim}; an unquantised float matrix is needed")
    return DenseWeight(tensor)

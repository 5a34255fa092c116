"""Rows of a prompt in NVFP4, and their product with an NVFP4 weight (W4A4): the specification.

Knows numbers only, in plain PyTorch on any device. Every row has a scale of its own, so that its values depend on no
neighbour. Experimental: what it does to answers was measured on no model, and no card that multiplies FP4 was at hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import E4M3_MAX, Nvfp4Weight, quantise_nvfp4

E2M1_MAX = 6.0
FP4_BACKEND = "triton_sm100"
"""The back end that can."""


@runtime_checkable
class Fp4Prompts(Protocol):
    """A back end whose card multiplies FP4: `fp4_prompts` says whether it does so with prompts."""

    fp4_prompts: bool


def reads_in_fp4(ops: object) -> bool:
    """Whether a back end multiplies the rows of prompts as FP4 now."""
    return isinstance(ops, Fp4Prompts) and ops.fp4_prompts


def quantise_rows(x: Tensor) -> Nvfp4Weight:
    """x: [R, K] float, K a multiple of 16. A row's scale is its amax / (6 * 448), or 1 where all is zero; a block's is
    the e4m3 value nearest to its own amax / 6. Raises ValueError for another K."""
    rows = x.to(torch.float32)
    amax = rows.abs().amax(dim=1)
    row_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    blocks = quantise_nvfp4(rows / row_scale[:, None], "max", tensor_scale=torch.ones((), device=x.device))
    return replace(blocks, row_scale=row_scale)


def fp4_product(x: Tensor, weight: Nvfp4Weight) -> Tensor:
    """x [R, K] float, weight [N, K] -> [R, N] float32: both dequantised, products summed in float32."""
    return quantise_rows(x).dequantise() @ weight.dequantise().t()

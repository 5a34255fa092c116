"""What the packed matmuls must compute, in plain PyTorch with float32 inside: their specification.

Knows the packed forms only through their own unpacking; runs anywhere, slowly.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.fp8_pack import PackedFp8, unpack_fp8
from localspec.kernels.nvfp4_pack import PackedNvfp4, dequantise_nvfp4, unpack
from localspec.kernels.ops import Epilogue, Norm


def packed_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [R, K] -> float32: x * rsqrt(mean(x^2) + eps) * (w + 1 or w)."""
    values = x.to(torch.float32)
    weight = norm.weight.to(torch.float32) + (1.0 if norm.plus_one else 0.0)
    return values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.eps) * weight


def packed_weight(packed: PackedNvfp4 | PackedFp8) -> Tensor:
    """[N, K] float32 in logical row order."""
    return dequantise_nvfp4(unpack(packed)) if isinstance(packed, PackedNvfp4) else unpack_fp8(packed)


def packed_linear(
    x: Tensor,
    packed: PackedNvfp4 | PackedFp8,
    norm: Norm | None = None,
    epilogue: Epilogue = "none",
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [R, K] -> [R, N] (`silu_mul`: [R, N/2]) float32, or rounded into `out`.

    A normed x is rounded to bfloat16 once, as the matmul's operand; everything after it stays float32.
    """
    rows = x.to(torch.float32) if norm is None else packed_norm(x, norm).to(torch.bfloat16).to(torch.float32)
    value = rows @ packed_weight(packed).T
    if bias is not None:
        value = value + bias.to(torch.float32)
    if epilogue == "silu_mul":
        gate, up = value.chunk(2, dim=-1)
        value = torch.nn.functional.silu(gate) * up
    elif epilogue == "residual":
        if residual is None:
            raise ValueError("the epilogue 'residual' needs a residual")
        value = value + residual.to(torch.float32)
    return value if out is None else out.copy_(value)

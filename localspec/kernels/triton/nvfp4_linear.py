"""x W^T for 1..16 rows with W in NVFP4: the entry that back ends call. The kernel is in weight_stream.py."""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import PackedNvfp4
from localspec.kernels.ops import Epilogue, Norm
from localspec.kernels.triton.stream_launch import Fusion, StreamWorkspace, stream_linear


def nvfp4_linear(
    x: Tensor,
    packed: PackedNvfp4,
    workspace: StreamWorkspace,
    norm: Norm | None = None,
    epilogue: Epilogue = "none",
    residual: Tensor | None = None,
    bias: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [R, K] bfloat16 -> [R, N] (`silu_mul`: [R, N/2]) in the dtype of `out`, bfloat16 where none is given.

    R is 1..16; a row's bits do not depend on the other rows. Specification: packed_reference.py.
    """
    if out is None:
        columns = packed.shape[0] // 2 if packed.gated else packed.shape[0]
        out = torch.empty(x.shape[0], columns, dtype=torch.bfloat16, device=x.device)
    return stream_linear(x, packed, Fusion(norm, epilogue, residual, bias), workspace, out)

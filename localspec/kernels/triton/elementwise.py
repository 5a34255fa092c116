"""Row-wise operations that stand alone: RMS norm, gates, the embedding row.

Each program handles one row or a piece of one, so a row's bits depend on nothing else. Knows nothing of what rows mean.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import Norm

BLOCK = 1024


@triton.jit
def rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_stride, width, eps, PLUS_ONE: tl.constexpr, BLOCK_WIDTH: tl.constexpr
):
    """Grid: (R,). x_ptr: rows of `width` values, x_stride apart; out_ptr: [R, width]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < width
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if PLUS_ONE:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + eps)
    tl.store(out_ptr + row * width + columns, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_kernel(
    x_ptr, gate_ptr, out_ptr, inner, width, x_row_stride, x_head_stride, gate_row_stride, gate_head_stride,
    out_row_stride, SILU: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (R, pieces). x * sigmoid(gate), or x * silu(gate). Rows are [heads, inner], `width` values in all."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    inside = columns < width
    head = columns // inner
    within = columns % inner
    x = tl.load(x_ptr + row * x_row_stride + head * x_head_stride + within, mask=inside, other=0.0).to(tl.float32)
    gate_offsets = row * gate_row_stride + head * gate_head_stride + within
    gate = tl.load(gate_ptr + gate_offsets, mask=inside, other=0.0).to(tl.float32)
    out = x / (1.0 + tl.exp(-gate))
    if SILU:
        out = out * gate
    tl.store(out_ptr + row * out_row_stride + columns, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def embed_kernel(ids_ptr, table_ptr, out_ptr, width, vocabulary, BLOCK_WIDTH: tl.constexpr):
    """Grid: (R, pieces). table_ptr may point to pinned host memory, which the card reads over the bus."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)
    token = tl.load(ids_ptr + row)
    token = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
    inside = columns < width
    values = tl.load(table_ptr + token * width + columns, mask=inside, other=0.0)
    tl.store(out_ptr + row * width + columns, values.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [..., K], rows contiguous -> same shape and dtype; see `Ops.rms_norm`."""
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(rows.shape[0],)](
        *(rows, norm.weight, out, rows.stride(0), width, norm.eps),
        PLUS_ONE=norm.plus_one,
        BLOCK_WIDTH=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return out


def gated(x: Tensor, gate: Tensor, silu: bool, out: Tensor | None = None) -> Tensor:
    """x * sigmoid(gate) or x * silu(gate); both [R, N] or [R, H, D], contiguous in their last dimension.

    out: where to, [R, N] with rows any distance apart; None makes it.
    """
    if x.shape != gate.shape or x.ndim not in (2, 3) or x.stride(-1) != 1 or gate.stride(-1) != 1:
        raise ValueError("x and gate must have one shape, [R, N] or [R, H, D], contiguous in the last dimension")
    if out is None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    width = x[0].numel()
    x_head_stride, gate_head_stride = (x.stride(1), gate.stride(1)) if x.ndim == 3 else (0, 0)
    gate_kernel[(x.shape[0], triton.cdiv(width, BLOCK))](
        *(
            x,
            gate,
            out,
            x.shape[-1],
            width,
            x.stride(0),
            x_head_stride,
            gate.stride(0),
            gate_head_stride,
            out.stride(0),
        ),
        SILU=silu,
        BLOCK_WIDTH=BLOCK,
        num_warps=4,
    )
    return out


def embed(token_ids: Tensor, table: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Rows of a table [V, K], on the device or pinned on the host -> [R, K]; ids out of range read the nearest row."""
    if not table.is_contiguous() or not (table.device == device or table.is_pinned()):
        raise ValueError("the embedding table must be contiguous and lie on the device or in pinned host memory")
    width = table.shape[1]
    out = torch.empty(token_ids.shape[0], width, dtype=dtype, device=device)
    embed_kernel[(token_ids.shape[0], triton.cdiv(width, BLOCK))](
        token_ids, table, out, width, table.shape[0], BLOCK_WIDTH=BLOCK, num_warps=4
    )
    return out

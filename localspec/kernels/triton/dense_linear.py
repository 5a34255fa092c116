"""Small-M matmul for weights kept in bf16: fixed splits of K, summed in order. Knows no bit formats.

The weight is the M side of each matmul and 16 rows of x are its N side, whatever the step's row count, so a row's sums
do not see its neighbours. Splits depend on the weight's shape and the card only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.triton.cards import multiprocessors

MAX_ROWS = 16
BLOCK_N = 64
BLOCK_K = 128
FINISH_COLUMNS = 256


@dataclass(frozen=True)
class DenseMatrix:
    """[N, K] bf16, contiguous. `gated`: gate rows, then as many up rows."""

    matrix: Tensor
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.shape[0], self.matrix.shape[1]

    @property
    def read_bytes(self) -> int:
        return self.matrix.numel() * self.matrix.element_size()


@triton.jit(do_not_specialize=["num_rows"])
def dense_split_kernel(
    x_ptr, w_ptr, part_ptr, num_rows, N, K, split_keys, x_stride, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (N / BLOCK_N, splits). part_ptr: [splits, num_rows, N] float32."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    ks = tl.arange(0, BLOCK_K)
    weight_rows = w_ptr + columns.to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in tl.range(
        split * split_keys, tl.minimum(split * split_keys + split_keys, K), BLOCK_K, num_stages=STAGES
    ):
        k = first + ks
        w = tl.load(weight_rows + k[None, :], mask=(columns < N)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(
            x_ptr + rows[None, :] * x_stride + k[:, None], mask=(rows < num_rows)[None, :] & (k < K)[:, None], other=0.0
        )
        acc = tl.dot(w, x, acc)
    target = part_ptr + (split * num_rows + rows).to(tl.int64)[None, :] * N + columns[:, None]
    tl.store(target, acc, mask=(columns < N)[:, None] & (rows < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_rows", "splits"])
def dense_finish_kernel(
    part_ptr, bias_ptr, residual_ptr, out_ptr, num_rows, N, splits, width, residual_stride, BIAS: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R, pieces of width). Sum the splits in order, then bias, gate or residual; out: [R, width]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        part = part_ptr + (split * num_rows + row) * N
        total += tl.load(part + columns, mask=inside, other=0.0)
        if GATED:
            up += tl.load(part + width + columns, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            up += tl.load(bias_ptr + width + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        total = total / (1.0 + tl.exp(-total)) * up
    if RESIDUAL:
        total += tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + columns, total.to(out_ptr.dtype.element_ty), mask=inside)


def dense_linear(x: Tensor, weight: DenseMatrix, residual: Tensor | None, bias: Tensor | None, out: Tensor) -> Tensor:
    """x [R <= 16, K] bf16, normed where a norm is asked for; out [R, N], or [R, N / 2] for a gated weight: filled.

    Raises ValueError for shapes or strides that the kernel does not read.
    """
    num_rows, columns = x.shape
    n, k = weight.shape
    width = n // 2 if weight.gated else n
    if not 1 <= num_rows <= MAX_ROWS or columns != k or x.stride(1) != 1:
        raise ValueError(f"x must be 1 to {MAX_ROWS} contiguous rows of {k} values, got {tuple(x.shape)}")
    if tuple(out.shape) != (num_rows, width) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {(num_rows, width)}, got {tuple(out.shape)}")
    tiles, blocks_of_k = triton.cdiv(n, BLOCK_N), triton.cdiv(k, BLOCK_K)
    wanted = max(1, min(blocks_of_k, 2 * multiprocessors(x.device) // tiles))
    split_blocks = triton.cdiv(blocks_of_k, wanted)
    splits = triton.cdiv(blocks_of_k, split_blocks)
    parts = torch.empty(splits, num_rows, n, dtype=torch.float32, device=x.device)
    dense_split_kernel[(tiles, splits)](
        *(x, weight.matrix, parts, num_rows, n, k, split_blocks * BLOCK_K, x.stride(0)),
        ROWS=MAX_ROWS,
        BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K,
        STAGES=4,
        num_warps=4,
    )
    dense_finish_kernel[(num_rows, triton.cdiv(width, FINISH_COLUMNS))](
        *(parts, parts if bias is None else bias, out if residual is None else residual, out),
        *(num_rows, n, splits, width, 0 if residual is None else residual.stride(0)),
        BIAS=bias is not None,
        GATED=weight.gated,
        RESIDUAL=residual is not None,
        BLOCK=FINISH_COLUMNS,
        num_warps=4,
    )
    return out

"""Prompts on cards that multiply FP4 (compute capability 10 and 12): weights and rows as plain NVFP4, W4A4.

Specification: `localspec/kernels/fp4_prompts.py`. Knows units of packed weights and the tiles of a matmul; knows no
models. The encoder is spelled in comparisons and integers, because the cards' own conversion is told to make NaN of
some values (CUTLASS issue 3120).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.nvfp4_pack import BLOCK, EPILOGUE_FACTOR, PackedNvfp4
from localspec.kernels.triton.unpack_weights import ROWS, in_order, load_unit, logical_row

COLUMNS = 1024
"""Of a row that a program quantises at a time."""
TILE_ROWS, TILE = 128, 64
"""Of a product: rows, and as many outputs as columns. Larger ones spill on sm_120."""


@dataclass(frozen=True)
class PlainNvfp4:
    """codes: [N, K/2] uint8, low nibble first; scales: [N, K/16] uint8, bits of e4m3; row_scale: [N] float32."""

    codes: Tensor
    scales: Tensor
    row_scale: Tensor

    @staticmethod
    def empty(rows: int, columns: int, device: torch.device) -> PlainNvfp4:
        """To be filled."""
        codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(rows, columns // BLOCK, dtype=torch.uint8, device=device)
        return PlainNvfp4(codes, scales, torch.empty(rows, device=device))


@triton.jit
def _code_pair(word, rotation: tl.constexpr):
    """Codes 2 f and 2 f + 1 of a block as a byte, from where `FIELD_ROTATIONS` places them."""
    if rotation > 0:
        word = (word << rotation) | ((word >> (32 - rotation)) & ((1 << rotation) - 1))
    low = ((word >> 6) & 7) | ((word >> 12) & 8)
    high = ((word >> 22) & 7) | ((word >> 28) & 8)
    return low | (high << 4)


@triton.jit
def plain_codes_kernel(
    w_ptr, row_scale_ptr, codes_ptr, scales_ptr, out_scale_ptr, N, K, pairs, factor, TILE_ROWS: tl.constexpr,
    ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid: (units, TILE_ROWS / ROWS). w_ptr: int32 words of the units; the rest: see `PlainNvfp4`, logical rows."""
    unit = tl.program_id(0).to(tl.int64)
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w0, w1, mixed, byte = load_unit(w_ptr, unit, within, TILE_ROWS)
    f0, f1, f2 = _code_pair(w0, 0), _code_pair(w0, 6), _code_pair(w0, 12)
    f3, f4, f5 = _code_pair(w1, 0), _code_pair(w1, 6), _code_pair(w1, 12)
    bytes_ = in_order(f0, f1, f2, f3, f4, f5, _code_pair(mixed, 8), _code_pair(mixed, 2), ROWS)
    packed_row = unit // pairs * TILE_ROWS + within
    row = logical_row(packed_row, N // 2, GATED)
    here = (packed_row < N)[:, None]
    column = (unit % pairs) * 128 + tl.arange(0, 128)
    codes_at = codes_ptr + row[:, None] * (K // 2) + column[None, :]
    tl.store(codes_at, bytes_.to(tl.uint8), mask=here & (column < K // 2)[None, :])
    # E5M3 with the bias of float16 -> e4m3; its values below 2^-6 are whole multiples of 2^-9.
    value = (byte << 7).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    e4m3 = tl.where(byte >= 72, byte - 64, (value * 512.0).to(tl.int32))
    block_column = (unit % pairs) * 16 + tl.arange(0, 16)
    scales_at = scales_ptr + row[:, None] * (K // 16) + block_column[None, :]
    tl.store(scales_at, e4m3.to(tl.uint8), mask=here & (block_column < K // 16)[None, :])
    if unit % pairs == 0:
        scale = tl.load(row_scale_ptr + packed_row) * factor
        tl.store(out_scale_ptr + row, scale, mask=packed_row < N)


@triton.jit
def _e4m3_code(value):
    """Bits of the e4m3 value nearest to a float32 between 2^-9 and 448, to even."""
    bits = value.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # Adding 1.5 * 2^23 leaves whole numbers, rounded to even.
    small = ((value * 512.0 + 12582912.0) - 12582912.0).to(tl.int32)
    return tl.where(value < 0.015625, small, normal)


@triton.jit
def _e2m1_code(ratio):
    """See `e2m1_codes`."""
    size = tl.abs(ratio)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | tl.where((ratio < 0.0) & (code > 0), 8, 0)


@triton.jit(do_not_specialize=["x_stride"])
def quantise_rows_kernel(x_ptr, codes_ptr, scales_ptr, row_scale_ptr, K, x_stride, COLUMNS: tl.constexpr):
    """Grid: (R,). x_ptr: [R, K]; the rest: see `PlainNvfp4`. Divisions round as IEEE says, like the specification's."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, K, COLUMNS):
        x = tl.load(x_ptr + row * x_stride + first + columns, mask=first + columns < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
    amax = tl.max(largest, axis=0)
    row_scale = tl.where(amax > 0.0, tl.div_rn(amax, 2688.0), 1.0)
    tl.store(row_scale_ptr + row, row_scale)
    blocks = tl.arange(0, COLUMNS // 16)
    pairs = tl.arange(0, COLUMNS // 2)
    for first in range(0, K, COLUMNS):
        x = tl.load(x_ptr + row * x_stride + first + columns, mask=first + columns < K, other=0.0).to(tl.float32)
        x = tl.reshape(tl.div_rn(x, tl.zeros([COLUMNS], tl.float32) + row_scale), [COLUMNS // 16, 16])
        wanted = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.zeros([COLUMNS // 16], tl.float32) + 6.0)
        scale_code = _e4m3_code(tl.minimum(tl.maximum(wanted, 0.001953125), 448.0))
        normal = ((scale_code + 960) << 20).to(tl.float32, bitcast=True)
        scale = tl.where(scale_code < 8, scale_code.to(tl.float32) * 0.001953125, normal)
        code = _e2m1_code(tl.div_rn(x, tl.broadcast_to(scale[:, None], [COLUMNS // 16, 16])))
        low, high = tl.split(tl.reshape(code, [COLUMNS // 2, 2]))
        at_pair, at_block = first // 2 + pairs, first // 16 + blocks
        tl.store(codes_ptr + row * (K // 2) + at_pair, (low | (high << 4)).to(tl.uint8), mask=at_pair < K // 2)
        tl.store(scales_ptr + row * (K // 16) + at_block, scale_code.to(tl.uint8), mask=at_block < K // 16)


@triton.jit(do_not_specialize=["R", "N", "blocks", "out_stride"])
def fp4_matmul_kernel(
    x_ptr, x_scales_ptr, x_row_scale_ptr, w_ptr, w_scales_ptr, w_row_scale_ptr, out_ptr, R, N, blocks, out_stride,
    TILE_ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (tiles of R, tiles of N). Operands: see `PlainNvfp4`, `blocks` of 16 a row, below 2^31 codes; out_ptr:
    [R, N]. A row's sums see no other row."""
    m = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_rows, in_outputs = m < R, n < N
    pair, block = tl.arange(0, TILE // 2), tl.arange(0, TILE // 16)
    x_at = x_ptr + m[:, None] * (blocks * 8) + pair[None, :]
    w_at = w_ptr + n[None, :] * (blocks * 8) + pair[:, None]
    x_scales_at = x_scales_ptr + m[:, None] * blocks + block[None, :]
    w_scales_at = w_scales_ptr + n[:, None] * blocks + block[None, :]
    acc = tl.zeros([TILE_ROWS, TILE], tl.float32)
    for first in range(0, blocks, TILE // 16):
        in_pairs, in_blocks = pair // 8 < blocks - first, block < blocks - first
        x = tl.load(x_at, mask=in_rows[:, None] & in_pairs[None, :], other=0)
        w = tl.load(w_at, mask=in_outputs[None, :] & in_pairs[:, None], other=0)
        x_scales = tl.load(x_scales_at, mask=in_rows[:, None] & in_blocks[None, :], other=0)
        w_scales = tl.load(w_scales_at, mask=in_outputs[:, None] & in_blocks[None, :], other=0)
        x_scales, w_scales = x_scales.to(tl.float8e4nv, bitcast=True), w_scales.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(x, x_scales, "e2m1", w, w_scales, "e2m1", acc)
        x_at += TILE // 2
        w_at += TILE // 2
        x_scales_at += TILE // 16
        w_scales_at += TILE // 16
    acc = acc * tl.load(x_row_scale_ptr + m, mask=in_rows, other=0.0)[:, None]
    acc = acc * tl.load(w_row_scale_ptr + n, mask=in_outputs, other=0.0)[None, :]
    out_at = out_ptr + m.to(tl.int64)[:, None] * out_stride + n[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=in_rows[:, None] & in_outputs[None, :])


def plain_codes(packed: PackedNvfp4, out: PlainNvfp4) -> PlainNvfp4:
    """A packed weight as plain NVFP4 in logical row order; fills and returns `out`."""
    n, k = packed.shape
    plain_codes_kernel[(packed.tiles * packed.pairs, packed.tile_rows // ROWS)](
        *(packed.data.view(torch.int32), packed.row_scale, out.codes, out.scales, out.row_scale, n, k, packed.pairs),
        1.0 / EPILOGUE_FACTOR,
        **{"TILE_ROWS": packed.tile_rows, "ROWS": ROWS, "GATED": packed.gated, "num_warps": 4},
    )
    return out


def quantised_rows(x: Tensor) -> PlainNvfp4:
    """See `quantise_rows`; x [R, K] on the card. Raises ValueError for rows that the kernel does not read."""
    rows, columns = x.shape
    if columns % BLOCK or x.stride(1) != 1:
        raise ValueError(
            f"rows must be contiguous and a multiple of {BLOCK} wide, not {columns} in steps of {x.stride(1)}"
        )
    out = PlainNvfp4.empty(rows, columns, x.device)
    quantise_rows_kernel[(rows,)](
        *(x, out.codes, out.scales, out.row_scale, columns, x.stride(0)), COLUMNS=COLUMNS, num_warps=4
    )
    return out


def fp4_matmul(x: PlainNvfp4, weight: PlainNvfp4, out: Tensor) -> Tensor:
    """x [R, K] times weight [N, K] into out [R, N], bfloat16 or float32, contiguous in its last dimension."""
    rows, outputs = out.shape
    if x.codes.shape[1] != weight.codes.shape[1] or (x.codes.shape[0], weight.codes.shape[0]) != (rows, outputs):
        raise ValueError(f"{tuple(x.codes.shape)} and {tuple(weight.codes.shape)} codes give no {rows} x {outputs}")
    fp4_matmul_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, TILE))](
        *(x.codes, x.scales, x.row_scale, weight.codes, weight.scales, weight.row_scale, out),
        *(rows, outputs, x.scales.shape[1], out.stride(0)),
        TILE_ROWS=TILE_ROWS,
        TILE=TILE,
        num_warps=4,
        num_stages=3,
    )
    return out

"""Packed weights back to bf16 [N, K] in logical row order, at memory speed: the operand of cuBLAS above 16 rows.

Knows both packed layouts (nvfp4_pack.py, fp8_pack.py) and nothing of who multiplies. Values are those of `dequantise`,
rounded once; the rounding is spelled in integers so that every back end of the compiler agrees on it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.fp8_pack import PackedFp8
from localspec.kernels.nvfp4_pack import PackedNvfp4

ROWS = 16  # of a unit that one program writes
MOST_UNPACKED_BYTES = 176 << 20
"""Of one weight at once: gate and up of a 27B in two slices, everything else of it whole. Slices of 96 MiB cost 5% of
the rate at 8k on an H200."""


@triton.jit
def _rounded(value):
    """float32 -> bf16 bits in the low half, to nearest even."""
    bits = value.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


@triton.jit
def _pair(half_bits, factor):
    """Two bf16 patterns in one word, times a float32 factor each -> two bf16 in one word."""
    low = (half_bits << 16).to(tl.float32, bitcast=True) * factor
    high = (half_bits & -65536).to(tl.float32, bitcast=True) * factor
    return low, high


@triton.jit
def _nvfp4_pair(word, rotation: tl.constexpr, scale, row_scale):
    """Codes 2 f and 2 f + 1 of a block, as `FIELD_ROTATIONS` places them."""
    if rotation > 0:
        word = (word << rotation) | ((word >> (32 - rotation)) & ((1 << rotation) - 1))
    low, high = _pair(word & -2118090304, scale)
    return _rounded(low * row_scale) | (_rounded(high * row_scale) << 16)


@triton.jit
def logical_row(row, half_rows, GATED: tl.constexpr):
    """Packed row -> row of the output: groups of 8 gate rows and their 8 up rows, when gated."""
    if GATED:
        return row // 16 * 8 + row % 8 + ((row // 8) % 2) * half_rows
    return row


@triton.jit
def load_unit(w_ptr, unit, within, TILE_ROWS: tl.constexpr):
    """Of rows of an NVFP4 unit and its 16 blocks: both words, the third that is mixed from them, and the scale byte."""
    block = tl.arange(0, 16)  # 8 chunk + 4 b + quad
    base = w_ptr + unit * (TILE_ROWS * 36)
    place = (
        (block // 8 * TILE_ROWS)[None, :] * 16 + within[:, None] * 16 + (block % 4 * 4 + block // 4 % 2 * 2)[None, :]
    )
    w0 = tl.load(base + place)
    w1 = tl.load(base + place + 1)
    scale_words = tl.load(base + TILE_ROWS * 32 + within[:, None] * 4 + (block % 4)[None, :])
    byte = (scale_words >> ((block // 4) * 8)[None, :]) & 0xFF
    turned = (w1 << 2) | ((w1 >> 30) & 3)
    return w0, w1, (turned & -2134802239) | (w0 & 2134802238), byte


@triton.jit
def in_order(f0, f1, f2, f3, f4, f5, f6, f7, ROWS: tl.constexpr):
    """Pairs of codes [ROWS, 16 blocks] by their place in a block -> [ROWS, 128] in the order of columns."""
    # Each join adds a fastest index: f = 4 a + 2 b + c comes out in order.
    even = tl.join(tl.join(f0, f4), tl.join(f2, f6))
    odd = tl.join(tl.join(f1, f5), tl.join(f3, f7))
    return tl.reshape(tl.join(even, odd), [ROWS, 128])


@triton.jit
def unpack_nvfp4_kernel(
    w_ptr, row_scale_ptr, out_ptr, N, K, pairs, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr
):
    """Grid: (units, TILE_ROWS / ROWS). w_ptr: int32 words of the units; out_ptr: [N, K] bf16 as int32 [N, K / 2]."""
    unit = tl.program_id(0).to(tl.int64)
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w0, w1, mixed, byte = load_unit(w_ptr, unit, within, TILE_ROWS)
    scale = (((byte << 4) + 0x7300) << 16).to(tl.float32, bitcast=True)
    row = unit // pairs * TILE_ROWS + within
    factor = tl.load(row_scale_ptr + row)[:, None]
    f0 = _nvfp4_pair(w0, 0, scale, factor)
    f1 = _nvfp4_pair(w0, 6, scale, factor)
    f2 = _nvfp4_pair(w0, 12, scale, factor)
    f3 = _nvfp4_pair(w1, 0, scale, factor)
    f4 = _nvfp4_pair(w1, 6, scale, factor)
    f5 = _nvfp4_pair(w1, 12, scale, factor)
    f6 = _nvfp4_pair(mixed, 8, scale, factor)
    f7 = _nvfp4_pair(mixed, 2, scale, factor)
    words = in_order(f0, f1, f2, f3, f4, f5, f6, f7, ROWS)
    column = (unit % pairs) * 128 + tl.arange(0, 128)
    target = out_ptr + logical_row(row, N // 2, GATED)[:, None] * (K // 2) + column[None, :]
    tl.store(target, words, mask=(row < N)[:, None] & (column < K // 2)[None, :])


@triton.jit
def unpack_fp8_kernel(
    w_ptr, row_scale_ptr, group_scale_ptr, out_ptr, N, K, pairs, group_stride,
    TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Grid: (units, TILE_ROWS / ROWS). As above; group_scale_ptr: [pairs, group_stride] float32 with GROUPS."""
    unit = tl.program_id(0).to(tl.int64)
    within = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    index = tl.arange(0, 32)  # word of a row: 16 chunk + 4 quad + r, in the order of K
    base = w_ptr + unit * (TILE_ROWS * 32)
    word = tl.load(base + (index // 16 * TILE_ROWS)[None, :] * 16 + within[:, None] * 16 + (index % 16)[None, :])
    row = unit // pairs * TILE_ROWS + within
    factor = tl.load(row_scale_ptr + row)[:, None]
    group = tl.full([ROWS], 1.0, tl.float32)[:, None]
    if GROUPS:
        group = tl.load(group_scale_ptr + (unit % pairs) * group_stride + row // 8)[:, None]
    # value * 2^-120 in both halves; 2^120 is exact and does not overflow on the way.
    first = word & -2014279696
    upper = (word << 28) | ((word >> 4) & 0x0FFFFFFF)
    second = (upper & -2021619840) | ((word << 4) & 0x00700070)
    scale = tl.full([ROWS, 32], 1.329227995784916e36, tl.float32)
    a, b = _pair(first, scale)
    c, d = _pair(second, scale)
    low = _rounded(a * group * factor) | (_rounded(b * group * factor) << 16)
    high = _rounded(c * group * factor) | (_rounded(d * group * factor) << 16)
    words = tl.reshape(tl.join(low, high), [ROWS, 64])
    column = (unit % pairs) * 64 + tl.arange(0, 64)
    target = out_ptr + logical_row(row, N // 2, GATED)[:, None] * (K // 2) + column[None, :]
    tl.store(target, words, mask=(row < N)[:, None] & (column < K // 2)[None, :])


def tile_slices(packed: object, multiprocessors: int) -> list[tuple[int, int]]:
    """(first, last) tiles of slices that may be unpacked one after the other; one slice where that is not needed.

    Half as many tiles as multiprocessors, or a multiple, give a matmul of 2,048 rows whole waves of blocks; the rest
    goes last.
    """
    if not isinstance(packed, PackedNvfp4 | PackedFp8):
        return []
    grouped = isinstance(packed, PackedFp8) and packed.group_scale is not None
    most = max(1, MOST_UNPACKED_BYTES // (2 * packed.tile_rows * packed.shape[1]))
    if packed.tiles <= most or grouped or (packed.gated and packed.shape[0] % packed.tile_rows):
        return [(0, packed.tiles)]
    half = max(1, multiprocessors // 2)
    step = most // half * half or most
    slices, first = [], 0
    while packed.tiles - first > most:
        slices.append((first, first + step))
        first += step
    return [*slices, (first, packed.tiles)]


def tiles_of(packed: PackedNvfp4 | PackedFp8, first: int, last: int) -> PackedNvfp4 | PackedFp8:
    """Some tiles as a weight of their own: of a gated one the same rows of gate and of up."""
    unit_bytes = packed.data.numel() // (packed.tiles * packed.pairs)
    return replace(
        packed,
        data=packed.data.view(-1)[first * packed.pairs * unit_bytes : last * packed.pairs * unit_bytes],
        row_scale=packed.row_scale[first * packed.tile_rows : last * packed.tile_rows],
        shape=(min(last * packed.tile_rows, packed.shape[0]) - first * packed.tile_rows, packed.shape[1]),
    )


def unpack_bfloat16(packed: PackedNvfp4 | PackedFp8, out: Tensor | None = None) -> Tensor:
    """[N, K] bfloat16, contiguous, into `out` where given. Raises ValueError for an `out` of another form."""
    n, k = packed.shape
    if out is None:
        out = torch.empty(n, k, dtype=torch.bfloat16, device=packed.data.device)
    if tuple(out.shape) != (n, k) or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous bfloat16 of shape {(n, k)}, got {out.dtype} {tuple(out.shape)}")
    words, target = packed.data.view(torch.int32), out.view(torch.int32)
    grid = (packed.tiles * packed.pairs, packed.tile_rows // ROWS)
    if isinstance(packed, PackedNvfp4):
        unpack_nvfp4_kernel[grid](
            *(words, packed.row_scale, target, n, k, packed.pairs),
            **{"TILE_ROWS": packed.tile_rows, "ROWS": ROWS, "GATED": packed.gated, "num_warps": 4},
        )
        return out
    groups = packed.row_scale if packed.group_scale is None else packed.group_scale
    unpack_fp8_kernel[grid](
        *(words, packed.row_scale, groups, target, n, k, packed.pairs, groups.shape[-1]),
        **{"TILE_ROWS": packed.tile_rows, "ROWS": ROWS, "GATED": packed.gated, "num_warps": 4},
        GROUPS=packed.group_scale is not None,
    )
    return out

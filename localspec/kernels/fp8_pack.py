"""FP8 (e4m3) weights: dequantise (the specification) and the packed form that the small-M kernel reads.

Knows bits and layouts, in plain PyTorch on any device. Knows nothing of Triton, models or checkpoint spellings.

A weight is e4m3(code) * row scale, times one float32 scale per block of 128 x 128 where the checkpoint has them.
Packed units as in nvfp4_pack.py, but a pair is two chunks of 64 columns: codes int32 [chunk 2][row][quad 4][word 4],
word r of quad q holding k = 64 chunk + 16 q + 4 r + 0..3. In a word, codes 0 and 1 lie in the low and high half under
0x87F0 (sign 15, magnitude 10..4), codes 2 and 3 in the bits that these leave: upper magnitude bits at 14..11, lower
ones at 2..0, the sign at bit 3 of the other half.
Block scales become a table [K / 128, rows / 8]: eight packed rows always share their block, also when gated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import TILE_ROWS_CHOICES, gated_row_order

FP8_PAIR_COLUMNS = 128
BLOCK_ROWS = 128


@dataclass(frozen=True)
class Fp8Weight:
    """codes: [N, K] float8_e4m3fn; row_scale: [N] float32; block_scale: [ceil(N/128), ceil(K/128)] float32 or None."""

    codes: Tensor
    row_scale: Tensor
    block_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self) -> Tensor:
        return dequantise_fp8(self)


@dataclass(frozen=True)
class PackedFp8:
    """`data`: uint8 units; `row_scale`: [padded N] float32; `group_scale`: [pairs, padded N / 8] float32 or None."""

    data: Tensor
    row_scale: Tensor
    group_scale: Tensor | None
    shape: tuple[int, int]
    tile_rows: int
    gated: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.shape[0] // self.tile_rows)

    @property
    def pairs(self) -> int:
        return -(-self.shape[1] // FP8_PAIR_COLUMNS)

    @property
    def read_bytes(self) -> int:
        groups = 0 if self.group_scale is None else 4 * self.group_scale.numel()
        return self.data.numel() + 4 * self.row_scale.numel() + groups


def dequantise_fp8(weight: Fp8Weight) -> Tensor:
    """[N, K] float32."""
    values = weight.codes.to(torch.float32)
    if weight.block_scale is not None:
        rows, columns = weight.shape
        scale = weight.block_scale.repeat_interleave(BLOCK_ROWS, 0)[:rows]
        values = values * scale.repeat_interleave(FP8_PAIR_COLUMNS, 1)[:, :columns]
    return values * weight.row_scale[:, None]


def quantise_fp8(weight: Tensor) -> Fp8Weight:
    """weight: [N, K] float -> e4m3 with one scale a row (row amax / 448). Raises ValueError for values not finite."""
    amax = weight.to(torch.float32).abs().amax(dim=1)
    if not bool(torch.isfinite(amax).all()):
        raise ValueError("weight holds values that are not finite; FP8 cannot store them")
    scale = torch.where(amax > 0, amax / 448.0, torch.ones_like(amax))
    return Fp8Weight((weight.to(torch.float32) / scale[:, None]).to(torch.float8_e4m3fn), scale)


def encode_words(codes: Tensor) -> Tensor:
    """[..., 4] uint8 e4m3 codes -> [...] int32 words."""
    c = codes.to(torch.int32)
    sign, magnitude = c >> 7, c & 0x7F
    word = torch.zeros_like(c[..., 0])
    for half in range(2):
        word |= ((magnitude[..., half] << 4) | (sign[..., half] << 15)) << (16 * half)
        second = magnitude[..., 2 + half]
        word |= ((second >> 3 << 11) | (second & 7)) << (16 * half)
        word |= sign[..., 2 + half] << (19 if half == 0 else 3)
    return word


def decode_words(words: Tensor) -> Tensor:
    """Inverse of `encode_words`: [...] int32 -> [..., 4] uint8."""
    codes = []
    for half in range(2):
        h = words >> (16 * half)
        codes.append((h >> 4 & 0x7F) | (h >> 15 & 1) << 7)
    for half in range(2):
        h = words >> (16 * half)
        sign = words >> (19 if half == 0 else 3) & 1
        codes.append((h >> 11 & 15) << 3 | (h & 7) | sign << 7)
    return torch.stack(codes, dim=-1).to(torch.uint8)


def stackable(parts: Sequence[Fp8Weight]) -> bool:
    """Parts with scales a block stack only at multiples of 128 rows, and only among themselves."""
    blocked = [part.block_scale is not None for part in parts]
    return not any(blocked) or (all(blocked) and all(part.shape[0] % 128 == 0 for part in parts[:-1]))


def pack_fp8(weight: Fp8Weight, tile_rows: int = 128, gated: bool = False) -> PackedFp8:
    """Re-order a weight for the small-M kernel; values are unchanged bit for bit.

    Rows are padded to a multiple of `tile_rows`, columns to 128, with zeros. Raises ValueError for NaN codes and for a
    tile that the kernel does not know.
    """
    rows, columns = weight.shape
    if tile_rows not in TILE_ROWS_CHOICES:
        raise ValueError(f"tile_rows is one of {TILE_ROWS_CHOICES}, got {tile_rows}")
    codes = weight.codes.view(torch.uint8)
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise ValueError("FP8 weight holds NaN codes; the checkpoint is damaged")
    order = gated_row_order(rows, codes.device) if gated else torch.arange(rows, device=codes.device)
    padded_rows = -(-rows // tile_rows) * tile_rows
    padded_columns = -(-columns // FP8_PAIR_COLUMNS) * FP8_PAIR_COLUMNS
    pad = torch.nn.functional.pad
    codes = pad(codes[order], (0, padded_columns - columns, 0, padded_rows - rows))
    tiles, pairs = padded_rows // tile_rows, padded_columns // FP8_PAIR_COLUMNS
    words = encode_words(codes.reshape(padded_rows, padded_columns // 4, 4))
    units = words.reshape(tiles, tile_rows, pairs, 2, 16).permute(0, 2, 3, 1, 4).contiguous()
    group_scale = None
    if weight.block_scale is not None:
        of_rows = weight.block_scale.to(torch.float32)[order // BLOCK_ROWS]
        group_scale = pad(of_rows, (0, 0, 0, padded_rows - rows))[::8].T.contiguous()
    return PackedFp8(
        data=units.reshape(-1).view(torch.uint8),
        row_scale=pad(weight.row_scale.to(torch.float32)[order], (0, padded_rows - rows)).contiguous(),
        group_scale=group_scale,
        shape=(rows, columns),
        tile_rows=tile_rows,
        gated=gated,
    )


def unpack_fp8(packed: PackedFp8) -> Tensor:
    """Inverse of `pack_fp8` for codes and scales together: [N, K] float32 in logical row order."""
    rows, columns = packed.shape
    tiles, pairs, tile_rows = packed.tiles, packed.pairs, packed.tile_rows
    words = packed.data.view(torch.int32).reshape(tiles, pairs, 2, tile_rows, 16).permute(0, 3, 1, 2, 4)
    codes = decode_words(words.reshape(tiles * tile_rows, pairs * 32).contiguous()).reshape(tiles * tile_rows, -1)
    values = codes.view(torch.float8_e4m3fn).to(torch.float32)
    if packed.group_scale is not None:
        scale = packed.group_scale.T.repeat_interleave(8, 0).repeat_interleave(FP8_PAIR_COLUMNS, 1)
        values = values * scale
    values = (values * packed.row_scale[:, None])[:rows, :columns]
    if packed.gated:
        values = values[torch.argsort(gated_row_order(rows, values.device))]
    return values


def random_packed_fp8(
    rows: int, columns: int, device: torch.device | str, seed: int, tile_rows: int = 128, gated: bool = False
) -> PackedFp8:
    """Valid random weights made on `device`: codes with exponents 0..7 of 16, so none is NaN and none dominates."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tiles, pairs = -(-rows // tile_rows), -(-columns // FP8_PAIR_COLUMNS)
    data = torch.empty(tiles * pairs * tile_rows * FP8_PAIR_COLUMNS, dtype=torch.uint8, device=device)
    data.random_(0, 256, generator=generator)
    # The top exponent bit of codes 0, 1 (bit 10) and 2, 3 (bit 14) is cleared in both halves of each word.
    data.view(torch.int32).bitwise_and_(~0x44004400)
    row_scale = torch.full((tiles * tile_rows,), 2.0 / columns**0.5, device=device)
    return PackedFp8(data, row_scale, None, (rows, columns), tile_rows, gated)

"""The NVFP4 number format: quantise, dequantise (the specification), and the packed form that the small-M kernel reads.

Knows bits and layouts, in plain PyTorch on any device. Knows nothing of Triton, models or checkpoint spellings.

A weight is e2m1(code) * e4m3(block scale) * fp32(row scale); a block is 16 consecutive values along K.

Packed form ("units"). Rows come in tiles of `tile_rows`, K in pairs of two 128-wide chunks. One unit = one tile x one
pair, contiguous: codes int32 [chunk 2][row][quad 4][word 4], then scale bytes [row][quad 4][4]. Quad q of a row holds
the blocks at k = 128 chunk + 64 b + 16 q for b = 0, 1, two words a block: exactly what one lane of an m16n8k16 MMA
feeds to 8 k-steps, so that the kernel moves words from memory to registers without a shuffle.

Codes inside a block's two words. A bfloat16 pair worth (code 2f, code 2f + 1) * 2^-126 has its sign at bit 15 and its
magnitude at bits 8..6 of each half. Pair f is one rotation and one mask away (`FIELD_ROTATIONS`); pairs 6 and 7 share
a third word mixed from the bits that the other six leave free.
Scales are unsigned E5M3, the float16 bits of the e4m3 value shifted right by 7: exact for every finite e4m3 value, and
(byte << 4) + 0x7300 are the bfloat16 bits of scale * 2^118. The product is scale * value * 2^-8, exact in bfloat16;
`row_scale` of the packed form carries the missing 2^8.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

BLOCK = 16
PAIR_COLUMNS = 256
TILE_ROWS_CHOICES = (32, 64, 128, 256)
E4M3_MAX = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
EPILOGUE_FACTOR = 256.0  # the decoded product is value * scale * 2^-8

FIELD_MASK = 0x81C081C0
MIX_MASK = 0x80C180C1  # bits of the mixed word that come from the second word, rotated left by MIX_ROTATION
MIX_ROTATION = 2
# Pair f of a block: (source word, or 2 for the mixed word; left rotation that brings its bits under FIELD_MASK).
FIELD_ROTATIONS = ((0, 0), (0, 6), (0, 12), (1, 0), (1, 6), (1, 12), (2, 8), (2, 2))
_FIELD_BITS = (6, 7, 8, 15)  # magnitude bits 0..2, then the sign


@dataclass(frozen=True)
class Nvfp4Weight:
    """codes: [N, K/2] uint8, low nibble first; block_scale: [N, K/16] float8_e4m3fn, >= 0; row_scale: [N] float32."""

    codes: Tensor
    block_scale: Tensor
    row_scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    def dequantise(self) -> Tensor:
        return dequantise_nvfp4(self)


@dataclass(frozen=True)
class PackedNvfp4:
    """`data`: uint8, units as the module says; `row_scale`: [padded N] float32 in packed row order, times 2^8.

    `gated`: the logical rows are gate then up, N/2 each, stored in alternating groups of 8 (gate 0..7, up 0..7, ...).
    """

    data: Tensor
    row_scale: Tensor
    shape: tuple[int, int]
    tile_rows: int
    gated: bool = False

    @property
    def tiles(self) -> int:
        return -(-self.shape[0] // self.tile_rows)

    @property
    def pairs(self) -> int:
        return -(-self.shape[1] // PAIR_COLUMNS)

    @property
    def read_bytes(self) -> int:
        return self.data.numel() + 4 * self.row_scale.numel()


def nvfp4_without_values(rows: int, columns: int) -> Nvfp4Weight:
    """A weight of this shape on the meta device, for what asks for shapes and types only."""
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8, device="meta")
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn, device="meta")
    return Nvfp4Weight(codes, scales, torch.empty(rows, device="meta"))


def dequantise_nvfp4(weight: Nvfp4Weight) -> Tensor:
    """[N, K] float32: code value * block scale * row scale, multiplied in that order."""
    rows, columns = weight.shape
    nibbles = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).reshape(rows, columns)
    values = e2m1_values(nibbles).reshape(rows, columns // BLOCK, BLOCK)
    scaled = values * weight.block_scale.to(torch.float32)[:, :, None]
    return scaled.reshape(rows, columns) * weight.row_scale[:, None]


def quantise_nvfp4(
    weight: Tensor,
    method: Literal["mse", "max"] = "mse",
    importance: Tensor | None = None,
    tensor_scale: Tensor | None = None,
) -> Nvfp4Weight:
    """weight: [N, K] float, K a multiple of 16. One tensor scale amax / (6 * 448) for all rows.

    "max" takes block amax / 6 as the block scale; "mse" tries the e4m3 codes within 7 steps of it and keeps the one of
    least squared error, which removes about a quarter of the error at no cost in speed. `importance` [K] >= 0 weighs
    the error of each column, as the mean square of its input does. `tensor_scale`: a scalar for all rows where
    `weight` is a part of a larger matrix.
    Raises ValueError for another K, an importance that does not fit, or values that are not finite.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"NVFP4 needs a multiple of {BLOCK} columns, got {columns}")
    blocks = weight.to(torch.float32).reshape(rows, columns // BLOCK, BLOCK)
    scale_of_all = nvfp4_tensor_scale(blocks.abs().amax()) if tensor_scale is None else tensor_scale
    blocks = blocks / scale_of_all
    centre = _e4m3_code(blocks.abs().amax(dim=-1) / 6.0)
    if method == "max":
        best_code = centre
    else:
        column_weights = None if importance is None else _column_weights(importance, columns)
        best_code = torch.empty_like(centre)
        # Slabs of rows: on a CPU the sweep's working set stays in its caches, on a card it stays small beside the rest.
        step = max(1, (1 << 24 if weight.is_cuda else 1 << 16) // columns)
        for begin in range(0, rows, step):
            part = slice(begin, begin + step)
            best_code[part] = _sweep(blocks[part], centre[part], column_weights)
    scale = _e4m3_value(best_code)
    codes = e2m1_codes(blocks / scale[..., None])
    packed = codes.reshape(rows, columns // 2, 2)
    return Nvfp4Weight(
        codes=(packed[..., 0] | (packed[..., 1] << 4)).contiguous(),
        block_scale=best_code.to(torch.uint8).view(torch.float8_e4m3fn),
        row_scale=scale_of_all.expand(rows).contiguous(),
    )


def nvfp4_tensor_scale(amax: Tensor) -> Tensor:
    """The tensor scale of a matrix of largest magnitude `amax` (scalar float32). Raises ValueError unless finite."""
    if not torch.isfinite(amax):
        raise ValueError("weight holds values that are not finite; NVFP4 cannot store them")
    return torch.where(amax > 0, amax / (6.0 * E4M3_MAX), torch.ones_like(amax))


def _column_weights(importance: Tensor, columns: int) -> Tensor:
    """[K] >= 0 -> [K / 16, 16] with mean 1. Columns that the calibration never saw active still count a little."""
    values = importance.to(torch.float32)
    if values.shape != (columns,) or not bool((torch.isfinite(values) & (values >= 0)).all()):
        raise ValueError(f"importance must be {columns} finite values >= 0, got {tuple(values.shape)}")
    mean = values.mean()
    relative = torch.where(mean > 0, values / mean, torch.ones_like(values))
    return relative.clamp(min=1e-4).reshape(columns // BLOCK, BLOCK)


def _sweep(blocks: Tensor, centre: Tensor, column_weights: Tensor | None) -> Tensor:
    """blocks [n, B, 16] in units of the tensor scale, centre [n, B] int32 -> e4m3 codes of least (weighted) error."""
    best_code = centre.clone()
    best_error = torch.full_like(blocks[..., 0], torch.inf)
    magnitude = blocks.abs()
    for step in range(-7, 8):
        code = (centre + step).clamp(1, 126)
        scale = _e4m3_value(code)
        squares = (_e2m1_rounded(magnitude / scale[..., None]) * scale[..., None] - magnitude).square()
        error = (squares if column_weights is None else squares * column_weights).sum(dim=-1)
        better = error < best_error
        best_code = torch.where(better, code, best_code)
        best_error = torch.where(better, error, best_error)
    return best_code


def _e4m3_code(value: Tensor) -> Tensor:
    """Nearest e4m3 code of a non-negative tensor, at least the smallest positive one, as int32."""
    clamped = value.clamp(2.0**-9, E4M3_MAX)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)


def _e4m3_value(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)


def e2m1_codes(ratio: Tensor) -> Tensor:
    """Nearest e2m1 code of values in units of their scale, ties to the even code, uint8 of the same shape."""
    magnitude = ratio.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index, midpoint in enumerate(E2M1_MIDPOINTS):
        # From an even code a tie stays below, from an odd one it goes up to the even code.
        code += (magnitude > midpoint) if index % 2 == 0 else (magnitude >= midpoint)
    return code | ((ratio < 0) & (code > 0)).to(torch.uint8) << 3


def e2m1_values(codes: Tensor) -> Tensor:
    """float32 values of codes 0..15, same shape."""
    table = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=codes.device)
    return torch.cat([table, -table])[codes.long()]


def _e2m1_rounded(ratio: Tensor) -> Tensor:
    """Nearest e2m1 value of ratios >= 0, ties as in `e2m1_codes`: steps of 0.5 below 2, of 1 below 4, then of 2."""
    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    return ((ratio / step).round_() * step).clamp_(max=6.0)


def _bit_places() -> list[list[tuple[int, int]]]:
    """[code 0..15][bit 0..3] -> (word, bit) inside the two words of a block."""
    places = []
    for code in range(BLOCK):
        field, half = divmod(code, 2)
        source, rotation = FIELD_ROTATIONS[field]
        code_places = []
        for bit in _FIELD_BITS:
            word, place = source, (16 * half + bit - rotation) % 32
            if source == 2:
                from_second = bool(MIX_MASK >> place & 1)
                word, place = (1, (place - MIX_ROTATION) % 32) if from_second else (0, place)
            code_places.append((word, place))
        places.append(code_places)
    return places


def _byte_tables(device: torch.device) -> Tensor:
    """[byte 0..7, 256, word 2] int32: what each byte of a block (two codes) adds to its two words."""
    places = _bit_places()
    tables = [[[0, 0] for _ in range(256)] for _ in range(8)]
    for byte in range(8):
        for value in range(256):
            for nibble in range(2):
                for bit in range(4):
                    if value >> (4 * nibble + bit) & 1:
                        word, place = places[2 * byte + nibble][bit]
                        tables[byte][value][word] |= 1 << place
    signed = [[[w - (1 << 32) if w >> 31 else w for w in pair] for pair in table] for table in tables]
    return torch.tensor(signed, dtype=torch.int32, device=device)


def encode_blocks(block_bytes: Tensor) -> Tensor:
    """[..., 8] uint8 (16 codes, low nibble first) -> [..., 2] int32 words of a block."""
    tables = _byte_tables(block_bytes.device)
    words = tables[0][block_bytes[..., 0].long()]
    for byte in range(1, 8):
        words = words | tables[byte][block_bytes[..., byte].long()]
    return words


def decode_blocks(words: Tensor) -> Tensor:
    """Inverse of `encode_blocks`: [..., 2] int32 -> [..., 8] uint8."""
    out = torch.zeros(*words.shape[:-1], 8, dtype=torch.uint8, device=words.device)
    for code, code_places in enumerate(_bit_places()):
        for bit, (word, place) in enumerate(code_places):
            taken = (words[..., word] >> place & 1).to(torch.uint8)
            out[..., code // 2] |= taken << (4 * (code % 2) + bit)
    return out


def gated_row_order(rows: int, device: torch.device) -> Tensor:
    """Packed position -> logical row for rows = 2 * half: groups of 8 gate rows, then the 8 up rows beside them."""
    half = rows // 2
    if rows % 16:
        raise ValueError(f"a gated weight needs a multiple of 16 rows, got {rows}")
    order = torch.arange(half, device=device).reshape(half // 8, 8)
    return torch.stack([order, order + half], dim=1).reshape(rows)


def pack_small_m(weight: Nvfp4Weight, tile_rows: int = 128, gated: bool = False) -> PackedNvfp4:
    """Re-order a weight for the small-M kernel; values are unchanged bit for bit.

    Rows are padded to a multiple of `tile_rows`, columns to 256, with zeros. Raises ValueError for NaN or negative
    block scales, for K that is not a multiple of 16 and for a tile that the kernel does not know.
    """
    rows, columns = weight.shape
    if tile_rows not in TILE_ROWS_CHOICES:
        raise ValueError(f"tile_rows is one of {TILE_ROWS_CHOICES}, got {tile_rows}")
    if columns % BLOCK:
        raise ValueError(f"NVFP4 needs a multiple of {BLOCK} columns, got {columns}")
    scale_codes = weight.block_scale.view(torch.uint8)
    if bool((scale_codes >= 0x7F).any()):
        raise ValueError("NVFP4 block scales must be finite and not negative")
    # A zero scale byte decodes to 2^103, so blocks without scale must hold zero codes.
    block_bytes = weight.codes.reshape(rows, columns // BLOCK, 8)
    block_bytes = torch.where((scale_codes == 0)[..., None], torch.zeros_like(block_bytes), block_bytes)
    scale_bytes = (weight.block_scale.to(torch.float16).view(torch.int16) >> 7).to(torch.uint8)
    row_scale = weight.row_scale.to(torch.float32) * EPILOGUE_FACTOR
    if gated:
        order = gated_row_order(rows, weight.codes.device)
        block_bytes, scale_bytes, row_scale = block_bytes[order], scale_bytes[order], row_scale[order]
    padded_rows = -(-rows // tile_rows) * tile_rows
    padded_blocks = -(-columns // PAIR_COLUMNS) * (PAIR_COLUMNS // BLOCK)
    pad = torch.nn.functional.pad
    block_bytes = pad(block_bytes, (0, 0, 0, padded_blocks - columns // BLOCK, 0, padded_rows - rows))
    scale_bytes = pad(scale_bytes, (0, padded_blocks - columns // BLOCK, 0, padded_rows - rows))
    return PackedNvfp4(
        data=_to_units(encode_blocks(block_bytes), scale_bytes, tile_rows),
        row_scale=pad(row_scale, (0, padded_rows - rows)).contiguous(),
        shape=(rows, columns),
        tile_rows=tile_rows,
        gated=gated,
    )


def _to_units(words: Tensor, scale_bytes: Tensor, tile_rows: int) -> Tensor:
    """words [N, blocks, 2] int32, scale_bytes [N, blocks] uint8, both padded -> the bytes of all units."""
    tiles, pairs = words.shape[0] // tile_rows, words.shape[1] // 16
    # block index in a pair = 8 chunk + 4 b + quad
    codes = words.reshape(tiles, tile_rows, pairs, 2, 2, 4, 2).permute(0, 2, 3, 1, 5, 4, 6).contiguous()
    scales = scale_bytes.reshape(tiles, tile_rows, pairs, 2, 2, 4).permute(0, 2, 1, 5, 3, 4).contiguous()
    unit_codes = codes.reshape(tiles * pairs, -1).view(torch.uint8)
    return torch.cat([unit_codes, scales.reshape(tiles * pairs, -1)], dim=1).reshape(-1)


def unpack(packed: PackedNvfp4) -> Nvfp4Weight:
    """Inverse of `pack_small_m`, apart from the codes of blocks whose scale is zero."""
    rows, columns = packed.shape
    tiles, pairs, tile_rows = packed.tiles, packed.pairs, packed.tile_rows
    units = packed.data.reshape(tiles * pairs, tile_rows * 144)
    codes = units[:, : tile_rows * 128].contiguous().view(torch.int32)
    words = codes.reshape(tiles, pairs, 2, tile_rows, 4, 2, 2).permute(0, 3, 1, 2, 5, 4, 6)
    block_bytes = decode_blocks(words.reshape(tiles * tile_rows, pairs * 16, 2).contiguous())
    scales = units[:, tile_rows * 128 :].reshape(tiles, pairs, tile_rows, 4, 2, 2).permute(0, 2, 1, 4, 5, 3)
    scale_bytes = scales.reshape(tiles * tile_rows, pairs * 16)
    block_scale = (scale_bytes.to(torch.int16) << 7).view(torch.float16).to(torch.float8_e4m3fn)
    row_scale = packed.row_scale / EPILOGUE_FACTOR
    keep_rows, keep_blocks = slice(0, rows), columns // BLOCK
    block_bytes, block_scale_codes = block_bytes[keep_rows, :keep_blocks], block_scale.view(torch.uint8)[keep_rows]
    row_scale = row_scale[keep_rows]
    if packed.gated:
        order = torch.argsort(gated_row_order(rows, packed.data.device))
        block_bytes, block_scale_codes, row_scale = block_bytes[order], block_scale_codes[order], row_scale[order]
    return Nvfp4Weight(
        codes=block_bytes.reshape(rows, columns // 2),
        block_scale=block_scale_codes[:, :keep_blocks].contiguous().view(torch.float8_e4m3fn),
        row_scale=row_scale,
    )


def random_packed(
    rows: int, columns: int, device: torch.device | str, seed: int, tile_rows: int = 128, gated: bool = False
) -> PackedNvfp4:
    """Valid random weights made on `device` without a float copy: standard deviation near 1 / sqrt(K).

    Any bits are valid codes; scale bytes are E5M3 of 1 to 2. Padding rows and columns hold random values too, which no
    output sees: the kernel masks rows, and columns beyond K meet zeros of x.
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    tiles, pairs = -(-rows // tile_rows), -(-columns // PAIR_COLUMNS)
    unit_bytes = tile_rows * 144
    data = torch.empty(tiles * pairs, unit_bytes, dtype=torch.uint8, device=device)
    data.random_(0, 256, generator=generator)
    # E5M3 bytes of 1.0 .. 1.875: exponent 15, any mantissa.
    scale_bytes = data[:, tile_rows * 128 :]
    scale_bytes.bitwise_and_(7).bitwise_or_(15 << 3)
    # Uniform e2m1 codes have a mean square of 8.8, scales of 1..1.875 one of 2.1.
    row_scale = torch.full((tiles * tile_rows,), EPILOGUE_FACTOR / (18.5 * columns) ** 0.5, device=device)
    return PackedNvfp4(data.reshape(-1), row_scale, (rows, columns), tile_rows, gated)

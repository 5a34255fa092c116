"""How a weight is cut into tiles and over a card, from measurements on an H200 (scripts/LOG.md).

Knows shapes and cards. The split of K, and with it a row's bits, depends on the weight and the card only.

The rule that matters: runs of units are equal, so every multiprocessor must hold equally many blocks. A kernel that may
start beside the one before it (dependent launch) finds places where that one left them; so the ring is made so large
that a multiprocessor never holds more blocks of streams than one launch gives it. The next launch's blocks then start,
and fill their rings, as those of this one end, and beside small kernels, wherever these lie.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
WARPS = 4
DEPTH = 3  # units in the rings
DEPENDENT_FP8_DEPTH = 4  # there 3 would leave room for a third block
BLOCKS_PER_MULTIPROCESSOR = 2
SHARED_REGISTERS = 128  # a thread's: leaves half of the register file to the small kernels that go before
MAX_REGISTERS = 255
_RESERVED_BYTES = 1024  # what the driver takes of shared memory for each block


@dataclass(frozen=True)
class Tiling:
    """warps: per block; depth: units in the rings; blocks_per_multiprocessor: blocks of one launch per processor.

    wide_results: whether results change places among a block's threads, so that eight neighbours leave as one;
    max_registers: per thread; dependent_launch: whether the kernel may start before the previous one has ended (sm_90
    and later).
    """

    tile_rows: int
    warps: int
    depth: int
    blocks_per_multiprocessor: int
    wide_results: bool
    max_registers: int
    dependent_launch: bool


def tile_rows_for(rows: int, columns: int) -> int:
    """Tile height to pack with. All heights measured lie within 5% of each other, for every shape of a 27B model."""
    del rows, columns
    return TILE_ROWS


def ring_bytes(tile_rows: int, depth: int, nvfp4: bool) -> int:
    """Shared memory of one block: words, scale bytes and x, as `weight_stream_kernel` allocates them."""
    words = 2 * depth * tile_rows * 64
    scales = depth * tile_rows * 16 if nvfp4 else 0
    x_slots, chunk_columns = (16, 128) if nvfp4 else (32, 64)
    return words + scales + 2 * depth * x_slots * chunk_columns * 2


def results_bytes(tile_rows: int, modern: bool) -> int:
    """Shared memory in which results of up to 16 rows change places: all of them, or on modern cards half at a time."""
    return tile_rows * 16 * (1 if modern else 2)


def tiling_for(tile_rows: int, nvfp4: bool, shared_bytes_per_multiprocessor: int, modern: bool) -> Tiling:
    """The launch of a weight packed with `tile_rows`. modern: sm_90 and later."""
    warps = max(1, tile_rows // 32)
    depth = DEPENDENT_FP8_DEPTH if modern and not nvfp4 else DEPTH
    block_bytes = ring_bytes(tile_rows, depth, nvfp4) + _RESERVED_BYTES
    places = max(1, shared_bytes_per_multiprocessor // block_bytes)
    wanted = max(1, BLOCKS_PER_MULTIPROCESSOR * TILE_ROWS // tile_rows)
    blocks = min(wanted, places)
    dependent = modern and places == blocks and tile_rows == TILE_ROWS
    wide = shared_bytes_per_multiprocessor >= blocks * (block_bytes + results_bytes(tile_rows, modern))
    return Tiling(tile_rows, warps, depth, blocks, wide, SHARED_REGISTERS if dependent else MAX_REGISTERS, dependent)

"""How a weight is cut into tiles and over a card, from measurements on an H200 (scripts/LOG.md).

Knows shapes and cards. The split of K, and with it a row's bits, depends on the weight and the card only.

The rule that matters: runs of units are equal, so every multiprocessor must hold equally many blocks. A kernel that may
start beside the one before it (dependent launch) finds places where that one left them, so this is safe only where the
blocks of two kernels fill a multiprocessor exactly. Therefore a block has the same size for 8 and 16 rows, and the ring
of x is padded to keep a fifth block out where four are wanted.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_ROWS = 128
WARPS = 4
DEPTH = 2  # units in the rings
BLOCKS_PER_MULTIPROCESSOR = 2
SHARED_REGISTERS = 128  # a thread's, where two kernels of two blocks of 128 threads fill a file of 65,536
MAX_REGISTERS = 255
_RESERVED_BYTES = 1024  # what the driver takes of shared memory for each block


@dataclass(frozen=True)
class Tiling:
    """warps: per block; depth: units in the rings; blocks_per_multiprocessor: blocks of one launch per processor.

    max_registers: per thread; dependent_launch: whether the kernel may start before the previous one has ended (sm_90
    and later).
    """

    tile_rows: int
    warps: int
    depth: int
    blocks_per_multiprocessor: int
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


def tiling_for(tile_rows: int, nvfp4: bool, shared_bytes_per_multiprocessor: int, modern: bool) -> Tiling:
    """The launch of a weight packed with `tile_rows`. modern: sm_90 and later."""
    warps = max(1, tile_rows // 32)
    block_bytes = ring_bytes(tile_rows, DEPTH, nvfp4) + _RESERVED_BYTES
    places = max(1, shared_bytes_per_multiprocessor // block_bytes)
    wanted = max(1, BLOCKS_PER_MULTIPROCESSOR * TILE_ROWS // tile_rows)
    blocks = min(wanted, places)
    dependent = modern and places == 2 * blocks and tile_rows == TILE_ROWS
    return Tiling(tile_rows, warps, DEPTH, blocks, SHARED_REGISTERS if dependent else MAX_REGISTERS, dependent)

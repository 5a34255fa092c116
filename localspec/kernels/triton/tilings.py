"""How a weight is cut into tiles and over a card: one table, measured on an H200 (scripts/LOG.md).

Knows shapes and cards. `tile_rows` is fixed when a weight is packed; the rest is chosen at launch and changes no bits
except through the number of blocks, which is fixed for a weight on a card.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiling:
    """warps: per block; depth: units in the rings; blocks_per_multiprocessor: blocks of one launch per processor.

    max_registers: per thread, low enough that the next kernel's first blocks fit beside this one's.
    """

    tile_rows: int
    warps: int
    depth: int
    blocks_per_multiprocessor: int
    max_registers: int = 112
    whole_tiles: bool = False


def tile_rows_for(rows: int, columns: int) -> int:
    """Tile height to pack with: low matrices take half tiles, so that fewer blocks share a tile."""
    del columns
    return 64 if rows <= 8192 else 128


def tiling_for(tile_rows: int, row_slots: int, shared_limit_bytes: int) -> Tiling:
    """row_slots: 8 or 16; shared_limit_bytes: of a block on this card. The ring is cut where the card is small."""
    warps = max(1, tile_rows // 32)
    blocks = {32: 8, 64: 4, 128: 2, 256: 1}[tile_rows]
    return Tiling(tile_rows, warps, 2, blocks)

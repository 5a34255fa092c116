"""Which program of the attention stream has which rows and keys, and how large the parts are that it writes.

Knows slots, tiles and counts of programs. Knows no bytes: attention_stream.py reads them, attention_join.py joins the
parts. All programs of a launch are shared equally among the tiles that there are, which only the device knows, so none
is started in vain.
"""

from __future__ import annotations

from localspec.kernels.compat import gl, gluon

QUAD_LOG2 = gl.constexpr(2)
GROUP_LOG2 = gl.constexpr(4)
BLOCKS_AHEAD = gl.constexpr(2)
"""Blocks of a program up to which each is a part: few programs stay idle, and the join has the least to fold."""
QUADS_AHEAD = gl.constexpr(4)
"""Quads of a program up to which each is a part: beyond, groups spread as evenly and leave less to write."""


@gluon.jit
def rows_by_slot(slots):
    """Rows of each slot, a byte each, the first lowest. slots: [ROWS], -1 for padding."""
    one = gl.where(slots >= 0, 1, 0).to(gl.int64)
    return gl.sum(one << (gl.maximum(slots, 0) * 8), axis=0)


@gluon.jit
def _tiles_before(counts, tile, GROUP: gl.constexpr, PAIRS: gl.constexpr, SLOTS: gl.constexpr):
    """Tiles of all slots; of tile number `tile` its slot, -1 if there are fewer, and its number within the slot."""
    slot = -1
    own = 0
    before = 0
    for each in gl.static_range(SLOTS):
        count = ((counts >> (8 * each)) & 255).to(gl.int32)
        stop = before + (count * GROUP + (PAIRS - 1)) // PAIRS
        inside = (tile >= before) & (tile < stop)
        slot = gl.where(inside, each, slot)
        own = gl.where(inside, tile - before, own)
        before = stop
    return before, slot, own


@gluon.jit
def programs_of_tile(
    counts, programs, least_tiles, GROUP: gl.constexpr, PAIRS: gl.constexpr, SLOTS: gl.constexpr
):  # fmt: skip
    """How many of `programs` each tile has. least_tiles: what the buffer for parts was sized for."""
    tiles, _, _ = _tiles_before(counts, 0, GROUP, PAIRS, SLOTS)
    return gl.maximum(programs // gl.maximum(tiles, least_tiles), 1)


@gluon.jit
def part_shift(longest, each, BLOCK: gl.constexpr):
    """log2 of a part's blocks for a slot whose last key is `longest`, with `each` programs for a tile."""
    blocks = gl.cdiv(longest, BLOCK)
    some = gl.where(blocks <= (each * QUADS_AHEAD << QUAD_LOG2), QUAD_LOG2, GROUP_LOG2)
    return gl.where(blocks <= each * BLOCKS_AHEAD, 0, some)


@gluon.jit
def tile_bounds(
    slots_ptr, begin_ptr, end_ptr, num_rows, programs, least_tiles,
    GROUP: gl.constexpr, PAIRS: gl.constexpr, BLOCK: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """This program's slot (-1: none), number among its tile's programs and how many these are, the tile's first pair
    and number of pairs, log2 of a part's blocks, and four keys: the first and the end of what any pair sees, and of
    what every pair sees.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    rows = gl.arange(0, ROWS, layout=layout)
    slots = gl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    end = gl.load(end_ptr + rows, mask=rows < num_rows, other=0).to(gl.int32)
    begin = gl.load(begin_ptr + rows, mask=rows < num_rows, other=0).to(gl.int32)
    counts = rows_by_slot(slots)
    each = programs_of_tile(counts, programs, least_tiles, GROUP, PAIRS, SLOTS)
    _, slot, tile = _tiles_before(counts, gl.program_id(0) // each, GROUP, PAIRS, SLOTS)
    own = (slots == slot) & (slots >= 0)
    first_row = gl.min(gl.where(own, rows, ROWS), axis=0)
    count = gl.sum(own.to(gl.int32), axis=0)
    shift = part_shift(gl.max(gl.where(own, end, 0), axis=0), each, BLOCK)
    first_pair = first_row * GROUP + tile * PAIRS
    pairs = gl.minimum(count * GROUP - tile * PAIRS, PAIRS)
    mine = own & (rows * GROUP + GROUP > first_pair) & (rows * GROUP < first_pair + pairs)
    first_key = gl.min(gl.where(mine, begin, 0x7FFFFFFF), axis=0)
    last_key = gl.max(gl.where(mine, end, 0), axis=0)
    inner_first = gl.max(gl.where(mine, begin, 0), axis=0)
    inner_stop = gl.min(gl.where(mine, end, 0x7FFFFFFF), axis=0)
    index = gl.program_id(0) % each
    return slot, index, each, first_pair, pairs, shift, first_key, last_key, inner_first, inner_stop


@gluon.jit
def own_blocks(first_key, last_key, index, each, shift, BLOCK: gl.constexpr):
    """The run of blocks [first, stop) of a tile's program: whole parts of 2^shift blocks, the same number for all."""
    stop_block = gl.cdiv(last_key, BLOCK)
    part_first = (first_key // BLOCK) >> shift
    parts = gl.maximum(((stop_block + (1 << shift) - 1) >> shift) - part_first, 0)
    first = part_first + index * parts // each
    stop = part_first + (index + 1) * parts // each
    return gl.maximum(first << shift, first_key // BLOCK), gl.minimum(stop << shift, stop_block)

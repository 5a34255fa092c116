"""The kernel that streams a packed weight once and multiplies it with 1..16 rows: y = x W^T, for NVFP4 and FP8.

Knows units and rings. The formats are in weight_decode.py, what blocks owe each other in weight_sums.py, the choice of
tilings in tilings.py; the two `_linear` modules are the entries.

How it moves bytes. Each block takes an equal run of consecutive units (unit = one tile of rows x two chunks of columns;
see nvfp4_pack.py), which lie in one stretch of memory, through rings in shared memory filled by cp.async. Even and odd
chunks have rings of their own, DEPTH slots each, so that one barrier a chunk is enough: while a chunk of one parity is
read, a chunk of the other is copied, and 2 * DEPTH - 1 are in flight. Words go from the ring to registers in the MMA
fragment layout and are decoded there. x rides in rings of the same shape. Under dependent launch (sm_90 and later)
every block lets the next kernel start at once and fills its own rings before it waits for the previous one.

How it stays exact per row. The weight is the MMA's A side and the rows of x its N side, 8 columns a tile: a column's
sums do not see its neighbours. The run of units of each block, and with it every split of K, depends on the weight and
the card only. A tile that several blocks share is summed in block order. FMA contraction is off at compile time.
"""

from __future__ import annotations

from localspec.kernels.compat import (
    async_copy,
    block_barrier,
    copy_to_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
)
from localspec.kernels.triton.weight_decode import multiply_chunk
from localspec.kernels.triton.weight_sums import close_tile, forget_rows, load_squares, normalise, row_factors


@gluon.jit
def _copy_codes(
    ring, w_ptr, unit, slot, BN: gl.constexpr, NW: gl.constexpr, UNIT_BYTES: gl.constexpr, ODD: gl.constexpr
):
    """Start the copy of one chunk's words of a unit."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [NW, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    base = (w_ptr + unit.to(gl.int64) * UNIT_BYTES).to(gl.pointer_type(gl.int32), bitcast=True)
    offsets = BN * 16 * ODD + (rows[:, None] * 16 + columns[None, :])
    copy_to_shared(ring.index(slot), base + offsets)


@gluon.jit
def _copy_scales(ring, w_ptr, unit, slot, BN: gl.constexpr, NW: gl.constexpr, UNIT_BYTES: gl.constexpr):
    """Start the copy of a unit's scale bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    base = w_ptr + unit.to(gl.int64) * UNIT_BYTES + BN * 128
    copy_to_shared(ring.index(slot), base + (rows[:, None] * 16 + columns[None, :]))


@gluon.jit
def _copy_x(
    ring, x_ptr, pair, slot, M, K8, x_stride8,
    MP: gl.constexpr, KC: gl.constexpr, NW: gl.constexpr, ODD: gl.constexpr,
):  # fmt: skip
    """Start the copy of one chunk of x, [MP, KC]; rows from M and columns from K on become zero.

    K and the row stride come in units of 8, which tells the compiler that 16-byte copies are aligned.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KC, KC // 8], [NW, 1], [1, 0])
    m = gl.arange(0, MP, layout=gl.SliceLayout(1, layout))
    k = (pair * 2 + ODD) * KC + gl.arange(0, KC, layout=gl.SliceLayout(0, layout))
    mask = (m < M)[:, None] & (k < K8 * 8)[None, :]
    copy_to_shared(ring.index(slot).slice(0, MP), x_ptr + ((m * (x_stride8 * 8))[:, None] + k[None, :]), mask=mask)


@gluon.jit
def _fill(
    even, odd, scales, w_ptr, unit, stop,
    BN: gl.constexpr, NW: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr, NVFP4: gl.constexpr,
):  # fmt: skip
    """Start the copies of the first 2 * DEPTH - 1 chunks of weights: before the wait, since nobody writes weights."""
    for ahead in gl.static_range(DEPTH):
        if unit + ahead < stop:
            _copy_codes(even, w_ptr, unit + ahead, ahead, BN, NW, UNIT, 0)
            if NVFP4:
                _copy_scales(scales, w_ptr, unit + ahead, ahead, BN, NW, UNIT)
            if ahead < DEPTH - 1:
                _copy_codes(odd, w_ptr, unit + ahead, ahead, BN, NW, UNIT, 1)
    async_copy.commit_group()


@gluon.jit
def _fill_x(
    even, odd, x_ptr, unit, stop, pairs, M, K8, x_stride8,
    MP: gl.constexpr, KC: gl.constexpr, NW: gl.constexpr, DEPTH: gl.constexpr,
):  # fmt: skip
    """Start the copies of x for the same chunks, a group each. Returns the pair of the unit DEPTH - 1 ahead."""
    pair = unit % pairs
    for ahead in gl.static_range(DEPTH):
        if ahead > 0:
            pair = gl.where(pair + 1 == pairs, 0, pair + 1)
        if unit + ahead < stop:
            _copy_x(even, x_ptr, pair, ahead, M, K8, x_stride8, MP, KC, NW, 0)
        async_copy.commit_group()
        if ahead < DEPTH - 1:
            if unit + ahead < stop:
                _copy_x(odd, x_ptr, pair, ahead, M, K8, x_stride8, MP, KC, NW, 1)
            async_copy.commit_group()
    return pair


@gluon.jit
def _stream_tile(
    even, odd, scales, x_even, x_odd, w_ptr, x_ptr, group_scale_ptr, group_stride,
    unit, tile_stop, stop, slot, later, pairs, M, K8, x_stride8,
    BN: gl.constexpr, MP: gl.constexpr, KC: gl.constexpr, NW: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr,
    NVFP4: gl.constexpr, BLOCK_SCALE: gl.constexpr, mma: gl.constexpr,
    ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """Sums of this block's units of one tile, the ring slot and the pair to go on with.

    later: pair of the unit whose odd chunk is copied next. group_scale_ptr: the tile's scales at the first unit.
    """
    acc0 = gl.zeros((BN, MP), gl.float32, layout=mma)
    acc1 = gl.zeros((BN, MP), gl.float32, layout=mma)
    for current in range(unit, tile_stop):
        async_copy.wait_group(2 * DEPTH - 2)
        block_barrier()
        if current + (DEPTH - 1) < stop:
            behind = gl.where(slot == 0, DEPTH - 1, slot - 1)
            _copy_codes(odd, w_ptr, current + (DEPTH - 1), behind, BN, NW, UNIT, 1)
            _copy_x(x_odd, x_ptr, later, behind, M, K8, x_stride8, MP, KC, NW, 1)
        async_copy.commit_group()
        later = gl.where(later + 1 == pairs, 0, later + 1)
        unit_scales = 0
        if NVFP4:
            unit_scales = scales.index(slot).load(gl.DotOperandLayout(0, mma, 4))
        part0 = gl.zeros((BN, MP), gl.float32, layout=mma) if BLOCK_SCALE else acc0
        part1 = gl.zeros((BN, MP), gl.float32, layout=mma) if BLOCK_SCALE else acc1
        rows = x_even.index(slot).slice(0, MP)
        part0, part1 = multiply_chunk(
            even.index(slot), unit_scales, rows, part0, part1, MP, NW, KC, NVFP4, mma, ASM_EVEN, CONSTRAINTS
        )
        async_copy.wait_group(2 * DEPTH - 2)
        block_barrier()
        if current + DEPTH < stop:
            _copy_codes(even, w_ptr, current + DEPTH, slot, BN, NW, UNIT, 0)
            if NVFP4:
                _copy_scales(scales, w_ptr, current + DEPTH, slot, BN, NW, UNIT)
            _copy_x(x_even, x_ptr, later, slot, M, K8, x_stride8, MP, KC, NW, 0)
        async_copy.commit_group()
        rows = x_odd.index(slot).slice(0, MP)
        part0, part1 = multiply_chunk(
            odd.index(slot), unit_scales, rows, part0, part1, MP, NW, KC, NVFP4, mma, ASM_ODD, CONSTRAINTS
        )
        if BLOCK_SCALE:
            group = (current - unit) * group_stride + gl.arange(0, BN, layout=gl.SliceLayout(1, mma)) // 8
            acc0 = acc0 + (part0 + part1) * gl.load(group_scale_ptr + group)[:, None]
        else:
            acc0 = part0
            acc1 = part1
        slot = gl.where(slot + 1 == DEPTH, 0, slot + 1)
    return acc0 + acc1, slot, later


@gluon.jit
def _run_units(
    even, odd, scales, x_even, x_odd, w_ptr, rows_ptr, scale_ptr, group_scale_ptr, bias_ptr, out_ptr, residual_ptr,
    following_ptr, weighted_ptr, squares_out_ptr, partial_ptr, ticket_ptr, squares, early_factor,
    unit, stop, later, M, K8, N8, tiles, pairs, rows_stride8, out_stride8, residual_stride8, eps,
    BN: gl.constexpr, MP: gl.constexpr, KC: gl.constexpr, NW: gl.constexpr, DEPTH: gl.constexpr, UNIT: gl.constexpr,
    NVFP4: gl.constexpr, BLOCK_SCALE: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    SQUARES: gl.constexpr, FOLLOWING: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr, mma: gl.constexpr,
    ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """A block's units [unit, stop), tile by tile, from rings that are being filled; see the kernel for the pointers.

    squares [SQUARES, MP], early_factor [MP]: what a norm of the rows needs, the second made where registers allow it.
    """
    units = tiles * pairs
    slot = 0
    while unit < stop:
        tile = unit // pairs
        tile_stop = gl.minimum(stop, tile * pairs + pairs)
        # Asked for now, used when the tile is done.
        scale = gl.load(scale_ptr + tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma)))
        group_stride = tiles * (BN // 8)
        total, slot, later = _stream_tile(
            even, odd, scales, x_even, x_odd, w_ptr, rows_ptr,
            group_scale_ptr + (unit - tile * pairs) * group_stride + tile * (BN // 8), group_stride,
            unit, tile_stop, stop, slot, later, pairs, M, K8, rows_stride8,
            BN, MP, KC, NW, DEPTH, UNIT, NVFP4, BLOCK_SCALE, mma, ASM_EVEN, ASM_ODD, CONSTRAINTS,
        )  # fmt: skip
        row_factor = early_factor
        if SQUARES > 0 and MP == 8:
            row_factor = row_factors(squares, K8, eps, mma)
        close_tile(
            total, tile, unit == tile * pairs, tile_stop - unit == pairs, scale, row_factor, bias_ptr, out_ptr,
            residual_ptr, following_ptr, weighted_ptr, squares_out_ptr, partial_ptr, ticket_ptr, M, N8, units, pairs,
            out_stride8, residual_stride8, BN, MP, EPILOGUE, HAS_BIAS, SQUARES > 0, FOLLOWING, STEP, WIDE, mma,
        )  # fmt: skip
        unit = tile_stop


@gluon.jit(do_not_specialize=["M", "K8", "N8", "tiles", "pairs", "x_stride8", "out_stride8", "residual_stride8"])
def weight_stream_kernel(
    w_ptr, scale_ptr, group_scale_ptr, bias_ptr, x_ptr, out_ptr, residual_ptr, norm_ptr, squares_ptr, following_ptr,
    weighted_ptr, squares_out_ptr, normed_ptr, ready_ptr, partial_ptr, ticket_ptr,
    M, K8, N8, tiles, pairs, x_stride8, out_stride8, residual_stride8, eps,
    BN: gl.constexpr, MP: gl.constexpr, DEPTH: gl.constexpr, NW: gl.constexpr, NVFP4: gl.constexpr,
    BLOCK_SCALE: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, NORM_BLOCK: gl.constexpr,
    PLUS_ONE: gl.constexpr, SQUARES: gl.constexpr, FOLLOWING: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr,
    PDL: gl.constexpr, ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """One block: its run of units. Grid: (blocks,), at most the number of units.

    partial_ptr: [blocks, BN, MP] float32; ticket_ptr: [tiles] int32, ready_ptr: [2] int32, zero before and after.
    NORM_BLOCK: 0 without a norm, else a power of two >= K; normed_ptr: [M, K] bfloat16, written here.
    SQUARES: 0, or a power of two >= K / BN: x is multiplied with the norm's weight already, and squares_ptr
    [K / BN, 16] float32 holds sums of its squares. FOLLOWING, weighted_ptr, squares_out_ptr: see `prepare`.
    N8, out_stride8, residual_stride8: in units of STEP, 8 or 1. WIDE: results change places among threads on their way.
    group_scale_ptr: [pairs, tiles * BN / 8] float32, FP8 with BLOCK_SCALE only; bias_ptr: [N], with HAS_BIAS only.
    """
    KC: gl.constexpr = 128 if NVFP4 else 64
    UNIT: gl.constexpr = BN * 144 if NVFP4 else BN * 128
    X_SLOTS: gl.constexpr = 16 if NVFP4 else 32  # more than MP: see tilings.py
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1], instr_shape=[16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    even = gl.allocate_shared_memory(gl.int32, [DEPTH, BN, 16], plain)
    odd = gl.allocate_shared_memory(gl.int32, [DEPTH, BN, 16], plain)
    scales = gl.allocate_shared_memory(gl.uint8, [DEPTH if NVFP4 else 1, BN, 16], plain)
    x_even = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, X_SLOTS, KC], swizzled)
    x_odd = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, X_SLOTS, KC], swizzled)
    units = tiles * pairs
    unit = gl.program_id(0) * units // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * units // gl.num_programs(0)
    if PDL:
        gdc_launch_dependents()
    _fill(even, odd, scales, w_ptr, unit, stop, BN, NW, DEPTH, UNIT, NVFP4)
    if PDL:
        gdc_wait()
    rows_ptr, rows_stride8 = x_ptr, x_stride8
    if NORM_BLOCK > 0:
        normalise(x_ptr, norm_ptr, normed_ptr, ready_ptr, M, K8, x_stride8, eps, NORM_BLOCK, PLUS_ONE, NW)
        rows_ptr, rows_stride8 = normed_ptr, K8
    later = _fill_x(x_even, x_odd, rows_ptr, unit, stop, pairs, M, K8, rows_stride8, MP, KC, NW, DEPTH)
    if NORM_BLOCK > 0:
        forget_rows(ready_ptr)
    squares = 0.0
    early_factor = 0.0
    if SQUARES > 0:
        # Asked for now, used when a tile is done; beside 16 rows of sums no registers are left to hold them.
        squares = load_squares(squares_ptr, (K8 * 8 + BN - 1) // BN, SQUARES, MP, NW)
        if MP == 16:
            early_factor = row_factors(squares, K8, eps, mma)
    _run_units(
        even, odd, scales, x_even, x_odd, w_ptr, rows_ptr, scale_ptr, group_scale_ptr, bias_ptr, out_ptr, residual_ptr,
        following_ptr, weighted_ptr, squares_out_ptr, partial_ptr, ticket_ptr, squares, early_factor,
        unit, stop, later, M, K8, N8, tiles, pairs, rows_stride8, out_stride8, residual_stride8, eps,
        BN, MP, KC, NW, DEPTH, UNIT, NVFP4, BLOCK_SCALE, EPILOGUE, HAS_BIAS, SQUARES, FOLLOWING, STEP, WIDE, mma,
        ASM_EVEN, ASM_ODD, CONSTRAINTS,
    )  # fmt: skip

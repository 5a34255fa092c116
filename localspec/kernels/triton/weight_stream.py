"""The kernel that streams a packed weight once and multiplies it with 1..16 rows: y = x W^T, for NVFP4 and FP8.

Knows units, rings and fragments. Does not choose tilings (`tilings.py`) nor check shapes (the two `_linear` modules).

How it moves bytes. Each block takes an equal run of consecutive units (unit = one tile of rows x `2 * KC` columns; see
nvfp4_pack.py), which lie in one stretch of memory, through a ring of `STAGES` units in shared memory filled by
cp.async. Words go from the ring to registers in the MMA fragment layout and are decoded there; decoded weights never
touch shared memory. x rides in the same ring. On sm_90 and later the ring is filled before the block waits for the
previous kernel (programmatic dependent launch), and the next kernel may start once all of this one's loads are issued.

How it stays exact per row. The weight is the MMA's A side and the rows of x its N side, 8 columns a tile: a column's
sums do not see its neighbours. The run of units of each block, and with it every split of K, depends on the weight and
the card only. A tile that several blocks share is summed from stored partials in block order by whoever arrives last,
so that the order of arrival does not show. FMA contraction is switched off at compile time.
"""

from __future__ import annotations

from localspec.kernels.compat import (
    async_copy,
    block_barrier,
    constexpr_function,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mma_v2,
)
from localspec.kernels.nvfp4_pack import FIELD_MASK, FIELD_ROTATIONS, MIX_MASK, MIX_ROTATION


def nvfp4_decode_asm(odd_chunk: bool, native_multiply: bool) -> str:
    """PTX that decodes 4 words (two blocks of 16) of one row.

    Outputs $0..$15: register 2 r + h holds the pair h of MMA r; MMAs 0..3 take block 0, 4..7 block 1. Inputs: words
    $16..$19, scale bytes $20 (0, 1 for the even chunk of a pair, 2, 3 for the odd one).
    bf16x2 multiply needs sm_90; before it fma with -0.0 gives the same bits.
    """
    multiply = "mul.rn.bf16x2 {0}, t, sc;" if native_multiply else "fma.rn.bf16x2 {0}, t, sc, nz;"
    lines = ["{ .reg .b32 t, c, sc, nz; mov.b32 nz, 0x80008000;"]
    for block in range(2):
        byte = block + (2 if odd_chunk else 0)
        words = (f"${16 + 2 * block}", f"${17 + 2 * block}", "c")
        lines.append(f"prmt.b32 sc, $20, 0, 0x4{byte}4{byte}; mad.lo.u32 sc, sc, 16, 0x73007300;")
        lines.append(f"shf.l.wrap.b32 t, {words[1]}, {words[1]}, {MIX_ROTATION};")
        lines.append(f"lop3.b32 c, {MIX_MASK:#x}, t, {words[0]}, 0xCA;")
        for field, (source, rotation) in enumerate(FIELD_ROTATIONS):
            word = words[source]
            if rotation > 6:
                lines.append(f"shf.l.wrap.b32 t, {word}, {word}, {rotation};")
            elif rotation:
                # No bit wraps below the mask's lowest; a plain shift can run on the multiplier's pipe.
                lines.append(f"shl.b32 t, {word}, {rotation};")
            lines.append(f"and.b32 t, {'t' if rotation else word}, {FIELD_MASK:#x};")
            lines.append(multiply.format(f"${8 * block + field}"))
    return "\n".join([*lines, "}"])


def fp8_decode_asm(native_multiply: bool) -> str:
    """PTX that decodes 4 words (16 e4m3 codes) of one row: word r feeds MMA r; outputs $0..$7, inputs $8..$11.

    bfloat16 bits sign | (byte & 0x7F) << 4 are value * 2^-120, exact with subnormals; the multiply by 2^120 is exact.
    The first pair lies under 0x87F0 of each half. The second has the upper magnitude bits at 14..11, the lower ones at
    2..0, and its signs at bit 3 of the *other* half, so that one rotation by 28 serves both.
    """
    multiply = "mul.rn.bf16x2 {0}, {1}, sc;" if native_multiply else "fma.rn.bf16x2 {0}, {1}, sc, nz;"
    lines = ["{ .reg .b32 t, c, sc, nz; mov.b32 nz, 0x80008000; mov.b32 sc, 0x7B807B80;"]
    for word_index in range(4):
        word = f"${8 + word_index}"
        lines.append(f"and.b32 t, {word}, 0x87F087F0;")
        lines.append(multiply.format(f"${2 * word_index}", "t"))
        lines.append(f"shf.l.wrap.b32 t, {word}, {word}, 28; shl.b32 c, {word}, 4; and.b32 c, c, 0x00700070;")
        lines.append("lop3.b32 t, t, 0x87808780, c, 0xEA;")
        lines.append(multiply.format(f"${2 * word_index + 1}", "t"))
    return "\n".join([*lines, "}"])


# One thread of the block asks for a whole unit.
PREFETCH_ASM = (
    "{{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "@p cp.async.bulk.prefetch.L2.global [$1], {0}; mov.u32 $0, 0; }}"
)
NVFP4_CONSTRAINTS = ",".join(["=r"] * 16 + ["r"] * 5)
FP8_CONSTRAINTS = ",".join(["=r"] * 8 + ["r"] * 4)


@constexpr_function
def _x_fragment_layout(MP, KC, NW):
    """Layout of an x chunk [MP, KC] whose registers are the B fragments of all MMAs of the chunk."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8]]
    if KC == 128:
        registers = [*registers, [0, 64]]
    if MP == 16:
        registers = [*registers, [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    warps = [[0, 0]] * (NW.bit_length() - 1)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [MP, KC])


@gluon.jit
def _split4(x, layout: gl.constexpr):
    """[16, MP, 2, 2] (r1, r0) -> the four [16, MP] B operands in the order of r."""
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(x0, layout, assert_trivial=True),
        gl.convert_layout(x1, layout, assert_trivial=True),
        gl.convert_layout(x2, layout, assert_trivial=True),
        gl.convert_layout(x3, layout, assert_trivial=True),
    )


@gluon.jit
def _nvfp4_chunk(
    words, scales, x, acc0, acc1,
    MP: gl.constexpr, layout: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """words [BN, 16] int32, scales [BN, 16] uint8, x [MP, 128]: 8 MMA steps."""
    w0, w1, w2, w3, w4, w5, w6, w7 = gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [words, scales],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # k = 64 b + 16 quad + 4 r + 2 h + p; an MMA's k index is (quad, h, p).
    fragments = gl.permute(gl.reshape(x, [MP, 2, 4, 4, 2, 2]), [2, 4, 5, 0, 3, 1])
    low, high = gl.split(gl.reshape(fragments, [16, MP, 4, 2]))
    x0, x1, x2, x3 = _split4(gl.reshape(low, [16, MP, 2, 2]), layout)
    x4, x5, x6, x7 = _split4(gl.reshape(high, [16, MP, 2, 2]), layout)
    acc0 = mma_v2(w0, x0, acc0)
    acc1 = mma_v2(w1, x1, acc1)
    acc0 = mma_v2(w2, x2, acc0)
    acc1 = mma_v2(w3, x3, acc1)
    acc0 = mma_v2(w4, x4, acc0)
    acc1 = mma_v2(w5, x5, acc1)
    acc0 = mma_v2(w6, x6, acc0)
    acc1 = mma_v2(w7, x7, acc1)
    return acc0, acc1


@gluon.jit
def _fp8_chunk(
    words, x, acc0, acc1,
    MP: gl.constexpr, layout: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """words [BN, 16] int32, x [MP, 64]: 4 MMA steps."""
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        ASM,
        CONSTRAINTS,
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    # k = 16 quad + 4 r + 2 h + p; an MMA's k index is (quad, h, p).
    fragments = gl.permute(gl.reshape(x, [MP, 4, 4, 2, 2]), [1, 3, 4, 0, 2])
    x0, x1, x2, x3 = _split4(gl.reshape(fragments, [16, MP, 2, 2]), layout)
    acc0 = mma_v2(w0, x0, acc0)
    acc1 = mma_v2(w1, x1, acc1)
    acc0 = mma_v2(w2, x2, acc0)
    acc1 = mma_v2(w3, x3, acc1)
    return acc0, acc1


@gluon.jit
def _copy_codes(ring, w_ptr, unit, slot, BN: gl.constexpr, NW: gl.constexpr, UNIT_BYTES: gl.constexpr, ODD: gl.constexpr):
    """Start the copy of one chunk's words of a unit."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [NW, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    base = (w_ptr + unit.to(gl.int64) * UNIT_BYTES).to(gl.pointer_type(gl.int32), bitcast=True)
    offsets = BN * 16 * ODD + (rows[:, None] * 16 + columns[None, :])
    async_copy.async_copy_global_to_shared(ring.index(slot), base + offsets)


@gluon.jit
def _copy_scales(ring, w_ptr, unit, slot, BN: gl.constexpr, NW: gl.constexpr, UNIT_BYTES: gl.constexpr):
    """Start the copy of a unit's scale bytes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW, 1], [1, 0])
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, layout))
    base = w_ptr + unit.to(gl.int64) * UNIT_BYTES + BN * 128
    async_copy.async_copy_global_to_shared(ring.index(slot), base + (rows[:, None] * 16 + columns[None, :]))


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
    async_copy.async_copy_global_to_shared(
        ring.index(slot), x_ptr + ((m * (x_stride8 * 8))[:, None] + k[None, :]), mask=mask
    )


@gluon.jit
def _load_residual(
    residual_ptr, tile, wanted, M, N, residual_stride, BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr
):
    """The tile's residual [BN, MP], asked for before the block waits for others."""
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, mma))
    mask = (rows < N)[:, None] & ((m < M) & wanted)[None, :]
    return gl.load(residual_ptr + (m * residual_stride)[None, :] + rows[:, None], mask=mask, other=0.0)


@gluon.jit
def _finish(
    acc, tile, scale, residual, bias_ptr, out_ptr, M, N, out_stride,
    BN: gl.constexpr, MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Row scale, epilogue and store of a tile's full sums [BN, MP]. N: columns of the output."""
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    acc = acc * scale[:, None]
    if EPILOGUE == "silu_mul":
        pairs = gl.permute(gl.reshape(acc, [BN // 16, 2, 8, MP]), [0, 2, 3, 1])
        gate, up = gl.split(gl.reshape(pairs, [BN // 2, MP, 2]))
        value = gate / (1.0 + gl.exp(-gate)) * up
        layout: gl.constexpr = value.type.layout
        n = tile * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, layout))
        m = gl.arange(0, MP, layout=gl.SliceLayout(0, layout))
        mask = (n < N)[:, None] & (m < M)[None, :]
        gl.store(out_ptr + (m * out_stride)[None, :] + n[:, None], value.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        m = gl.arange(0, MP, layout=gl.SliceLayout(0, mma))
        mask = (rows < N)[:, None] & (m < M)[None, :]
        if HAS_BIAS:
            acc = acc + gl.load(bias_ptr + rows, mask=rows < N, other=0.0).to(gl.float32)[:, None]
        if EPILOGUE == "residual":
            acc = acc + residual.to(gl.float32)
        gl.store(out_ptr + (m * out_stride)[None, :] + rows[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load_partial(partial_ptr, slot, offsets, mask, SIZE: gl.constexpr):
    """Past the first-level cache: another block wrote it during this kernel."""
    return gl.load(partial_ptr + slot * SIZE + offsets, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _add_partials(acc, partial_ptr, first, last, offsets, mask, BN: gl.constexpr, MP: gl.constexpr):
    """acc + the partials of blocks first..last in block order. Four loads travel together: one round trip a four."""
    SIZE: gl.constexpr = BN * MP
    for block in range(first, last + 1, 4):
        p0 = _load_partial(partial_ptr, block, offsets, mask, SIZE)
        p1 = _load_partial(partial_ptr, block + 1, offsets, mask & (block + 1 <= last), SIZE)
        p2 = _load_partial(partial_ptr, block + 2, offsets, mask & (block + 2 <= last), SIZE)
        p3 = _load_partial(partial_ptr, block + 3, offsets, mask & (block + 3 <= last), SIZE)
        acc = (((acc + p0) + p1) + p2) + p3
    return acc


@gluon.jit
def _multiply_chunk(
    words, scales, x, acc0, acc1,
    MP: gl.constexpr, NW: gl.constexpr, KC: gl.constexpr, NVFP4: gl.constexpr, mma: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """Add one chunk from the rings to the sums. scales: the unit's scale bytes in registers, NVFP4 only."""
    layout: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    codes = words.load(gl.DotOperandLayout(0, mma, 4))
    rows = x.load(_x_fragment_layout(MP, KC, NW))
    if NVFP4:
        acc0, acc1 = _nvfp4_chunk(codes, scales, rows, acc0, acc1, MP, layout, ASM, CONSTRAINTS)
    else:
        acc0, acc1 = _fp8_chunk(codes, rows, acc0, acc1, MP, layout, ASM, CONSTRAINTS)
    return acc0, acc1


@gluon.jit
def _share_tile(
    acc, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, M,
    BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """A tile that several blocks hold parts of: all but the first store theirs, the first waits and adds them up.

    Block b owns the units from b * units // blocks on, so the owner of unit u is ((u + 1) * blocks - 1) // units. The
    first block of a tile comes to it last in its run, the others first in theirs: the wait is short, and nobody waits
    for a block that waits for it. Blocks start in order, so that a later one comes even where not all fit at once.
    Returns the full sum in the first block.
    """
    block = gl.program_id(0)
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, mma))
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    offsets = (rows * MP)[:, None] + m[None, :]
    mask = (rows >= 0)[:, None] & (m < M)[None, :]
    if starts_tile:
        last = ((tile * pairs + pairs) * gl.num_programs(0) - 1) // units
        arrived = gl.atomic_add(ticket_ptr + tile, 0, sem="acquire", scope="gpu")
        while arrived < last - block:
            arrived = gl.atomic_add(ticket_ptr + tile, 0, sem="acquire", scope="gpu")
        acc = _add_partials(acc, partial_ptr, block + 1, last, offsets, mask, BN, MP)
        gl.store(ticket_ptr + tile, 0)
    else:
        gl.store(partial_ptr + block * (BN * MP) + offsets, acc, mask=mask)
        block_barrier()
        gl.atomic_add(ticket_ptr + tile, 1, sem="release", scope="gpu")
    return acc


@gluon.jit
def _wait_until_near_end(near_end_ptr, parity):
    """Hold back until the previous kernel has issued its loads, or a while: only when bytes move depends on it."""
    seen = gl.load(near_end_ptr + (1 - parity), volatile=True)
    tries = 0
    while (seen == 0) & (tries < 60):
        seen = gl.load(near_end_ptr + (1 - parity), volatile=True)
        tries += 1


@gluon.jit
def _prefetch_units(w_ptr, unit, stop, COUNT: gl.constexpr, UNIT: gl.constexpr, ASM: gl.constexpr):
    """Ask for the units after the ring's to come to the second-level cache."""
    for ahead in gl.static_range(COUNT):
        if unit + ahead < stop:
            gl.inline_asm_elementwise(
                ASM, "=r,l", [w_ptr + (unit + ahead).to(gl.int64) * UNIT], dtype=gl.int32, is_pure=False, pack=1
            )


@gluon.jit(do_not_specialize=["M", "K8", "N", "tiles", "pairs", "x_stride8", "out_stride", "residual_stride", "parity"])
def weight_stream_kernel(
    w_ptr, scale_ptr, group_scale_ptr, bias_ptr, x_ptr, out_ptr, residual_ptr, partial_ptr, ticket_ptr,
    near_end_ptr, M, K8, N, tiles, pairs, x_stride8, out_stride, residual_stride, parity,
    BN: gl.constexpr, MP: gl.constexpr, DEPTH: gl.constexpr, NW: gl.constexpr, NVFP4: gl.constexpr,
    BLOCK_SCALE: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr, POLL: gl.constexpr, AHEAD: gl.constexpr,
    ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr, ASM_PREFETCH: gl.constexpr,
):  # fmt: skip
    """One block: its run of units. Grid: (blocks,), at most the number of units.

    Even and odd chunks have rings of their own, DEPTH slots each, so that one barrier a chunk is enough: while a chunk
    of one parity is read, a chunk of the other is copied. 2 * DEPTH - 1 chunks are in flight.
    partial_ptr: [blocks, BN, MP] float32; ticket_ptr: [tiles] int32, zero before and after.
    group_scale_ptr: [pairs, tiles * BN / 8] float32, FP8 with BLOCK_SCALE only; bias_ptr: [N], with HAS_BIAS only.
    """
    KC: gl.constexpr = 128 if NVFP4 else 64
    UNIT: gl.constexpr = BN * 144 if NVFP4 else BN * 128
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1], instr_shape=[16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    swizzled: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    even = gl.allocate_shared_memory(gl.int32, [DEPTH, BN, 16], plain)
    odd = gl.allocate_shared_memory(gl.int32, [DEPTH, BN, 16], plain)
    scales = gl.allocate_shared_memory(gl.uint8, [DEPTH if NVFP4 else 1, BN, 16], plain)
    x_even = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, MP, KC], swizzled)
    x_odd = gl.allocate_shared_memory(gl.bfloat16, [DEPTH, MP, KC], swizzled)
    units = tiles * pairs
    unit = gl.program_id(0) * units // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * units // gl.num_programs(0)
    if PDL == 3:
        gdc_launch_dependents()
    if POLL:
        _wait_until_near_end(near_end_ptr, parity)
    for ahead in gl.static_range(DEPTH):
        if unit + ahead < stop:
            _copy_codes(even, w_ptr, unit + ahead, ahead, BN, NW, UNIT, 0)
            if NVFP4:
                _copy_scales(scales, w_ptr, unit + ahead, ahead, BN, NW, UNIT)
            if ahead < DEPTH - 1:
                _copy_codes(odd, w_ptr, unit + ahead, ahead, BN, NW, UNIT, 1)
    async_copy.commit_group()
    if AHEAD > 0:
        _prefetch_units(w_ptr, unit + DEPTH, stop, AHEAD, UNIT, ASM_PREFETCH)
    if PDL:
        gdc_wait()
        if PDL == 2:
            gdc_launch_dependents()
        if PDL == 1:
            if unit + DEPTH > stop:
                gdc_launch_dependents()
    if POLL:
        gl.store(near_end_ptr + (1 - parity), 0, mask=gl.program_id(0) == 0)
    # x of pair unit + DEPTH - 1 goes last; `later` then names the pair whose odd chunk is copied next.
    later = unit % pairs
    for ahead in gl.static_range(DEPTH):
        if ahead > 0:
            later = gl.where(later + 1 == pairs, 0, later + 1)
        if unit + ahead < stop:
            _copy_x(x_even, x_ptr, later, ahead, M, K8, x_stride8, MP, KC, NW, 0)
        async_copy.commit_group()
        if ahead < DEPTH - 1:
            if unit + ahead < stop:
                _copy_x(x_odd, x_ptr, later, ahead, M, K8, x_stride8, MP, KC, NW, 1)
            async_copy.commit_group()
    slot = 0
    behind = DEPTH - 1
    while unit < stop:
        tile = unit // pairs
        tile_stop = gl.minimum(stop, tile * pairs + pairs)
        # Asked for now, used when the tile is done.
        scale = gl.load(scale_ptr + tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma)))
        acc0 = gl.zeros((BN, MP), gl.float32, layout=mma)
        acc1 = gl.zeros((BN, MP), gl.float32, layout=mma)
        for current in range(unit, tile_stop):
            async_copy.wait_group(2 * DEPTH - 2)
            block_barrier()
            if current + (DEPTH - 1) < stop:
                _copy_codes(odd, w_ptr, current + (DEPTH - 1), behind, BN, NW, UNIT, 1)
                _copy_x(x_odd, x_ptr, later, behind, M, K8, x_stride8, MP, KC, NW, 1)
            async_copy.commit_group()
            if current + DEPTH == stop:
                if PDL == 1:
                    gdc_launch_dependents()
                if POLL:
                    gl.store(near_end_ptr + parity, 1, mask=gl.program_id(0) == 0)
            later = gl.where(later + 1 == pairs, 0, later + 1)
            if NVFP4:
                unit_scales = scales.index(slot).load(gl.DotOperandLayout(0, mma, 4))
            else:
                unit_scales = 0
            part0 = acc0
            part1 = acc1
            if BLOCK_SCALE:
                part0 = gl.zeros((BN, MP), gl.float32, layout=mma)
                part1 = gl.zeros((BN, MP), gl.float32, layout=mma)
            part0, part1 = _multiply_chunk(
                even.index(slot), unit_scales, x_even.index(slot), part0, part1,
                MP, NW, KC, NVFP4, mma, ASM_EVEN, CONSTRAINTS,
            )  # fmt: skip
            async_copy.wait_group(2 * DEPTH - 2)
            block_barrier()
            if current + DEPTH < stop:
                _copy_codes(even, w_ptr, current + DEPTH, slot, BN, NW, UNIT, 0)
                if NVFP4:
                    _copy_scales(scales, w_ptr, current + DEPTH, slot, BN, NW, UNIT)
                _copy_x(x_even, x_ptr, later, slot, M, K8, x_stride8, MP, KC, NW, 0)
            async_copy.commit_group()
            part0, part1 = _multiply_chunk(
                odd.index(slot), unit_scales, x_odd.index(slot), part0, part1,
                MP, NW, KC, NVFP4, mma, ASM_ODD, CONSTRAINTS,
            )  # fmt: skip
            if BLOCK_SCALE:
                group = gl.arange(0, BN, layout=gl.SliceLayout(1, mma)) // 8 + tile * (BN // 8)
                factor = gl.load(group_scale_ptr + (current - tile * pairs) * (tiles * (BN // 8)) + group)
                acc0 = acc0 + (part0 + part1) * factor[:, None]
            else:
                acc0 = part0
                acc1 = part1
            behind = slot
            slot = gl.where(slot + 1 == DEPTH, 0, slot + 1)
        total = acc0 + acc1
        starts_tile = unit == tile * pairs
        residual = total
        if EPILOGUE == "residual" and MP == 8:
            residual = _load_residual(residual_ptr, tile, starts_tile, M, N, residual_stride, BN, MP, mma)
        if tile_stop - unit < pairs:
            total = _share_tile(total, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, M, BN, MP, mma)
        if starts_tile:
            # 16 rows leave no registers to hold the residual through the wait.
            late = residual
            if EPILOGUE == "residual" and MP == 16:
                late = _load_residual(residual_ptr, tile, starts_tile, M, N, residual_stride, BN, MP, mma).to(gl.float32)
            _finish(total, tile, scale, late, bias_ptr, out_ptr, M, N, out_stride, BN, MP, EPILOGUE, HAS_BIAS, mma)
        unit = tile_stop

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
            if rotation:
                lines.append(f"shf.l.wrap.b32 t, {word}, {word}, {rotation}; and.b32 t, t, {FIELD_MASK:#x};")
            else:
                lines.append(f"and.b32 t, {word}, {FIELD_MASK:#x};")
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
def _copy_weight(codes, scales, w_ptr, unit, slot, BN: gl.constexpr, NW: gl.constexpr, NVFP4: gl.constexpr):
    """Start the copy of one unit into ring slot `slot`."""
    UNIT_BYTES: gl.constexpr = BN * 144 if NVFP4 else BN * 128
    word_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [NW, 1], [1, 0])
    base = w_ptr + unit.to(gl.int64) * UNIT_BYTES
    rows = gl.arange(0, 2 * BN, layout=gl.SliceLayout(1, word_layout))
    columns = gl.arange(0, 16, layout=gl.SliceLayout(0, word_layout))
    words = base.to(gl.pointer_type(gl.int32), bitcast=True)
    async_copy.async_copy_global_to_shared(codes.index(slot), words + (rows[:, None] * 16 + columns[None, :]))
    if NVFP4:
        scale_layout: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [NW, 1], [1, 0])
        scale_rows = gl.arange(0, BN, layout=gl.SliceLayout(1, scale_layout))
        scale_columns = gl.arange(0, 16, layout=gl.SliceLayout(0, scale_layout))
        offsets = BN * 128 + (scale_rows[:, None] * 16 + scale_columns[None, :])
        async_copy.async_copy_global_to_shared(scales.index(slot), base + offsets)


@gluon.jit
def _copy_x(ring, x_ptr, pair, slot, M, K8, x_stride8, MP: gl.constexpr, KC: gl.constexpr, NW: gl.constexpr):
    """Start the copy of x[:, pair] as two chunks [MP, KC] stacked; rows from M and columns from K on become zero.

    K and the row stride come in units of 8, which tells the compiler that 16-byte copies are aligned.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // KC, KC // 8], [NW, 1], [1, 0])
    row = gl.arange(0, 2 * MP, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, KC, layout=gl.SliceLayout(0, layout))
    m = row % MP
    k = (pair * (2 * KC) + (row // MP) * KC)[:, None] + column[None, :]
    mask = (m < M)[:, None] & (k < K8 * 8)
    async_copy.async_copy_global_to_shared(ring.index(slot), x_ptr + (m * (x_stride8 * 8))[:, None] + k, mask=mask)


@gluon.jit
def _finish(
    acc, tile, scale_ptr, bias_ptr, out_ptr, residual_ptr, M, N, out_stride, residual_stride,
    BN: gl.constexpr, MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Row scale, epilogue and store of a tile's full sums [BN, MP]. N: columns of the output."""
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    acc = acc * gl.load(scale_ptr + rows)[:, None]
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
            residual = gl.load(residual_ptr + (m * residual_stride)[None, :] + rows[:, None], mask=mask, other=0.0)
            acc = acc + residual.to(gl.float32)
        gl.store(out_ptr + (m * out_stride)[None, :] + rows[:, None], acc.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _load_partial(partial_ptr, slot, offsets, mask, SIZE: gl.constexpr):
    """Past the first-level cache: another block wrote it during this kernel."""
    return gl.load(partial_ptr + slot * SIZE + offsets, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _sum_partials(
    partial_ptr, first_block, last_block, offsets, mask,
    BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Partials of a tile, added in block order. Four loads travel together: one round trip a four."""
    SIZE: gl.constexpr = BN * MP
    total = gl.zeros((BN, MP), gl.float32, layout=mma)
    for batch in range(first_block, last_block + 1, 4):
        slot0 = 2 * batch + (batch == first_block).to(gl.int32)
        p0 = _load_partial(partial_ptr, slot0, offsets, mask, SIZE)
        p1 = _load_partial(partial_ptr, 2 * batch + 2, offsets, mask & (batch + 1 <= last_block), SIZE)
        p2 = _load_partial(partial_ptr, 2 * batch + 4, offsets, mask & (batch + 2 <= last_block), SIZE)
        p3 = _load_partial(partial_ptr, 2 * batch + 6, offsets, mask & (batch + 3 <= last_block), SIZE)
        total = (((total + p0) + p1) + p2) + p3
    return total


@gluon.jit
def _multiply_unit(
    codes, scales, x, group_scale_ptr, acc0, acc1,
    BN: gl.constexpr, MP: gl.constexpr, NW: gl.constexpr, KC: gl.constexpr, NVFP4: gl.constexpr,
    BLOCK_SCALE: gl.constexpr, mma: gl.constexpr,
    ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """Add one unit from the ring to the sums. group_scale_ptr: the unit's first row group, with BLOCK_SCALE."""
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, mma, 4)
    row_layout: gl.constexpr = gl.DotOperandLayout(1, mma, 4)
    x_layout: gl.constexpr = _x_fragment_layout(MP, KC, NW)
    even = codes.slice(0, BN).load(weight_layout)
    odd = codes.slice(BN, BN).load(weight_layout)
    x_even = x.slice(0, MP).load(x_layout)
    x_odd = x.slice(MP, MP).load(x_layout)
    if NVFP4:
        scale = scales.load(weight_layout)
        acc0, acc1 = _nvfp4_chunk(even, scale, x_even, acc0, acc1, MP, row_layout, ASM_EVEN, CONSTRAINTS)
        acc0, acc1 = _nvfp4_chunk(odd, scale, x_odd, acc0, acc1, MP, row_layout, ASM_ODD, CONSTRAINTS)
    elif BLOCK_SCALE:
        factor = gl.load(group_scale_ptr + gl.arange(0, BN, layout=gl.SliceLayout(1, mma)) // 8)
        part0 = gl.zeros((BN, MP), gl.float32, layout=mma)
        part1 = gl.zeros((BN, MP), gl.float32, layout=mma)
        part0, part1 = _fp8_chunk(even, x_even, part0, part1, MP, row_layout, ASM_EVEN, CONSTRAINTS)
        part0, part1 = _fp8_chunk(odd, x_odd, part0, part1, MP, row_layout, ASM_EVEN, CONSTRAINTS)
        acc0 = acc0 + (part0 + part1) * factor[:, None]
    else:
        acc0, acc1 = _fp8_chunk(even, x_even, acc0, acc1, MP, row_layout, ASM_EVEN, CONSTRAINTS)
        acc0, acc1 = _fp8_chunk(odd, x_odd, acc0, acc1, MP, row_layout, ASM_EVEN, CONSTRAINTS)
    return acc0, acc1


@gluon.jit
def _share_tile(
    acc, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, M,
    BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Store this block's partial of a shared tile. Returns (whether all have arrived, their sum where they have).

    Block b owns the units from b * units // blocks on, so the owner of unit u is ((u + 1) * blocks - 1) // units.
    A block shares at most its first and its last tile: slot 2 b + 1 is for the run that starts its tile.
    """
    block = gl.program_id(0)
    blocks = gl.num_programs(0)
    first_block = ((tile * pairs + 1) * blocks - 1) // units
    last_block = ((tile * pairs + pairs) * blocks - 1) // units
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, mma))
    rows = gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    offsets = (rows * MP)[:, None] + m[None, :]
    mask = (rows >= 0)[:, None] & (m < M)[None, :]
    gl.store(partial_ptr + (2 * block + starts_tile.to(gl.int32)) * (BN * MP) + offsets, acc, mask=mask)
    block_barrier()
    arrived = gl.atomic_add(ticket_ptr + tile, 1, sem="acq_rel", scope="gpu")
    complete = arrived == last_block - first_block
    total = acc
    if complete:
        total = _sum_partials(partial_ptr, first_block, last_block, offsets, mask, BN, MP, mma)
        gl.store(ticket_ptr + tile, 0)
    return complete, total


@gluon.jit(do_not_specialize=["M", "K8", "N", "tiles", "pairs", "x_stride8", "out_stride", "residual_stride"])
def weight_stream_kernel(
    w_ptr, scale_ptr, group_scale_ptr, bias_ptr, x_ptr, out_ptr, residual_ptr, partial_ptr, ticket_ptr,
    M, K8, N, tiles, pairs, x_stride8, out_stride, residual_stride,
    BN: gl.constexpr, MP: gl.constexpr, STAGES: gl.constexpr, NW: gl.constexpr, NVFP4: gl.constexpr,
    BLOCK_SCALE: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
    ASM_EVEN: gl.constexpr, ASM_ODD: gl.constexpr, CONSTRAINTS: gl.constexpr,
):  # fmt: skip
    """One block: its run of units. Grid: (blocks,), at most the number of units.

    partial_ptr: [2 * blocks, BN, MP] float32; ticket_ptr: [tiles] int32, zero before and after.
    group_scale_ptr: [pairs, tiles * BN / 8] float32, FP8 with BLOCK_SCALE only; bias_ptr: [N], with HAS_BIAS only.
    """
    KC: gl.constexpr = 128 if NVFP4 else 64
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[NW, 1], instr_shape=[16, 8])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    codes = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * BN, 16], plain)
    scales = gl.allocate_shared_memory(gl.uint8, [STAGES if NVFP4 else 1, BN, 16], plain)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * MP, KC], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    units = tiles * pairs
    unit = gl.program_id(0) * units // gl.num_programs(0)
    stop = (gl.program_id(0) + 1) * units // gl.num_programs(0)
    next_pair = unit % pairs
    for stage in gl.static_range(STAGES - 1):
        if unit + stage < stop:
            _copy_weight(codes, scales, w_ptr, unit + stage, stage, BN, NW, NVFP4)
        async_copy.commit_group()
    if PDL:
        gdc_wait()
        if PDL == 2:
            gdc_launch_dependents()
        elif unit + STAGES > stop:
            gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 1):
        if unit + stage < stop:
            _copy_x(x_ring, x_ptr, next_pair, stage, M, K8, x_stride8, MP, KC, NW)
        async_copy.commit_group()
        next_pair = gl.where(next_pair + 1 == pairs, 0, next_pair + 1)
    slot = 0
    next_slot = STAGES - 1
    while unit < stop:
        tile = unit // pairs
        tile_stop = gl.minimum(stop, tile * pairs + pairs)
        acc0 = gl.zeros((BN, MP), gl.float32, layout=mma)
        acc1 = gl.zeros((BN, MP), gl.float32, layout=mma)
        for current in range(unit, tile_stop):
            async_copy.wait_group(STAGES - 2)
            block_barrier()
            upcoming = current + (STAGES - 1)
            if upcoming < stop:
                _copy_weight(codes, scales, w_ptr, upcoming, next_slot, BN, NW, NVFP4)
                _copy_x(x_ring, x_ptr, next_pair, next_slot, M, K8, x_stride8, MP, KC, NW)
            async_copy.commit_group()
            if PDL == 1:
                if upcoming + 1 == stop:
                    gdc_launch_dependents()
            next_pair = gl.where(next_pair + 1 == pairs, 0, next_pair + 1)
            groups = group_scale_ptr + (current - tile * pairs) * (tiles * (BN // 8)) + tile * (BN // 8)
            acc0, acc1 = _multiply_unit(
                codes.index(slot), scales.index(slot if NVFP4 else 0), x_ring.index(slot), groups, acc0, acc1,
                BN, MP, NW, KC, NVFP4, BLOCK_SCALE, mma, ASM_EVEN, ASM_ODD, CONSTRAINTS,
            )  # fmt: skip
            slot = gl.where(slot + 1 == STAGES, 0, slot + 1)
            next_slot = gl.where(next_slot + 1 == STAGES, 0, next_slot + 1)
        total = acc0 + acc1
        complete = tile_stop - unit == pairs
        if not complete:
            complete, total = _share_tile(
                total, tile, unit == tile * pairs, units, pairs, partial_ptr, ticket_ptr, M, BN, MP, mma
            )
        if complete:
            _finish(
                total, tile, scale_ptr, bias_ptr, out_ptr, residual_ptr, M, N, out_stride, residual_stride,
                BN, MP, EPILOGUE, HAS_BIAS, mma,
            )  # fmt: skip
        unit = tile_stop

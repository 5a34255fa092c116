"""What blocks of the weight-stream kernel owe each other: partial sums of shared tiles and normalised rows; epilogues.

Knows the words in memory that blocks count in, and the order of sums that makes arrival invisible. Knows no formats.
"""

from __future__ import annotations

from localspec.kernels.compat import block_barrier, constexpr_function, gl, gluon

LOAD_ACQUIRE_ASM = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")


@constexpr_function
def _layout_of_results(rows, fragments, wide, warps):
    """Layout of [rows, MP]: where `wide`, eight values that follow each other in memory are one thread's."""
    if not wide:
        return fragments
    lanes = max(1, min(32, rows // 8))
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def load_residual(
    residual_ptr, tile, wanted, M, N8, residual_stride8, BN: gl.constexpr, MP: gl.constexpr, STEP: gl.constexpr,
    WIDE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The tile's residual [BN, MP], asked for before the block waits for others."""
    layout: gl.constexpr = _layout_of_results(BN, mma, WIDE, mma.warps_per_cta[0])
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, layout))
    mask = (rows < N8 * STEP)[:, None] & ((m < M) & wanted)[None, :]
    return gl.load(residual_ptr + (m * (residual_stride8 * STEP))[None, :] + rows[:, None], mask=mask, other=0.0)


@gluon.jit
def finish(
    acc, tile, scale, row_factor, residual, bias_ptr, out_ptr, following_ptr, weighted_ptr, squares_ptr, M, N8,
    out_stride8, BN: gl.constexpr, MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    PREPARED: gl.constexpr, FOLLOWING: gl.constexpr, STEP: gl.constexpr, WIDE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Row scale, epilogue and store of a tile's full sums [BN, MP]. N8: columns of the output in units of STEP, as
    strides are: 8 where that divides them all, which tells the compiler that eight values may travel as one.

    row_factor: [MP], what the norm of x multiplies each row with, where x came PREPARED. FOLLOWING: see `prepare`.
    """
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    acc = acc * scale[:, None]
    if PREPARED:
        acc = acc * row_factor[None, :]
    if EPILOGUE == "silu_mul":
        pairs = gl.permute(gl.reshape(acc, [BN // 16, 2, 8, MP]), [0, 2, 3, 1])
        gate, up = gl.split(gl.reshape(pairs, [BN // 2, MP, 2]))
        acc = gate / (1.0 + gl.exp(-gate)) * up
    elif HAS_BIAS:
        acc = acc + gl.load(bias_ptr + rows, mask=rows < N8 * STEP, other=0.0).to(gl.float32)[:, None]
    if EPILOGUE == "residual":
        acc = acc + gl.convert_layout(residual, mma).to(gl.float32)
    TALL: gl.constexpr = acc.shape[0]
    layout: gl.constexpr = _layout_of_results(TALL, acc.type.layout, WIDE, mma.warps_per_cta[0])
    value = gl.convert_layout(acc.to(out_ptr.dtype.element_ty), layout)
    rows = tile * TALL + gl.arange(0, TALL, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, layout))
    mask = (rows < N8 * STEP)[:, None] & (m < M)[None, :]
    gl.store(out_ptr + (m * (out_stride8 * STEP))[None, :] + rows[:, None], value, mask=mask)
    if FOLLOWING > 0:
        prepare(value, tile, rows, m, mask, following_ptr, weighted_ptr, squares_ptr, M, N8 * STEP, FOLLOWING)


@gluon.jit
def prepare(
    value, tile, rows, m, mask, following_ptr, weighted_ptr, squares_ptr, M, N, FOLLOWING: gl.constexpr
):  # fmt: skip
    """What the norm that follows needs of a tile: the values times its weight, and the sum of their squares by row.

    The next kernel then starts its matmul at once and multiplies its sums by 1 / rms. FOLLOWING: 1, or 2 for a norm
    that multiplies by 1 + weight. weighted_ptr: [M, N] bfloat16; squares_ptr: [tiles, 16] float32.
    """
    value = gl.where(mask, value.to(gl.float32), 0.0)
    factor = gl.load(following_ptr + rows, mask=rows < N, other=0.0).to(gl.float32)
    if FOLLOWING == 2:
        factor = factor + 1.0
    weighted = (value * factor[:, None]).to(gl.bfloat16)
    gl.store(weighted_ptr + (m * N)[None, :] + rows[:, None], weighted, mask=mask)
    gl.store(squares_ptr + tile * 16 + m, gl.sum(value * value, axis=0), mask=m < M)


@gluon.jit
def load_squares(squares_ptr, num_tiles, BLOCK: gl.constexpr, MP: gl.constexpr, NW: gl.constexpr):
    """The sums of squares that the kernel before left: [BLOCK, MP], zero from num_tiles on. Four lanes share a line;
    which tiles a thread sums, and in which order, does not depend on MP."""
    layout: gl.constexpr = gl.BlockedLayout([1, MP // 4], [8, 4], [NW, 1], [1, 0])
    tiles = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, layout))
    return gl.load(squares_ptr + (tiles * 16)[:, None] + m[None, :], mask=(tiles < num_tiles)[:, None], other=0.0)


@gluon.jit
def row_factors(squares, K8, eps, mma: gl.constexpr):
    """1 / rms of every row from what `load_squares` found: [MP]."""
    factors = gl.rsqrt(gl.sum(squares, axis=0) / (K8 * 8).to(gl.float32) + eps)
    return gl.convert_layout(factors, gl.SliceLayout(0, mma))


@gluon.jit
def _by_thread(sums, mma: gl.constexpr):
    """[BN, MP] in fragments -> [BN * MP / threads / 4, threads * 4]: what a thread holds, four values side by side that
    travel as one. No value moves between threads."""
    NW: gl.constexpr = mma.warps_per_cta[0]
    TALL: gl.constexpr = sums.shape[0] // (16 * NW)
    COLUMNS: gl.constexpr = sums.shape[1] // 8
    places = gl.permute(gl.reshape(sums, [TALL, NW, 2, 8, COLUMNS, 4, 2]), [0, 4, 1, 3, 5, 2, 6])
    return gl.reshape(places, [TALL * COLUMNS, NW * 128])


@gluon.jit
def _in_fragments(sums, BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr):
    """What `_by_thread` was given."""
    NW: gl.constexpr = mma.warps_per_cta[0]
    places = gl.permute(gl.reshape(sums, [BN // (16 * NW), MP // 8, NW, 8, 4, 2, 2]), [0, 2, 5, 3, 1, 4, 6])
    return gl.convert_layout(gl.reshape(places, [BN, MP]), mma, assert_trivial=True)


@gluon.jit
def _places(sums):
    """Offsets of `_by_thread`'s values in their partial sum."""
    layout: gl.constexpr = sums.type.layout
    parts = gl.arange(0, sums.shape[0], layout=gl.SliceLayout(1, layout))
    places = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    return (parts * sums.shape[1])[:, None] + places[None, :]


@gluon.jit
def _add_partials(sums, partial_ptr, first, last, BN: gl.constexpr, MP: gl.constexpr):
    """sums + the partials of blocks first..last in block order, past the first-level cache: other blocks wrote them
    during this kernel. As many loads travel together as registers allow: with 8 rows a tile's usual seven blocks take
    one round trip.
    """
    COUNT: gl.constexpr = 7 if MP == 8 else 4
    places = _places(sums)
    for block in range(first, last + 1, COUNT):
        partials = ()
        for ahead in gl.static_range(COUNT):
            wanted = block + ahead <= last
            at = partial_ptr + (block + ahead) * (BN * MP) + places
            partials = partials + (gl.load(at, mask=wanted, other=0.0, cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
        for ahead in gl.static_range(COUNT):
            sums = sums + partials[ahead]
    return sums


@gluon.jit
def _load_acquire(pointer):
    """A word that other blocks add to; what they wrote before is visible after it. Each thread sees its own."""
    return gl.inline_asm_elementwise(LOAD_ACQUIRE_ASM, "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def share_tile(
    acc, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, BN: gl.constexpr, MP: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """A tile that several blocks hold parts of: all but the first store theirs, the first waits and adds them up.

    Block b owns the units from b * units // blocks on, so the owner of unit u is ((u + 1) * blocks - 1) // units. The
    first block of a tile comes to it last in its run, the others first in theirs: the wait is short, and nobody waits
    for a block that waits for it. Blocks start in order, so that a later one comes even where not all fit at once.
    Returns the full sum in the first block.
    """
    block = gl.program_id(0)
    sums = _by_thread(acc, mma)
    if starts_tile:
        last = ((tile * pairs + pairs) * gl.num_programs(0) - 1) // units
        arrived = _load_acquire(ticket_ptr + tile)
        while arrived < last - block:
            arrived = _load_acquire(ticket_ptr + tile)
        sums = _add_partials(sums, partial_ptr, block + 1, last, BN, MP)
        # No thread may still be reading the ticket.
        block_barrier()
        gl.store(ticket_ptr + tile, 0)
    else:
        gl.store(partial_ptr + block * (BN * MP) + _places(sums), sums)
        block_barrier()
        gl.atomic_add(ticket_ptr + tile, 1, sem="release", scope="gpu")
    return _in_fragments(sums, BN, MP, mma)


@gluon.jit
def normalise(
    x_ptr, norm_ptr, normed_ptr, ready_ptr, M, K8, x_stride8, eps, BLOCK: gl.constexpr, PLUS_ONE: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """RMS norm of x, float32 inside: block b takes row b, then every block waits until all rows are there."""
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [NW], [0])
    columns = gl.arange(0, BLOCK, layout=layout)
    mask = columns < K8 * 8
    for row in range(gl.program_id(0), M, gl.num_programs(0)):
        weight = gl.load(norm_ptr + columns, mask=mask, other=0.0)
        x = gl.load(x_ptr + row * (x_stride8 * 8) + columns, mask=mask, other=0.0).to(gl.float32)
        scale = gl.rsqrt(gl.sum(x * x, axis=0) / (K8 * 8).to(gl.float32) + eps)
        factor = weight.to(gl.float32)
        if PLUS_ONE:
            factor = factor + 1.0
        gl.store(normed_ptr + row * (K8 * 8) + columns, (x * scale * factor).to(gl.bfloat16), mask=mask)
        block_barrier()
        gl.atomic_add(ready_ptr, 1, sem="release", scope="gpu")
    arrived = _load_acquire(ready_ptr)
    while arrived < M:
        arrived = _load_acquire(ready_ptr)


@gluon.jit
def forget_rows(ready_ptr):
    """The last block that has seen all normalised rows leaves the words at zero for the next launch."""
    if gl.atomic_add(ready_ptr + 1, 1, sem="relaxed", scope="gpu") == gl.num_programs(0) - 1:
        gl.store(ready_ptr, 0)
        gl.store(ready_ptr + 1, 0)


@gluon.jit
def close_tile(
    total, tile, starts_tile, complete, scale, row_factor, bias_ptr, out_ptr, residual_ptr, following_ptr, weighted_ptr,
    squares_out_ptr, partial_ptr, ticket_ptr, M, N8, units, pairs, out_stride8, residual_stride8, BN: gl.constexpr,
    MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PREPARED: gl.constexpr, FOLLOWING: gl.constexpr,
    STEP: gl.constexpr, WIDE: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Share the sums of a tile that is not complete here; in its first block apply the epilogue and store."""
    residual = total
    if EPILOGUE == "residual" and MP == 8:
        residual = load_residual(residual_ptr, tile, starts_tile, M, N8, residual_stride8, BN, MP, STEP, WIDE, mma)
    if not complete:
        total = share_tile(total, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, BN, MP, mma)
    if starts_tile:
        late = residual
        if EPILOGUE == "residual" and MP == 16:
            # 16 rows leave no registers to hold the residual through the wait.
            late = load_residual(residual_ptr, tile, starts_tile, M, N8, residual_stride8, BN, MP, STEP, WIDE, mma)
        finish(
            total, tile, scale, row_factor, late, bias_ptr, out_ptr, following_ptr, weighted_ptr, squares_out_ptr, M,
            N8, out_stride8, BN, MP, EPILOGUE, HAS_BIAS, PREPARED, FOLLOWING, STEP, WIDE, mma,
        )  # fmt: skip

"""What blocks of the weight-stream kernel owe each other: partial sums of shared tiles and normalised rows; epilogues.

Knows the words in memory that blocks count in, and the order of sums that makes arrival invisible. Knows no formats.
"""

from __future__ import annotations

from localspec.kernels.compat import block_barrier, gl, gluon

LOAD_ACQUIRE_ASM = gl.constexpr("ld.acquire.gpu.global.b32 $0, [$1];")


@gluon.jit
def load_residual(
    residual_ptr, tile, wanted, M, N, residual_stride, BN: gl.constexpr, MP: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """The tile's residual [BN, MP], asked for before the block waits for others."""
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, mma))
    mask = (rows < N)[:, None] & ((m < M) & wanted)[None, :]
    return gl.load(residual_ptr + (m * residual_stride)[None, :] + rows[:, None], mask=mask, other=0.0)


@gluon.jit
def finish(
    acc, tile, scale, row_factor, residual, bias_ptr, out_ptr, following_ptr, weighted_ptr, squares_ptr, M, N,
    out_stride, BN: gl.constexpr, MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr,
    PREPARED: gl.constexpr, FOLLOWING: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Row scale, epilogue and store of a tile's full sums [BN, MP]. N: columns of the output.

    row_factor: [MP], what the norm of x multiplies each row with, where x came PREPARED. FOLLOWING: see `prepare`.
    """
    rows = tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, mma))
    acc = acc * scale[:, None]
    if PREPARED:
        acc = acc * row_factor[None, :]
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
        value = acc.to(out_ptr.dtype.element_ty)
        gl.store(out_ptr + (m * out_stride)[None, :] + rows[:, None], value, mask=mask)
        if FOLLOWING > 0:
            prepare(value, tile, rows, m, mask, following_ptr, weighted_ptr, squares_ptr, M, N, FOLLOWING)


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
    """The sums of squares that the kernel before left: [BLOCK, MP], zero from num_tiles on."""
    layout: gl.constexpr = gl.BlockedLayout([BLOCK // 32, 1], [32, 1], [1, NW], [0, 1])
    tiles = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    m = gl.arange(0, MP, layout=gl.SliceLayout(0, layout))
    return gl.load(squares_ptr + (tiles * 16)[:, None] + m[None, :], mask=(tiles < num_tiles)[:, None], other=0.0)


@gluon.jit
def row_factors(squares, K8, eps, mma: gl.constexpr):
    """1 / rms of every row from what `load_squares` found: [MP]."""
    factors = gl.rsqrt(gl.sum(squares, axis=0) / (K8 * 8).to(gl.float32) + eps)
    return gl.convert_layout(factors, gl.SliceLayout(0, mma))


@gluon.jit
def _load_partial(partial_ptr, slot, offsets, mask, SIZE: gl.constexpr):
    """Past the first-level cache: another block wrote it during this kernel."""
    return gl.load(partial_ptr + slot * SIZE + offsets, mask=mask, other=0.0, cache_modifier=".cg")


@gluon.jit
def _add_partials(acc, partial_ptr, first, last, offsets, mask, BN: gl.constexpr, MP: gl.constexpr):
    """acc + the partials of blocks first..last in block order. As many loads travel together as registers allow: with 8
    rows a tile's usual seven blocks take one round trip.
    """
    SIZE: gl.constexpr = BN * MP
    COUNT: gl.constexpr = 7 if MP == 8 else 4
    for block in range(first, last + 1, COUNT):
        partials = ()
        for ahead in gl.static_range(COUNT):
            partial = _load_partial(partial_ptr, block + ahead, offsets, mask & (block + ahead <= last), SIZE)
            partials = partials + (partial,)  # type: ignore[assignment]  # noqa: RUF005
        for ahead in gl.static_range(COUNT):
            acc = acc + partials[ahead]
    return acc


@gluon.jit
def _load_acquire(pointer):
    """A word that other blocks add to; what they wrote before is visible after it. Each thread sees its own."""
    return gl.inline_asm_elementwise(LOAD_ACQUIRE_ASM, "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def share_tile(
    acc, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, M, BN: gl.constexpr, MP: gl.constexpr,
    mma: gl.constexpr,
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
        arrived = _load_acquire(ticket_ptr + tile)
        while arrived < last - block:
            arrived = _load_acquire(ticket_ptr + tile)
        acc = _add_partials(acc, partial_ptr, block + 1, last, offsets, mask, BN, MP)
        # No thread may still be reading the ticket.
        block_barrier()
        gl.store(ticket_ptr + tile, 0)
    else:
        gl.store(partial_ptr + block * (BN * MP) + offsets, acc, mask=mask)
        block_barrier()
        gl.atomic_add(ticket_ptr + tile, 1, sem="release", scope="gpu")
    return acc


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
    squares_out_ptr, partial_ptr, ticket_ptr, M, N, units, pairs, out_stride, residual_stride, BN: gl.constexpr,
    MP: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, PREPARED: gl.constexpr, FOLLOWING: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Share the sums of a tile that is not complete here; in its first block apply the epilogue and store."""
    residual = total
    if EPILOGUE == "residual" and MP == 8:
        residual = load_residual(residual_ptr, tile, starts_tile, M, N, residual_stride, BN, MP, mma)
    if not complete:
        total = share_tile(total, tile, starts_tile, units, pairs, partial_ptr, ticket_ptr, M, BN, MP, mma)
    if starts_tile:
        late = residual
        if EPILOGUE == "residual" and MP == 16:
            # 16 rows leave no registers to hold the residual through the wait.
            asked = load_residual(residual_ptr, tile, starts_tile, M, N, residual_stride, BN, MP, mma)
            late = asked.to(gl.float32)
        finish(
            total, tile, scale, row_factor, late, bias_ptr, out_ptr, following_ptr, weighted_ptr, squares_out_ptr, M, N,
            out_stride, BN, MP, EPILOGUE, HAS_BIAS, PREPARED, FOLLOWING, mma,
        )  # fmt: skip

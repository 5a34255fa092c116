"""Joins the parts that attention_stream.py leaves: blocks to groups, groups to one output, gated.

Knows parts and their order. Warp w of a program folds the groups w, w + 4, ... in order; the four results are added in
one fixed way. A group comes whole, or as the quads or blocks that it is folded from here as the stream would have done.
"""

from __future__ import annotations

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait, gl, gluon
from localspec.kernels.triton.attention_stream import fold_tile, fold_weights
from localspec.kernels.triton.attention_tiles import GROUP_LOG2, QUAD_LOG2, part_shift, programs_of_tile, rows_by_slot

CHAINS = gl.constexpr(4)


@gluon.jit
def _load_parts(
    acc_ptr, top_ptr, sum_ptr, base, first, stride, start, stop, pairs, dims,
    COUNT: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """COUNT parts of each chain, all asked for before any is used: `first` [CHAINS] and every `stride` further ones.

    Returns tuples of acc [SLICE, CHAINS], top and total [CHAINS]; parts outside [start, stop) are empty.
    """
    accs = ()
    tops = ()
    totals = ()
    for step in gl.static_range(COUNT):
        index = first + step * stride
        present = (index >= start) & (index < stop)
        place = base + index * pairs
        mask = present[None, :] & (dims >= 0)[:, None]
        part_top = gl.load(top_ptr + place, mask=present, other=float("-inf"))
        part_total = gl.load(sum_ptr + place, mask=present, other=0.0)
        part = gl.load(acc_ptr + place[None, :] * D + dims[:, None], mask=mask, other=0.0)
        tops = tops + (part_top,)  # type: ignore[assignment]  # noqa: RUF005
        totals = totals + (part_total,)  # type: ignore[assignment]  # noqa: RUF005
        accs = accs + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return accs, tops, totals


@gluon.jit
def _fold_part(acc, top, total, part, part_top, part_total):
    """acc, part: [SLICE, CHAINS]; the others [CHAINS]."""
    new_top, keep, share = fold_weights(top, part_top)
    return fold_tile(acc, keep, share, part), new_top, gl.fma(total, keep, part_total * share)


@gluon.jit
def _nothing(dims, layout: gl.constexpr):
    """An empty part of each chain: acc [SLICE, CHAINS], top and total [CHAINS]."""
    chain_layout: gl.constexpr = gl.SliceLayout(0, layout)
    acc = gl.zeros([dims.shape[0], CHAINS], gl.float32, layout=layout)
    top = gl.full([CHAINS], float("-inf"), gl.float32, layout=chain_layout)
    return acc, top, gl.zeros([CHAINS], gl.float32, layout=chain_layout)


@gluon.jit
def _fold_run(accs, tops, totals, FIRST: gl.constexpr, COUNT: gl.constexpr, dims, layout: gl.constexpr):
    """Loaded parts FIRST to FIRST + COUNT - 1 of each chain, in order."""
    acc, top, total = _nothing(dims, layout)
    for member in gl.static_range(COUNT):
        acc, top, total = _fold_part(
            acc, top, total, accs[FIRST + member], tops[FIRST + member], totals[FIRST + member]
        )
    return acc, top, total


@gluon.jit
def _join_chains(acc, top, total, out_scale):
    """acc: [SLICE, CHAINS]; top, total: [CHAINS] -> the output [SLICE], zero where no chain saw a key."""
    last_top = gl.max(top, axis=0)
    share = gl.exp2(top - gl.where(last_top == float("-inf"), 0.0, last_top))
    out = gl.sum(acc * share[None, :], axis=1)
    weight = gl.sum(total * share, axis=0)
    return out * out_scale / gl.where(weight == 0.0, 1.0, weight)


@gluon.jit
def _join_groups(
    acc_ptr, top_ptr, sum_ptr, base, begin, end, shift, pairs, dims,
    D: gl.constexpr, BLOCK: gl.constexpr, STEPS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """A row's parts of 2^shift blocks, those of keys [begin, end), folded in each chain: see `_nothing` for shapes.

    STEPS parts of each chain are asked for at once: blocks of one group, quads of STEPS / 4, or STEPS groups.
    """
    FANOUT: gl.constexpr = 1 << QUAD_LOG2
    acc, top, total = _nothing(dims, layout)
    chain = gl.arange(0, CHAINS, layout=gl.SliceLayout(0, layout))
    first_group = begin // (BLOCK << GROUP_LOG2)
    stop_group = gl.cdiv(end, BLOCK << GROUP_LOG2)
    start = begin // (BLOCK << shift)
    stop = gl.cdiv(end, BLOCK << shift)
    first_group = first_group // CHAINS * CHAINS
    if shift == 0:
        for batch in range(first_group, stop_group, CHAINS):
            first = (batch + chain) << GROUP_LOG2
            accs, tops, totals = _load_parts(
                acc_ptr, top_ptr, sum_ptr, base, first, 1, start, stop, pairs, dims, STEPS, D
            )
            group_acc, group_top, group_total = _nothing(dims, layout)
            for quad in gl.static_range(FANOUT):
                quad_acc, quad_top, quad_total = _fold_run(accs, tops, totals, quad * FANOUT, FANOUT, dims, layout)
                group_acc, group_top, group_total = _fold_part(
                    group_acc, group_top, group_total, quad_acc, quad_top, quad_total
                )
            acc, top, total = _fold_part(acc, top, total, group_acc, group_top, group_total)
    elif shift == QUAD_LOG2:
        COUNT: gl.constexpr = STEPS // FANOUT
        for batch in range(first_group, stop_group, CHAINS * COUNT):
            accs, tops, totals = (), (), ()
            for member in gl.static_range(COUNT):
                first = (batch + member * CHAINS + chain) << QUAD_LOG2
                more = _load_parts(acc_ptr, top_ptr, sum_ptr, base, first, 1, start, stop, pairs, dims, FANOUT, D)
                accs, tops, totals = accs + more[0], tops + more[1], totals + more[2]
            for member in gl.static_range(COUNT):
                group_acc, group_top, group_total = _fold_run(accs, tops, totals, member * FANOUT, FANOUT, dims, layout)
                acc, top, total = _fold_part(acc, top, total, group_acc, group_top, group_total)
    else:
        for batch in range(first_group, stop_group, CHAINS * STEPS):
            accs, tops, totals = _load_parts(
                acc_ptr, top_ptr, sum_ptr, base, batch + chain, CHAINS, start, stop, pairs, dims, STEPS, D
            )
            for step in gl.static_range(STEPS):
                acc, top, total = _fold_part(acc, top, total, accs[step], tops[step], totals[step])
    return acc, top, total


@gluon.jit(do_not_specialize=["num_rows", "max_parts", "programs", "least_tiles"])
def attention_join_kernel(
    acc_ptr, top_ptr, sum_ptr, slots_ptr, begin_ptr, end_ptr, gate_ptr, out_ptr,
    num_rows, max_parts, programs, least_tiles, gate_row_stride, gate_head_stride, out_scale,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SLICE: gl.constexpr, BLOCK: gl.constexpr,
    PAIRS: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Grid: (R, H, D / SLICE), CHAINS warps. Padding rows become zero. out_ptr: [R, H, D]; out_scale: a factor of all.

    STEPS: parts that each chain asks for at once, 16. programs, least_tiles, PAIRS: of the stream, the launch before
    this. slots and bounds are read early: the stream waited for whoever wrote them.
    """
    layout: gl.constexpr = gl.BlockedLayout([SLICE // 32, 1], [32, 1], [1, CHAINS], [0, 1])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [CHAINS], [0])
    row = gl.program_id(0).to(gl.int64)
    head = gl.program_id(1)
    dims = gl.program_id(2) * SLICE + gl.arange(0, SLICE, layout=gl.SliceLayout(1, layout))
    slot = gl.load(slots_ptr + row)
    rows = gl.arange(0, ROWS, layout=lanes)
    slots = gl.load(slots_ptr + rows, mask=rows < num_rows, other=-1)
    ends = gl.load(end_ptr + rows, mask=rows < num_rows, other=0)
    each = programs_of_tile(rows_by_slot(slots), programs, least_tiles, GROUP, PAIRS, SLOTS)
    shift = part_shift(gl.max(gl.where(slots == slot, ends, 0), axis=0).to(gl.int32), each, BLOCK)
    begin = gl.load(begin_ptr + row).to(gl.int32)
    end = gl.where(slot < 0, 0, gl.load(end_ptr + row).to(gl.int32))
    pairs = num_rows * GROUP
    base = ((head // GROUP) * max_parts).to(gl.int64) * pairs + row * GROUP + head % GROUP
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    acc, top, total = _join_groups(
        acc_ptr, top_ptr, sum_ptr, base, begin, end, shift, pairs, dims, D, BLOCK, STEPS, layout
    )
    out = _join_chains(acc, top, total, out_scale)
    if GATED:
        gate = gl.load(gate_ptr + row * gate_row_stride + head * gate_head_stride + dims).to(gl.float32)
        out = out / (1.0 + gl.exp(-gate))
    gl.store(out_ptr + (row * H + head) * D + dims, out.to(out_ptr.dtype.element_ty))

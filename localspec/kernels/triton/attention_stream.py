"""The split of a verify step's attention where bytes decide: a paged cache streamed once through shared memory.

Knows head sizes 64, 128 and 256, and a cache in fp8 or in the queries' 16-bit type. Other shapes, and the launch, are
in attention.py; what joins the parts is in attention_join.py.

How it moves bytes. A program has a run of consecutive blocks of keys of one slot and key head, and rings in shared
memory for keys and values, filled by cp.async. Page numbers are read a block before they are needed. Between two
barriers lie the values of one block and the scores of the next, so that neither waits for the other. Bytes of fp8 go
from the ring to registers in the fragment layout of the matmul and are decoded there: a thread's four values of a word
feed four matmuls, and the queries (and the output's place) are permuted to match, which costs nothing.

How it stays exact per row. Keys are the matmul's A side and (row, head) pairs its N side, 8 columns a tile: a column's
sums do not see its neighbours, so a tile of 16 pairs gives the bits of one of 64. A block is a softmax of its own.
Four blocks are folded in order to a quad, four quads to a group. A part, which is written, is a block, a quad or a
group, by how many of them each program has; the join folds the rest in the same tree, so the bits are the same.
"""

from __future__ import annotations

from localspec.kernels.compat import (
    async_copy,
    block_barrier,
    constexpr_function,
    copy_to_shared,
    gdc_launch_dependents,
    gdc_wait,
    gl,
    gluon,
    mma_v2,
)
from localspec.kernels.triton.attention_tiles import QUAD_LOG2, own_blocks, tile_bounds
from localspec.kernels.triton.cache_values import FRAGMENT_CONSTRAINTS

PAGE = gl.constexpr(64)


@constexpr_function
def _ring_layout(fp8, values):
    """Where 16-byte pieces lie, so that the lanes of one read find different banks."""
    if not fp8:
        return gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    return gl.SwizzledSharedLayout(8, 2, 4, [1, 0]) if values else gl.SwizzledSharedLayout(8, 1, 4, [1, 0])


@constexpr_function
def _operand_layout(row_bytes):
    return gl.SwizzledSharedLayout(8, 1, min(8, row_bytes // 16), [1, 0])


@constexpr_function
def _mma_layout(rows, most_warps, warps):
    """Warps along the A side as far as its rows go, the others along the pairs."""
    along = min(most_warps, max(1, rows // 16))
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[along, warps // along], instr_shape=[16, 8])


@gluon.jit
def fold_tile(acc, keep, share, part):
    """Two partial outputs into one; the FMA is explicit, so that all callers get the same bits. acc: [A, B]."""
    return gl.fma(acc, keep[None, :] + gl.zeros_like(acc), part * share[None, :])


@gluon.jit
def fold_weights(top, part_top):
    """Maxima of two partial softmaxes -> the new one, and the factors of either. An empty part has -inf."""
    new_top = gl.maximum(top, part_top)
    # Where neither saw a key there is no maximum; any finite one keeps NaN out.
    finite = gl.where(new_top == float("-inf"), 0.0, new_top)
    return new_top, gl.exp2(top - finite), gl.exp2(part_top - finite)


@gluon.jit
def _copy_block(
    ring, slot, pool_ptr, page, key, last_key, kv_head,
    HEADS_KV: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr, VEC: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Start the copy of BLOCK keys from `key` on, W elements each; keys from last_key on become zero."""
    lanes: gl.constexpr = W // VEC
    layout: gl.constexpr = gl.BlockedLayout([1, VEC], [32 // lanes, lanes], [NW, 1], [1, 0])
    token = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, W, layout=gl.SliceLayout(0, layout))
    base = pool_ptr + ((page.to(gl.int64) * PAGE + key % PAGE) * HEADS_KV + kv_head) * W
    offsets = (token * (HEADS_KV * W))[:, None] + column[None, :]
    mask = (token < last_key - key)[:, None] & (column >= 0)[None, :]
    copy_to_shared(ring.index(slot), base + offsets, mask=mask)


@gluon.jit
def _store_queries(
    q_shared, q_ptr, first_pair, pairs, kv_head, q_row_stride, q_head_stride,
    GROUP: gl.constexpr, D: gl.constexpr, PAIRS: gl.constexpr, FP8: gl.constexpr, CONVERT: gl.constexpr,
    NW: gl.constexpr, dtype: gl.constexpr,
):  # fmt: skip
    """Queries of the tile to shared memory, [PAIRS, D], for fp8 as four matrices in the order that decoding makes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [NW, 1], [1, 0])
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    place = first_pair + pair
    at = place // GROUP * q_row_stride + (kv_head * GROUP + place % GROUP) * q_head_stride
    q = gl.load(q_ptr + at[:, None] + dims[None, :], mask=(pair < pairs)[:, None], other=0.0).to(dtype)
    if FP8:
        # A thread's MMA takes two values of each of four matrices from 8 bytes: see the asm of cache_values.py.
        bits = gl.reshape(q, [PAIRS, D // 8, 2, 2, 2])
        bits = gl.permute(bits, [0, 1, 4, 2, 3] if CONVERT else [0, 1, 3, 2, 4])
        even, odd = gl.split(bits)
        q0, q2 = gl.split(even)
        q1, q3 = gl.split(odd)
        q_shared.index(0).store(gl.reshape(q0, [PAIRS, D // 4]))
        q_shared.index(1).store(gl.reshape(q1, [PAIRS, D // 4]))
        q_shared.index(2).store(gl.reshape(q2, [PAIRS, D // 4]))
        q_shared.index(3).store(gl.reshape(q3, [PAIRS, D // 4]))
    else:
        q_shared.index(0).store(q)


@gluon.jit
def _decode(words, ASM: gl.constexpr):
    """e4m3 words [A, B], neighbours along B in pairs -> four float16 matrices [A, B]."""
    types: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    return gl.inline_asm_elementwise(ASM, FRAGMENT_CONSTRAINTS, [words], dtype=types, is_pure=True, pack=2)


@gluon.jit
def _queries(q_shared, which, first, COUNT: gl.constexpr, layout: gl.constexpr):
    """Columns [first, first + COUNT) of one of the matrices of queries, as the matmul's other side."""
    return q_shared.index(which).slice(first, COUNT, dim=1).permute([1, 0]).load(layout)


@gluon.jit
def _scores(
    keys, q_shared, BLOCK: gl.constexpr, PAIRS: gl.constexpr, D: gl.constexpr, FP8: gl.constexpr, ASM: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Products of a block of keys with the queries, [BLOCK, PAIRS], as two chains of matmuls."""
    a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    b: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    first = gl.zeros([BLOCK, PAIRS], gl.float32, layout=mma)
    second = gl.zeros([BLOCK, PAIRS], gl.float32, layout=mma)
    if FP8:
        # Decoded a half of each key at a time: more would not leave registers for the sums of a whole part.
        WORDS: gl.constexpr = max(16, D // 8)
        for at in gl.static_range(0, D // 4, WORDS):
            k0, k1, k2, k3 = _decode(keys.slice(at, WORDS, dim=1).load(a), ASM)
            first = mma_v2(k0, _queries(q_shared, 0, at, WORDS, b), first)
            second = mma_v2(k1, _queries(q_shared, 1, at, WORDS, b), second)
            first = mma_v2(k2, _queries(q_shared, 2, at, WORDS, b), first)
            second = mma_v2(k3, _queries(q_shared, 3, at, WORDS, b), second)
    else:
        half: gl.constexpr = D // 2
        q = q_shared.index(0)
        first = mma_v2(keys.slice(0, half, dim=1).load(a), q.slice(0, half, dim=1).permute([1, 0]).load(b), first)
        second = mma_v2(
            keys.slice(half, half, dim=1).load(a), q.slice(half, half, dim=1).permute([1, 0]).load(b), second
        )
    return first + second


@gluon.jit
def _weigh(p_shared, scores, top, scale_log2, mma: gl.constexpr, wide_mma: gl.constexpr):
    """exp2(scores * scale - top) to shared memory, [BLOCK, PAIRS]; zero where a pair sees no key. -> fold_weights."""
    part_top = gl.max(scores, axis=0) * scale_log2
    below = gl.where(part_top == float("-inf"), 0.0, 0.0 - part_top)
    wide = gl.zeros(scores.shape, gl.float32, layout=mma)
    p_shared.store(gl.exp2(gl.fma(scores, wide + scale_log2, below[None, :] + wide)).to(p_shared.dtype))
    top, keep, share = fold_weights(top, part_top)
    pair: gl.constexpr = gl.SliceLayout(0, wide_mma)
    return top, gl.convert_layout(keep, pair), gl.convert_layout(share, pair)


@gluon.jit
def _hide_unseen(
    scores, begin_ptr, end_ptr, first_pair, key, pair, pairs,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Scores of keys that a pair does not see become -inf. Bounds are read again here: only a few blocks need them."""
    keys = key + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, mma))
    row = (first_pair + pair) // GROUP
    begin = gl.load(begin_ptr + row, mask=pair < pairs, other=0x7FFFFFFF).to(gl.int32)
    end = gl.load(end_ptr + row, mask=pair < pairs, other=0).to(gl.int32)
    seen = (keys[:, None] >= begin[None, :]) & (keys[:, None] < end[None, :])
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def _add_values(
    acc0, acc1, acc2, acc3, total, keep, share, values, p_shared,
    PAIRS: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr, FP8: gl.constexpr, ASM: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Fold a block's weighted values and its sum of weights, which is a product with ones: the sum of what was used."""
    a: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    TOTAL: gl.constexpr = total.shape[0]
    # Decoded a quarter of the keys at a time: more would not leave registers for the sums of a whole part.
    KEYS: gl.constexpr = BLOCK // 4 if FP8 else BLOCK
    ones = gl.full([TOTAL, KEYS], 1.0, p_shared.dtype, layout=a)
    block_total = gl.zeros([TOTAL, PAIRS], gl.float32, layout=mma)
    block0 = gl.zeros([W, PAIRS], gl.float32, layout=mma)
    block1 = block0
    block2 = block0
    block3 = block0
    for first in gl.static_range(0, BLOCK, KEYS):
        p = p_shared.slice(first, KEYS).load(gl.DotOperandLayout(1, mma, 2))
        block_total = mma_v2(ones, p, block_total)
        own = values.slice(first, KEYS).permute([1, 0]).load(a)
        if FP8:
            v0, v1, v2, v3 = _decode(own, ASM)
            block0 = mma_v2(v0, p, block0)
            block1 = mma_v2(v1, p, block1)
            block2 = mma_v2(v2, p, block2)
            block3 = mma_v2(v3, p, block3)
        else:
            block0 = mma_v2(own, p, block0)
    total = fold_tile(total, keep, share, block_total)
    acc0 = fold_tile(acc0, keep, share, block0)
    if FP8:
        acc1 = fold_tile(acc1, keep, share, block1)
        acc2 = fold_tile(acc2, keep, share, block2)
        acc3 = fold_tile(acc3, keep, share, block3)
    return acc0, acc1, acc2, acc3, total


@gluon.jit
def _store_part(
    acc_ptr, top_ptr, sum_ptr, place, acc0, acc1, acc2, acc3, top, total, pairs,
    PAIRS: gl.constexpr, D: gl.constexpr, W: gl.constexpr, FP8: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Write a part from its first pair's place on."""
    dims = gl.arange(0, W, layout=gl.SliceLayout(1, mma))
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, mma))
    gl.store(top_ptr + place + pair, top, mask=pair < pairs)
    gl.store(sum_ptr + place + pair, total, mask=pair < pairs)
    mask = (pair < pairs)[None, :] & (dims >= 0)[:, None]
    target = acc_ptr + place * D
    if FP8:
        offsets = (pair * D)[None, :] + (dims * 4)[:, None]
        gl.store(target + offsets, acc0, mask=mask)
        gl.store(target + 1 + offsets, acc1, mask=mask)
        gl.store(target + 2 + offsets, acc2, mask=mask)
        gl.store(target + 3 + offsets, acc3, mask=mask)
    else:
        gl.store(target + ((pair * D)[None, :] + dims[:, None]), acc0, mask=mask)


@gluon.jit
def _fold_quad(
    acc0, acc1, acc2, acc3, top, total, quad0, quad1, quad2, quad3, quad_top, quad_total,
    FP8: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """A quad's sums [W, PAIRS], maximum and weight [PAIRS] into those of its part; where the part begins `top` is -inf,
    which makes them the quad's own, whatever they hold. quad_total: the same in each of its rows.
    """
    top, keep, share = fold_weights(top, gl.convert_layout(quad_top, gl.SliceLayout(0, mma)))
    total = gl.fma(total, keep, gl.max(quad_total, axis=0) * share)
    acc0 = fold_tile(acc0, keep, share, quad0)
    if FP8:
        acc1 = fold_tile(acc1, keep, share, quad1)
        acc2 = fold_tile(acc2, keep, share, quad2)
        acc3 = fold_tile(acc3, keep, share, quad3)
    return acc0, acc1, acc2, acc3, top, total


@gluon.jit
def _copy_ahead(
    k_ring, v_ring, at, k_pool, v_pool, page_k, page_v, current, stop, last_key, kv_head,
    HEADS_KV: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr, VEC: gl.constexpr, DEPTH: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Start the copies [BLOCK, W] over the keys of this block and the values of the last: nobody reads them now."""
    if current + (DEPTH - 1) < stop:
        behind = gl.where(at == 0, DEPTH - 1, at - 1)
        ahead_key = current * BLOCK + (DEPTH - 1) * BLOCK
        _copy_block(v_ring, behind, v_pool, page_v, ahead_key, last_key, kv_head, HEADS_KV, W, BLOCK, VEC, NW)
        if current + DEPTH < stop:
            ahead_key = current * BLOCK + DEPTH * BLOCK
            _copy_block(k_ring, at, k_pool, page_k, ahead_key, last_key, kv_head, HEADS_KV, W, BLOCK, VEC, NW)
    async_copy.commit_group()


@gluon.jit
def _stream_blocks(
    k_ring, v_ring, q_shared, p_shared, k_pool, v_pool, table, begin_ptr, end_ptr, acc_ptr, top_ptr, sum_ptr,
    max_parts, num_rows, first_pair, pairs, kv_head, block, stop, shift, last_key, inner_first, inner_stop, scale_log2,
    GROUP: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, PAIRS: gl.constexpr,
    FP8: gl.constexpr, DEPTH: gl.constexpr, NW: gl.constexpr, ASM_KEYS: gl.constexpr, ASM_VALUES: gl.constexpr,
):  # fmt: skip
    """All blocks [block, stop) of a tile, whose first copies are under way: scores [BLOCK, PAIRS], sums [W, PAIRS]."""
    W: gl.constexpr = D // 4 if FP8 else D
    mma_s: gl.constexpr = _mma_layout(BLOCK, 4, NW)
    mma_o: gl.constexpr = _mma_layout(W, NW, NW)
    page_v = gl.load(table + gl.minimum(block + (DEPTH - 1), stop - 1) * BLOCK // PAGE)
    page_k = gl.load(table + gl.minimum(block + DEPTH, stop - 1) * BLOCK // PAGE)
    async_copy.wait_group(DEPTH - 1)
    block_barrier()
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, mma_s))
    top = gl.full([PAIRS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, mma_s))
    total = gl.zeros([min(W, 64), PAIRS], gl.float32, layout=mma_o)
    acc0 = gl.zeros([W, PAIRS], gl.float32, layout=mma_o)
    acc1 = acc0 if FP8 else 0
    acc2, acc3 = acc1, acc1
    part0, part1, part2, part3 = acc0, acc1, acc2, acc3
    part_top = gl.full([PAIRS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, mma_o))
    part_total = gl.zeros([PAIRS], gl.float32, layout=gl.SliceLayout(0, mma_o))
    scores = _scores(k_ring.index(0), q_shared, BLOCK, PAIRS, D, FP8, ASM_KEYS, mma_s)
    at = 0
    for current in range(block, stop):
        page_next = gl.load(table + gl.minimum(current + (DEPTH + 1), stop - 1) * BLOCK // PAGE)
        key = current * BLOCK
        if (key < inner_first) | (key + BLOCK > inner_stop):
            scores = _hide_unseen(scores, begin_ptr, end_ptr, first_pair, key, pair, pairs, GROUP, BLOCK, mma_s)
        top, keep, share = _weigh(p_shared, scores, top, scale_log2, mma_s, mma_o)
        async_copy.wait_group(DEPTH - 2)
        block_barrier()
        _copy_ahead(
            k_ring, v_ring, at, k_pool, v_pool, page_k, page_v, current, stop, last_key, kv_head, HEADS_KV, W, BLOCK,
            4 if FP8 else 8, DEPTH, NW,
        )  # fmt: skip
        acc0, acc1, acc2, acc3, total = _add_values(
            acc0, acc1, acc2, acc3, total, keep, share, v_ring.index(at), p_shared, PAIRS, W, BLOCK, FP8,
            ASM_VALUES, mma_o,
        )  # fmt: skip
        at = gl.where(at == DEPTH - 1, 0, at + 1)
        # After the last block these are scores of old bytes, and dropped.
        scores = _scores(k_ring.index(at), q_shared, BLOCK, PAIRS, D, FP8, ASM_KEYS, mma_s)
        following = current + 1
        quad = gl.minimum(shift, QUAD_LOG2)
        if (following >> quad << quad == following) | (following == stop):
            part0, part1, part2, part3, part_top, part_total = _fold_quad(
                part0, part1, part2, part3, part_top, part_total, acc0, acc1, acc2, acc3, top, total, FP8, mma_o
            )
            # The next one is folded into nothing: exact, whatever the sums hold.
            top = gl.full([PAIRS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, mma_s))
            if (following >> shift << shift == following) | (following == stop):
                place = (kv_head * max_parts + (current >> shift)).to(gl.int64) * (num_rows * GROUP) + first_pair
                _store_part(
                    acc_ptr, top_ptr, sum_ptr, place, part0, part1, part2, part3, part_top, part_total, pairs,
                    PAIRS, D, W, FP8, mma_o,
                )  # fmt: skip
                part_top = gl.full([PAIRS], float("-inf"), gl.float32, layout=gl.SliceLayout(0, mma_o))
        page_v, page_k = page_k, page_next


@gluon.jit(do_not_specialize=["num_rows", "table_stride", "max_parts", "programs", "least_tiles"])
def attention_stream_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, slots_ptr, begin_ptr, end_ptr, acc_ptr, top_ptr, sum_ptr,
    num_rows, table_stride, max_parts, programs, least_tiles, q_row_stride, q_head_stride, scale_log2,
    GROUP: gl.constexpr, HEADS_KV: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, PAIRS: gl.constexpr,
    ROWS: gl.constexpr, SLOTS: gl.constexpr, FP8: gl.constexpr, CONVERT: gl.constexpr, DEPTH: gl.constexpr,
    NW: gl.constexpr, PDL: gl.constexpr, ASM_KEYS: gl.constexpr, ASM_VALUES: gl.constexpr,
):  # fmt: skip
    """Grid: (at least `programs` and as many as there are tiles, Hkv). Each part of each row: unnormed output, maximum
    and sum of weights.

    acc_ptr: [Hkv, max_parts, R, GROUP, D]; top_ptr, sum_ptr: [Hkv, max_parts, R, GROUP]; all float32. Rows of a slot
    are contiguous; its pairs are cut into tiles, and all tiles have equally many programs. scale_log2 is above zero.
    CONVERT: the asm converts by the card's own instruction (see cache_values.py).
    """
    W: gl.constexpr = D // 4 if FP8 else D  # elements of a key in the ring: words of four bytes, or 16-bit values
    VEC: gl.constexpr = 4 if FP8 else 8
    element: gl.constexpr = gl.int32 if FP8 else k_ptr.dtype.element_ty
    dtype: gl.constexpr = gl.float16 if FP8 else k_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    k_ring = gl.allocate_shared_memory(element, [DEPTH, BLOCK, W], _ring_layout(FP8, False))
    v_ring = gl.allocate_shared_memory(element, [DEPTH, BLOCK, W], _ring_layout(FP8, True))
    q_shared = gl.allocate_shared_memory(dtype, [4 if FP8 else 1, PAIRS, W], _operand_layout(W * 2))
    p_shared = gl.allocate_shared_memory(dtype, [BLOCK, PAIRS], _operand_layout(PAIRS * 2))
    k_pool = k_ptr.to(gl.pointer_type(element), bitcast=True)
    v_pool = v_ptr.to(gl.pointer_type(element), bitcast=True)
    kv_head = gl.program_id(1)
    slot, index, each, first_pair, pairs, shift, first_key, last_key, inner_first, inner_stop = tile_bounds(
        slots_ptr, begin_ptr, end_ptr, num_rows, programs, least_tiles, GROUP, PAIRS, BLOCK, ROWS, SLOTS, NW
    )
    block, stop = own_blocks(first_key, last_key, index, each, shift, BLOCK)
    if block < stop:
        table = tables_ptr + slot.to(gl.int64) * table_stride
        for ahead in gl.static_range(DEPTH):
            # Group `ahead`: keys of this block and values of the same, but for the last.
            if block + ahead < stop:
                key = (block + ahead) * BLOCK
                page = gl.load(table + key // PAGE)
                _copy_block(k_ring, ahead, k_pool, page, key, last_key, kv_head, HEADS_KV, W, BLOCK, VEC, NW)
                if ahead < DEPTH - 1:
                    _copy_block(v_ring, ahead, v_pool, page, key, last_key, kv_head, HEADS_KV, W, BLOCK, VEC, NW)
            async_copy.commit_group()
        _store_queries(
            q_shared, q_ptr, first_pair, pairs, kv_head, q_row_stride, q_head_stride, GROUP, D, PAIRS, FP8, CONVERT, NW,
            dtype,
        )  # fmt: skip
        _stream_blocks(
            k_ring, v_ring, q_shared, p_shared, k_pool, v_pool, table, begin_ptr, end_ptr, acc_ptr, top_ptr, sum_ptr,
            max_parts, num_rows, first_pair, pairs, kv_head, block, stop, shift, last_key, inner_first, inner_stop,
            scale_log2, GROUP, HEADS_KV, D, BLOCK, PAIRS, FP8, DEPTH, NW, ASM_KEYS, ASM_VALUES,
        )  # fmt: skip
        async_copy.wait_group(0)

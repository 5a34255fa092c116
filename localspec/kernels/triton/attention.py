"""Attention of a verify step over paged keys and values: fixed splits, merged in order.

Knows rows, slots, block tables and splits. Does not write the cache (`kv_store.py`) nor serve prompts
(`attention_prefill.py`). Specification: `reference_attention.py`.

A block holds 16 or 32 (row, head) pairs of one slot and key head as the N side of its matmuls: keys and values are read
from memory once for all heads of the group, and further rows find them in the L2 cache. Its shape is the same for every
number of rows, so a row's sums have one order. The number of blocks does not depend on the context: each takes every
n-th split below its rows' last key, which is read from the device, so one captured graph serves every length.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import Paging
from localspec.kernels.triton.cache_values import E4M3_SHIFT, PAGE_TOKENS, cache_bytes, load_cached

SPLIT_KEYS = 256
MAX_ROWS = 16
MERGE_SPLITS = 16
TARGET_BLOCKS = 264
"""Blocks of the split kernel that fill a card: two for each of 132 multiprocessors."""


@triton.jit
def attend_block(
    q,
    acc,
    top,
    weight_sum,
    k_ptr,
    v_ptr,
    table_ptr,
    first_key,
    last_key,
    begin,
    end,
    scale,
    kv_head,
    HEADS_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    """One block of keys [first_key, first_key + BLOCK_N), all in one page, into the running softmax.

    q: [D, M]; acc: [D, M]; top, weight_sum: [M]; begin, end: [M] keys that each pair sees; `last_key`: above every
    `end`. Scores are in powers of two. A pair that sees none of the keys keeps its sums bit for bit.
    """
    page = tl.load(table_ptr + first_key // PAGE).to(tl.int64)
    keys = first_key + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, D)
    first_token = page * PAGE + first_key % PAGE
    base = (first_token * HEADS_KV + kv_head) * D
    offsets = (tl.arange(0, BLOCK_N) * (HEADS_KV * D))[:, None] + dims[None, :]
    present = (keys < last_key)[:, None]
    k = load_cached(k_ptr + base + offsets, present, FP8, q.dtype)
    scores = tl.dot(k, q) * scale
    seen = (keys[:, None] >= begin[None, :]) & (keys[:, None] < end[None, :])
    scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=0))
    # A pair that has seen no key yet has no maximum; any finite one keeps NaN out.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - finite_top[None, :])
    keep = tl.exp2(top - finite_top)
    weight_sum = weight_sum * keep + tl.sum(weights, axis=0)
    v = load_cached(v_ptr + base + offsets, present, FP8, q.dtype)
    if FP8:
        weights = weights * E4M3_SHIFT
    acc = tl.dot(tl.trans(v), weights.to(q.dtype), acc * keep[None, :])
    return acc, new_top, weight_sum


@triton.jit
def attention_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tables_ptr,
    slots_ptr,
    begin_ptr,
    end_ptr,
    acc_ptr,
    top_ptr,
    sum_ptr,
    num_rows,
    table_stride,
    max_splits,
    q_row_stride,
    q_head_stride,
    scale_log2,
    GROUP: tl.constexpr,
    HEADS_KV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    FP8: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid: (blocks, Hkv, S * ROW_TILES). Each split of each row: unnormed output, maximum and sum of weights.

    acc_ptr: [R, H, max_splits, D]; top_ptr, sum_ptr: [R, H, max_splits]; all float32. Rows of a slot are contiguous.
    """
    kv_head = tl.program_id(1)
    slot = (tl.program_id(2) // ROW_TILES).to(tl.int64)
    tile = tl.program_id(2) % ROW_TILES
    all_rows = tl.arange(0, ROWS)
    own = tl.load(slots_ptr + all_rows, mask=all_rows < num_rows, other=-1) == slot
    count = tl.sum(own.to(tl.int32), axis=0)
    tile_first = tile * (PAIRS // GROUP)
    if tile_first >= count:
        return
    first_row = tl.min(tl.where(own, all_rows, ROWS), axis=0)
    pair = tl.arange(0, PAIRS)
    member = tile_first + pair // GROUP
    valid = (member < count) & (pair < PAIRS // GROUP * GROUP)
    row = (first_row + member).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    begin = tl.load(begin_ptr + row, mask=valid, other=0x7FFFFFFF).to(tl.int32)
    end = tl.load(end_ptr + row, mask=valid, other=0).to(tl.int32)
    first_key = tl.min(begin, axis=0)
    last_key = tl.max(end, axis=0)
    dims = tl.arange(0, D)
    q_offsets = row * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offsets[None, :] + dims[:, None], mask=valid[None, :], other=0.0)
    scale = scale_log2
    if FP8:
        q = (q.to(tl.float32) * E4M3_SHIFT).to(tl.bfloat16)
        scale = scale * E4M3_SHIFT
    table_ptr = tables_ptr + slot * table_stride
    for split in range(first_key // SPLIT + tl.program_id(0), tl.cdiv(last_key, SPLIT), tl.num_programs(0)):
        acc = tl.zeros([D, PAIRS], tl.float32)
        top = tl.full([PAIRS], float("-inf"), tl.float32)
        weight_sum = tl.zeros([PAIRS], tl.float32)
        block_begin = tl.maximum(split * SPLIT, first_key // BLOCK_N * BLOCK_N)
        block_end = tl.minimum(split * SPLIT + SPLIT, last_key)
        for key in tl.range(block_begin, block_end, BLOCK_N, num_stages=STAGES):
            acc, top, weight_sum = attend_block(
                q,
                acc,
                top,
                weight_sum,
                k_ptr,
                v_ptr,
                table_ptr,
                key,
                last_key,
                begin,
                end,
                scale,
                kv_head,
                HEADS_KV,
                D,
                PAGE,
                BLOCK_N,
                FP8,
            )
        if FP8:
            acc = acc * E4M3_SHIFT
        place = (row * (HEADS_KV * GROUP) + head) * max_splits + split
        tl.store(top_ptr + place, top, mask=valid)
        tl.store(sum_ptr + place, weight_sum, mask=valid)
        tl.store(acc_ptr + place[None, :] * D + dims[:, None], acc, mask=valid[None, :])


@triton.jit
def attention_merge_kernel(
    acc_ptr,
    top_ptr,
    sum_ptr,
    slots_ptr,
    begin_ptr,
    end_ptr,
    gate_ptr,
    out_ptr,
    max_splits,
    gate_row_stride,
    gate_head_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    MERGE: tl.constexpr,
    GATED: tl.constexpr,
):
    """Grid: (R, H, D / BLOCK_D). Sum a row's splits in order, MERGE at a time, and gate; padding rows become zero."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = (tl.load(begin_ptr + row) // SPLIT).to(tl.int32)
    last = tl.cdiv(tl.load(end_ptr + row), SPLIT).to(tl.int32)
    if tl.load(slots_ptr + row) < 0:
        last = first
    base = (row * H + head) * max_splits
    total = tl.zeros([BLOCK_D], tl.float32)
    total_max = -1.0e30
    total_sum = 0.0
    for batch in range(first, last, MERGE):
        splits = batch + tl.arange(0, MERGE)
        present = splits < last
        maxima = tl.load(top_ptr + base + splits, mask=present, other=float("-inf"))
        sums = tl.load(sum_ptr + base + splits, mask=present, other=0.0)
        parts = tl.load(acc_ptr + (base + splits)[:, None] * D + dims[None, :], mask=present[:, None], other=0.0)
        new_max = tl.maximum(total_max, tl.max(maxima, axis=0))
        keep = tl.exp2(total_max - new_max)
        weights = tl.exp2(maxima - new_max)
        total = total * keep + tl.sum(parts * weights[:, None], axis=0)
        total_sum = total_sum * keep + tl.sum(sums * weights, axis=0)
        total_max = new_max
    out = total / tl.where(total_sum == 0.0, 1.0, total_sum)
    if GATED:
        gate = tl.load(gate_ptr + row * gate_row_stride + head * gate_head_stride + dims).to(tl.float32)
        out = out / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + (row * H + head) * D + dims, out.to(out_ptr.dtype.element_ty))


def pairs_in_block(head_dim: int, device: torch.device) -> int:
    """Pairs that a block holds without spilling: on sm_90 and sm_100 queries stay in shared memory, not in registers."""
    wide = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)
    return 32 if wide or head_dim <= 128 else 16


def check_attention(q: Tensor, k_pages: Tensor, v_pages: Tensor, paging: Paging) -> None:
    """Raises ValueError naming what the kernels cannot take."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads = k_pages.shape[2]
    if head_dim & (head_dim - 1) or not 16 <= head_dim <= 256:
        raise ValueError(f"head size {head_dim} is not supported; it must be a power of two from 16 to 256")
    if num_heads % num_kv_heads:
        raise ValueError(f"{num_heads} query heads do not divide over {num_kv_heads} key heads")
    if q.stride(2) != 1:
        raise ValueError("queries must be contiguous in their last dimension")
    if k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype or k_pages.shape[3] != head_dim:
        raise ValueError("key and value pages must have one shape and dtype, and the queries' head size")
    if paging.block_tables.stride(1) != 1 or paging.block_tables.shape[1] * PAGE_TOKENS < paging.max_key_bound:
        raise ValueError(f"block tables must be contiguous and hold {paging.max_key_bound} keys")


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    paging: Paging,
    bounds: tuple[Tensor, Tensor],
    scale: float,
    gate: Tensor | None = None,
) -> Tensor:
    """A verify step of up to 16 rows; see `Ops.attention`. bounds: key_begin, key_end; gate: [R, H, D], sigmoid of it
    multiplies the output. Returns [R, H, D] in q's dtype, zero for padding rows.
    """
    check_attention(q, k_pages, v_pages, paging)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    group = num_heads // num_kv_heads
    if num_rows > MAX_ROWS:
        raise ValueError(f"a verify step has at most {MAX_ROWS} rows, not {num_rows}")
    k_bytes, fp8 = cache_bytes(k_pages)
    v_bytes, _ = cache_bytes(v_pages)
    num_slots = paging.block_tables.shape[0]
    max_splits = triton.cdiv(paging.max_key_bound, SPLIT_KEYS)
    pairs = max(pairs_in_block(head_dim, q.device), triton.next_power_of_2(group))
    row_tiles = triton.cdiv(num_rows, pairs // group)
    blocks = min(max_splits, triton.cdiv(TARGET_BLOCKS, num_kv_heads))
    acc = torch.empty(num_rows, num_heads, max_splits, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, num_rows, num_heads, max_splits, dtype=torch.float32, device=q.device)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    attention_split_kernel[(blocks, num_kv_heads, num_slots * row_tiles)](
        *(q, k_bytes, v_bytes, paging.block_tables, paging.slots, *bounds, acc, stats[0], stats[1]),
        *(num_rows, paging.block_tables.stride(0), max_splits, q.stride(0), q.stride(1), scale * math.log2(math.e)),
        GROUP=group,
        HEADS_KV=num_kv_heads,
        D=head_dim,
        PAGE=PAGE_TOKENS,
        SPLIT=SPLIT_KEYS,
        PAIRS=pairs,
        BLOCK_N=32,
        ROWS=MAX_ROWS,
        ROW_TILES=row_tiles,
        FP8=fp8,
        STAGES=2,
        num_warps=4,
    )
    block_dims = min(64, head_dim)
    gated = gate is not None
    attention_merge_kernel[(num_rows, num_heads, head_dim // block_dims)](
        *(acc, stats[0], stats[1], paging.slots, *bounds, gate if gated else q, out, max_splits),
        *((gate.stride(0), gate.stride(1)) if gate is not None else (0, 0)),
        H=num_heads,
        D=head_dim,
        BLOCK_D=block_dims,
        SPLIT=SPLIT_KEYS,
        MERGE=MERGE_SPLITS,
        GATED=gated,
        num_warps=2,
    )
    return out

"""Attention of a verify step for any head size and type: plain Triton, which also runs in its interpreter.

Knows rows, slots, block tables and blocks of keys. The shapes of large models take attention_stream.py; attention.py
chooses. Specification: `reference_attention.py`.

Order of sums: 32 keys are one softmax of their own; 8 such blocks are folded in order into a group of 256 keys; groups
are merged 16 at a time. Short contexts spread single blocks over the card and leave the fold of 8 to the merge; long
ones fold in registers and write an eighth as much. Both use `fold`, so the bits are the same, and the length that
decides is read from the device: one captured graph serves every length.

A program holds 16 (row, head) pairs of one slot and key head as the N side of its matmuls: keys and values come from
memory once for all heads of the group, and further rows find them in the L2 cache. Its shape is the same for every
number of rows, so a row's sums have one order.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.ops import PAGE_TOKENS, Paging
from localspec.kernels.triton.cache_values import E4M3_SCALE, load_cached
from localspec.kernels.triton.cards import capability_major, dependent_launch

BLOCK_KEYS = 32
GROUP_BLOCKS = 8
PAIRS = 16
MAX_ROWS = 16
MERGE_GROUPS = 16
TARGET_PROGRAMS = 264
"""Programs of the split kernel for a row tile: two for each of 132 multiprocessors."""


@triton.jit
def fold(acc, top, weight_sum, part_acc, part_top, part_sum):
    """Two partial softmaxes into one. acc: [A, B], the others [B]; FMAs are explicit, so all callers get the same bits.

    An empty part (top -inf, sum and acc zero) changes nothing.
    """
    new_top = tl.maximum(top, part_top)
    # Where neither saw a key there is no maximum; any finite one keeps NaN out.
    finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.exp2(top - finite_top)
    share = tl.exp2(part_top - finite_top)
    wide_keep = keep[None, :] + tl.zeros_like(acc)
    acc = tl.fma(acc, wide_keep, part_acc * share[None, :])
    return acc, new_top, tl.fma(weight_sum, keep, part_sum * share)


@triton.jit
def attend_block(
    q, k_ptr, v_ptr, page, first_key, last_key, begin, end, scale, kv_head, HEADS_KV: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Softmax over keys [first_key, first_key + BLOCK), all in one page -> acc [D, M], top [M], sum of weights [M].

    q: [D, M]; begin, end: [M] keys that each pair sees; last_key: above every `end`. Scores are in powers of two.
    """
    keys = first_key + tl.arange(0, BLOCK)
    base = ((page.to(tl.int64) * PAGE + first_key % PAGE) * HEADS_KV + kv_head) * D
    offsets = (tl.arange(0, BLOCK) * (HEADS_KV * D))[:, None] + tl.arange(0, D)[None, :]
    present = (keys < last_key)[:, None]
    k = load_cached(k_ptr + base + offsets, present, FP8, ASM, q.dtype)
    scores = tl.dot(k, q) * scale
    seen = (keys[:, None] >= begin[None, :]) & (keys[:, None] < end[None, :])
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.max(scores, axis=0)
    weights = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[None, :])
    v = load_cached(v_ptr + base + offsets, present, FP8, ASM, q.dtype)
    return tl.dot(tl.trans(v), weights.to(q.dtype)), top, tl.sum(weights, axis=0)


@triton.jit(do_not_specialize=["num_rows", "table_stride", "max_parts", "row_tiles", "fine_keys"])
def attention_split_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, slots_ptr, begin_ptr, end_ptr, acc_ptr, top_ptr, sum_ptr, num_rows, table_stride,
    max_parts, row_tiles, fine_keys, q_row_stride, q_head_stride, scale_log2, GROUP: tl.constexpr,
    HEADS_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, COARSE: tl.constexpr,
    PAIRS: tl.constexpr, ROWS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, Hkv, S * row_tiles). Each part of each row: unnormed output, maximum and sum of weights.

    acc_ptr: [R, H, max_parts, D]; top_ptr, sum_ptr: [R, H, max_parts]; all float32. A part is BLOCK keys where the
    slot's last key is at most fine_keys, else COARSE keys. Rows of a slot are contiguous.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(1)
    slot = (tl.program_id(2) // row_tiles).to(tl.int64)
    all_rows = tl.arange(0, ROWS)
    own = tl.load(slots_ptr + all_rows, mask=all_rows < num_rows, other=-1) == slot
    count = tl.sum(own.to(tl.int32), axis=0)
    tile_first = (tl.program_id(2) % row_tiles) * (PAIRS // GROUP)
    if tile_first >= count:
        return
    last_key = tl.max(tl.load(end_ptr + all_rows, mask=own, other=0), axis=0).to(tl.int32)
    part_keys = tl.where(last_key <= fine_keys, BLOCK, COARSE)
    pair = tl.arange(0, PAIRS)
    member = tile_first + pair // GROUP
    valid = (member < count) & (pair < PAIRS // GROUP * GROUP)
    row = (tl.min(tl.where(own, all_rows, ROWS), axis=0) + member).to(tl.int64)
    head = kv_head * GROUP + pair % GROUP
    begin = tl.load(begin_ptr + row, mask=valid, other=0x7FFFFFFF).to(tl.int32)
    end = tl.load(end_ptr + row, mask=valid, other=0).to(tl.int32)
    first_key = tl.min(begin, axis=0)
    last_key = tl.max(end, axis=0)
    dims = tl.arange(0, D)
    q_offsets = row * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offsets[None, :] + dims[:, None], mask=valid[None, :], other=0.0)
    if FP8:
        q = q.to(tl.float16)
    table_ptr = tables_ptr + slot * table_stride
    for part in range(first_key // part_keys + tl.program_id(0), tl.cdiv(last_key, part_keys), tl.num_programs(0)):
        acc = tl.zeros([D, PAIRS], tl.float32)
        top = tl.full([PAIRS], float("-inf"), tl.float32)
        weight_sum = tl.zeros([PAIRS], tl.float32)
        block_begin = tl.maximum(part * part_keys, first_key // BLOCK * BLOCK)
        for key in tl.range(block_begin, tl.minimum(part * part_keys + part_keys, last_key), BLOCK, num_stages=STAGES):
            block_acc, block_top, block_sum = attend_block(
                q, k_ptr, v_ptr, tl.load(table_ptr + key // PAGE), key, last_key, begin, end, scale_log2, kv_head,
                HEADS_KV, D, PAGE, BLOCK, FP8, ASM,
            )  # fmt: skip
            acc, top, weight_sum = fold(acc, top, weight_sum, block_acc, block_top, block_sum)
        place = (row * (HEADS_KV * GROUP) + head) * max_parts + part
        tl.store(top_ptr + place, top, mask=valid)
        tl.store(sum_ptr + place, weight_sum, mask=valid)
        tl.store(acc_ptr + place[None, :] * D + dims[:, None], acc, mask=valid[None, :])


@triton.jit
def load_part(acc_ptr, top_ptr, sum_ptr, place, dims, present, D: tl.constexpr):
    """Parts of one row and head -> acc [BLOCK_D, M], top [M], sum of weights [M]; absent ones are empty."""
    top = tl.load(top_ptr + place, mask=present, other=float("-inf"))
    weight_sum = tl.load(sum_ptr + place, mask=present, other=0.0)
    acc = tl.load(acc_ptr + place[None, :] * D + dims[:, None], mask=present[None, :], other=0.0)
    return acc, top, weight_sum


@triton.jit(do_not_specialize=["num_rows", "max_parts", "fine_keys"])
def attention_merge_kernel(
    acc_ptr, top_ptr, sum_ptr, slots_ptr, begin_ptr, end_ptr, gate_ptr, out_ptr, num_rows, max_parts, fine_keys,
    gate_row_stride, gate_head_stride, out_scale, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, MERGE: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R, H, D / BLOCK_D). Fold a row's parts, BLOCKS to a group, merge its groups in order, MERGE at a time,
    and gate. Padding rows become zero. out_ptr: [R, H, D]; out_scale: a factor of every value.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + row)
    all_rows = tl.arange(0, ROWS)
    own = tl.load(slots_ptr + all_rows, mask=all_rows < num_rows, other=-1) == slot
    fine = tl.max(tl.load(end_ptr + all_rows, mask=own, other=0), axis=0) <= fine_keys
    begin = tl.load(begin_ptr + row).to(tl.int32)
    end = tl.where(slot < 0, 0, tl.load(end_ptr + row)).to(tl.int32)
    base = (row * H + head) * max_parts
    total = tl.zeros([BLOCK_D], tl.float32)
    total_top = -1.0e30
    total_sum = 0.0
    for batch in range(begin // (BLOCK * BLOCKS), tl.cdiv(end, BLOCK * BLOCKS), MERGE):
        groups = batch + tl.arange(0, MERGE)
        if fine:
            acc = tl.zeros([BLOCK_D, MERGE], tl.float32)
            top = tl.full([MERGE], float("-inf"), tl.float32)
            weight_sum = tl.zeros([MERGE], tl.float32)
            for block in tl.static_range(BLOCKS):
                index = groups * BLOCKS + block
                present = (index >= begin // BLOCK) & (index < tl.cdiv(end, BLOCK))
                part, part_top, part_sum = load_part(acc_ptr, top_ptr, sum_ptr, base + index, dims, present, D)
                acc, top, weight_sum = fold(acc, top, weight_sum, part, part_top, part_sum)
        else:
            # A coarse part is its whole group, folded already; folding it into nothing would give its own bits.
            present = groups * (BLOCK * BLOCKS) < end
            acc, top, weight_sum = load_part(acc_ptr, top_ptr, sum_ptr, base + groups, dims, present, D)
        new_top = tl.maximum(total_top, tl.max(top, axis=0))
        keep = tl.exp2(total_top - new_top)
        share = tl.exp2(top - new_top)
        total = total * keep + tl.sum(acc * share[None, :], axis=1)
        total_sum = total_sum * keep + tl.sum(weight_sum * share, axis=0)
        total_top = new_top
    out = total * out_scale / tl.where(total_sum == 0.0, 1.0, total_sum)
    if GATED:
        gate = tl.load(gate_ptr + row * gate_row_stride + head * gate_head_stride + dims).to(tl.float32)
        out = out / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + (row * H + head) * D + dims, out.to(out_ptr.dtype.element_ty))


def pipeline_steps(fp8: bool, device: torch.device) -> int:
    """A page number and then its keys are two loads in a row: five steps keep the next block's keys in flight.

    In bf16 that spills where queries live in registers; three steps then hide the page number only.
    """
    return 5 if fp8 or capability_major(device) in (9, 10) else 3


def most_parts(bound: int, fine_keys: int, block: int, coarse: int) -> int:
    """Parts of the longest slot of at most `bound` keys: of `block` keys up to fine_keys, of `coarse` keys beyond."""
    fine = triton.cdiv(min(bound, fine_keys), block)
    return int(max(fine, triton.cdiv(bound, coarse)) if bound > fine_keys else fine)


def attend_in_blocks(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    paging: Paging,
    bounds: tuple[Tensor, Tensor],
    scale: float,
    gate: Tensor | None,
    fine_keys: int,
) -> Tensor:
    """`paged_attention` of checked arguments. pages: keys and values as `cache_bytes` gives them; fine_keys: the
    length, shared among the row tiles, up to which single blocks are spread over the card.
    """
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages[0].shape[2]
    group = num_heads // num_kv_heads
    fp8 = pages[0].dtype == torch.uint8
    bound = paging.max_key_bound
    pairs = max(PAIRS, triton.next_power_of_2(group))
    row_tiles = triton.cdiv(num_rows, pairs // group)
    fine_keys = fine_keys // row_tiles
    max_parts = most_parts(bound, fine_keys, BLOCK_KEYS, BLOCK_KEYS * GROUP_BLOCKS)
    programs = min(max_parts, triton.cdiv(TARGET_PROGRAMS, num_kv_heads))
    acc = torch.empty(num_rows, num_heads, max_parts, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, num_rows, num_heads, max_parts, dtype=torch.float32, device=q.device)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    key_scale = E4M3_SCALE.value if fp8 else 1.0
    pdl = dependent_launch(q.device)
    attention_split_kernel[(programs, num_kv_heads, paging.block_tables.shape[0] * row_tiles)](
        *(q, *pages, paging.block_tables, paging.slots, *bounds, acc, stats[0], stats[1]),
        *(num_rows, paging.block_tables.stride(0), max_parts, row_tiles, fine_keys),
        *(q.stride(0), q.stride(1), scale * key_scale * math.log2(math.e)),
        **{"GROUP": group, "HEADS_KV": num_kv_heads, "D": head_dim, "PAGE": PAGE_TOKENS, "BLOCK": BLOCK_KEYS},
        **{"COARSE": BLOCK_KEYS * GROUP_BLOCKS, "PAIRS": pairs, "ROWS": MAX_ROWS, "FP8": fp8, "ASM": q.is_cuda},
        **{"STAGES": pipeline_steps(fp8, q.device), "PDL": pdl, "num_warps": 4, "launch_pdl": pdl},
    )
    block_dims = min(32, head_dim)
    attention_merge_kernel[(num_rows, num_heads, head_dim // block_dims)](
        *(acc, stats[0], stats[1], paging.slots, *bounds, q if gate is None else gate, out),
        *(num_rows, max_parts, fine_keys),
        *((0, 0) if gate is None else (gate.stride(0), gate.stride(1))),
        key_scale,
        **{"H": num_heads, "D": head_dim, "BLOCK_D": block_dims, "BLOCK": BLOCK_KEYS, "BLOCKS": GROUP_BLOCKS},
        **{"MERGE": MERGE_GROUPS, "ROWS": MAX_ROWS, "GATED": gate is not None},
        **{"PDL": pdl, "num_warps": 2, "launch_pdl": pdl},
    )
    return out

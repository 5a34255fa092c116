"""Attention of a prefill chunk: many rows of one slot over the paged cache, keys in order from the first.

Knows rows, block tables and key bounds. A row's bits depend on its own place in its tile and its own keys only: a block
of keys that a row does not see changes none of its sums.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import PAGE_TOKENS, Paging
from localspec.kernels.triton.attention import check_attention
from localspec.kernels.triton.cache_values import E4M3_SCALE, cache_bytes, load_cached
from localspec.kernels.triton.cards import capability_major


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def attention_prefill_kernel(
    q_ptr, k_ptr, v_ptr, tables_ptr, slots_ptr, begin_ptr, end_ptr, out_ptr, num_rows, table_stride, q_row_stride,
    q_head_stride, scale_log2, H: tl.constexpr, HEADS_KV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, V_PARTS: tl.constexpr, FP8: tl.constexpr, ASM: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (H, V_PARTS, row tiles). out_ptr: [R, H, D], zero for padding rows. Each block makes D / V_PARTS values."""
    head = tl.program_id(0)
    kv_head = head // (H // HEADS_KV)
    # Late rows see most keys, so their tiles start first.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    row = (tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    row_slots = tl.load(slots_ptr + row, mask=row < num_rows, other=-1)
    slot = tl.max(row_slots, axis=0)
    valid = row_slots >= 0
    PART: tl.constexpr = D // V_PARTS
    part_dims = tl.program_id(1) * PART + tl.arange(0, PART)
    if slot < 0:
        cleared = out_ptr + ((row * H + head) * D)[:, None] + part_dims[None, :]
        tl.store(cleared, tl.zeros([BLOCK_M, PART], out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None])
        return
    begin = tl.load(begin_ptr + row, mask=valid, other=0x7FFFFFFF).to(tl.int32)
    end = tl.load(end_ptr + row, mask=valid, other=0).to(tl.int32)
    last_key = tl.max(end, axis=0)
    dims = tl.arange(0, D)
    q_offsets = row * q_row_stride + head * q_head_stride
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=valid[:, None], other=0.0)
    if FP8:
        q = q.to(tl.float16)
    acc = tl.zeros([BLOCK_M, PART], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight_sum = tl.zeros([BLOCK_M], tl.float32)
    table_ptr = tables_ptr + slot * table_stride
    for first_key in tl.range(tl.min(begin, axis=0) // BLOCK_N * BLOCK_N, last_key, BLOCK_N, num_stages=STAGES):
        page = tl.load(table_ptr + first_key // PAGE).to(tl.int64)
        keys = first_key + tl.arange(0, BLOCK_N)
        base = ((page * PAGE + first_key % PAGE) * HEADS_KV + kv_head) * D
        tokens = (tl.arange(0, BLOCK_N) * (HEADS_KV * D))[:, None]
        present = (keys < last_key)[:, None]
        k = load_cached(k_ptr + base + tokens + dims[None, :], present, FP8, ASM, q.dtype)
        scores = tl.dot(q, tl.trans(k)) * scale_log2
        seen = (keys[None, :] >= begin[:, None]) & (keys[None, :] < end[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # A row that has seen no key yet has no maximum; any finite one keeps NaN out.
        finite_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - finite_top[:, None])
        keep = tl.exp2(top - finite_top)
        weight_sum = weight_sum * keep + tl.sum(weights, axis=1)
        v = load_cached(v_ptr + base + tokens + part_dims[None, :], present, FP8, ASM, q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * keep[:, None])
        top = new_top
    if FP8:
        acc = acc * E4M3_SCALE
    out = acc / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    target = out_ptr + ((row * H + head) * D)[:, None] + part_dims[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=(row < num_rows)[:, None])


@dataclass(frozen=True)
class PrefillTile:
    """Sizes of one block: rows, keys of a step, parts of the head size, steps in flight, warps."""

    block_rows: int
    block_keys: int
    v_parts: int
    stages: int
    num_warps: int


def prefill_tile(head_dim: int, capability_major: int) -> PrefillTile:
    """Tiles that do not spill, nor exceed 99 KB where that is the limit.

    sm_90 and sm_100 keep queries in shared memory, of which they have 227 KB (with head size 256 over fp8, sm_90 spills
    136 bytes and is still 1.6 times as fast as halves would be); elsewhere queries take registers, and with head size
    256 a block has room for a half (sm_120) or a quarter (sm_8x) of the output.
    """
    if capability_major in (9, 10):
        return PrefillTile(128, 64, 1, 2, 8)
    if capability_major == 12:
        return PrefillTile(64, 32, 2 if head_dim == 256 else 1, 2, 4)
    return PrefillTile(64, 64, 4, 2, 4) if head_dim == 256 else PrefillTile(64, 32, 1, 2, 4)


def prefill_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    paging: Paging,
    bounds: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """A prefill chunk of one slot, with padding rows anywhere; see `Ops.attention`. bounds: key_begin, key_end."""
    check_attention(q, k_pages, v_pages, paging)
    num_rows, num_heads, head_dim = q.shape
    k_bytes, fp8 = cache_bytes(k_pages)
    v_bytes, _ = cache_bytes(v_pages)
    tile = prefill_tile(head_dim, capability_major(q.device))
    key_scale = E4M3_SCALE.value if fp8 else 1.0
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    attention_prefill_kernel[(num_heads, tile.v_parts, triton.cdiv(num_rows, tile.block_rows))](
        *(q, k_bytes, v_bytes, paging.block_tables, paging.slots, *bounds, out, num_rows),
        *(paging.block_tables.stride(0), q.stride(0), q.stride(1), scale * key_scale * math.log2(math.e)),
        H=num_heads,
        HEADS_KV=k_pages.shape[2],
        D=head_dim,
        PAGE=PAGE_TOKENS,
        BLOCK_M=tile.block_rows,
        BLOCK_N=tile.block_keys,
        V_PARTS=tile.v_parts,
        FP8=fp8,
        ASM=q.is_cuda,
        STAGES=tile.stages,
        num_warps=tile.num_warps,
    )
    return out

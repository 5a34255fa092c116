"""Attention of a verify step over paged keys and values: checks, the choice of kernels, and their launch.

Knows shapes and cards. The kernels are in attention_stream.py (long caches of the usual shapes) and
attention_blocks.py (everything else). Does not write the cache (`norm_rope.py`) nor serve prompts
(`attention_prefill.py`). Specification: `reference_attention.py`.

Which kernels run depends on the model and the card only, and both give a row the same bits for every number of rows
and slots beside it and for every length of its neighbours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from localspec.kernels.ops import PAGE_TOKENS, Paging
from localspec.kernels.triton.attention_blocks import MAX_ROWS, attend_in_blocks
from localspec.kernels.triton.attention_join import attention_join_kernel
from localspec.kernels.triton.attention_stream import attention_stream_kernel
from localspec.kernels.triton.attention_tiles import BLOCKS_AHEAD, GROUP_LOG2, QUAD_LOG2, QUADS_AHEAD
from localspec.kernels.triton.cache_values import E4M3_SCALE, cache_bytes, fragment_asm
from localspec.kernels.triton.cards import dependent_launch

FINE_KEYS = 4096
"""Up to this length attention_blocks.py spreads single blocks of keys over the card; for more rows, up to less."""
STREAM_HEAD_DIMS = (64, 128, 256)
MAX_STREAM_SLOTS = 8
MAX_SLICE = 64
JOIN_STEPS = 16


@dataclass(frozen=True)
class StreamShape:
    """What a stream launch is made of. pairs: (row, head) pairs of a tile; depth: blocks in a ring; block_keys: keys
    of a block; programs: of one row tile on the whole card."""

    pairs: int
    num_warps: int
    depth: int
    block_keys: int
    programs: int


def stream_shape(slot_rows: int, group: int, head_dim: int, fp8: bool, device: torch.device) -> StreamShape:
    """Sixteen pairs while they hold all rows of a slot, else 32 with twice the warps: neither spills on any card."""
    properties = torch.cuda.get_device_properties(device)
    least = max(16, triton.next_power_of_2(group))
    pairs = least if slot_rows * group <= least else 2 * least
    block_keys = 32 if head_dim == 256 and not fp8 else 64
    block_bytes = block_keys * head_dim * (1 if fp8 else 2)
    other_bytes = pairs * (head_dim + block_keys) * 2 + 2048
    shared_bytes = properties.shared_memory_per_multiprocessor
    places = 2 if pairs == 16 and shared_bytes >= 2 * (4 * block_bytes + other_bytes) else 1
    room_bytes = shared_bytes // places
    depth = 3 if room_bytes >= 6 * block_bytes + other_bytes else 2
    warps = 4 if pairs == 16 else 8
    return StreamShape(pairs, warps, depth, block_keys, places * properties.multi_processor_count)


@dataclass(frozen=True)
class StreamGrid:
    """programs: of each key head, shared among the tiles; most_tiles, least_tiles: what the rows may make;
    max_parts: the most that a row has."""

    programs: int
    most_tiles: int
    least_tiles: int
    max_parts: int


def stream_grid(shape: StreamShape, rows: tuple[int, int, int], kv_heads: int, bound: int) -> StreamGrid:
    """rows: of the step, its slots, and query heads of a key head; bound: keys of the longest slot."""
    num_rows, num_slots, group = rows
    programs = triton.cdiv(shape.programs, kv_heads)
    sharing = min(num_rows, num_slots)
    most_tiles = (num_rows * group + sharing * (shape.pairs - 1)) // shape.pairs
    least_tiles = triton.cdiv(num_rows * group, shape.pairs)
    each = max(1, programs // least_tiles)
    blocks = triton.cdiv(bound, shape.block_keys)
    quads, groups = triton.cdiv(blocks, 1 << QUAD_LOG2.value), triton.cdiv(blocks, 1 << GROUP_LOG2.value)
    max_parts = max(min(blocks, each * BLOCKS_AHEAD.value), min(quads, each * QUADS_AHEAD.value), groups)
    return StreamGrid(programs, most_tiles, least_tiles, max_parts)


def converts_e4m3(device: torch.device) -> bool:
    """Whether the card has an instruction for it (sm_89 and later)."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


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


def streams(q: Tensor, pages: Tensor, num_slots: int) -> bool:
    """Whether attention_stream.py has kernels for these queries, cache bytes and slots."""
    num_heads, head_dim = q.shape[1:]
    same = q.dtype in (torch.bfloat16, torch.float16) and pages.dtype in (q.dtype, torch.uint8)
    few = num_slots <= MAX_STREAM_SLOTS and num_heads // pages.shape[2] <= 16
    return q.is_cuda and same and few and head_dim in STREAM_HEAD_DIMS


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
    if q.shape[0] > MAX_ROWS:
        raise ValueError(f"a verify step has at most {MAX_ROWS} rows, not {q.shape[0]}")
    pages = cache_bytes(k_pages)[0], cache_bytes(v_pages)[0]
    if scale > 0 and streams(q, pages[0], paging.block_tables.shape[0]):
        return attend_in_streams(q, pages, paging, bounds, scale, gate)
    return attend_in_blocks(q, pages, paging, bounds, scale, gate, FINE_KEYS)


def attend_in_streams(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    paging: Paging,
    bounds: tuple[Tensor, Tensor],
    scale: float,
    gate: Tensor | None,
    shape: StreamShape | None = None,
) -> Tensor:
    """`paged_attention` of checked arguments. pages: keys and values as `cache_bytes` gives them."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pages[0].shape[2]
    group = num_heads // num_kv_heads
    fp8 = pages[0].dtype == torch.uint8
    shape = shape or stream_shape(min(num_rows, paging.slot_rows_bound), group, head_dim, fp8, q.device)
    num_slots = paging.block_tables.shape[0]
    grid = stream_grid(shape, (num_rows, num_slots, group), num_kv_heads, paging.max_key_bound)
    acc = torch.empty(num_kv_heads, grid.max_parts, num_rows, group, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(2, num_kv_heads, grid.max_parts, num_rows, group, dtype=torch.float32, device=q.device)
    out = torch.empty(num_rows, num_heads, head_dim, dtype=q.dtype, device=q.device)
    convert = fp8 and converts_e4m3(q.device)
    key_scale = E4M3_SCALE.value if fp8 and not convert else 1.0
    # Contraction is off: what is fused is written as fma, so that all shapes of a tile have the same bits.
    options = {"enable_fp_fusion": False, "PDL": dependent_launch(q.device), "launch_pdl": dependent_launch(q.device)}
    common = {"GROUP": group, "D": head_dim, "BLOCK": shape.block_keys, "PAIRS": shape.pairs, "SLOTS": num_slots}
    attention_stream_kernel[(max(grid.programs, grid.most_tiles), num_kv_heads)](
        *(q, *pages, paging.block_tables, paging.slots, *bounds, acc, stats[0], stats[1]),
        *(num_rows, paging.block_tables.stride(0), grid.max_parts, grid.programs, grid.least_tiles),
        *(q.stride(0), q.stride(1), scale * key_scale * math.log2(math.e)),
        **{**common, "HEADS_KV": num_kv_heads, "ROWS": MAX_ROWS, "FP8": fp8, "CONVERT": convert, "DEPTH": shape.depth},
        **{"ASM_KEYS": fragment_asm(False, convert), "ASM_VALUES": fragment_asm(True, convert)},
        **{"NW": shape.num_warps, "num_warps": shape.num_warps, **options},
    )
    slice_dims = min(MAX_SLICE, head_dim)
    attention_join_kernel[(num_rows, num_heads, head_dim // slice_dims)](
        *(acc, stats[0], stats[1], paging.slots, *bounds, q if gate is None else gate, out),
        *(num_rows, grid.max_parts, grid.programs, grid.least_tiles),
        *((0, 0) if gate is None else (gate.stride(0), gate.stride(1))),
        key_scale,
        **{**common, "H": num_heads, "SLICE": slice_dims, "STEPS": JOIN_STEPS, "ROWS": MAX_ROWS},
        **{"GATED": gate is not None, "num_warps": 4, **options},
    )
    return out

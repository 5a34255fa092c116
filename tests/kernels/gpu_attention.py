"""Attention kernels on a card: against the reference in float32, and bit for bit between row counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.ops import Paging
from localspec.kernels.triton import attention
from localspec.kernels.triton.attention import paged_attention
from localspec.kernels.triton.attention_prefill import prefill_attention
from localspec.kernels.triton.cache_values import cache_bytes
from tests.kernels.gpu_support import DEVICE, paged_cache, paging, poison, relative_error

pytestmark = pytest.mark.gpu

HEADS = [(24, 4, 256), (8, 8, 64), (32, 8, 128), (16, 2, 128), (6, 1, 32)]
DTYPES = [torch.bfloat16, torch.float8_e4m3fn]
# Weights are rounded to bf16 before they meet the values: 2^-9 each.
BOUND = 4e-3


def _rows(lengths: list[int], counts: list[int], padding: int) -> tuple[list[int], list[int]]:
    """Slots and key ends of the last `count` positions of each sequence, then padding."""
    slots, ends = [], []
    for slot, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        slots += [slot] * count
        ends += list(range(length - count + 1, length + 1))
    return slots + [-1] * padding, ends + [0] * padding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_window_matches_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim = heads
    lengths = [1000, 257, 64, 2053]
    k, v, k_pages, v_pages, tables = paged_cache(lengths, kv_heads, head_dim, dtype, seed=1)
    slots, ends = _rows(lengths, [5, 1, 3, 6], padding=1)
    q = torch.randn(16, num_heads + 1, head_dim, device=DEVICE, dtype=torch.bfloat16)[:, :num_heads]
    end = torch.tensor(ends, device=DEVICE)
    begin = torch.zeros_like(end)
    begin[0], begin[10] = 700, 300  # a sliding window in some rows
    where = paging(tables, slots, 2100)
    expected = ReferenceOps(DEVICE).attention(q.float(), k, v, where, begin, end, head_dim**-0.5)
    poison()
    found = paged_attention(q, k_pages, v_pages, where, (begin, end), head_dim**-0.5)
    assert relative_error(found[:15], expected[:15]) < BOUND
    assert torch.equal(found[15], torch.zeros_like(found[15]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_row_bits_do_not_depend_on_other_rows(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim = heads
    length = 1500
    _, _, k_pages, v_pages, tables = paged_cache([length], kv_heads, head_dim, dtype, seed=2)
    q = torch.randn(16, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    end = torch.arange(length - 15, length + 1, device=DEVICE)
    begin = torch.zeros_like(end)
    scale = head_dim**-0.5
    whole = paged_attention(q, k_pages, v_pages, paging(tables, [0] * 16, length), (begin, end), scale)
    for count in range(1, 17):
        for first in {0, 16 - count}:
            rows = slice(first, first + count)
            poison()
            part = paged_attention(
                q[rows], k_pages, v_pages, paging(tables, [0] * count, length + 30), (begin[rows], end[rows]), scale
            )
            assert torch.equal(part, whole[rows]), f"rows {first} to {first + count} differ"


def test_row_bits_do_not_depend_on_other_slots() -> None:
    lengths = [700, 300, 1111, 65]
    _, _, k_pages, v_pages, tables = paged_cache(lengths, 4, 256, torch.bfloat16, seed=3)
    slots, ends = _rows(lengths, [4, 4, 4, 4], padding=0)
    q = torch.randn(16, 24, 256, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor(ends, device=DEVICE)
    begin = torch.zeros_like(end)
    whole = paged_attention(q, k_pages, v_pages, paging(tables, slots, 1200), (begin, end), 0.0625)
    for slot in range(4):
        rows = slice(4 * slot, 4 * slot + 4)
        alone = Paging(tables[slot : slot + 1], torch.zeros(4, dtype=torch.int64, device=DEVICE), 1200)
        part = paged_attention(q[rows], k_pages, v_pages, alone, (begin[rows], end[rows]), 0.0625)
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_quads_and_groups_give_the_same_bits(dtype: torch.dtype) -> None:
    """A context that crosses a limit mid-window, or a longer neighbour row, must not change a row's bits."""
    k, v, k_pages, v_pages, tables = paged_cache([5000], 4, 256, dtype, seed=8)
    q = torch.randn(3, 24, 256, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor([4990, 3000, 700], device=DEVICE)
    begin = torch.tensor([0, 45, 500], device=DEVICE)
    where = paging(tables, [0, 0, 0], 5000)
    expected = ReferenceOps(DEVICE).attention(q.float(), k, v, where, begin, end, 0.0625)
    pages = cache_bytes(k_pages)[0], cache_bytes(v_pages)[0]
    usual = attention.stream_shape(3, 6, 256, dtype.itemsize == 1, DEVICE)
    found = {}
    for each in (1, 6, 100):  # programs of a tile: parts are groups, quads, blocks
        poison()
        shape = replace(usual, programs=4 * each)
        found[each] = attention.attend_in_streams(q, pages, where, (begin, end), 0.0625, None, shape)
    assert relative_error(found[1], expected) < BOUND
    assert torch.equal(found[1], found[6])
    assert torch.equal(found[1], found[100])
    one = paging(tables, [0], 5000)
    alone = attention.paged_attention(q[2:], k_pages, v_pages, one, (begin[2:], end[2:]), 0.0625)
    assert torch.equal(alone, found[1][2:])


def test_single_blocks_and_groups_of_small_heads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, k_pages, v_pages, tables = paged_cache([1500], 1, 32, torch.bfloat16, seed=10)
    q = torch.randn(3, 6, 32, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor([1490, 1000, 300], device=DEVICE)
    begin = torch.tensor([0, 45, 200], device=DEVICE)
    where = paging(tables, [0, 0, 0], 1500)
    found = []
    for limit in (64, 4096):
        monkeypatch.setattr(attention, "FINE_KEYS", limit)
        poison()
        found.append(attention.paged_attention(q, k_pages, v_pages, where, (begin, end), 32**-0.5))
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_tiles_of_any_shape_give_the_same_bits(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim = heads
    _, _, k_pages, v_pages, tables = paged_cache([1500, 70], kv_heads, head_dim, dtype, seed=9)
    q = torch.randn(16, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor([*range(1488, 1499), *range(66, 71)], device=DEVICE)
    begin = torch.zeros_like(end)
    begin[3], begin[12] = 1111, 65
    where = paging(tables, [0] * 11 + [1] * 5, 1500)
    pages = cache_bytes(k_pages)[0], cache_bytes(v_pages)[0]
    block = attention.stream_shape(1, num_heads // kv_heads, head_dim, dtype.itemsize == 1, DEVICE).block_keys
    found = []
    for pairs, warps, depth, programs in (
        (16, 4, 2, 264),
        (16, 4, 3, 20),
        (16, 4, 2, 1),
        (32, 8, 2, 132),
        (64, 8, 2, 132),
    ):
        shape = attention.StreamShape(pairs, warps, depth, block, programs)
        poison()
        found.append(attention.attend_in_streams(q, pages, where, (begin, end), head_dim**-0.5, None, shape))
    assert all(torch.equal(other, found[0]) for other in found[1:])


def test_small_fp8_values_keep_their_size() -> None:
    """e4m3 subnormals read as bf16 are bf16 subnormals: the matmul must not flush them."""
    k, v, k_pages, v_pages, tables = paged_cache([300], 4, 256, torch.float8_e4m3fn, seed=4, scale=0.004)
    q = torch.randn(2, 24, 256, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor([299, 300], device=DEVICE)
    begin = torch.zeros_like(end)
    where = paging(tables, [0, 0], 300)
    expected = ReferenceOps(DEVICE).attention(q.float(), k, v, where, begin, end, 1.0)
    assert relative_error(paged_attention(q, k_pages, v_pages, where, (begin, end), 1.0), expected) < BOUND


def test_gate_multiplies_the_merged_output() -> None:
    _, _, k_pages, v_pages, tables = paged_cache([500], 4, 256, torch.bfloat16, seed=5)
    q, gate = torch.randn(2, 3, 24, 256, device=DEVICE, dtype=torch.bfloat16).unbind(0)
    end = torch.tensor([498, 499, 500], device=DEVICE)
    bounds = torch.zeros_like(end), end
    where = paging(tables, [0, 0, 0], 500)
    plain = paged_attention(q, k_pages, v_pages, where, bounds, 0.0625)
    gated = paged_attention(q, k_pages, v_pages, where, bounds, 0.0625, gate)
    assert relative_error(gated, plain.float() * torch.sigmoid(gate.float())) < BOUND


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS[:3], ids=str)
def test_prefill_matches_the_reference(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_heads, kv_heads, head_dim = heads
    k, v, k_pages, v_pages, tables = paged_cache([700], kv_heads, head_dim, dtype, seed=6)
    slots = [-1] * 30 + [0] * 414 + [-1] * 68
    q = torch.randn(512, num_heads, head_dim, device=DEVICE, dtype=torch.bfloat16)
    end = torch.arange(512, device=DEVICE) + 257  # tile of positions 256 .. 767
    begin = (end - 450).clamp_min(0)
    where = paging(tables, slots, 700)
    expected = ReferenceOps(DEVICE).attention(q.float(), k, v, where, begin, end, head_dim**-0.5)
    poison()
    found = prefill_attention(q, k_pages, v_pages, where, (begin, end), head_dim**-0.5)
    assert relative_error(found, expected) < BOUND
    assert not found[:30].any() and not found[-68:].any()


def test_prefill_row_bits_do_not_depend_on_the_chunk() -> None:
    _, _, k_pages, v_pages, tables = paged_cache([1024], 4, 256, torch.bfloat16, seed=7)
    q = torch.randn(1024, 24, 256, device=DEVICE, dtype=torch.bfloat16)
    end = torch.arange(1024, device=DEVICE) + 1
    begin = torch.zeros_like(end)
    whole = prefill_attention(q, k_pages, v_pages, paging(tables, [0] * 1024, 1024), (begin, end), 0.0625)
    for first in range(0, 1024, 256):
        rows = slice(first, first + 256)
        where = paging(tables, [0] * 256, 1024)
        part = prefill_attention(q[rows], k_pages, v_pages, where, (begin[rows], end[rows]), 0.0625)
        assert torch.equal(part, whole[rows])

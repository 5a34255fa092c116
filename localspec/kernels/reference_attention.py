"""Attention over paged keys and values in plain PyTorch: the specification of every attention kernel.

Keys are taken in fixed splits of 256 positions (4 pages). Each split is a matmul of the same shape whatever the cache
length, a masked key weighs exactly zero, the row maximum does not depend on order, and splits are added in order: so a
row's bits are the same in a window, in a prefill chunk of any size and at any cache length. The pool must be finite
(zero-filled at creation), because a masked key still meets its value as 0 * value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.kernels.ops import PAGE_TOKENS
from localspec.kernels.reference_linear import ROW_MULTIPLE

SPLIT_PAGES = 4
SPLIT_KEYS = SPLIT_PAGES * PAGE_TOKENS
BLOCK_ROWS = 64
"""Most rows that are scored at once; bounds the memory for scores."""


@dataclass(frozen=True)
class _Run:
    """Splits [first, last) of a sequence. `page` is the first page where they lie in one piece, else None."""

    first: int
    last: int
    page: int | None


@dataclass(frozen=True)
class _Limit:
    """Keys at or above (else below) each row's limit are hidden; only splits [first, last) can hold such keys.

    keys: [r] int64.
    """

    keys: Tensor
    first: int
    last: int
    above: bool


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    block_tables: Tensor,
    slots: Sequence[int],
    key_begin: Tensor,
    key_end: Tensor,
    scale: float,
) -> Tensor:
    """softmax(q k^T * scale) v over keys [key_begin, key_end) of each row's slot.

    q: [R, H, D]; pages: [num_pages, 64, Hkv, D]; block_tables: [S, P] int32; slots: R host integers, -1 for padding
    rows, whose output is zero; key_begin, key_end: [R] int64, at least one key a row. Returns [R, H, D] in q's dtype.
    """
    out = torch.zeros_like(q)
    begins, ends = key_begin.tolist(), key_end.tolist()
    q = q.float() * scale
    for first, last in _row_blocks(slots):
        split_range = min(begins[first:last]) // SPLIT_KEYS, -(-max(ends[first:last]) // SPLIT_KEYS)
        pages = block_tables[slots[first], : split_range[1] * SPLIT_PAGES].tolist()
        runs = _runs(pages, split_range, k_pages.shape[0])
        limits = (
            _Limit(key_begin[first:last], split_range[0], -(-max(begins[first:last]) // SPLIT_KEYS), above=False),
            # All rows see a split whole that lies below the smallest end.
            _Limit(key_end[first:last], min(ends[first:last]) // SPLIT_KEYS, split_range[1], above=True),
        )
        out[first:last] = _attend(q[first:last], (k_pages, v_pages), pages, runs, limits)
    return out


def _row_blocks(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows of one slot, at most BLOCK_ROWS long; padding rows are left out."""
    first = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[first] or row - first == BLOCK_ROWS:
            if slots[first] >= 0:
                yield first, row
            first = row


def _runs(pages: list[int], split_range: tuple[int, int], num_pages: int) -> list[_Run]:
    """Splits joined while their pages follow each other; a split with scattered or missing pages stands alone."""
    runs: list[_Run] = []
    for split in range(*split_range):
        own = pages[split * SPLIT_PAGES : (split + 1) * SPLIT_PAGES]
        start = own[0]
        # Pages behind the sequence's end are 0 or missing: what follows in the pool is masked and may be read instead.
        used = [page for page in own if page > 0]
        joined = used == list(range(start, start + len(used))) and 0 < start <= num_pages - SPLIT_PAGES
        if not joined:
            runs.append(_Run(split, split + 1, None))
        elif runs and runs[-1].page is not None and runs[-1].page + (split - runs[-1].first) * SPLIT_PAGES == start:
            runs[-1] = _Run(runs[-1].first, split + 1, runs[-1].page)
        else:
            runs.append(_Run(split, split + 1, start))
    return runs


def _keys(pool: Tensor, pages: list[int], run: _Run) -> Tensor:
    """[splits, 256, Hkv, D] float32: a view where the pages lie in one piece, else a copy."""
    num_splits = run.last - run.first
    if run.page is not None:
        found = pool[run.page : run.page + num_splits * SPLIT_PAGES]
    else:
        own = pages[run.first * SPLIT_PAGES : run.last * SPLIT_PAGES]
        own += [0] * (num_splits * SPLIT_PAGES - len(own))
        found = pool[torch.tensor(own, device=pool.device)]
    return found.reshape(num_splits, SPLIT_KEYS, *pool.shape[2:]).float()


def _attend(
    q: Tensor, pools: tuple[Tensor, Tensor], pages: list[int], runs: list[_Run], limits: tuple[_Limit, ...]
) -> Tensor:
    """q [r, H, D] float32, scaled, all of one slot -> [r, H, D] float32."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pools[0].shape[2]
    group = num_heads // num_kv_heads
    first_split, num_splits = runs[0].first, runs[-1].last - runs[0].first
    padded = -(-num_rows * group // ROW_MULTIPLE) * ROW_MULTIPLE
    grouped = q.new_zeros(num_kv_heads, 1, padded, head_dim)
    grouped[:, 0, : num_rows * group] = q.view(num_rows, num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
    scores = q.new_empty(num_kv_heads, num_splits, padded, SPLIT_KEYS)
    # Tensors are indexed, not iterated: taking them apart in one call costs more than all these views.
    for run in runs:
        keys = _keys(pools[0], pages, run).permute(2, 0, 3, 1)  # [Hkv, splits of the run, D, 256]
        target = scores[:, run.first - first_split : run.last - first_split]
        for head in range(num_kv_heads):
            torch.bmm(grouped[head].expand(keys.shape[1], -1, -1), keys[head], out=target[head])
    for limit in limits:
        _hide_keys(scores[:, :, : num_rows * group], limit, first_split, group)
    weights = scores.sub_(scores.amax(dim=(1, 3), keepdim=True)).exp_()
    parts = q.new_empty(num_kv_heads, num_splits, padded, head_dim)
    for run in runs:
        values = _keys(pools[1], pages, run).permute(2, 0, 1, 3)  # [Hkv, splits of the run, 256, D]
        span = slice(run.first - first_split, run.last - first_split)
        for head in range(num_kv_heads):
            _batched(weights[head, span], values[head], parts[head, span])
    out = _sum_in_order(parts) / _sum_in_order(weights.sum(dim=-1, keepdim=True))
    rows = out[:, : num_rows * group].view(num_kv_heads, num_rows, group, head_dim)
    return rows.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _batched(weight: Tensor, value: Tensor, out: Tensor) -> None:
    """out[i] = weight[i] @ value[i]. weight: [n, rows, 256]; value: [n, 256, D]; out: [n, rows, D].

    A batch of one is made two: alone, the library may share the 256 keys out to threads and sum them in another order
    (seen with 3 threads and head sizes below 32).
    """
    if len(weight) > 1:
        torch.bmm(weight, value, out=out)
    else:
        out.copy_(torch.bmm(weight.expand(2, -1, -1), value.expand(2, -1, -1))[:1])


def _hide_keys(scores: Tensor, limit: _Limit, first_split: int, group: int) -> None:
    """Set scores of hidden keys to -inf. scores: [Hkv, splits, rows, 256], rows of padding left out: they see all."""
    if limit.first >= limit.last:
        return
    rows = limit.keys.view(-1, 1).expand(-1, group).reshape(-1, 1)
    keys = torch.arange(limit.first * SPLIT_KEYS, limit.last * SPLIT_KEYS, device=scores.device).view(-1, 1, SPLIT_KEYS)
    hidden = keys >= rows if limit.above else keys < rows
    scores[:, limit.first - first_split : limit.last - first_split].masked_fill_(hidden, float("-inf"))


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dim 1 from first to last. `Tensor.sum` would choose an order that depends on the count; a running sum
    cannot, and splits of masked keys add exact zeros at its end."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.cumsum(dim=1)[:, -1]

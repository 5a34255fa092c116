"""Attention over paged keys and values in plain PyTorch: the specification of every attention kernel.

Keys are taken in fixed splits of 256 positions (4 pages). Each split is a matmul of the same shape whatever the cache
length, a masked key weighs exactly zero, the row maximum does not depend on order, and splits are added in order: so a
row's bits are the same in a window, in a prefill chunk of any size and at any cache length. The pool must be finite
(zero-filled at creation), because a masked key still meets its value as 0 * value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from localspec.kernels.ops import PAGE_TOKENS
from localspec.kernels.reference_linear import ROW_MULTIPLE

SPLIT_PAGES = 4
SPLIT_KEYS = SPLIT_PAGES * PAGE_TOKENS
BLOCK_ROWS = 64
"""Most rows that are scored at once; bounds the memory for scores."""


MOST_COPIED_SPLITS = 16
"""Splits of scattered pages that are copied together; bounds the memory for the copy."""


@dataclass(frozen=True)
class Run:
    """Splits [first, last) of a sequence. `page` is the first page where they lie in one piece, else None."""

    first: int
    last: int
    page: int | None

    def part(self, first: int, last: int) -> Run:
        """Some of these splits."""
        return Run(first, last, None if self.page is None else self.page + (first - self.first) * SPLIT_PAGES)


@dataclass(frozen=True)
class Limit:
    """Keys at or above (else below) each row's limit are hidden; only splits [first, last) can hold such keys.

    keys: [r] int64.
    """

    keys: Tensor
    first: int
    last: int
    above: bool

    def hidden(self, first: int, last: int, group: int) -> Tensor:
        """[splits, r * group, 256] bool for splits [first, last)."""
        rows = self.keys.view(-1, 1).expand(-1, group).reshape(-1, 1)
        keys = torch.arange(first * SPLIT_KEYS, last * SPLIT_KEYS, device=rows.device).view(-1, 1, SPLIT_KEYS)
        return keys >= rows if self.above else keys < rows


Attend: TypeAlias = Callable[[Tensor, tuple[Tensor, Tensor], list[int], list[Run], tuple[Limit, ...]], Tensor]
"""(q [r, H, D] float32, scaled, all of one slot; pools of keys and values; the slot's pages; runs that cover the
splits in order; what is hidden) -> [r, H, D] float32."""


def paged_attention(
    q: Tensor,
    pools: tuple[Tensor, Tensor],
    block_tables: Tensor,
    slots: Sequence[int],
    key_begin: Tensor,
    key_end: Tensor,
    scale: float,
    way: Attend,
) -> Tensor:
    """softmax(q k^T * scale) v over keys [key_begin, key_end) of each row's slot.

    q: [R, H, D]; pools: keys and values, each [num_pages, 64, Hkv, D]; block_tables: [S, P] int32; slots: R host
    integers, -1 for padding rows, whose output is zero; key_begin, key_end: [R] int64, at least one key a row; way:
    `attend`, or what does the same. Returns [R, H, D] in q's dtype.
    """
    out = torch.zeros_like(q)
    begins, ends = key_begin.tolist(), key_end.tolist()
    q = q.float() * scale
    for first, last in _row_blocks(slots):
        split_range = min(begins[first:last]) // SPLIT_KEYS, -(-max(ends[first:last]) // SPLIT_KEYS)
        pages = block_tables[slots[first], : split_range[1] * SPLIT_PAGES].tolist()
        runs = _runs(pages, split_range, pools[0].shape[0])
        limits = (
            Limit(key_begin[first:last], split_range[0], -(-max(begins[first:last]) // SPLIT_KEYS), above=False),
            # All rows see a split whole that lies below the smallest end.
            Limit(key_end[first:last], min(ends[first:last]) // SPLIT_KEYS, split_range[1], above=True),
        )
        out[first:last] = way(q[first:last], pools, pages, runs, limits)
    return out


def _row_blocks(slots: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows of one slot, at most BLOCK_ROWS long; padding rows are left out."""
    first = 0
    for row in range(1, len(slots) + 1):
        if row == len(slots) or slots[row] != slots[first] or row - first == BLOCK_ROWS:
            if slots[first] >= 0:
                yield first, row
            first = row


def _runs(pages: list[int], split_range: tuple[int, int], num_pages: int) -> list[Run]:
    """Splits joined while their pages follow each other; a split with scattered or missing pages stands alone."""
    first, last = split_range
    wanted = pages[first * SPLIT_PAGES :]
    page, num_used = wanted[0], len(wanted) - wanted.count(0)
    reaches = page + (last - first) * SPLIT_PAGES <= num_pages
    if page > 0 and reaches and wanted[:num_used] == list(range(page, page + num_used)):
        # The usual case, of which every layer asks anew.
        return [Run(first, last, page)]
    runs: list[Run] = []
    for split in range(*split_range):
        own = pages[split * SPLIT_PAGES : (split + 1) * SPLIT_PAGES]
        start = own[0]
        # Pages behind the sequence's end are 0 or missing: what follows in the pool is masked and may be read instead.
        used = [page for page in own if page > 0]
        joined = used == list(range(start, start + len(used))) and 0 < start <= num_pages - SPLIT_PAGES
        if not joined:
            grows = runs and runs[-1].page is None and split - runs[-1].first < MOST_COPIED_SPLITS
            runs.append(Run(runs.pop().first if grows else split, split + 1, None))
        elif runs and runs[-1].page is not None and runs[-1].page + (split - runs[-1].first) * SPLIT_PAGES == start:
            runs[-1] = Run(runs[-1].first, split + 1, runs[-1].page)
        else:
            runs.append(Run(split, split + 1, start))
    return runs


def keys_of(pool: Tensor, pages: list[int], run: Run) -> Tensor:
    """[splits, 256, Hkv, D] float32: a view where the pages lie in one piece, else a copy."""
    num_splits = run.last - run.first
    if run.page is not None:
        found = pool[run.page : run.page + num_splits * SPLIT_PAGES]
    else:
        own = pages[run.first * SPLIT_PAGES : run.last * SPLIT_PAGES]
        own += [0] * (num_splits * SPLIT_PAGES - len(own))
        found = pool[torch.tensor(own, device=pool.device)]
    return found.reshape(num_splits, SPLIT_KEYS, *pool.shape[2:]).float()


def group_rows(q: Tensor, num_kv_heads: int) -> Tensor:
    """[r, H, D] -> [Hkv, rows, D]: each row's heads of one key head are rows of their own; zeros up to a multiple."""
    num_rows, num_heads, head_dim = q.shape
    wanted = num_rows * num_heads // num_kv_heads
    grouped = q.new_zeros(num_kv_heads, -(-wanted // ROW_MULTIPLE) * ROW_MULTIPLE, head_dim)
    by_head = q.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    grouped[:, :wanted] = by_head.reshape(num_kv_heads, wanted, head_dim)
    return grouped


def attend(
    q: Tensor, pools: tuple[Tensor, Tensor], pages: list[int], runs: list[Run], limits: tuple[Limit, ...]
) -> Tensor:
    """See `Attend`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pools[0].shape[2]
    group = num_heads // num_kv_heads
    first_split, num_splits = runs[0].first, runs[-1].last - runs[0].first
    grouped = group_rows(q, num_kv_heads)
    padded = grouped.shape[1]
    scores = q.new_empty(num_kv_heads, num_splits, padded, SPLIT_KEYS)
    # Tensors are indexed, not iterated: taking them apart in one call costs more than all these views.
    for run in runs:
        keys = keys_of(pools[0], pages, run).permute(2, 0, 3, 1)  # [Hkv, splits of the run, D, 256]
        target = scores[:, run.first - first_split : run.last - first_split]
        for head in range(num_kv_heads):
            torch.bmm(grouped[head].expand(keys.shape[1], -1, -1), keys[head], out=target[head])
    for limit in limits:
        _hide_keys(scores[:, :, : num_rows * group], limit, first_split, group)
    weights = scores.sub_(scores.amax(dim=(1, 3), keepdim=True)).exp_()
    parts = q.new_empty(num_kv_heads, num_splits, padded, head_dim)
    for run in runs:
        values = keys_of(pools[1], pages, run).permute(2, 0, 1, 3)  # [Hkv, splits of the run, 256, D]
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


def _hide_keys(scores: Tensor, limit: Limit, first_split: int, group: int) -> None:
    """Set scores of hidden keys to -inf. scores: [Hkv, splits, rows, 256], rows of padding left out: they see all."""
    if limit.first < limit.last:
        target = scores[:, limit.first - first_split : limit.last - first_split]
        target.masked_fill_(limit.hidden(limit.first, limit.last, group), float("-inf"))


def _sum_in_order(parts: Tensor) -> Tensor:
    """Sum over dim 1 from first to last. `Tensor.sum` would choose an order that depends on the count; a running sum
    cannot, and splits of masked keys add exact zeros at its end."""
    return parts[:, 0] if parts.shape[1] == 1 else parts.cumsum(dim=1)[:, -1]

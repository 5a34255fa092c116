"""Attention of one slot on CPUs by PyTorch's fused kernel: splits of 256 keys as a batch, then joined in order.

Meets `reference_attention.Attend` with the same promises: each split is a problem of the same shape whatever the cache
length, hidden keys weigh exactly zero, a split that a row sees nothing of adds exact zeros, and splits are added in
order. The fused kernel reads keys in place and keeps no scores. Whether a row has the same bits in it alone, in a
window and in a chunk depends on the library's small matmuls, so that is probed on the machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from localspec.kernels.reference_attention import SPLIT_KEYS, Attend, Limit, Run, attend, group_rows, keys_of
from localspec.kernels.reference_linear import ROW_MULTIPLE

MOST_MASKED_ROWS = 256
"""Rows times splits that get one mask; more are cut where hidden keys begin, so that the others need none."""
_PROBE_HEADS = ((3, 64), (1, 128), (2, 40))
_PROBE_ROWS = (ROW_MULTIPLE, 3 * ROW_MULTIPLE, 48, 192)


@dataclass(frozen=True)
class _Hidden:
    """What is hidden in splits [first, last) of a run. keys: [splits, r * group, 256] bool."""

    first: int
    last: int
    keys: Tensor

    @staticmethod
    def by(limit: Limit, run: Run, group: int) -> _Hidden:
        """What a limit hides in a run that it meets."""
        first, last = max(limit.first, run.first), min(limit.last, run.last)
        return _Hidden(first - run.first, last - run.first, limit.hidden(first, last, group))


def choose_attend(device: torch.device) -> Attend:
    """The fused way where it runs and keeps a row's bits, else the plain one."""
    return attend_fused if device.type == "cpu" and row_bits_are_kept() else attend


def attend_fused(
    q: Tensor, pools: tuple[Tensor, Tensor], pages: list[int], runs: list[Run], limits: tuple[Limit, ...]
) -> Tensor:
    """See `Attend`."""
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = pools[0].shape[2]
    group = num_heads // num_kv_heads
    grouped = group_rows(q, num_kv_heads)
    if grouped.shape[1] * (runs[-1].last - runs[0].first) > MOST_MASKED_ROWS:
        runs = _cut(runs, limits)
    parts = []
    for run in runs:
        hidden = [
            _Hidden.by(limit, run, group) for limit in limits if limit.first < run.last and run.first < limit.last
        ]
        parts.append(_splits(grouped, keys_of(pools[0], pages, run), keys_of(pools[1], pages, run), hidden))
    rows = _joined(parts)[:, : num_rows * group]
    return rows.view(num_kv_heads, num_rows, group, head_dim).transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _cut(runs: list[Run], limits: tuple[Limit, ...]) -> list[Run]:
    """The runs, cut where splits with hidden keys begin or end, so that the others need no mask."""
    borders = {border for limit in limits if limit.first < limit.last for border in (limit.first, limit.last)}
    found: list[Run] = []
    for run in runs:
        places = [run.first, *sorted(border for border in borders if run.first < border < run.last), run.last]
        found += [run.part(first, last) for first, last in pairwise(places)]
    return found


def _splits(grouped: Tensor, keys: Tensor, values: Tensor, hidden: list[_Hidden]) -> tuple[Tensor, Tensor]:
    """Attention within each split, and the logarithm of its weight.

    grouped: [Hkv, rows, D]; keys, values: [splits, 256, Hkv, D]. Returns [splits, Hkv, rows, D] and
    [splits, Hkv, rows], -inf where a row sees nothing of a split.
    """
    mask = grouped.new_zeros(len(keys) if hidden else 0, 1, grouped.shape[1], SPLIT_KEYS)
    for each in hidden:
        mask[each.first : each.last, 0, : each.keys.shape[1]].masked_fill_(each.keys, -math.inf)
    num_splits = len(keys)
    if num_splits * len(grouped) == 1:
        # Alone, the library may share the keys out to threads and sum them in another order.
        keys, values = keys.expand(2, -1, -1, -1), values.expand(2, -1, -1, -1)
        mask = mask.expand(2 * len(mask), -1, -1, -1)
    rows = grouped.expand(len(keys), -1, -1, -1)
    mixed, weight = _fused(rows, keys.transpose(1, 2), values.transpose(1, 2), mask if hidden else None)
    mixed, weight = mixed[:num_splits], weight[:num_splits]
    for each in hidden:
        # The kernel gives zeros for a row that sees nothing, and zero as its logarithm.
        empty = mask[each.first : each.last].amax(dim=-1) == -math.inf
        weight[each.first : each.last].masked_fill_(empty, -math.inf)
    return mixed, weight


def _fused(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """PyTorch's kernel: softmax(q k^T + mask) v and the logarithm of each row's sum of weights, for each batch."""
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    found: tuple[Tensor, Tensor] = kernel(q, keys, values, attn_mask=mask, scale=1.0)
    return found


def _joined(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """What `_splits` gave, in order -> [Hkv, rows, D]. Added split by split: a sum's order depends on their number."""
    weights = parts[0][1] if len(parts) == 1 else torch.cat([weight for _, weight in parts])
    if len(weights) == 1:
        return parts[0][0][0]
    weights = (weights - weights.amax(dim=0)).exp_().unsqueeze(-1)
    out, first = torch.zeros_like(parts[0][0][0]), 0
    for mixed, _ in parts:
        mixed.mul_(weights[first : first + len(mixed)])
        for split in mixed.unbind():
            out.add_(split)
        first += len(mixed)
    return out.div_(weights.cumsum(dim=0)[-1])


def row_bits_are_kept() -> bool:
    """Whether a row has the same bits alone, in a window and in a chunk, in a masked split or not, on this machine."""
    generator = torch.Generator().manual_seed(7)
    try:
        for num_heads, head_dim in _PROBE_HEADS:
            keys, values = torch.randn(2, 2, SPLIT_KEYS, num_heads, head_dim, generator=generator)
            rows = torch.randn(num_heads, 1 + _PROBE_ROWS[-1], head_dim, generator=generator)
            expected = _splits(rows[:, 1 : 1 + ROW_MULTIPLE], keys, values, [])
            for count in _PROBE_ROWS:
                for hidden in ([], [_Hidden(0, 1, torch.zeros(1, count, SPLIT_KEYS, dtype=torch.bool))]):
                    found = _splits(rows[:, 1 : 1 + count], keys[:1], values[:1], hidden)
                    if not all(
                        torch.equal(a[:, :, :ROW_MULTIPLE], b[:1]) for a, b in zip(found, expected, strict=True)
                    ):
                        return False
    except (RuntimeError, AttributeError, TypeError):
        # A PyTorch without this kernel, or with another one of its name.
        return False
    return True

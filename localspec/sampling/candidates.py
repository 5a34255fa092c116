"""The best tokens of a law in order, and how many of them min-p, top-k and top-p keep.

Probability mass is summed as integers, so that any order gives the same sum, and tokens are ordered by (logit, lower
id first): which tokens are kept depends on the row alone, not on the device, the batch or the number looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.state import SamplingTable

MASS_ONE = 2**34
"""Mass of the best token; a vocabulary of 2^18 tokens sums below 2^53, so that float64 holds every sum exactly."""
ID_MASK = 0xFFFFFFFF
HOST_CANDIDATES = 512
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class RowParameters:
    """Sampling parameters of each row. temperature, top_p, min_p: [R] float32; top_k: [R] int64 (0: off)."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def gather(cls, table: SamplingTable, slots: Tensor) -> RowParameters:
        """Parameters of rows with the given slots [R] int64, all at or above 0."""
        return cls(table.temperature[slots], table.top_k[slots], table.top_p[slots], table.min_p[slots])


def ordered(adjusted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` best of each row of [R, V]: values [R, count] falling, ids [R, count]; equal values by rising id.

    Sorts integers that hold logit and id, so that no two are equal and the order is the same on every device. Looks at
    twice as many by value alone; only if that many were equal could another choice among equals be made.
    """
    vocab_size = adjusted.shape[1]
    if 2 * count < vocab_size:
        best = adjusted.topk(2 * count, dim=1)
        keys = _keys(best.values, best.indices)
    else:
        keys = _keys(adjusted, torch.arange(vocab_size, device=adjusted.device))
    return _unpacked(keys.sort(dim=1, descending=True).values[:, :count])


def kept_candidates(values: Tensor, parameters: RowParameters, vocab_size: int, totals: Tensor | None = None) -> Tensor:
    """values [R, n] in falling order -> [R, n] bool: min-p, then top-k, then top-p; the best token always stays.

    totals: [R] int64 mass of everything that min-p and top-k keep; None or -1: `values` hold all of that.
    """
    rank = torch.arange(values.shape[1], device=values.device)
    mass = masses(values)
    top_k = torch.where(parameters.top_k > 0, parameters.top_k, vocab_size)
    kept = (mass >= mass_floor(parameters)) & (rank < top_k[:, None])
    mass = torch.where(kept, mass, 0)
    through = mass.cumsum(dim=1)
    total = through[:, -1] if totals is None else torch.where(totals < 0, through[:, -1], totals)
    needed = (parameters.top_p.to(torch.float64) * total.to(torch.float64))[:, None]
    kept &= ((through - mass).to(torch.float64) < needed) | (parameters.top_p >= 1)[:, None]
    return kept | (rank == 0)


def few_on_host(adjusted: Tensor, parameters: RowParameters, divisor: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """As `ordered` and `kept_candidates`, from the best few tokens; None if some row keeps more than those.

    For the CPU, where looking at the values costs nothing and sorting the vocabulary costs more than all else here.
    Returns scaled values [R, n] falling, ids [R, n], kept [R, n] bool.
    """
    vocab_size = adjusted.shape[1]
    drawn = parameters.temperature > 0
    unfiltered = (parameters.top_k == 0) & (parameters.top_p >= 1) & (parameters.min_p <= 0)
    too_many = drawn & (unfiltered | (parameters.top_k > HOST_CANDIDATES))
    if vocab_size <= 2 * HOST_CANDIDATES or bool(too_many.any()):
        return None
    best = adjusted.topk(HOST_CANDIDATES, dim=1)
    exact, ids = _unpacked(_keys(best.values, best.indices).sort(dim=1, descending=True).values)
    values = exact / divisor
    totals = torch.full_like(parameters.top_k, -1)
    for row in torch.nonzero(drawn & (parameters.top_k == 0) & (parameters.top_p < 1)).flatten().tolist():
        mass = masses(adjusted[row : row + 1] / divisor[row])
        totals[row] = torch.where(mass >= mass_floor(parameters)[row], mass, 0).sum()
    kept = kept_candidates(values, parameters, vocab_size, totals)
    # Of the tokens that equal the last one looked at, some may not have been.
    sure = (kept & (exact == exact[:, -1:])).any(dim=1).logical_not() | ~drawn
    return (values, ids, kept) if bool(sure.all()) else None


def mass_floor(parameters: RowParameters) -> Tensor:
    """[R, 1] int64: least mass that min-p lets through (min-p is a share of the best token's probability)."""
    return (parameters.min_p.to(torch.float64) * MASS_ONE).to(torch.int64)[:, None]


def masses(scaled: Tensor) -> Tensor:
    """[R, n] float32 -> [R, n] int64 probability relative to the row's best token, in units of 1 / MASS_ONE."""
    best = scaled.amax(dim=1, keepdim=True).clamp(min=-_LARGEST)
    below = scaled - best
    if below.device.type == "cpu":
        # A float32 exponential there may differ in its last bit between the vector loop and its tail.
        below = below.to(torch.float64)
    return below.exp_().to(torch.float64).mul_(MASS_ONE).to(torch.int64)


def _keys(adjusted: Tensor, ids: Tensor) -> Tensor:
    """[R, n] int64 whose order is that of (logit, lower id first)."""
    bits = adjusted.contiguous().view(torch.int32)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(torch.int64) << 32) | (ID_MASK - ids)


def _unpacked(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Values float32 and ids int64 of such keys."""
    rising = (keys >> 32).to(torch.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).view(torch.float32), ID_MASK - (keys & ID_MASK)

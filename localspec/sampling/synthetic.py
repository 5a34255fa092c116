"""Drafts accepted at a given rate whatever the model says: for benchmarks, and named wherever figures are shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localspec.core.records import MAX_ROWS, Draft, Rows
from localspec.sampling.accept import RowRules
from localspec.sampling.noise import row_keys


class SyntheticAcceptance:
    """Forces each draft to be accepted or refused so that position i is reached at the marginal rate `rates[i]`.

    Same path as any other step: the forced token of a row is its draft, or another token where the draft must fail.
    """

    def __init__(self, rates: Sequence[float], device: torch.device) -> None:
        """Raises ValueError unless the rates lie in (0, 1] and never rise."""
        before = (1.0, *rates)
        if not rates or any(not 0.0 < rate <= last for rate, last in zip(rates, before, strict=False)):
            raise ValueError("acceptance rates must lie above 0, start at most at 1, and never rise")
        conditional = [rate / last for rate, last in zip(rates, before, strict=False)]
        conditional += [conditional[-1]] * (MAX_ROWS - len(conditional))
        self._chance = torch.tensor(conditional, dtype=torch.float32, device=device)  # [MAX_ROWS]

    def __call__(self, rows: Rows, draft: Draft, seeds: Tensor) -> RowRules:
        """seeds: [S] int64 of the slots. Deterministic in (seed, position)."""
        num_drafts = draft.token_ids.shape[1]
        slots = rows.slots.clamp(min=0)
        if not num_drafts:
            return RowRules(forced=torch.full_like(rows.slots, -1))
        offset = torch.arange(rows.slots.shape[0], device=slots.device) - rows.window_starts[slots]
        column = offset.clamp(0, num_drafts - 1)
        drafted = draft.token_ids[slots, column]
        # 24 bits of the row's noise key as a uniform number.
        uniform = (row_keys(seeds[slots], rows.positions)[:, 0] & 0xFFFFFF).to(torch.float32) / float(1 << 24)
        # The token before it, since behind the last one of the vocabulary there is none.
        other = torch.where(drafted > 0, drafted - 1, 1)
        forced = torch.where(uniform < self._chance[column], drafted, other)
        return RowRules(forced=torch.where((offset < num_drafts) & (drafted >= 0), forced, -1))

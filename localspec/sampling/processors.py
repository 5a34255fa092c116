"""From logits to the law that a token is drawn from, exactly and for each row on its own.

Order: grammar mask, bias, penalties (each row also counts the drafts before it), temperature, min-p, top-k, top-p.
Slots with different parameters share one call, and a row's result depends on nothing but that row. Knows nothing of
acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.records import Draft, Rows
from localspec.core.state import SamplingTable
from localspec.sampling.candidates import (
    ID_MASK,
    RowParameters,
    few_on_host,
    kept_candidates,
    mass_floor,
    masses,
    ordered,
)
from localspec.sampling.noise import gumbel

FEW_CANDIDATES = 128
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class ProcessorPlan:
    """What the requests of a step need, known to the host: a step of greedy requests is one argmax.

    num_candidates: 0 when no top-k or top-p is used, else how many of the best tokens are ordered. A plan only saves
    work: for a row that both cover, every plan gives the same token.
    """

    sampled: bool = True
    bias: bool = True
    penalties: bool = True
    min_p: bool = True
    num_candidates: int = 0

    @classmethod
    def for_requests(cls, samplings: Sequence[Sampling], vocab_size: int) -> ProcessorPlan:
        """The cheapest plan that covers all of `samplings`."""
        drawn = [sampling for sampling in samplings if sampling.temperature > 0]
        ordered = [sampling for sampling in drawn if sampling.top_k > 0 or sampling.top_p < 1]
        few = all(0 < sampling.top_k <= FEW_CANDIDATES for sampling in drawn)
        return cls(
            sampled=bool(drawn),
            bias=any(sampling.logit_bias for sampling in samplings),
            penalties=any(_has_penalty(sampling) for sampling in samplings),
            min_p=any(sampling.min_p > 0 for sampling in drawn),
            num_candidates=(min(FEW_CANDIDATES, vocab_size) if few else vocab_size) if ordered else 0,
        )

    @property
    def is_wide(self) -> bool:
        """Whether some row needs the mass or the order of the whole vocabulary."""
        return self.sampled and (self.min_p or self.num_candidates > FEW_CANDIDATES)

    @classmethod
    def general(cls, vocab_size: int) -> ProcessorPlan:
        """The plan that covers every request."""
        return cls(num_candidates=vocab_size)


@dataclass(frozen=True)
class Law:
    """values [R, n] float32: logits of the law, -inf where refused; ids [R, n] int64 or None when column = id.

    greedy: [R] int64 best token before temperature; is_greedy: [R] bool rows that take it, None: all rows.
    """

    values: Tensor
    ids: Tensor | None
    greedy: Tensor
    is_greedy: Tensor | None

    def draw(self, keys: Tensor) -> Tensor:
        """keys [R, 2] int32 of `noise.row_keys` -> [R] int64 tokens: argmax of law + noise, lowest id among equals."""
        if self.is_greedy is None:
            return self.greedy
        if self.ids is None:
            columns = torch.arange(self.values.shape[1], device=self.values.device, dtype=torch.int32)
            drawn = (self.values + gumbel(keys, columns)).argmax(dim=1)
        else:
            noisy = self.values + gumbel(keys, self.ids)
            best = noisy == noisy.amax(dim=1, keepdim=True)
            drawn = torch.where(best, self.ids, ID_MASK).amin(dim=1)
        return torch.where(self.is_greedy, self.greedy, drawn)

    def log_probabilities(self, adjusted: Tensor) -> Tensor:
        """[R, V] float32 log-probabilities of the law; of a greedy row, of its logits as at temperature 1.

        adjusted: [R, V] float32, what the law was made from.
        """
        if self.ids is None or self.is_greedy is None:
            return self.values.log_softmax(dim=1)
        dense = torch.full_like(adjusted, -torch.inf).scatter_(1, self.ids, self.values)
        return torch.where(self.is_greedy[:, None], adjusted, dense).log_softmax(dim=1)


def adjust(
    logits: Tensor, rows: Rows, draft: Draft, table: SamplingTable, plan: ProcessorPlan, allowed: Tensor | None = None
) -> Tensor:
    """Everything before temperature. logits [R, V] float32 -> new [R, V] float32 without NaN.

    allowed: [R, V] bool of a grammar, or None.
    """
    adjusted = logits.nan_to_num(nan=-torch.inf, posinf=_LARGEST, neginf=-torch.inf)
    slots = rows.slots.clamp(min=0)
    if allowed is not None:
        adjusted = adjusted.masked_fill_(~allowed, -torch.inf)
    if plan.bias:
        adjusted = adjusted + table.bias[slots]
    if plan.penalties:
        adjusted = _penalise(adjusted, rows, draft, table, slots)
    return adjusted


def greedy_law(adjusted: Tensor) -> Law:
    """The law of rows that are all greedy. adjusted [R, V] float32."""
    return Law(adjusted, None, adjusted.argmax(dim=1), None)


def law(adjusted: Tensor, parameters: RowParameters, plan: ProcessorPlan) -> Law:
    """Temperature and filters. adjusted [R, V] float32 -> the law of each row."""
    if not plan.sampled:
        return greedy_law(adjusted)
    is_greedy = parameters.temperature <= 0
    divisor = torch.where(is_greedy, 1.0, parameters.temperature)[:, None]
    if not plan.num_candidates:
        scaled = adjusted / divisor
        if plan.min_p:
            refused = (masses(scaled) < mass_floor(parameters)) & ~is_greedy[:, None]
            scaled = scaled.masked_fill_(refused, -torch.inf)
        # Rounding in the division may join two logits; the greedy token is taken from before it.
        return Law(scaled, None, adjusted.argmax(dim=1), is_greedy)
    few = few_on_host(adjusted, parameters, divisor) if adjusted.device.type == "cpu" else None
    if few is not None:
        values, ids, kept = few
    else:
        values, ids = ordered(adjusted, plan.num_candidates)
        values = values / divisor
        kept = kept_candidates(values, parameters, adjusted.shape[1])
    return Law(torch.where(kept | is_greedy[:, None], values, -torch.inf), ids, ids[:, 0], is_greedy)


def _penalise(adjusted: Tensor, rows: Rows, draft: Draft, table: SamplingTable, slots: Tensor) -> Tensor:
    """Repetition (prompt and answer), then frequency and presence (answer). [R, V] -> [R, V]."""
    tokens = draft.token_ids[slots]  # [R, K]
    row_index = torch.arange(rows.slots.shape[0], device=slots.device)
    offset = row_index - rows.window_starts[slots]
    before = torch.arange(tokens.shape[1], device=slots.device) < offset[:, None]
    counts = table.output_counts[slots]  # [R, V] int32, a copy
    counts.scatter_add_(1, tokens.clamp(min=0), (before & (tokens >= 0)).to(counts.dtype))
    seen = (counts + table.prompt_counts[slots]) > 0
    repetition = table.repetition_penalty[slots][:, None]
    repeated = torch.where(adjusted > 0, adjusted / repetition, adjusted * repetition)
    adjusted = torch.where(seen, repeated, adjusted)
    adjusted = adjusted - table.frequency_penalty[slots][:, None] * counts
    return adjusted - table.presence_penalty[slots][:, None] * (counts > 0)


def _has_penalty(sampling: Sampling) -> bool:
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0

"""Coupled sampling: what a verify step emits, decided and committed on the device.

At every row the target draws its own token with noise keyed by (seed, position); a draft stands exactly while it
equals that token. The emitted tokens are therefore the target's draws whatever was drafted. Fixed shapes and no wait
for the device, so that the call can be captured in a graph. Knows nothing of models, drafters or requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.api.types import TARGET_ORIGIN
from localspec.core.records import Draft, Rows, StepResult
from localspec.core.state import SequenceState
from localspec.sampling.candidates import RowParameters
from localspec.sampling.noise import row_keys
from localspec.sampling.processors import ProcessorPlan, adjust, greedy_law, law
from localspec.sampling.thinking import ThinkingState, commit, forced_rows

RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Values of `StepResult.finish`."""


@dataclass(frozen=True)
class RowRules:
    """What may be said at single rows beyond the sampling parameters.

    forced: [R] int64 token that must be drawn at the row, -1 where free, or None; allowed: [R, V] bool, or None.
    """

    forced: Tensor | None = None
    allowed: Tensor | None = None


@torch.inference_mode()
def accept(
    logits: Tensor,
    rows: Rows,
    draft: Draft,
    state: SequenceState,
    *,
    logprobs: int | None,
    plan: ProcessorPlan | None = None,
    rules: RowRules | None = None,
    thinking: ThinkingState | None = None,
) -> StepResult:
    """Draw at every row, accept drafts while equal, cut at stops and limits, and commit to `state` in place.

    logits: [R, V] float32; rows: of kind verify. `plan` None covers every request; `logprobs` None leaves them out,
    else the number of alternatives. The stop token itself is emitted. Changes history, lengths, remaining, frozen,
    pending_rows and sampling.output_counts of the slots in the step (`rows.window_rows` > 0) and of no other; with
    `thinking`, also that state. Log-probabilities are those of the law even where a token was forced.
    """
    plan = plan or ProcessorPlan.general(logits.shape[1])
    rules = rules or RowRules()
    slots = rows.slots.clamp(min=0)
    adjusted = adjust(logits, rows, draft, state.sampling, plan, rules.allowed)
    if plan.sampled:
        drawn_law = law(adjusted, RowParameters.gather(state.sampling, slots), plan)
        # A row at position p draws the token of position p + 1.
        drawn = drawn_law.draw(row_keys(state.sampling.seeds[slots], rows.positions + 1))  # [R]
    else:
        drawn_law = greedy_law(adjusted)
        drawn = drawn_law.greedy
    if rules.forced is not None:
        drawn = torch.where(rules.forced >= 0, rules.forced, drawn)
    if thinking is not None:
        due = forced_rows(thinking, rows, draft, state)
        drawn = torch.where(due >= 0, due, drawn)
    row_index = _window_rows(rows, draft.token_ids.shape[1] + 1)  # [S, K + 1]
    targets = drawn[row_index]
    accepted = _accepted(targets, rows, draft)
    emitted, finish = _cut(targets, accepted, rows, state)
    in_step = rows.window_rows > 0
    accepted = torch.where(emitted > 0, accepted, 0)
    column = torch.arange(targets.shape[1], device=targets.device)
    valid = column < emitted[:, None]
    _commit(targets, valid, emitted, finish, in_step, state)
    result = StepResult(
        token_ids=torch.where(valid, targets, -1),
        num_emitted=emitted,
        origins=_origins(draft, accepted, targets.shape),
        num_accepted=accepted,
        finish=finish,
        origin_names=(TARGET_ORIGIN, *draft.origin_names),
    )
    if thinking is not None:
        commit(thinking, result, state)
    return (
        result
        if logprobs is None
        else _with_logprobs(result, drawn_law.log_probabilities(adjusted), row_index, logprobs)
    )


def _window_rows(rows: Rows, num_columns: int) -> Tensor:
    """[S, K + 1] int64: row of each window place, the last row of the step where the window is shorter."""
    column = torch.arange(num_columns, device=rows.slots.device)
    return (rows.window_starts[:, None] + column).clamp(0, rows.slots.shape[0] - 1)


def _accepted(targets: Tensor, rows: Rows, draft: Draft) -> Tensor:
    """[S] int64: leading drafts that equal the target's draw and had a row of their own in the window."""
    column = torch.arange(draft.token_ids.shape[1], device=targets.device)
    verified = column + 1 < rows.window_rows[:, None]
    equal = (draft.token_ids == targets[:, :-1]) & (draft.token_ids >= 0) & verified
    return equal.to(torch.int64).cumprod(dim=1).sum(dim=1)


def _cut(targets: Tensor, accepted: Tensor, rows: Rows, state: SequenceState) -> tuple[Tensor, Tensor]:
    """[S] int64 tokens emitted and [S] int64 finish code: a stop id ends at itself, else the limit cuts."""
    num_columns = targets.shape[1]
    column = torch.arange(num_columns, device=targets.device)
    stops = (targets[:, :, None] == state.stop_ids[:, None, :]).any(dim=2)  # -1 padding never equals a token
    first_stop = torch.where(stops, column, num_columns).amin(dim=1)
    active = (rows.window_rows > 0) & ~state.frozen
    free = torch.minimum(accepted, first_stop) + 1
    emitted = torch.where(active, torch.minimum(free, state.remaining.clamp(min=0)), 0)
    stopped = active & (first_stop < emitted)
    at_limit = active & (emitted >= state.remaining) & ~stopped
    return emitted, torch.where(stopped, STOPPED, torch.where(at_limit, LENGTH, RUNNING))


def _commit(
    targets: Tensor, valid: Tensor, emitted: Tensor, finish: Tensor, in_step: Tensor, state: SequenceState
) -> None:
    """Append to the history and move the counters. Slots outside the step keep everything."""
    column = torch.arange(targets.shape[1], device=targets.device)
    place = (state.lengths[:, None] + column).clamp(max=state.history.shape[1] - 1)
    state.history.scatter_(1, place, torch.where(valid, targets, state.history.gather(1, place)))
    counts = state.sampling.output_counts
    counts.scatter_add_(1, torch.where(valid, targets, 0), valid.to(counts.dtype))
    state.lengths.add_(emitted)
    state.remaining.sub_(emitted)
    state.frozen.logical_or_(finish != RUNNING)
    state.pending_rows.copy_(torch.where(in_step, emitted, state.pending_rows))


def _origins(draft: Draft, accepted: Tensor, shape: torch.Size) -> Tensor:
    """[S, K + 1] int64: the draft's origin, moved by one, for accepted drafts; 0 for the target's own token."""
    origins = torch.zeros(shape, dtype=torch.int64, device=accepted.device)
    column = torch.arange(shape[1] - 1, device=accepted.device)
    origins[:, :-1] = torch.where(column < accepted[:, None], draft.origins + 1, 0)
    return origins


def _with_logprobs(result: StepResult, log_probabilities: Tensor, row_index: Tensor, count: int) -> StepResult:
    """Log-probabilities of the emitted tokens and the `count` best alternatives under the law they were drawn from."""
    own = log_probabilities[row_index, result.token_ids.clamp(min=0)]  # [S, K + 1]
    top = log_probabilities.topk(max(1, min(count, log_probabilities.shape[1])), dim=1)
    return StepResult(
        token_ids=result.token_ids,
        num_emitted=result.num_emitted,
        origins=result.origins,
        num_accepted=result.num_accepted,
        finish=result.finish,
        origin_names=result.origin_names,
        logprobs=own,
        top_ids=top.indices[row_index, :count] if count else None,
        top_logprobs=top.values[row_index, :count] if count else None,
    )

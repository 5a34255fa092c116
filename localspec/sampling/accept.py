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
from localspec.sampling.processors import Law, ProcessorPlan, adjust, greedy_law, law
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
    else the number of alternatives; they are those of the law even where a token was forced. The stop token itself is
    emitted. Changes history, lengths, remaining, frozen and pending_rows of the slots in the step (`rows.window_rows`
    > 0) and of no other; if the plan has penalties also sampling.output_counts, and with `thinking` that state.
    """
    plan = plan or ProcessorPlan.general(logits.shape[1])
    rules = rules or RowRules()
    adjusted = adjust(logits, rows, draft, state.sampling, plan, rules.allowed)
    drawn_law, drawn = _draw(adjusted, rows, state, plan)
    if rules.forced is not None:
        drawn = torch.where(rules.forced >= 0, rules.forced, drawn)
    if thinking is not None:
        due = forced_rows(thinking, rows, draft, state)
        drawn = torch.where(due >= 0, due, drawn)
    column = torch.arange(draft.token_ids.shape[1] + 1, device=drawn.device)
    # Where a window is shorter than the draft is wide, some other row is read, and refused below.
    row_index = (rows.window_starts[:, None] + column).clamp_(max=drawn.shape[0] - 1)  # [S, K + 1]
    targets = drawn[row_index]
    accepted = _accepted(targets, column, rows, draft)
    emitted, finish = _cut(targets, column, accepted, rows, state)
    accepted = accepted * (emitted > 0)
    valid = column < emitted[:, None]
    _commit(targets, valid, emitted, finish, rows, state)
    if plan.penalties:
        # Without penalties nobody reads the counts.
        counts = state.sampling.output_counts
        counts.scatter_add_(1, torch.where(valid, targets, 0), valid.to(counts.dtype))
    taken = torch.where(column[:-1] < accepted[:, None], draft.origins + 1, 0)
    result = StepResult(
        token_ids=torch.where(valid, targets, -1),
        num_emitted=emitted,
        origins=torch.nn.functional.pad(taken, (0, 1)),
        num_accepted=accepted,
        finish=finish,
        origin_names=(TARGET_ORIGIN, *draft.origin_names),
    )
    if thinking is not None:
        commit(thinking, result, state)
    if logprobs is None:
        return result
    return _with_logprobs(result, drawn_law.log_probabilities(adjusted), row_index, logprobs)


def _draw(adjusted: Tensor, rows: Rows, state: SequenceState, plan: ProcessorPlan) -> tuple[Law, Tensor]:
    """The law of each row and its token [R] int64."""
    if not plan.sampled:
        found = greedy_law(adjusted)
        return found, found.greedy
    slots = rows.slots.clamp(min=0)
    found = law(adjusted, RowParameters.gather(state.sampling, slots), plan)
    # A row at position p draws the token of position p + 1.
    return found, found.draw(row_keys(state.sampling.seeds[slots], rows.positions + 1))


def _accepted(targets: Tensor, column: Tensor, rows: Rows, draft: Draft) -> Tensor:
    """[S] int64: leading drafts that equal the target's draw and had a row of their own in the window.

    A draft of -1 equals no token.
    """
    num_drafts = draft.token_ids.shape[1]
    if not num_drafts:
        return torch.zeros_like(rows.window_rows)
    wrong = (draft.token_ids != targets[:, :-1]) | (column[1:] >= rows.window_rows[:, None])
    return torch.where(wrong, column[:-1], num_drafts).amin(dim=1)


def _cut(targets: Tensor, column: Tensor, accepted: Tensor, rows: Rows, state: SequenceState) -> tuple[Tensor, Tensor]:
    """[S] int64 tokens emitted and [S] int64 finish code: a stop id ends at itself, else the limit cuts."""
    stops = (targets[:, :, None] == state.stop_ids[:, None, :]).any(dim=2)  # -1 padding never equals a token
    first_stop = torch.where(stops, column, targets.shape[1]).amin(dim=1)
    active = (rows.window_rows > 0) & ~state.frozen
    emitted = torch.minimum(torch.minimum(accepted, first_stop) + 1, state.remaining.clamp(min=0)) * active
    stopped = first_stop < emitted
    at_limit = active & (emitted >= state.remaining) & ~stopped
    return emitted, stopped * STOPPED + at_limit * LENGTH


def _commit(targets: Tensor, valid: Tensor, emitted: Tensor, finish: Tensor, rows: Rows, state: SequenceState) -> None:
    """Append to the history and move the counters. Slots outside the step keep everything."""
    column = torch.arange(targets.shape[1], device=targets.device)
    place = (state.lengths[:, None] + column).clamp_(max=state.history.shape[1] - 1)
    state.history.scatter_(1, place, torch.where(valid, targets, state.history.gather(1, place)))
    state.lengths.add_(emitted)
    state.remaining.sub_(emitted)
    state.frozen.logical_or_(finish)
    state.pending_rows.copy_(torch.where(rows.window_rows > 0, emitted, state.pending_rows))


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

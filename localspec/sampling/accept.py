"""Coupled sampling: what a verify step emits, decided and committed on the device.

At every row the target draws its own token with noise keyed by (seed, position); a draft stands exactly while it
equals that token. The emitted tokens are therefore the target's draws whatever was drafted. Fixed shapes and no wait
for the device, so that the call can be captured in a graph. Knows nothing of models, drafters or requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.api.types import TARGET_ORIGIN
from localspec.core.records import Draft, Rows, StepResult
from localspec.core.state import SequenceState
from localspec.kernels.ops import Settled, SlotCounters, Window
from localspec.kernels.reference_settle import settle as settle_reference
from localspec.sampling.candidates import RowParameters
from localspec.sampling.noise import row_keys
from localspec.sampling.processors import ProcessorPlan, adjust, greedy_law, law
from localspec.sampling.thinking import ThinkingState, commit, forced_rows

MOST_VALUES = 1 << 20
"""Of rows that are put in order at once: four of 248,000 tokens, some 80 MB of scratch."""
Settle = Callable[[Window, SlotCounters], Settled]


@dataclass(frozen=True)
class RowRules:
    """What may be said at single rows beyond the sampling parameters.

    forced: [R] int64 token that must be drawn at the row, -1 where free, or None; allowed: [R, V] bool, or None.
    settle: the back end's `Ops.settle`, which every back end computes alike.
    """

    forced: Tensor | None = None
    allowed: Tensor | None = None
    settle: Settle = settle_reference


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
    drawn, log_probabilities = _draw(adjusted, rows, state, plan, logprobs is not None)
    if rules.forced is not None:
        drawn = torch.where(rules.forced >= 0, rules.forced, drawn)
    if thinking is not None:
        due = forced_rows(thinking, rows, draft, state)
        drawn = torch.where(due >= 0, due, drawn)
    window = Window(drawn, draft.token_ids, draft.origins, rows.window_starts, rows.window_rows)
    settled = rules.settle(window, state)
    if plan.penalties:
        # Without penalties nobody reads the counts.
        counts = state.sampling.output_counts
        said = settled.token_ids >= 0
        counts.scatter_add_(1, settled.token_ids.clamp(min=0), said.to(counts.dtype))
    result = StepResult(
        token_ids=settled.token_ids,
        num_emitted=settled.num_emitted,
        origins=settled.origins,
        num_accepted=settled.num_accepted,
        finish=settled.finish,
        origin_names=(TARGET_ORIGIN, *draft.origin_names),
    )
    if thinking is not None:
        commit(thinking, result, state)
    if logprobs is None or log_probabilities is None:
        return result
    return _with_logprobs(result, log_probabilities, rows, logprobs)


def _draw(
    adjusted: Tensor, rows: Rows, state: SequenceState, plan: ProcessorPlan, logged: bool
) -> tuple[Tensor, Tensor | None]:
    """The token of each row [R] int64 and, if asked for, the log-probabilities of its law [R, V] float32.

    A few rows at a time where each needs the whole vocabulary in order, so that the scratch of 16 rows stays small.
    """
    if not plan.sampled:
        found = greedy_law(adjusted)
        return found.greedy, found.log_probabilities(adjusted) if logged else None
    slots = rows.slots.clamp(min=0)
    # A row at position p draws the token of position p + 1.
    keys = row_keys(state.sampling.seeds[slots], rows.positions + 1)
    num_rows, vocab_size = adjusted.shape
    at_once = max(1, MOST_VALUES // vocab_size) if plan.is_wide else num_rows
    drawn = []
    log_probabilities = torch.empty_like(adjusted) if logged else None
    for first in range(0, num_rows, at_once):
        part = slice(first, first + at_once)
        found = law(adjusted[part], RowParameters.gather(state.sampling, slots[part]), plan)
        drawn.append(found.draw(keys[part]))
        if log_probabilities is not None:
            log_probabilities[part] = found.log_probabilities(adjusted[part])
    return torch.cat(drawn), log_probabilities


def _with_logprobs(result: StepResult, log_probabilities: Tensor, rows: Rows, count: int) -> StepResult:
    """Log-probabilities of the emitted tokens and the `count` best alternatives under the law they were drawn from."""
    column = torch.arange(result.token_ids.shape[1], device=log_probabilities.device)
    # Where a window is shorter than the draft is wide, some other row is read; nothing was emitted there.
    row_index = (rows.window_starts[:, None] + column).clamp_(max=log_probabilities.shape[0] - 1)  # [S, K + 1]
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

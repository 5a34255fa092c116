"""Which drafts of a step are verified: the likeliest, as many as the step has rows for or as pay.

Tensors only and no wait, so that it can stand in a captured graph: with a number of rows that the host fixed beforehand
from smoothed counters, the rows are shared by what this step's drafts are worth. Where the host sees the drafts anyway
the number is chosen from them too. Cutting drafts never changes a token: the target's draws do not depend on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localspec.core.records import MAX_ROWS, Draft
from localspec.engine.confidence import SURE, Calibration, added_tokens, best_budget


@dataclass
class VerifySchedule:
    """What is known between two steps. verify_ms: by rows, empty until something was measured; draft_ms: of the step
    that is planned; calibrations: by origin."""

    verify_ms: Sequence[float] = ()
    draft_ms: float = 0.0
    calibrations: dict[str, Calibration] = field(default_factory=dict)

    def see(self, drafted_by: Sequence[str], confidence: Sequence[float], accepted: int) -> None:
        """A window was verified: origins and confidences of its drafts, and how many stood."""
        if drafted_by and len(confidence) == len(drafted_by):
            same = next((i for i, name in enumerate(drafted_by) if name != drafted_by[0]), len(drafted_by))
            self.calibrations.setdefault(drafted_by[0], Calibration()).see(confidence[:same], min(accepted, same))

    def weights(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Slopes [N] and offsets [N, MAX_ROWS - 1], float32, of these origins."""
        known = [self.calibrations.get(name, Calibration()) for name in names] or [Calibration()]
        slopes = torch.tensor([each.slope for each in known], dtype=torch.float32, device=device)
        return slopes, torch.tensor([each.offsets for each in known], dtype=torch.float32, device=device)


def survivals(draft: Draft, weights: tuple[Tensor, Tensor]) -> Tensor:
    """[S, K] float32: the chance that each draft stands, 0 where there is none. weights: see `VerifySchedule`."""
    assert draft.confidence is not None
    slopes, offsets = weights
    confidence = draft.confidence.clamp(1.0 - SURE, SURE)
    origins = draft.origins.clamp(0, slopes.shape[0] - 1)
    column = torch.arange(draft.token_ids.shape[1], device=confidence.device)
    chance = (slopes[origins] * torch.logit(confidence) + offsets[origins, column]).sigmoid()
    inside = column < draft.num_drafts[:, None]
    return torch.where(inside, chance, 0.0).cumprod(dim=1)


def share(chances: Tensor, num_drafts: Tensor, budget: int) -> Tensor:
    """[S] int64: how many drafts of each slot are among the `budget` likeliest of all.

    chances: [S, K], never rising along a slot; num_drafts: [S]. Of equals the one that stands earlier in its window
    comes first, then the lower slot, whatever the values are.
    """
    num_slots, width = chances.shape
    column = torch.arange(width, device=chances.device)
    inside = column < num_drafts[:, None]
    # Column by column, so that a stable sort leaves equals in the wanted order.
    ranked = torch.where(inside, chances, -1.0).t().reshape(-1)
    order = ranked.sort(descending=True, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    chosen = (place.view(width, num_slots).t() < budget) & inside
    return chosen.sum(dim=1)


def cut(draft: Draft, counts: Tensor) -> Draft:
    """The draft with at most `counts` [S] tokens a slot; `num_offered` tells what there was."""
    kept = torch.minimum(counts, draft.num_drafts)
    inside = torch.arange(draft.token_ids.shape[1], device=kept.device) < kept[:, None]
    return replace(
        draft,
        token_ids=torch.where(inside, draft.token_ids, -1),
        num_drafts=kept,
        num_offered=draft.num_drafts,
    )


def chosen_by_host(draft: Draft, slots: Sequence[int], schedule: VerifySchedule) -> Draft:
    """The drafts that pay, where reading device values costs nothing: number and rows from this step's own drafts.

    slots: those in the step. Never more than MAX_ROWS rows in all.
    """
    if draft.confidence is None or not draft.token_ids.shape[1]:
        return draft
    chances = survivals(draft, schedule.weights(draft.origin_names, draft.token_ids.device))
    budget = MAX_ROWS - len(slots)
    if schedule.verify_ms:
        counts = draft.num_drafts.tolist()
        windows = [values[: counts[slot]] for slot, values in enumerate(chances.tolist()) if slot in set(slots)]
        budget = best_budget(added_tokens(windows), len(slots), schedule.verify_ms, schedule.draft_ms)
    return cut(draft, share(chances, draft.num_drafts, budget))


def layout_rows(num_drafts: Tensor, in_step: Tensor, num_rows: int) -> Mapping[str, Tensor]:
    """Rows of a step whose windows only the device knows, in the terms of `runner.inputs.Layout`.

    num_drafts: [S] int64 after sharing; in_step: [S] bool; num_rows: of the captured step, at least those in use.
    Returns slots, offsets [R] (-1 and 0 for padding rows), starts, counts [S], all int64.
    """
    counts = torch.where(in_step, 1 + num_drafts, 0)
    ends = counts.cumsum(dim=0)
    starts = ends - counts
    row = torch.arange(num_rows, device=counts.device)
    slot = (row[:, None] >= ends).sum(dim=1)
    inside = slot < counts.shape[0]
    safe = slot.clamp(max=counts.shape[0] - 1)
    return {
        "slots": torch.where(inside, safe, -1),
        "offsets": torch.where(inside, row - starts[safe], 0),
        "starts": starts,
        "counts": counts,
    }

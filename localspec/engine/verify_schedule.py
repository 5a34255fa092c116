"""Which drafts of a step are verified: the likeliest, as many as the step has rows for or as pay.

Tensors only and no wait, so that it can stand in a captured graph: with a number of rows that the host fixed beforehand
from smoothed counters, the rows are shared by what this step's drafts are worth. Where the host sees the drafts anyway
the number is chosen from them too. Cutting drafts never changes a token: the target's draws do not depend on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from localspec.core.records import Draft, SlotResult
from localspec.engine.confidence import SURE, Calibration, RowBudget, added_tokens, best_budget
from localspec.runner.inputs import Layout

REFRESH_WINDOWS = 32
"""Windows between two times that a card is told what was learnt of confidences."""
STAGING_BUFFERS = 4
"""More than the refreshes that can be in flight."""


@dataclass
class VerifySchedule:
    """What is known between two steps. host_knows: drafts are chosen where the host sees them; else on the device, with
    the rows that `budget` settled beforehand. calibrations: by origin."""

    host_knows: bool = True
    budget: RowBudget = field(default_factory=RowBudget)
    calibrations: defaultdict[str, Calibration] = field(default_factory=lambda: defaultdict(Calibration))
    _static: dict[tuple[str, ...], StaticWeights] = field(default_factory=dict)
    _windows: int = 0

    def see(self, result: SlotResult) -> list[float]:
        """A window was verified. Returns the survivals of the drafts that it offered, as they are estimated now."""
        drafted_by, confidence = result.drafted_by, result.confidence
        if len(confidence) < len(result.offered_by) or not confidence:
            return []
        if drafted_by:
            same = next((i for i, name in enumerate(drafted_by) if name != drafted_by[0]), len(drafted_by))
            self.calibrations[drafted_by[0]].see(confidence[:same], min(result.num_accepted, same))
        self._windows += 1
        return self.calibrations[result.offered_by[0]].survivals(confidence)

    def see_step(self, windows: Sequence[Sequence[float]], verify_ms: Sequence[float], draft_ms: float) -> None:
        """All windows of a step were seen; what steps cost from here on."""
        self.budget.see(windows)
        self.budget.verify_ms, self.budget.draft_ms = verify_ms, draft_ms
        if self._windows >= REFRESH_WINDOWS:
            self._windows = 0
            for names, static in self._static.items():
                static.refresh([self.calibrations.get(name, Calibration()) for name in names])

    def weights(self, names: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
        """Slopes [N] and offsets [N, MAX_ROWS - 1], float32, of these origins. Of a card always the same tensors, as a
        captured step reads them again; they follow what is learnt."""
        known = [self.calibrations.get(name, Calibration()) for name in names] or [Calibration()]
        if self.host_knows:
            return split_weights(torch.tensor(_rows_of(known), dtype=torch.float32, device=device))
        key = tuple(names)
        if key not in self._static:
            self._static[key] = StaticWeights.of(known, device)
        return split_weights(self._static[key].device_values)


@dataclass
class StaticWeights:
    """Values that captured steps read; new ones come through pinned buffers that are used in turn."""

    device_values: Tensor
    host_values: tuple[Tensor, ...]
    turn: int = 0

    @classmethod
    def of(cls, known: Sequence[Calibration], device: torch.device) -> StaticWeights:
        """[N, MAX_ROWS] float32: slope, offsets."""
        values = torch.tensor(_rows_of(known), dtype=torch.float32)
        pinned = device.type == "cuda"
        host = tuple(values.clone().pin_memory() if pinned else values.clone() for _ in range(STAGING_BUFFERS))
        return cls(values.to(device), host)

    def refresh(self, known: Sequence[Calibration]) -> None:
        """Waits for nothing."""
        self.turn = (self.turn + 1) % len(self.host_values)
        host = self.host_values[self.turn]
        host.copy_(torch.tensor(_rows_of(known), dtype=torch.float32))
        self.device_values.copy_(host, non_blocking=True)


def _rows_of(known: Sequence[Calibration]) -> list[list[float]]:
    return [[each.slope, *each.offsets] for each in known]


def split_weights(values: Tensor) -> tuple[Tensor, Tensor]:
    """[N, MAX_ROWS] -> slopes [N] and offsets [N, MAX_ROWS - 1]."""
    return values[:, 0], values[:, 1:]


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


def chosen(draft: Draft, slots: Sequence[int], row_budget: int, schedule: VerifySchedule) -> Draft:
    """The drafts that pay, at most as many as a step of row_budget rows has room for. slots: those in the step.

    Where reading device values costs nothing the number too is chosen from this step's own drafts.
    """
    if draft.confidence is None or not draft.token_ids.shape[1]:
        return draft
    chances = survivals(draft, schedule.weights(draft.origin_names, draft.token_ids.device))
    drafts = row_budget - len(slots)
    if schedule.host_knows and schedule.budget.verify_ms:
        counts = draft.num_drafts.tolist()
        windows = [values[: counts[slot]] for slot, values in enumerate(chances.tolist()) if slot in set(slots)]
        drafts = best_budget(added_tokens(windows), len(slots), schedule.budget.verify_ms, schedule.budget.draft_ms)
    return cut(draft, share(chances, draft.num_drafts, drafts))


def layout_rows(num_drafts: Tensor, in_step: Tensor, num_rows: int) -> Layout:
    """Rows of a step whose windows only the device knows, slot after slot.

    num_drafts: [S] int64 after sharing; in_step: [S] bool; num_rows: of the captured step, at least those in use.
    """
    counts = torch.where(in_step, 1 + num_drafts, 0)
    ends = counts.cumsum(dim=0)
    starts = ends - counts
    row = torch.arange(num_rows, device=counts.device)
    slot = (row[:, None] >= ends).sum(dim=1)
    inside = slot < counts.shape[0]
    safe = slot.clamp(max=counts.shape[0] - 1)
    offsets = torch.where(inside, row - starts[safe], 0)
    return Layout(torch.where(inside, safe, -1), offsets, starts, counts)

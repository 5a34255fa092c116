"""Rows of a forward pass from a plan. Reads true lengths on the device; the host adds only what it planned."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.records import (
    MAX_SLOTS,
    PAGE_TOKENS,
    Draft,
    PrefillPlan,
    Rows,
    SlotPlan,
    VerifyPlan,
)
from localspec.core.state import SequenceState
from localspec.kernels.ops import Ops


@dataclass(frozen=True)
class Layout:
    """Which rows belong to which slot, on the device. slots, offsets: [R] int64 (slot -1: padding row; offset in the
    window); starts, counts: [S] int64."""

    slots: Tensor
    offsets: Tensor
    starts: Tensor
    counts: Tensor


def layout_numbers(plan: VerifyPlan, pad_to: int) -> list[int]:
    """slots [R], offsets [R], starts [S], counts [S] of a plan, one after the other.

    Of slots that share fewer rows than they ask for only the counts mean anything: the device lays their rows out.
    """
    slots: list[int] = []
    offsets: list[int] = []
    starts = [0] * MAX_SLOTS
    counts = [0] * MAX_SLOTS
    for entry in plan.slots:
        starts[entry.slot] = len(slots)
        counts[entry.slot] = 1 + entry.num_drafts
        slots.extend([entry.slot] * (1 + entry.num_drafts))
        offsets.extend(range(1 + entry.num_drafts))
    if plan.row_budget is not None:
        slots, offsets = slots[:pad_to], offsets[:pad_to]
    padding = max(0, pad_to - len(slots))
    return [*slots, *([-1] * padding), *offsets, *([0] * padding), *starts, *counts]


def layout_of(numbers: Tensor) -> Layout:
    """Views of a [2 R + 2 S] int64 tensor as `layout_numbers` orders it."""
    num_rows = (numbers.shape[0] - 2 * MAX_SLOTS) // 2
    slots, offsets, starts, counts = torch.split(numbers, [num_rows, num_rows, MAX_SLOTS, MAX_SLOTS])
    return Layout(slots, offsets, starts, counts)


def verify_rows(ops: Ops, layout: Layout, draft: Draft, state: SequenceState, max_position_bound: int) -> Rows:
    """Rows of a verify step: for each slot its last token, then its drafts. Device arithmetic only."""
    token_ids, positions = ops.window_rows(layout, draft.token_ids, state)
    return Rows(
        kind="verify",
        token_ids=token_ids,
        positions=positions,
        slots=layout.slots,
        block_tables=state.block_tables,
        lengths=state.lengths.clone(),
        window_starts=layout.starts,
        window_rows=layout.counts,
        pending_rows=state.pending_rows.clone(),
        max_position_bound=max_position_bound,
        slot_rows_bound=1 + draft.token_ids.shape[1],
    )


def prefill_rows(plan: PrefillPlan, state: SequenceState, row_multiple: int) -> Rows:
    """Rows of a prompt chunk. With a multiple of a whole tile, rows keep their place in it; gaps are padding rows."""
    device = state.history.device
    lead = (plan.start_tokens - plan.tile_start_tokens) if row_multiple > PAGE_TOKENS else 0
    count = plan.end_tokens - plan.start_tokens
    total = -(-(lead + count) // row_multiple) * row_multiple
    positions = torch.arange(total, dtype=torch.int64, device=device) + (plan.start_tokens - lead)
    inside = (positions >= plan.start_tokens) & (positions < plan.end_tokens)
    positions = torch.where(inside, positions, 0)
    starts = [0] * MAX_SLOTS
    counts = [0] * MAX_SLOTS
    starts[plan.slot] = lead
    counts[plan.slot] = count
    return Rows(
        kind="prefill",
        token_ids=state.history[plan.slot, positions],
        positions=positions,
        slots=torch.where(inside, plan.slot, -1),
        block_tables=state.block_tables,
        lengths=state.lengths.clone(),
        window_starts=torch.tensor(starts, dtype=torch.int64, device=device),
        window_rows=torch.tensor(counts, dtype=torch.int64, device=device),
        pending_rows=state.pending_rows.clone(),
        max_position_bound=plan.end_tokens,
        slot_rows_bound=total,
    )


def cut_to_draft(plan: VerifyPlan, num_drafts: list[int]) -> VerifyPlan:
    """The plan with only as many rows as were drafted; for devices whose values the host knows at once."""
    return VerifyPlan(
        tuple(
            SlotPlan(
                slot=slot.slot,
                sequence_id=slot.sequence_id,
                drafter=slot.drafter,
                num_drafts=min(slot.num_drafts, num_drafts[slot.slot]),
                length_bound_tokens=slot.length_bound_tokens,
            )
            for slot in plan.slots
        )
    )

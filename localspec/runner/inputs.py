"""Rows of a forward pass from a plan. Reads true lengths on the device; the host adds only what it planned."""

from __future__ import annotations

import torch

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


def verify_rows(plan: VerifyPlan, draft: Draft, state: SequenceState, pad_to: int) -> Rows:
    """Rows of a verify step: for each slot its last token, then its drafts; padding rows up to `pad_to`.

    Drafts of -1 run as token 0; acceptance refuses them. Positions count from 0.
    """
    device = state.history.device
    slots, offsets, starts, counts = _layout(plan, pad_to)
    slot_of_row = torch.tensor(slots, dtype=torch.int64, device=device)  # [R]
    offset = torch.tensor(offsets, dtype=torch.int64, device=device)  # [R]
    safe_slot = slot_of_row.clamp(min=0)
    last = state.lengths[safe_slot] - 1
    own = state.history[safe_slot, last.clamp(min=0)]
    if draft.token_ids.shape[1]:
        column = (offset - 1).clamp(min=0, max=draft.token_ids.shape[1] - 1)
        drafted = draft.token_ids[safe_slot, column].clamp(min=0)
        token_ids = torch.where(offset == 0, own, drafted)
    else:
        token_ids = own
    bound = max(slot.length_bound_tokens + slot.num_drafts for slot in plan.slots)
    return Rows(
        kind="verify",
        token_ids=token_ids,
        positions=(last + offset).clamp(min=0),
        slots=slot_of_row,
        block_tables=state.block_tables,
        lengths=state.lengths.clone(),
        window_starts=torch.tensor(starts, dtype=torch.int64, device=device),
        window_rows=torch.tensor(counts, dtype=torch.int64, device=device),
        pending_rows=state.pending_rows.clone(),
        max_position_bound=bound,
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


def _layout(plan: VerifyPlan, pad_to: int) -> tuple[list[int], list[int], list[int], list[int]]:
    slots: list[int] = []
    offsets: list[int] = []
    starts = [0] * MAX_SLOTS
    counts = [0] * MAX_SLOTS
    for entry in plan.slots:
        starts[entry.slot] = len(slots)
        counts[entry.slot] = 1 + entry.num_drafts
        slots.extend([entry.slot] * (1 + entry.num_drafts))
        offsets.extend(range(1 + entry.num_drafts))
    padding = max(0, pad_to - len(slots))
    return slots + [-1] * padding, offsets + [0] * padding, starts, counts

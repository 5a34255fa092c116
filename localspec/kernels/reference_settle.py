"""Rows of a verify step and what becomes of them, in plain PyTorch: specifies `Ops.window_rows`, `settle`.

Whole numbers only, so every back end gives the same. Knows no logits and no reasons for a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.ops import LENGTH, STOPPED, Settled, SlotCounters, Window, WindowPlaces


def window_rows(places: WindowPlaces, drafts: Tensor, slots: SlotCounters) -> tuple[Tensor, Tensor]:
    """See `Ops.window_rows`."""
    safe_slot = places.slots.clamp(min=0)
    last = slots.lengths[safe_slot] - 1
    token_ids = slots.history[safe_slot, last.clamp(min=0)]
    if drafts.shape[1]:
        column = (places.offsets - 1).clamp(min=0, max=drafts.shape[1] - 1)
        token_ids = torch.where(places.offsets == 0, token_ids, drafts[safe_slot, column].clamp(min=0))
    return token_ids, (last + places.offsets).clamp(min=0)


def settle(window: Window, slots: SlotCounters) -> Settled:
    """See `Ops.settle`."""
    column = torch.arange(window.drafts.shape[1] + 1, device=window.drawn.device)
    # Where a window is shorter than the draft is wide, some other row is read, and refused below.
    row_index = (window.starts[:, None] + column).clamp_(max=window.drawn.shape[0] - 1)  # [S, K + 1]
    targets = window.drawn[row_index]
    accepted = _accepted(targets, column, window)
    emitted, finish = _cut(targets, column, accepted, window, slots)
    accepted = accepted * (emitted > 0)
    valid = column < emitted[:, None]
    _commit(targets, valid, emitted, finish, window, slots)
    taken = torch.where(column[:-1] < accepted[:, None], window.origins + 1, 0)
    return Settled(
        token_ids=torch.where(valid, targets, -1),
        num_emitted=emitted,
        origins=torch.nn.functional.pad(taken, (0, 1)),
        num_accepted=accepted,
        finish=finish,
    )


def _accepted(targets: Tensor, column: Tensor, window: Window) -> Tensor:
    """[S] int64: leading drafts that equal what was drawn and had a row of their own in the window."""
    num_drafts = window.drafts.shape[1]
    if not num_drafts:
        return torch.zeros_like(window.counts)
    wrong = (window.drafts != targets[:, :-1]) | (column[1:] >= window.counts[:, None])
    return torch.where(wrong, column[:-1], num_drafts).amin(dim=1)


def _cut(
    targets: Tensor, column: Tensor, accepted: Tensor, window: Window, slots: SlotCounters
) -> tuple[Tensor, Tensor]:
    """[S] int64 tokens emitted and [S] int64 finish code: a stop id ends at itself, else the limit cuts."""
    stops = (targets[:, :, None] == slots.stop_ids[:, None, :]).any(dim=2)  # -1 padding never equals a token
    first_stop = torch.where(stops, column, targets.shape[1]).amin(dim=1)
    active = (window.counts > 0) & ~slots.frozen
    emitted = torch.minimum(torch.minimum(accepted, first_stop) + 1, slots.remaining.clamp(min=0)) * active
    stopped = first_stop < emitted
    at_limit = active & (emitted >= slots.remaining) & ~stopped
    return emitted, stopped * STOPPED + at_limit * LENGTH


def _commit(
    targets: Tensor, valid: Tensor, emitted: Tensor, finish: Tensor, window: Window, slots: SlotCounters
) -> None:
    """Append to the history and move the counters. Slots outside the step keep everything."""
    column = torch.arange(targets.shape[1], device=targets.device)
    place = (slots.lengths[:, None] + column).clamp_(max=slots.history.shape[1] - 1)
    slots.history.scatter_(1, place, torch.where(valid, targets, slots.history.gather(1, place)))
    slots.lengths.add_(emitted)
    slots.remaining.sub_(emitted)
    slots.frozen.logical_or_(finish)
    slots.pending_rows.copy_(torch.where(window.counts > 0, emitted, slots.pending_rows))

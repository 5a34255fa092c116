"""Rows of a verify step and what becomes of them, a launch each. Whole numbers; specification: reference_settle.py.

In PyTorch these are some sixty launches of a microsecond each, of which a step with one row would feel every one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import LENGTH, STOPPED, Settled, SlotCounters, Window, WindowPlaces

STOP_CODE = tl.constexpr(STOPPED)
LENGTH_CODE = tl.constexpr(LENGTH)


@triton.jit(do_not_specialize=["num_rows", "width", "history_stride"])
def window_rows_kernel(
    slots_ptr, offsets_ptr, drafts_ptr, history_ptr, lengths_ptr, tokens_ptr, positions_ptr, num_rows, width,
    history_stride, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). ROWS: a power of two >= num_rows; drafts_ptr: [S, width]; history_ptr: [S, history_stride]."""
    row = tl.arange(0, ROWS)
    inside = row < num_rows
    slot = tl.maximum(tl.load(slots_ptr + row, mask=inside, other=0), 0)
    offset = tl.load(offsets_ptr + row, mask=inside, other=0)
    last = tl.load(lengths_ptr + slot) - 1
    own = tl.load(history_ptr + slot * history_stride + tl.maximum(last, 0))
    column = tl.minimum(tl.maximum(offset - 1, 0), width - 1)
    drafted = tl.load(drafts_ptr + slot * width + column, mask=inside & (column >= 0), other=0)
    token = tl.where((offset == 0) | (width == 0), own, tl.maximum(drafted, 0))
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, tl.maximum(last + offset, 0), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "width", "history_stride"])
def settle_kernel(
    drawn_ptr, drafts_ptr, origins_ptr, starts_ptr, counts_ptr, history_ptr, lengths_ptr, remaining_ptr, frozen_ptr,
    stops_ptr, pending_ptr, tokens_ptr, emitted_ptr, taken_ptr, accepted_ptr, finish_ptr, num_rows, width,
    history_stride, COLUMNS: tl.constexpr, STOPS: tl.constexpr, STOPS_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid: (S,). COLUMNS: a power of two > width, the drafts of a slot; frozen_ptr: bytes."""
    slot = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    start, count = tl.load(starts_ptr + slot), tl.load(counts_ptr + slot)
    remaining, frozen = tl.load(remaining_ptr + slot), tl.load(frozen_ptr + slot)
    target = tl.load(drawn_ptr + tl.minimum(start + column, num_rows - 1))
    is_draft = column < width
    draft = tl.load(drafts_ptr + slot * width + column, mask=is_draft, other=-1)
    right = is_draft & (draft == target) & (column + 1 < count)
    accepted = tl.min(tl.where(right, COLUMNS, column), axis=0)
    stop_column = tl.arange(0, STOPS_PADDED)
    stops = tl.load(stops_ptr + slot * STOPS + stop_column, mask=stop_column < STOPS, other=-1)
    at_stop = tl.max((target[:, None] == stops[None, :]).to(tl.int32), axis=1) > 0
    first_stop = tl.min(tl.where(at_stop & (column <= width), column, width + 1), axis=0)
    active = (count > 0) & (frozen == 0)
    emitted = tl.minimum(tl.minimum(accepted, first_stop) + 1, tl.maximum(remaining, 0))
    emitted = tl.where(active, emitted, 0)
    accepted = tl.where(emitted > 0, accepted, 0)
    stopped = first_stop < emitted
    at_limit = active & (emitted >= remaining) & (stopped == 0)
    finish = tl.where(stopped, STOP_CODE, tl.where(at_limit, LENGTH_CODE, 0))
    length = tl.load(lengths_ptr + slot)
    valid = column < emitted
    place = length + column
    tl.store(history_ptr + slot * history_stride + place, target, mask=valid & (place < history_stride))
    tl.store(lengths_ptr + slot, length + emitted)
    tl.store(remaining_ptr + slot, remaining - emitted)
    tl.store(frozen_ptr + slot, tl.where(finish > 0, 1, frozen).to(tl.uint8))
    tl.store(pending_ptr + slot, emitted, mask=count > 0)
    out = slot * (width + 1) + column
    origin = tl.load(origins_ptr + slot * width + column, mask=is_draft, other=0)
    tl.store(tokens_ptr + out, tl.where(valid, target, -1), mask=column <= width)
    tl.store(taken_ptr + out, tl.where(is_draft & (column < accepted), origin + 1, 0), mask=column <= width)
    tl.store(emitted_ptr + slot, emitted)
    tl.store(accepted_ptr + slot, accepted)
    tl.store(finish_ptr + slot, finish)


def _check(slots: SlotCounters) -> None:
    tensors = (slots.history, slots.stop_ids, slots.lengths, slots.remaining, slots.pending_rows, slots.frozen)
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ValueError("the counters of the slots must be contiguous")


def window_rows(places: WindowPlaces, drafts: Tensor, slots: SlotCounters) -> tuple[Tensor, Tensor]:
    """See `Ops.window_rows`."""
    _check(slots)
    num_rows = places.slots.shape[0]
    tokens, positions = torch.empty(2, num_rows, dtype=torch.int64, device=drafts.device).unbind(0)
    window_rows_kernel[(1,)](
        *(places.slots, places.offsets, drafts.contiguous(), slots.history, slots.lengths, tokens, positions),
        *(num_rows, drafts.shape[1], slots.history.shape[1]),
        ROWS=triton.next_power_of_2(num_rows),
        num_warps=1,
    )
    return tokens, positions


def settle(window: Window, slots: SlotCounters) -> Settled:
    """See `Ops.settle`."""
    _check(slots)
    num_slots, width = window.drafts.shape
    tokens, taken = torch.empty(2, num_slots, width + 1, dtype=torch.int64, device=window.drawn.device).unbind(0)
    emitted, accepted, finish = torch.empty(3, num_slots, dtype=torch.int64, device=window.drawn.device).unbind(0)
    stops = slots.stop_ids.shape[1]
    settle_kernel[(num_slots,)](
        *(
            window.drawn,
            window.drafts.contiguous(),
            window.origins.contiguous(),
            window.starts,
            window.counts,
            slots.history,
        ),
        *(slots.lengths, slots.remaining, slots.frozen.view(torch.uint8), slots.stop_ids, slots.pending_rows),
        *(tokens, emitted, taken, accepted, finish, window.drawn.shape[0], width, slots.history.shape[1]),
        **{"COLUMNS": triton.next_power_of_2(width + 1), "STOPS": stops},
        STOPS_PADDED=triton.next_power_of_2(stops),
        num_warps=1,
    )
    return Settled(tokens, emitted, taken, accepted, finish)

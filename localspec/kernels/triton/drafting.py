"""The small things between a drafter's matmuls, a launch each; specification: reference_drafting.py.

In PyTorch a proposal has a hundred launches of a microsecond or two each, as much as its matmuls take.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.draft_rows import KeptRows, NewestRows, Rounds, SeenRows, SlotTexts, TakenRows
from localspec.kernels.ops import Norm

CHUNK = 4096
"""Logits of one program; the last program of a row puts the row together."""
COPY_BLOCK = 1024


@triton.jit
def joined_norms_kernel(
    first_ptr, second_ptr, first_weight_ptr, second_weight_ptr, out_ptr, first_stride, second_stride, width,
    first_eps, second_eps, FIRST_PLUS_ONE: tl.constexpr, SECOND_PLUS_ONE: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Grid: (R, 2). Rows of `width` values -> out_ptr [R, 2 * width]."""
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < width
    if side == 0:
        x = tl.load(first_ptr + row * first_stride + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(first_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if FIRST_PLUS_ONE:
            weight += 1.0
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + first_eps)
    else:
        x = tl.load(second_ptr + row * second_stride + columns, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(second_weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        if SECOND_PLUS_ONE:
            weight += 1.0
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + second_eps)
    out = out_ptr + row * (2 * width) + side * width + columns
    tl.store(out, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def best_tokens_kernel(
    logits_ptr, divisor_ptr, ids_ptr, partial_ptr, partial_place_ptr, tickets_ptr, tokens_ptr, certainty_ptr, size,
    stride, DIVIDED: tl.constexpr, MAPPED: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Grid: (R, parts). partial_ptr: [R, 2, PARTS] float32, partial_place_ptr: [R, PARTS] int32, both scratch;
    tickets_ptr: [R] int32, zero before and after. PARTS: a power of two >= parts."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    place = part * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    x = tl.load(logits_ptr + row * stride + place, mask=inside, other=-float("inf"))
    if MAPPED:
        x = tl.where(tl.load(ids_ptr + place, mask=inside, other=-1) < 0, -float("inf"), x)
    if DIVIDED:
        x = x / tl.load(divisor_ptr + row)
    best = tl.max(x, axis=0)
    shift = tl.where(best == -float("inf"), 0.0, best)
    values = partial_ptr + row * (2 * PARTS)
    tl.store(values + part, best)
    tl.store(values + PARTS + part, tl.sum(tl.exp(x - shift), axis=0))
    tl.store(partial_place_ptr + row * PARTS + part, tl.min(tl.where(x == best, place, size), axis=0))
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.store(tickets_ptr + row, 0)
        each = tl.arange(0, PARTS)
        known = each < parts
        # Other programs wrote these, hence past the L1 cache.
        tops = tl.load(values + each, mask=known, other=-float("inf"), cache_modifier=".cg")
        sums = tl.load(values + PARTS + each, mask=known, other=0.0, cache_modifier=".cg")
        places = tl.load(partial_place_ptr + row * PARTS + each, mask=known, other=0, cache_modifier=".cg")
        top = tl.max(tops, axis=0)
        first = tl.min(tl.where(known & (tops == top), places, size), axis=0)
        first = tl.minimum(first, size - 1).to(tl.int64)
        total = tl.sum(sums * tl.exp(tops - top), axis=0)
        if MAPPED:
            token = tl.maximum(tl.load(ids_ptr + first), 0)
        else:
            token = first
        tl.store(tokens_ptr + row, token)
        tl.store(certainty_ptr + row, 1.0 / total)


@triton.jit(do_not_specialize=["num_rows", "num_slots", "num_kept"])
def store_rows_kernel(
    slots_ptr, positions_ptr, starts_ptr, counts_ptr, sources_ptr, lengths_ptr, kept_ptr, done_ptr, num_rows, num_slots,
    num_kept, width, source_stride, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R + 1, pieces of a row). The first program of the last row notes where slots begin."""
    if tl.program_id(0) < num_rows:
        row = tl.program_id(0).to(tl.int64)
        slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
        if (slot >= 0) & (position + 1 < tl.load(lengths_ptr + tl.maximum(slot, 0))):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            value = tl.load(sources_ptr + row * source_stride + column, mask=inside)
            place = (slot * num_kept + position % num_kept) * width
            tl.store(kept_ptr + place + column, value.to(kept_ptr.dtype.element_ty), mask=inside)
    elif tl.program_id(1) == 0:
        slot = tl.arange(0, SLOTS)
        is_slot = slot < num_slots
        start = tl.minimum(tl.load(starts_ptr + slot, mask=is_slot, other=0), num_rows - 1)
        first = tl.load(positions_ptr + start)
        done = tl.load(done_ptr + slot, mask=is_slot, other=0)
        new = (done < 0) & (tl.load(counts_ptr + slot, mask=is_slot, other=0) > 0)
        tl.store(done_ptr + slot, tl.where(new, first, done), mask=is_slot)


@triton.jit(do_not_specialize=["num_slots", "num_kept", "history_stride"])
def take_rows_kernel(
    depths_ptr, lengths_ptr, history_ptr, done_ptr, valid_ptr, slots_ptr, positions_ptr, begin_ptr, end_ptr, tokens_ptr,
    places_ptr, num_slots, num_kept, history_stride, ROWS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid: (1,). ROWS, SLOTS: powers of two, of which the rows are all used; places_ptr: rows of the flat sources."""
    slot = tl.arange(0, SLOTS)
    is_slot = slot < num_slots
    done = tl.load(done_ptr + slot, mask=is_slot, other=-1)
    end = tl.load(lengths_ptr + slot, mask=is_slot, other=0) - 1
    depth = tl.load(depths_ptr + slot, mask=is_slot, other=0)
    valid = tl.load(valid_ptr + slot, mask=is_slot, other=0)
    begin = tl.maximum(done, end - num_kept)
    asked = (depth > 0) & (done >= 0)
    # Of a slot that is not asked for, rows may be missing because its prompt is still being read.
    valid = tl.where(asked & (begin > done), begin, valid)
    wanted = tl.where(asked, tl.maximum(end - begin, 0), 0)
    row = tl.arange(0, ROWS)
    fits = tl.sum(tl.minimum(wanted[None, :], row[:, None] + 1), axis=1) <= ROWS
    counts = tl.minimum(wanted, tl.sum(fits.to(tl.int64), axis=0))
    last = tl.cumsum(counts, axis=0)
    of = tl.sum((row[:, None] >= last[None, :]).to(tl.int64), axis=1)
    inside = row < tl.sum(counts, axis=0)
    of = tl.where(inside, of, 0)
    mine = slot[None, :] == of[:, None]
    first = tl.sum(tl.where(mine, (last - counts)[None, :], 0), axis=1)
    row_begin = tl.sum(tl.where(mine, begin[None, :], 0), axis=1)
    position = tl.maximum(row_begin + tl.where(inside, row - first, 0), 0)
    tl.store(slots_ptr + row, tl.where(inside, of, -1))
    tl.store(positions_ptr + row, position)
    tl.store(begin_ptr + row, tl.sum(tl.where(mine, valid[None, :], 0), axis=1))
    tl.store(end_ptr + row, position + 1)
    token = tl.load(history_ptr + of * history_stride + tl.minimum(position + 1, history_stride - 1))
    tl.store(tokens_ptr + row, token)
    tl.store(places_ptr + row, of * num_kept + position % num_kept)
    tl.store(valid_ptr + slot, valid, mask=is_slot)
    tl.store(done_ptr + slot, tl.where(counts > 0, begin + counts, done), mask=is_slot)


@triton.jit(do_not_specialize=["num_slots", "num_rounds", "width"])
def keep_newest_kernel(
    slots_ptr, positions_ptr, hidden_ptr, depths_ptr, lengths_ptr, kept_ptr, kept_position_ptr, ready_ptr,
    out_positions_ptr, out_slots_ptr, out_end_ptr, num_slots, num_rounds, width, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (R + 1, pieces of the hidden). A program of a row copies its hidden if it is the newest of its slot; the
    first program of the last row keeps positions and lays the rounds out. ROUNDS: a power of two >= num_rounds."""
    if tl.program_id(0) < ROWS:
        row = tl.program_id(0).to(tl.int64)
        slot, position = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
        if (slot >= 0) & (position == tl.load(lengths_ptr + tl.maximum(slot, 0)) - 2):
            column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
            inside = column < width
            value = tl.load(hidden_ptr + row * width + column, mask=inside)
            tl.store(kept_ptr + slot * width + column, value.to(kept_ptr.dtype.element_ty), mask=inside)
    elif tl.program_id(1) == 0:
        rows = tl.arange(0, ROWS)
        own, position = tl.load(slots_ptr + rows), tl.load(positions_ptr + rows)
        slot = tl.arange(0, SLOTS)
        is_slot = slot < num_slots
        length = tl.load(lengths_ptr + slot, mask=is_slot, other=0)
        depth = tl.load(depths_ptr + slot, mask=is_slot, other=0)
        before = tl.load(kept_position_ptr + slot, mask=is_slot, other=-1)
        at_end = (own[:, None] == slot[None, :]) & (position[:, None] == (length - 2)[None, :])
        has_newest = tl.max(at_end.to(tl.int32), axis=0) > 0
        newest = tl.where(has_newest, length - 2, before)
        tl.store(kept_position_ptr + slot, newest, mask=is_slot)
        ready = (newest == length - 2) & (length >= 2)
        tl.store(ready_ptr + slot, ready.to(tl.uint8), mask=is_slot)
        column = tl.arange(0, ROUNDS)
        place = column[:, None] * num_slots + slot[None, :]
        inside = (column < num_rounds)[:, None] & is_slot[None, :]
        at = tl.maximum(length - 2, 0)[None, :] + column[:, None]
        runs = ready[None, :] & (depth[None, :] > column[:, None])
        tl.store(out_positions_ptr + place, at, mask=inside)
        tl.store(out_slots_ptr + place, tl.where(runs, slot[None, :], -1).to(tl.int64), mask=inside)
        tl.store(out_end_ptr + place, at + 1, mask=inside)


def joined_norms(parts: tuple[Tensor, Tensor], norms: tuple[Norm, Norm]) -> Tensor:
    """See `Ops.joined_norms`; both parts have one dtype, which is the result's."""
    first, second = (part if part.stride(1) == 1 else part.contiguous() for part in parts)
    if first.shape != second.shape or first.dtype != second.dtype:
        raise ValueError("parts that are joined must have one shape and dtype")
    num_rows, width = first.shape
    out = torch.empty(num_rows, 2 * width, dtype=first.dtype, device=first.device)
    block = triton.next_power_of_2(width)
    joined_norms_kernel[(num_rows, 2)](
        *(first, second, norms[0].weight, norms[1].weight, out, first.stride(0), second.stride(0), width),
        *(norms[0].eps, norms[1].eps),
        FIRST_PLUS_ONE=norms[0].plus_one,
        SECOND_PLUS_ONE=norms[1].plus_one,
        BLOCK_WIDTH=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return out


def best_tokens(logits: Tensor, divisor: Tensor | None, ids: Tensor | None, tickets: Tensor) -> tuple[Tensor, Tensor]:
    """See `Ops.best_tokens`. tickets: int32, zero, at least one a row; launches of one stream may share them."""
    num_rows, size = logits.shape
    if logits.stride(1) != 1 or logits.dtype != torch.float32 or tickets.numel() < num_rows:
        raise ValueError("logits must be float32 and contiguous in their last dimension, with a ticket for each row")
    device = logits.device
    parts = triton.cdiv(size, CHUNK)
    padded = triton.next_power_of_2(parts)
    partial = torch.empty(num_rows, 2, padded, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, padded, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    certainty = torch.empty(num_rows, dtype=torch.float32, device=device)
    best_tokens_kernel[(num_rows, parts)](
        *(logits, logits if divisor is None else divisor.contiguous(), tokens if ids is None else ids),
        *(partial, places, tickets, tokens, certainty, size, logits.stride(0)),
        DIVIDED=divisor is not None,
        MAPPED=ids is not None,
        CHUNK=CHUNK,
        PARTS=padded,
        num_warps=8,
    )
    return tokens, certainty


def store_rows(kept: KeptRows, seen: SeenRows, lengths: Tensor) -> None:
    """See `Ops.store_rows`."""
    sources = seen.sources if seen.sources.stride(1) == 1 else seen.sources.contiguous()
    num_rows, width = sources.shape
    store_rows_kernel[(num_rows + 1, triton.cdiv(width, COPY_BLOCK))](
        *(seen.slots, seen.positions, seen.window_starts, seen.window_rows, sources, lengths, kept.sources, kept.done),
        *(num_rows, lengths.shape[0], kept.sources.shape[1], width, sources.stride(0)),
        SLOTS=triton.next_power_of_2(lengths.shape[0]),
        BLOCK=COPY_BLOCK,
        num_warps=4,
    )


def take_rows(kept: KeptRows, texts: SlotTexts, num_rows: int) -> TakenRows:
    """See `Ops.take_rows`; num_rows is a power of two. The rows' sources are gathered by one more launch."""
    num_slots, num_kept = kept.valid_from.shape[0], kept.sources.shape[1]
    if not all(each.is_contiguous() for each in (kept.sources, texts.history, texts.lengths, texts.depths)):
        raise ValueError("what is kept of the rows and the state of the slots must be contiguous")
    out = torch.empty(6, num_rows, dtype=torch.int64, device=kept.done.device)
    slots, positions, begin, end, tokens, places = out.unbind(0)
    take_rows_kernel[(1,)](
        *(texts.depths, texts.lengths, texts.history, kept.done, kept.valid_from),
        *(slots, positions, begin, end, tokens, places, num_slots, num_kept, texts.history.shape[1]),
        ROWS=num_rows,
        SLOTS=triton.next_power_of_2(num_slots),
        num_warps=1,
    )
    return TakenRows(slots, positions, begin, end, tokens, kept.sources.flatten(0, 1).index_select(0, places))


def keep_newest(taken: TakenRows, hidden: Tensor, newest: NewestRows, texts: SlotTexts, num_rounds: int) -> Rounds:
    """See `Ops.keep_newest`; the number of taken rows is a power of two."""
    num_rows, width = hidden.shape
    num_slots, device = texts.lengths.shape[0], hidden.device
    ready = torch.empty(num_slots, dtype=torch.bool, device=device)
    positions, slots, end = torch.empty(3, num_rounds, num_slots, dtype=torch.int64, device=device).unbind(0)
    keep_newest_kernel[(num_rows + 1, triton.cdiv(width, COPY_BLOCK))](
        *(taken.slots, taken.positions, hidden.contiguous(), texts.depths, texts.lengths),
        *(newest.hidden, newest.position, ready.view(torch.uint8), positions, slots, end, num_slots, num_rounds, width),
        ROWS=num_rows,
        SLOTS=triton.next_power_of_2(num_slots),
        ROUNDS=triton.next_power_of_2(max(num_rounds, 1)),
        BLOCK=COPY_BLOCK,
        num_warps=4,
    )
    return Rounds(ready, positions, slots, end)

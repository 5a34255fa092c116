"""Kernels that keep the rows a drafter has seen, take those that wait, and lay out a proposal's rounds, a launch each.

Specification: reference_drafting.py. Knows slots and positions; knows no networks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.draft_rows import KeptRows, NewestRows, Rounds, SeenRows, SlotTexts, TakenRows
from localspec.kernels.ops import Norm
from localspec.kernels.triton.cards import dependent_launch
from localspec.kernels.triton.drafting import check_table, norm_factors, norm_kind, normed, row_launch

COPY_BLOCK = 1024


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


@triton.jit
def waiting_counts(slot, is_slot, state, num_kept, ROWS: tl.constexpr):
    """Of each slot: where its waiting rows begin, how many are taken, what was done, from where rows are valid."""
    depths_ptr, lengths_ptr, done_ptr, valid_ptr = state
    done = tl.load(done_ptr + slot, mask=is_slot, other=-1)
    end = tl.load(lengths_ptr + slot, mask=is_slot, other=0) - 1
    depth = tl.load(depths_ptr + slot, mask=is_slot, other=0)
    valid = tl.load(valid_ptr + slot, mask=is_slot, other=0)
    begin = tl.maximum(done, end - num_kept)
    asked = (depth > 0) & (done >= 0)
    # Of a slot that is not asked for, rows may be missing because its prompt is still being read.
    valid = tl.where(asked & (begin > done), begin, valid)
    wanted = tl.where(asked, tl.maximum(end - begin, 0), 0)
    cap = 1 + tl.arange(0, ROWS)
    fits = tl.sum(tl.minimum(wanted[None, :], cap[:, None]), axis=1) <= ROWS
    counts = tl.minimum(wanted, tl.sum(fits.to(tl.int64), axis=0))
    return begin, counts, done, valid


@triton.jit
def place_of_row(row, slot, begin, counts):
    """Whether a row of the pass is used, its slot (0 if not), and its position there."""
    last = tl.cumsum(counts, axis=0)
    inside = row < tl.sum(counts, axis=0)
    of = tl.where(inside, tl.sum((row >= last).to(tl.int64), axis=0), 0)
    mine = slot == of
    first = tl.sum(tl.where(mine, last - counts, 0), axis=0)
    row_begin = tl.sum(tl.where(mine, begin, 0), axis=0)
    position = tl.maximum(row_begin + tl.where(inside, row - first, 0), 0)
    return inside, of, position


@triton.jit(do_not_specialize=["num_slots", "num_kept", "history_stride", "vocabulary"])
def take_rows_kernel(
    depths_ptr, lengths_ptr, history_ptr, done_ptr, valid_ptr, kept_ptr, slots_ptr, positions_ptr, begin_ptr, end_ptr,
    tokens_ptr, sources_ptr, tickets_ptr, table_ptr, first_weight_ptr, second_weight_ptr, num_slots, num_kept,
    history_stride, vocabulary, width, first_eps, second_eps, ROWS: tl.constexpr, SLOTS: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R, pieces of a row). Every program finds its row from the state of all slots; the last one changes it.

    FIRST, SECOND: see `norm_factors`; 0: rows are copied. Else there are two pieces, the normed embedding of the token
    behind the row and the normed row, and sources_ptr is [R, 2 * width]. ROWS, SLOTS: powers of two, of which the rows
    are all used. tickets_ptr: [1] int32, zero before and after.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK_WIDTH)
    if FIRST > 0:
        inside_row = column < width
        if piece == 0:
            factors = norm_factors(first_weight_ptr, column, inside_row, FIRST)
        else:
            factors = norm_factors(second_weight_ptr, column, inside_row, SECOND)
    else:
        column += piece * BLOCK_WIDTH
        inside_row = column < width
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    slot = tl.arange(0, SLOTS)
    is_slot = slot < num_slots
    state = (depths_ptr, lengths_ptr, done_ptr, valid_ptr)
    begin, counts, done, valid = waiting_counts(slot, is_slot, state, num_kept, ROWS)
    inside, of, position = place_of_row(row, slot, begin, counts)
    token = tl.load(history_ptr + of * history_stride + tl.minimum(position + 1, history_stride - 1))
    if piece == 0:
        tl.store(slots_ptr + row, tl.where(inside, of, -1))
        tl.store(positions_ptr + row, position)
        tl.store(begin_ptr + row, tl.sum(tl.where(slot == of, valid, 0), axis=0))
        tl.store(end_ptr + row, position + 1)
        tl.store(tokens_ptr + row, token)
    kept = kept_ptr + (of * num_kept + position % num_kept) * width
    if FIRST > 0:
        if piece == 0:
            known = tl.minimum(tl.maximum(token, 0), vocabulary - 1)
            x = tl.load(table_ptr + known * width + column, mask=inside_row, other=0.0)
            x = x.to(sources_ptr.dtype.element_ty).to(tl.float32)
            eps = first_eps
        else:
            x = tl.load(kept + column, mask=inside_row, other=0.0).to(tl.float32)
            eps = second_eps
        value = normed(x, factors, width, eps).to(sources_ptr.dtype.element_ty)
        tl.store(sources_ptr + (row * 2 + piece) * width + column, value, mask=inside_row)
    else:
        tl.store(sources_ptr + row * width + column, tl.load(kept + column, mask=inside_row), mask=inside_row)
    tl.debug_barrier()
    # Programs only have to have read what the last one changes, and what they stored depends on that: no fence.
    arrived = tl.atomic_add(tickets_ptr, 1, sem="relaxed", scope="gpu")
    if arrived == ROWS * tl.num_programs(1) - 1:
        tl.store(tickets_ptr, 0)
        tl.store(valid_ptr + slot, valid, mask=is_slot)
        tl.store(done_ptr + slot, tl.where(counts > 0, begin + counts, done), mask=is_slot)


@triton.jit(do_not_specialize=["num_slots", "num_rounds"])
def keep_newest_kernel(
    slots_ptr, positions_ptr, hidden_ptr, weight_ptr, depths_ptr, lengths_ptr, kept_ptr, kept_position_ptr, ready_ptr,
    out_positions_ptr, out_slots_ptr, out_end_ptr, num_slots, num_rounds, width, eps, ROWS: tl.constexpr,
    SLOTS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R + 1,). A program of a row keeps its hidden, normed, if it is the newest of its slot; the last one keeps
    positions and lays the rounds out. ROUNDS: a power of two >= num_rounds; NORM: see `norm_factors`, 0: none."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_WIDTH)
    inside = column < width
    if NORM > 0:
        factors = norm_factors(weight_ptr, column, inside, NORM)
    slot = tl.arange(0, SLOTS)
    is_slot = slot < num_slots
    # Nothing in a proposal changes lengths and depths.
    length = tl.load(lengths_ptr + slot, mask=is_slot, other=0)
    depth = tl.load(depths_ptr + slot, mask=is_slot, other=0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if row < ROWS:
        own, at = tl.load(slots_ptr + row), tl.load(positions_ptr + row)
        # Asked for before it is known whether it is wanted: one round trip to memory less.
        value = tl.load(hidden_ptr + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if (own >= 0) & (at == tl.sum(tl.where(slot == own, length, 0), axis=0) - 2):
            if NORM > 0:
                value = normed(value, factors, width, eps)
            tl.store(kept_ptr + own * width + column, value.to(kept_ptr.dtype.element_ty), mask=inside)
    else:
        rows = tl.arange(0, ROWS)
        owners, positions = tl.load(slots_ptr + rows), tl.load(positions_ptr + rows)
        before = tl.load(kept_position_ptr + slot, mask=is_slot, other=-1)
        at_end = (owners[:, None] == slot[None, :]) & (positions[:, None] == (length - 2)[None, :])
        has_newest = tl.max(at_end.to(tl.int32), axis=0) > 0
        newest = tl.where(has_newest, length - 2, before)
        tl.store(kept_position_ptr + slot, newest, mask=is_slot)
        ready = (newest == length - 2) & (length >= 2)
        tl.store(ready_ptr + slot, ready.to(tl.uint8), mask=is_slot)
        round_ = tl.arange(0, ROUNDS)
        place = round_[:, None] * num_slots + slot[None, :]
        used = (round_ < num_rounds)[:, None] & is_slot[None, :]
        places = tl.maximum(length - 2, 0)[None, :] + round_[:, None]
        runs = ready[None, :] & (depth[None, :] > round_[:, None])
        tl.store(out_positions_ptr + place, places, mask=used)
        tl.store(out_slots_ptr + place, tl.where(runs, slot[None, :], -1).to(tl.int64), mask=used)
        tl.store(out_end_ptr + place, places + 1, mask=used)


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


def take_rows(kept: KeptRows, texts: SlotTexts, num_rows: int, tickets: Tensor) -> TakenRows:
    """See `Ops.take_rows`; num_rows is a power of two. tickets: as for `best_tokens`, one is used."""
    num_slots, num_kept = kept.valid_from.shape[0], kept.sources.shape[1]
    if not all(each.is_contiguous() for each in (kept.sources, texts.history, texts.lengths, texts.depths)):
        raise ValueError("what is kept of the rows and the state of the slots must be contiguous")
    device, width, joined = kept.done.device, kept.sources.shape[2], kept.joined
    slots, positions, begin, end, tokens = torch.empty(5, num_rows, dtype=torch.int64, device=device).unbind(0)
    if joined is not None:
        check_table(joined.table, kept.sources)
        norms, table, pieces = (joined.embedding, joined.source), joined.table, 2
        launch = row_launch(width, device)
    else:
        norms, table, pieces = None, kept.sources, triton.cdiv(width, COPY_BLOCK)
        dependent = dependent_launch(device)
        launch = {"BLOCK_WIDTH": COPY_BLOCK, "num_warps": 4, "PDL": dependent, "launch_pdl": dependent}
    sources = torch.empty(num_rows, width if norms is None else 2 * width, dtype=kept.sources.dtype, device=device)
    weights = (kept.sources, kept.sources) if norms is None else (norms[0].weight, norms[1].weight)
    take_rows_kernel[(num_rows, pieces)](
        *(texts.depths, texts.lengths, texts.history, kept.done, kept.valid_from, kept.sources),
        *(slots, positions, begin, end, tokens, sources, tickets, table, *weights),
        *(num_slots, num_kept, texts.history.shape[1], table.shape[0], width),
        *((0.0, 0.0) if norms is None else (norms[0].eps, norms[1].eps)),
        ROWS=num_rows,
        SLOTS=triton.next_power_of_2(num_slots),
        FIRST=0 if norms is None else norm_kind(norms[0]),
        SECOND=0 if norms is None else norm_kind(norms[1]),
        **launch,
    )
    return TakenRows(slots, positions, begin, end, tokens, sources)


def keep_newest(
    taken: TakenRows,
    hidden: Tensor,
    newest: NewestRows,
    texts: SlotTexts,
    num_rounds: int,
    norm: Norm | None = None,
) -> Rounds:
    """See `Ops.keep_newest`; the number of taken rows is a power of two."""
    num_rows, width = hidden.shape
    num_slots, device = texts.lengths.shape[0], hidden.device
    ready = torch.empty(num_slots, dtype=torch.bool, device=device)
    positions, slots, end = torch.empty(3, num_rounds, num_slots, dtype=torch.int64, device=device).unbind(0)
    hidden = hidden.contiguous()
    keep_newest_kernel[(num_rows + 1,)](
        *(taken.slots, taken.positions, hidden, hidden if norm is None else norm.weight, texts.depths, texts.lengths),
        *(newest.hidden, newest.position, ready.view(torch.uint8), positions, slots, end, num_slots, num_rounds, width),
        0.0 if norm is None else norm.eps,
        ROWS=num_rows,
        SLOTS=triton.next_power_of_2(num_slots),
        ROUNDS=triton.next_power_of_2(max(num_rounds, 1)),
        NORM=norm_kind(norm),
        **row_launch(width, device),
    )
    return Rounds(ready, positions, slots, end)

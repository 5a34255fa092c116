"""The small things between a drafter's matmuls, a launch each; specification: reference_drafting.py.

In PyTorch a proposal has a hundred launches of a microsecond or two each, as much as its matmuls take. Under dependent
launch each kernel reads only what nobody writes before it waits for the one before, and lets the next one, mostly a
weight stream that fills its rings meanwhile, start at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.draft_rows import DraftNote
from localspec.kernels.ops import Norm
from localspec.kernels.triton.cards import dependent_launch

CHUNK = 4096
"""Logits of one program; the last program of a row puts the row together."""


@triton.jit
def norm_factors(weight_ptr, columns, inside, NORM: tl.constexpr):
    """What a norm multiplies with, float32. NORM: 1, or 2 for a norm that multiplies by 1 + weight."""
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if NORM == 2:
        weight += 1.0
    return weight


@triton.jit
def normed(x, factors, width, eps):
    """RMS norm of a row of float32, zero beyond its width."""
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / width + eps) * factors


@triton.jit(do_not_specialize=["vocabulary"])
def joined_norms_kernel(
    ids_ptr, table_ptr, hidden_ptr, first_weight_ptr, second_weight_ptr, before_weight_ptr, out_ptr, hidden_stride,
    vocabulary, width, first_eps, second_eps, before_eps, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BEFORE: tl.constexpr, BLOCK_WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R, 2). Rows of `width` values -> out_ptr [R, 2 * width].

    FIRST, SECOND, BEFORE: see `norm_factors`; 0: none. table_ptr may point to pinned host memory, which the card
    reads over the bus.
    """
    row, side = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK_WIDTH)
    inside = columns < width
    out = out_ptr + row * (2 * width) + side * width + columns
    if side == 0:
        factors = norm_factors(first_weight_ptr, columns, inside, FIRST)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        token = tl.minimum(tl.maximum(tl.load(ids_ptr + row), 0), vocabulary - 1).to(tl.int64)
        x = tl.load(table_ptr + token * width + columns, mask=inside, other=0.0)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.store(out, normed(x, factors, width, first_eps).to(out_ptr.dtype.element_ty), mask=inside)
    else:
        factors = norm_factors(second_weight_ptr, columns, inside, SECOND)
        if BEFORE > 0:
            before = norm_factors(before_weight_ptr, columns, inside, BEFORE)
        if PDL:
            gdc_wait()
            gdc_launch_dependents()
        x = tl.load(hidden_ptr + row * hidden_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if BEFORE > 0:
            x = normed(x, before, width, before_eps).to(out_ptr.dtype.element_ty).to(tl.float32)
        tl.store(out, normed(x, factors, width, second_eps).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def note_draft(
    row, token, certainty, depth, ready, drafts_ptr, origins_ptr, confidence_ptr, counts_ptr, num_slots, width,
    num_columns, column, first, num_rows, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a row's draft of one column; with the first also what no column will write, of its own slot and, by the
    first row, of slots without rows. SLOTS, COLUMNS: powers of two >= num_slots, width."""
    slot, each = tl.arange(0, SLOTS)[:, None], tl.arange(0, COLUMNS)[None, :]
    own = slot == first + row
    nobodys = (row == 0) & ((slot < first) | (slot >= first + num_rows)) & (slot < num_slots)
    mine = own & (each == column)
    rest = (column == 0) & (nobodys | (own & (each >= num_columns)))
    wanted = (mine | rest) & (each < width)
    drafts = mine & ready & (depth > column)
    place = slot * width + each
    tl.store(drafts_ptr + place, tl.where(drafts, token, -1), mask=wanted)
    tl.store(confidence_ptr + place, tl.where(drafts, certainty, 0.0), mask=wanted)
    tl.store(origins_ptr + place, tl.zeros([SLOTS, COLUMNS], tl.int64), mask=wanted)
    if column == 0:
        count = tl.minimum(tl.maximum(depth, 0), num_columns)
        counts = tl.where(own & ready, count, 0)
        tl.store(counts_ptr + slot, counts, mask=own | nobodys)


@triton.jit
def best_of_parts(values, places_of, parts, size, PARTS: tl.constexpr):
    """A row's best token and its probability from what all parts found; the first of equals. Other programs wrote it,
    hence past the L1 cache."""
    each = tl.arange(0, PARTS)
    known = each < parts
    tops = tl.load(values + each, mask=known, other=-float("inf"), cache_modifier=".cg")
    sums = tl.load(values + PARTS + each, mask=known, other=0.0, cache_modifier=".cg")
    places = tl.load(places_of + each, mask=known, other=0, cache_modifier=".cg")
    tokens = tl.load(places_of + PARTS + each, mask=known, other=0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    first = tl.min(tl.where(known & (tops == top), places, size), axis=0)
    token = tl.sum(tl.where(known & (places == first), tokens, 0), axis=0).to(tl.int64)
    return token, 1.0 / tl.sum(sums * tl.exp(tops - top), axis=0)


@triton.jit(do_not_specialize=["num_slots", "draft_width", "num_columns", "column", "first_slot"])
def best_tokens_kernel(
    logits_ptr, divisor_ptr, ids_ptr, partial_ptr, partial_place_ptr, tickets_ptr, tokens_ptr, certainty_ptr,
    chosen_ptr, ready_ptr, depths_ptr, drafts_ptr, origins_ptr, confidence_ptr, counts_ptr, size, stride, num_slots,
    draft_width, num_columns, column, first_slot, DIVIDED: tl.constexpr, MAPPED: tl.constexpr, NOTED: tl.constexpr,
    CHOSEN: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (R, parts). partial_ptr: [R, 2, PARTS] float32, partial_place_ptr: [R, 2, PARTS] int32, places and their
    tokens, both scratch; tickets_ptr: [R] int32, zero before and after. PARTS: a power of two >= parts. NOTED: see
    `note_draft`. Whatever the last program needs is asked for before it is known to be the last.
    """
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    place = part * CHUNK + tl.arange(0, CHUNK)
    inside = place < size
    if MAPPED:
        ids = tl.load(ids_ptr + place, mask=inside, other=-1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(logits_ptr + row * stride + place, mask=inside, other=-float("inf"))
    if NOTED:
        depth, ready = tl.load(depths_ptr + row), tl.load(ready_ptr + row) != 0
    if CHOSEN:
        chosen = tl.load(chosen_ptr + row)
    if MAPPED:
        x = tl.where(ids < 0, -float("inf"), x)
    if DIVIDED:
        x = x / tl.load(divisor_ptr + row)
    best, at = tl.max(x, axis=0, return_indices=True)
    own_place = tl.minimum(part * CHUNK + at, size - 1)
    own_token = own_place
    if MAPPED:
        own_token = tl.maximum(tl.load(ids_ptr + own_place), 0).to(tl.int32)
    shift = tl.where(best == -float("inf"), 0.0, best)
    values, places_of = partial_ptr + row * (2 * PARTS), partial_place_ptr + row * (2 * PARTS)
    tl.store(values + part, best)
    tl.store(values + PARTS + part, tl.sum(tl.exp(x - shift), axis=0))
    tl.store(places_of + part, own_place)
    tl.store(places_of + PARTS + part, own_token)
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets_ptr + row, 1, sem="acq_rel", scope="gpu")
    if arrived == parts - 1:
        tl.store(tickets_ptr + row, 0)
        token, certainty = best_of_parts(values, places_of, parts, size, PARTS)
        tl.store(tokens_ptr + row, token)
        tl.store(certainty_ptr + row, certainty)
        if NOTED:
            if CHOSEN:
                token = chosen
            note_draft(
                row, token, certainty, depth, ready, drafts_ptr, origins_ptr, confidence_ptr, counts_ptr, num_slots,
                draft_width, num_columns, column, first_slot, tl.num_programs(0), SLOTS, COLUMNS,
            )  # fmt: skip


def norm_kind(norm: Norm | None) -> int:
    """As kernels know it: 0 none, 1 multiplies by its weight, 2 by 1 + weight."""
    return 0 if norm is None else 1 + norm.plus_one


def row_launch(width: int, device: torch.device) -> dict[str, int | bool]:
    """Launch options of a kernel whose programs hold a row of `width` values each."""
    block = triton.next_power_of_2(width)
    dependent = dependent_launch(device)
    return {
        "BLOCK_WIDTH": block,
        "num_warps": max(1, min(16, block // 512)),
        "PDL": dependent,
        "launch_pdl": dependent,
    }


def check_table(table: Tensor, beside: Tensor) -> None:
    """Raises ValueError for an embedding table that kernels cannot read beside such hiddens."""
    if not table.is_contiguous() or not (table.device == beside.device or table.is_pinned()):
        raise ValueError("the embedding table must be contiguous and lie on the device or in pinned host memory")
    if table.shape[1] != beside.shape[-1]:
        raise ValueError(f"embeddings of {table.shape[1]} values do not fit hiddens of {beside.shape[-1]}")


def joined_norms(
    token_ids: Tensor, table: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], before: Norm | None = None
) -> Tensor:
    """See `Ops.joined_norms`; the result has the hiddens' dtype. Raises ValueError for what cannot be read."""
    check_table(table, hidden)
    if hidden.ndim != 2 or token_ids.shape != hidden.shape[:1]:
        raise ValueError(f"there must be one token for each hidden, not {tuple(token_ids.shape)} for {hidden.shape[0]}")
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    num_rows, width = hidden.shape
    out = torch.empty(num_rows, 2 * width, dtype=hidden.dtype, device=hidden.device)
    joined_norms_kernel[(num_rows, 2)](
        *(token_ids.contiguous(), table, hidden, norms[0].weight, norms[1].weight),
        *(norms[0].weight if before is None else before.weight, out, hidden.stride(0), table.shape[0], width),
        *(norms[0].eps, norms[1].eps, 0.0 if before is None else before.eps),
        FIRST=norm_kind(norms[0]),
        SECOND=norm_kind(norms[1]),
        BEFORE=norm_kind(before),
        **row_launch(width, hidden.device),
    )
    return out


def best_tokens(
    logits: Tensor, divisor: Tensor | None, ids: Tensor | None, tickets: Tensor, note: DraftNote | None = None
) -> tuple[Tensor, Tensor]:
    """See `Ops.best_tokens`. tickets: int32, zero, at least one a row; launches of one stream may share them."""
    num_rows, size = logits.shape
    if logits.stride(1) != 1 or logits.dtype != torch.float32 or tickets.numel() < num_rows:
        raise ValueError("logits must be float32 and contiguous in their last dimension, with a ticket for each row")
    if note is not None and note.columns.ready.shape[0] != num_rows:
        raise ValueError(f"{num_rows} rows cannot be noted for {note.columns.ready.shape[0]}; they must be the same")
    device = logits.device
    parts = triton.cdiv(size, CHUNK)
    padded = triton.next_power_of_2(parts)
    partial = torch.empty(num_rows, 2, padded, dtype=torch.float32, device=device)
    places = torch.empty(num_rows, 2, padded, dtype=torch.int32, device=device)
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    certainty = torch.empty(num_rows, dtype=torch.float32, device=device)
    unread = (tokens, tokens, tokens, tokens, tokens, certainty, tokens, 1, 1, 0, 0, 0)
    noted = unread if note is None else _note_arguments(note)
    slots, columns = (1, 1) if note is None else note.columns.token_ids.shape
    dependent = dependent_launch(device)
    best_tokens_kernel[(num_rows, parts)](
        *(logits, logits if divisor is None else divisor.contiguous(), tokens if ids is None else ids),
        *(partial, places, tickets, tokens, certainty),
        *(*noted[:7], size, logits.stride(0), *noted[7:]),
        DIVIDED=divisor is not None,
        MAPPED=ids is not None,
        NOTED=note is not None,
        CHOSEN=note is not None and note.chosen is not None,
        SLOTS=triton.next_power_of_2(slots),
        COLUMNS=triton.next_power_of_2(columns),
        CHUNK=CHUNK,
        PARTS=padded,
        PDL=dependent,
        num_warps=8,
        launch_pdl=dependent,
    )
    return tokens, certainty


def _note_arguments(note: DraftNote) -> tuple[Tensor | int, ...]:
    """Pointers and numbers that `note_draft` wants, in the kernel's order."""
    columns = note.columns
    return (
        *(columns.token_ids if note.chosen is None else note.chosen.contiguous(), columns.ready.view(torch.uint8)),
        *(columns.depths, columns.token_ids, columns.origins, columns.confidence, columns.num_drafts),
        *(*columns.token_ids.shape, columns.num_columns, note.column, columns.first),
    )

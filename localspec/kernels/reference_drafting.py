"""The small things between a drafter's matmuls, in plain PyTorch: specifies `Ops.best_tokens`, `store_rows`,
`take_rows`, `keep_newest`. Knows no networks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.draft_rows import (
    DraftNote,
    JoinedNorms,
    KeptRows,
    NewestRows,
    Rounds,
    SeenRows,
    SlotTexts,
    TakenRows,
)
from localspec.kernels.ops import Norm


def best_tokens(
    logits: Tensor, divisor: Tensor | None, ids: Tensor | None, note: DraftNote | None = None
) -> tuple[Tensor, Tensor]:
    """See `Ops.best_tokens`."""
    if ids is not None:
        logits = logits.masked_fill(ids < 0, -torch.inf)
    if divisor is not None:
        logits = logits / divisor[:, None]
    first = logits.argmax(dim=1)
    certainty = (logits.amax(dim=1) - logits.logsumexp(dim=1)).exp()
    tokens = first if ids is None else ids[first].clamp(min=0)
    if note is not None:
        _note(note, tokens, certainty)
    return tokens, certainty


def _note(note: DraftNote, tokens: Tensor, certainty: Tensor) -> None:
    columns, column = note.columns, note.column
    rows = slice(columns.first, columns.first + tokens.shape[0])
    if column == 0:
        columns.token_ids.fill_(-1)
        columns.origins.zero_()
        columns.confidence.zero_()
        columns.num_drafts.zero_()
        count = columns.depths.clamp(0, columns.num_columns)
        columns.num_drafts[rows] = torch.where(columns.ready, count, 0)
    drafts = columns.ready & (columns.depths > column)
    columns.token_ids[rows, column] = torch.where(drafts, tokens if note.chosen is None else note.chosen, -1)
    columns.confidence[rows, column] = torch.where(drafts, certainty, 0.0)


def store_rows(kept: KeptRows, seen: SeenRows, lengths: Tensor) -> None:
    """See `Ops.store_rows`."""
    num_slots = lengths.shape[0]
    committed = (seen.slots >= 0) & (seen.positions + 1 < lengths[seen.slots.clamp(min=0)])
    place = torch.where(committed, seen.slots, num_slots)
    kept.sources[place, seen.positions % kept.sources.shape[1]] = seen.sources.to(kept.sources.dtype)
    done = kept.done[:num_slots]
    first = seen.positions[seen.window_starts.clamp(max=seen.positions.shape[0] - 1)]
    done.copy_(torch.where((done < 0) & (seen.window_rows > 0), first, done))


def take_rows(kept: KeptRows, texts: SlotTexts, num_rows: int) -> TakenRows:
    """See `Ops.take_rows`."""
    num_slots, num_kept = kept.valid_from.shape[0], kept.sources.shape[1]
    done, ends = kept.done[:num_slots], texts.lengths - 1
    begin = torch.maximum(done, ends - num_kept)
    asked = (texts.depths > 0) & (done >= 0)
    # Of a slot that is not asked for, rows may be missing because its prompt is still being read.
    kept.valid_from.copy_(torch.where(asked & (begin > done), begin, kept.valid_from))
    wanted = torch.where(asked, (ends - begin).clamp(min=0), 0)
    cap = torch.arange(1, num_rows + 1, device=wanted.device)
    fits = torch.minimum(wanted, cap[:, None]).sum(dim=1) <= num_rows
    counts = torch.minimum(wanted, fits.sum())
    last = counts.cumsum(dim=0)
    row = torch.arange(num_rows, device=wanted.device)
    slot = (row[:, None] >= last).sum(dim=1)
    inside = slot < num_slots
    slot = torch.where(inside, slot, 0)
    offset = torch.where(inside, row - (last - counts)[slot], 0)
    positions = (begin[slot] + offset).clamp(min=0)
    done.copy_(torch.where(counts > 0, begin + counts, done))
    token_ids = texts.history[slot, (positions + 1).clamp(max=texts.history.shape[1] - 1)]
    sources = kept.sources[slot, positions % num_kept]
    return TakenRows(
        slots=torch.where(inside, slot, -1),
        positions=positions,
        key_begin=kept.valid_from[slot],
        key_end=positions + 1,
        token_ids=token_ids,
        sources=sources if kept.joined is None else _joined(token_ids, sources, kept.joined),
    )


def _joined(token_ids: Tensor, sources: Tensor, joined: JoinedNorms) -> Tensor:
    embeddings = joined.table[token_ids.clamp(0, joined.table.shape[0] - 1).to(joined.table.device)].to(sources)
    pairs = (embeddings, joined.embedding), (sources, joined.source)
    return torch.cat([_normed(part, norm) for part, norm in pairs], dim=1)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    weight = norm.weight.float() + float(norm.plus_one)
    scale = (x.float().square().mean(dim=-1, keepdim=True) + norm.eps).rsqrt()
    return (x.float() * scale * weight).to(x.dtype)


def keep_newest(taken: TakenRows, hidden: Tensor, newest: NewestRows, texts: SlotTexts, num_rounds: int) -> Rounds:
    """See `Ops.keep_newest`."""
    num_slots = texts.lengths.shape[0]
    slot = torch.arange(num_slots, device=texts.lengths.device)[:, None]
    is_newest = (taken.slots == slot) & (taken.positions == texts.lengths[:, None] - 2)  # [S, R]
    found, row = is_newest.any(dim=1), is_newest.to(torch.uint8).argmax(dim=1)
    newest.hidden.copy_(torch.where(found[:, None], hidden[row].to(newest.hidden.dtype), newest.hidden))
    newest.position.copy_(torch.where(found, texts.lengths - 2, newest.position))
    ready = (newest.position == texts.lengths - 2) & (texts.lengths >= 2)
    column = torch.arange(num_rounds, device=ready.device)[:, None]
    positions = (texts.lengths - 2).clamp(min=0) + column
    runs = ready & (texts.depths > column)
    slots = torch.where(runs, torch.arange(num_slots, device=ready.device), -1)
    return Rounds(ready, positions, slots, positions + 1)

"""The kernels between a drafter's matmuls on a card, at the 27B's sizes, against their specification."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from localspec.kernels import reference_drafting
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.draft_rows import DraftColumns, DraftNote, JoinedNorms, KeptRows, NewestRows, SeenRows, SlotTexts
from localspec.kernels.ops import Norm
from localspec.kernels.triton import drafting, waiting_rows

pytestmark = pytest.mark.gpu
SLOTS, KEPT, WIDTH, CONTEXT = 4, 64, 5120, 400


def _equal(found: object, wanted: object) -> None:
    for field in fields(found):  # type: ignore[arg-type]
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name


def _copy(kept: KeptRows) -> KeptRows:
    return KeptRows(kept.sources.clone(), kept.done.clone(), kept.valid_from.clone())


def test_rows_are_kept_taken_and_laid_out() -> None:
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda")

    tickets = torch.zeros(1, dtype=torch.int32, device="cuda")
    norm = Norm(torch.randn(WIDTH, device="cuda", generator=generator) * 0.1, 1e-6, plus_one=True)
    joined = JoinedNorms(torch.randn(3000, WIDTH, device="cuda", generator=generator).bfloat16(), norm, norm)
    reference = ReferenceOps(torch.device("cuda"), torch.bfloat16)
    for turn in range(60):
        lengths = draw(2, CONTEXT, SLOTS)
        done = torch.cat([(lengths - draw(0, 90, SLOTS)).clamp(min=-1), draw(0, 1, 1) - 1])
        sources = torch.randn(SLOTS + 1, KEPT, WIDTH, device="cuda", generator=generator).bfloat16()
        kept = KeptRows(sources, done, draw(0, 3, SLOTS))
        other = _copy(kept)
        slots = torch.tensor([0, 0, 0, 0, 2, 2, 2, -1], device="cuda")
        positions = lengths[slots.clamp(min=0)] - 2 + torch.tensor([0, 1, 2, 3, 0, 1, 2, 0], device="cuda")
        starts, counts = (torch.tensor(values, device="cuda") for values in ([0, 4, 4, 7], [4, 0, 3, 0]))
        rows = torch.randn(8, WIDTH, device="cuda", generator=generator).bfloat16()
        seen = SeenRows(slots, positions, starts, counts, rows)
        waiting_rows.store_rows(kept, seen, lengths)
        reference_drafting.store_rows(other, seen, lengths)
        assert torch.equal(kept.sources[:SLOTS], other.sources[:SLOTS]) and torch.equal(kept.done, other.done)
        texts = SlotTexts(draw(0, 248320, SLOTS, CONTEXT), lengths, draw(0, 4, SLOTS))
        num_rows = (4, 8, 16)[turn % 3]
        if turn % 2:
            pairs = replace(kept, joined=joined), replace(other, joined=joined)
            again, same = (replace(each, done=each.done.clone(), valid_from=each.valid_from.clone()) for each in pairs)
            one, two = (
                waiting_rows.take_rows(again, texts, num_rows, tickets),
                reference_drafting.take_rows(same, texts, num_rows),
            )
            torch.testing.assert_close(one.sources, two.sources, rtol=2e-2, atol=2e-2)
            assert torch.equal(one.positions, two.positions) and torch.equal(again.done, same.done)
        found = waiting_rows.take_rows(kept, texts, num_rows, tickets)
        wanted = reference_drafting.take_rows(other, texts, num_rows)
        _equal(found, wanted)
        assert not bool(tickets.any())
        assert torch.equal(kept.done, other.done) and torch.equal(kept.valid_from, other.valid_from)
        hidden = torch.randn(num_rows, WIDTH, device="cuda", generator=generator).bfloat16()
        newest = NewestRows(torch.zeros(SLOTS, WIDTH, device="cuda").bfloat16(), lengths.new_full((SLOTS,), -1))
        same = NewestRows(newest.hidden.clone(), newest.position.clone())
        used = norm if turn % 3 else None
        rounds = waiting_rows.keep_newest(found, hidden, newest, texts, 7, used)
        _equal(rounds, reference.keep_newest(wanted, hidden, same, texts, 7, used))
        torch.testing.assert_close(newest.hidden, same.hidden, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [32768, 248320])
def test_best_tokens(size: int) -> None:
    generator = torch.Generator("cuda").manual_seed(size)
    logits = torch.randn(4, size, device="cuda", generator=generator) * 5
    ids = torch.randperm(size, device="cuda", generator=generator)
    ids[logits[0].argmax()] = -1
    tickets = torch.zeros(16, dtype=torch.int32, device="cuda")
    for divisor in (None, torch.tensor([1.0, 0.3, 0.7, 2.0], device="cuda")):
        for mapped in (None, ids):
            found = drafting.best_tokens(logits, divisor, mapped, tickets)
            wanted = reference_drafting.best_tokens(logits, divisor, mapped)
            assert torch.equal(found[0], wanted[0]) and not bool(tickets.any())
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-4, atol=1e-7)


def test_joined_norms() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    hidden = torch.randn(16, WIDTH, device="cuda", generator=generator).bfloat16()
    table = torch.randn(700, WIDTH, device="cuda", generator=generator).bfloat16()
    ids = torch.randint(0, 700, (16,), device="cuda", generator=generator)
    norms = [Norm(torch.randn(WIDTH, device="cuda", generator=generator), 1e-6, plus_one=True) for _ in range(3)]
    reference = ReferenceOps(hidden.device, torch.bfloat16)
    for before in (None, norms[2]):
        for place in (table, table.cpu().pin_memory()):
            found = drafting.joined_norms(ids, place, hidden, (norms[0], norms[1]), before)
            wanted = reference.joined_norms(ids, table, hidden, (norms[0], norms[1]), before)
            torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)


def test_drafts_are_noted_column_by_column() -> None:
    generator = torch.Generator("cuda").manual_seed(5)
    tickets = torch.zeros(SLOTS, dtype=torch.int32, device="cuda")
    ready = torch.tensor([True, True, False, True], device="cuda")
    depths = torch.tensor([2, 0, 3, 7], device="cuda")
    found, wanted = (DraftColumns.empty((SLOTS + 2, 7), 5, ready, depths, first=1) for _ in range(2))
    for column in range(5):
        logits = torch.randn(SLOTS, 32768, device="cuda", generator=generator) * 4
        chosen = torch.randint(0, 300, (SLOTS,), device="cuda", generator=generator) if column % 2 else None
        drafting.best_tokens(logits, None, None, tickets, DraftNote(found, column, chosen))
        reference_drafting.best_tokens(logits, None, None, DraftNote(wanted, column, chosen))
    for name in ("token_ids", "origins", "num_drafts"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.confidence, wanted.confidence, rtol=1e-4, atol=1e-7)

"""The kernels between a drafter's matmuls on a card, at the 27B's sizes, against their specification."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from localspec.kernels import reference_drafting
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.draft_rows import KeptRows, NewestRows, SeenRows, SlotTexts
from localspec.kernels.ops import Norm
from localspec.kernels.triton import drafting

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

    for _ in range(60):
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
        drafting.store_rows(kept, seen, lengths)
        reference_drafting.store_rows(other, seen, lengths)
        assert torch.equal(kept.sources[:SLOTS], other.sources[:SLOTS]) and torch.equal(kept.done, other.done)
        texts = SlotTexts(draw(0, 248320, SLOTS, CONTEXT), lengths, draw(0, 4, SLOTS))
        found, wanted = drafting.take_rows(kept, texts, 16), reference_drafting.take_rows(other, texts, 16)
        _equal(found, wanted)
        assert torch.equal(kept.done, other.done) and torch.equal(kept.valid_from, other.valid_from)
        hidden = torch.randn(16, WIDTH, device="cuda", generator=generator).bfloat16()
        newest = NewestRows(torch.zeros(SLOTS + 1, WIDTH, device="cuda").bfloat16(), lengths.new_full((SLOTS + 1,), -1))
        same = NewestRows(newest.hidden.clone(), newest.position.clone())
        rounds = drafting.keep_newest(found, hidden, newest, texts, 7)
        _equal(rounds, reference_drafting.keep_newest(wanted, hidden, same, texts, 7))
        assert torch.equal(newest.hidden[:SLOTS], same.hidden[:SLOTS])


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
    parts = [torch.randn(16, WIDTH, device="cuda", generator=generator).bfloat16() for _ in range(2)]
    weights = [torch.randn(WIDTH, device="cuda", generator=generator).bfloat16() for _ in range(2)]
    norms = Norm(weights[0], 1e-6, plus_one=True), Norm(weights[1], 1e-6, plus_one=True)
    wanted = ReferenceOps(parts[0].device, torch.bfloat16).joined_norms((parts[0], parts[1]), norms)
    found = drafting.joined_norms((parts[0], parts[1]), norms)
    torch.testing.assert_close(found.float(), wanted.float(), rtol=2e-2, atol=2e-2)

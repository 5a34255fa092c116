"""Numerics of the kernels between a drafter's matmuls, in the interpreter. Run by test_interpreter.py on its own."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import tests.helpers.interpreter  # noqa: F401  must come before the kernels

import pytest  # isort: skip
import torch  # isort: skip
from torch import Tensor  # isort: skip

from localspec.kernels import reference_drafting  # isort: skip
from localspec.kernels.backends.reference import ReferenceOps  # isort: skip
from localspec.kernels.draft_rows import DraftColumns, DraftNote, JoinedNorms, KeptRows, NewestRows, SeenRows, SlotTexts  # isort: skip
from localspec.kernels.ops import Norm  # isort: skip
from localspec.kernels.self_test_drafting import drafting_error  # isort: skip
from localspec.kernels.triton import drafting, waiting_rows  # isort: skip

REFERENCE = ReferenceOps(torch.device("cpu"))
KEPT, SLOTS, WIDTH = 8, 4, 6
torch.set_num_threads(1)


def _equal(found: object, wanted: object) -> None:
    for field in fields(found):  # type: ignore[arg-type]
        one, other = getattr(found, field.name), getattr(wanted, field.name)
        if isinstance(one, Tensor) and one.is_floating_point():
            torch.testing.assert_close(one, other)
        elif isinstance(one, Tensor):
            assert torch.equal(one, other), field.name


def _copy(part: KeptRows | NewestRows) -> dict[str, Any]:
    named = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in named.items()}


@pytest.mark.parametrize(("num_rows", "num_rounds"), [(4, 30), (16, 24)])
def test_rows_that_wait_are_taken_and_their_newest_kept(num_rows: int, num_rounds: int) -> None:
    """Random sequences, pauses beyond what is kept, slots that were never seen or are not asked; whole numbers."""
    generator = torch.Generator().manual_seed(num_rows)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    norm = Norm(torch.randn(WIDTH, generator=generator), 1e-6, plus_one=True)
    joined = JoinedNorms(torch.randn(99, WIDTH, generator=generator), norm, Norm(norm.weight * 2, 1e-4))
    tickets = torch.zeros(2, dtype=torch.int32)
    seen_ready = seen_lost = 0
    for round_ in range(num_rounds):
        lengths = draw(0, 30, SLOTS)
        done = torch.cat([(lengths - draw(0, 14, SLOTS)).clamp(min=-1), torch.tensor([-1])])
        rows = torch.randn(SLOTS + 1, KEPT, WIDTH, generator=generator)
        kept = KeptRows(rows, done, draw(0, 3, SLOTS), joined if round_ % 2 else None)
        texts = SlotTexts(draw(0, 99, SLOTS, 31), lengths, draw(-1, 4, SLOTS).clamp(min=0))
        other = KeptRows(**_copy(kept))
        found, wanted = (
            waiting_rows.take_rows(kept, texts, num_rows, tickets),
            reference_drafting.take_rows(other, texts, num_rows),
        )
        _equal(found, wanted)
        _equal(kept, other)
        assert not tickets.any()
        seen_lost += int((kept.valid_from > 2).any())
        hidden = torch.randn(num_rows, WIDTH, generator=generator)
        newest = NewestRows(torch.randn(SLOTS, WIDTH, generator=generator), draw(-1, 30, SLOTS))
        if round_ % 2:
            newest.position[:] = torch.where(draw(0, 2, SLOTS) > 0, lengths - 2, newest.position)
        same = NewestRows(**_copy(newest))
        used = norm if round_ % 3 else None
        rounds = waiting_rows.keep_newest(found, hidden, newest, texts, 1 + round_ % 5, used)
        _equal(rounds, REFERENCE.keep_newest(wanted, hidden, same, texts, 1 + round_ % 5, used))
        torch.testing.assert_close(newest.hidden, same.hidden)
        assert torch.equal(newest.position, same.position)
        seen_ready += int(rounds.ready.any())
    assert seen_ready > 5 and seen_lost > 5


@pytest.mark.parametrize("num_rows", [1, 3, 9])
def test_seen_rows_are_kept(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    stored = 0
    for _ in range(20):
        lengths = torch.randint(0, 20, (SLOTS,), generator=generator)
        counts = torch.randint(0, 2, (SLOTS,), generator=generator) * (num_rows // 3)
        starts = counts.cumsum(0) - counts
        own = torch.repeat_interleave(torch.arange(SLOTS), counts)[:num_rows]
        slots = torch.nn.functional.pad(own, (0, num_rows - len(own)), value=-1)
        positions = torch.randint(0, 20, (num_rows,), generator=generator)
        # Two rows of one place would race; a window has none.
        positions = torch.where(slots >= 0, positions[:1] // 2 + torch.arange(num_rows) % KEPT, positions)
        sources = torch.randn(num_rows, WIDTH + 1, generator=generator)[:, :WIDTH]
        done = torch.randint(-1, 2, (SLOTS + 1,), generator=generator)
        kept = KeptRows(torch.zeros(SLOTS + 1, KEPT, WIDTH), done, torch.zeros(SLOTS, dtype=torch.int64))
        other = KeptRows(**_copy(kept))
        seen = SeenRows(slots, positions, starts, counts, sources)
        waiting_rows.store_rows(kept, seen, lengths)
        reference_drafting.store_rows(other, seen, lengths)
        assert torch.equal(kept.sources[:SLOTS], other.sources[:SLOTS]) and torch.equal(kept.done, other.done)
        stored += int(kept.sources.any())
    assert stored > 3 or num_rows < 3


@pytest.mark.parametrize("size", [1, 5, 4096, 9001])
def test_best_tokens(size: int) -> None:
    torch.manual_seed(size)
    logits = torch.randn(3, size + 2)[:, :size] * 4
    logits[1, size // 2] = logits[1].max()
    tickets = torch.zeros(8, dtype=torch.int32)
    ids = torch.randperm(2 * size)[:size]
    ids[torch.rand(size) < 0.3] = -1
    ids[0] = 3
    for divisor in (None, torch.tensor([0.5, 1.0, 2.5])):
        for mapped in (None, ids):
            found = drafting.best_tokens(logits, divisor, mapped, tickets)
            wanted = reference_drafting.best_tokens(logits, divisor, mapped)
            assert torch.equal(found[0], wanted[0]) and not tickets.any()
            torch.testing.assert_close(found[1], wanted[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("width", "num_columns", "first", "num_slots"), [(1, 1, 0, 4), (3, 3, 1, 6), (7, 4, 2, 6)])
def test_drafts_are_noted_column_by_column(width: int, num_columns: int, first: int, num_slots: int) -> None:
    torch.manual_seed(width)
    tickets = torch.zeros(SLOTS, dtype=torch.int32)
    ready, depths = torch.tensor([True, True, False, True]), torch.tensor([2, 0, 3, 9])
    found = DraftColumns.empty((num_slots, width), num_columns, ready, depths, first)
    wanted = DraftColumns.empty((num_slots, width), num_columns, ready, depths, first)
    for columns in (found, wanted):
        for name in ("token_ids", "origins", "confidence", "num_drafts"):
            getattr(columns, name).fill_(77)
    for column in range(num_columns):
        logits = torch.randn(SLOTS, 300)
        chosen = torch.randint(0, 300, (SLOTS,)) if column % 2 else None
        drafting.best_tokens(logits, None, None, tickets, DraftNote(found, column, chosen))
        reference_drafting.best_tokens(logits, None, None, DraftNote(wanted, column, chosen))
    for name in ("token_ids", "origins", "num_drafts"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    torch.testing.assert_close(found.confidence, wanted.confidence)
    after = [0] * (num_slots - SLOTS - first)
    assert found.num_drafts.tolist() == [0] * first + [min(2, num_columns), 0, 0, num_columns] + after
    last = found.token_ids[first + 3]
    assert last[num_columns:].tolist() == [-1] * (width - num_columns) and last[0] >= 0


class Kernels(ReferenceOps):
    """The reference with the kernels in its place where a proposal calls them."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._tickets = torch.zeros(SLOTS, dtype=torch.int32)

    store_rows = staticmethod(waiting_rows.store_rows)
    keep_newest = staticmethod(waiting_rows.keep_newest)
    joined_norms = staticmethod(drafting.joined_norms)

    def take_rows(self, *arguments: Any) -> Any:
        return waiting_rows.take_rows(*arguments, self._tickets)

    def best_tokens(self, logits: Tensor, divisor: Tensor | None, ids: Tensor | None, note: Any = None) -> Any:
        return drafting.best_tokens(logits, divisor, ids, self._tickets, note)


def test_the_self_test_finds_the_kernels_right() -> None:
    """As it runs on a card: kernels against the reference, and not the reference against itself."""
    error = drafting_error(Kernels(), torch.device("cpu"), REFERENCE, torch.Generator().manual_seed(11))
    assert error < 1e-5


def test_joined_norms() -> None:
    torch.manual_seed(0)
    table, hidden = torch.randn(9, 40), torch.randn(5, 50)[:, :40]
    ids = torch.tensor([3, 0, 8, 8, 1])
    norms = Norm(torch.randn(40), 1e-6, plus_one=True), Norm(torch.randn(40), 1e-5)
    for before in (None, Norm(torch.randn(40), 1e-3), Norm(torch.randn(40), 1e-3, plus_one=True)):
        found = drafting.joined_norms(ids, table, hidden, norms, before)
        torch.testing.assert_close(found, REFERENCE.joined_norms(ids, table, hidden, norms, before))
    # A slot that got no draft reads some row, not memory beyond the table.
    assert torch.equal(
        drafting.joined_norms(ids - 9, table, hidden, norms)[0], drafting.joined_norms(ids * 0, table, hidden, norms)[0]
    )

"""The self-test's group of what lies between a drafter's matmuls: whole numbers must be equal, rounded ones near.

Goes through `Ops` alone. Knows no drafters; the cases are slots that are behind, were never seen or are not asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from localspec.kernels.draft_rows import (
    DraftColumns,
    DraftNote,
    JoinedNorms,
    KeptRows,
    NewestRows,
    SeenRows,
    SlotTexts,
)
from localspec.kernels.ops import Norm, Ops

SLOTS, ROWS, KEPT, WIDTH, CONTEXT, VOCABULARY, DRAFTS = 4, 8, 16, 320, 60, 5000, 3
DIFFERENT = 1.0
"""Error of a result that had to be equal and is not."""


@dataclass(frozen=True)
class _Case:
    """The same numbers for both back ends, all on the CPU."""

    lengths: Tensor
    depths: Tensor
    history: Tensor
    done: Tensor
    window: tuple[Tensor, Tensor, Tensor, Tensor]
    sources: Tensor
    rows: Tensor
    hidden: Tensor
    table: Tensor
    logits: Tensor
    ids: Tensor
    weights: Tensor


def worst(errors: Iterable[float]) -> float:
    """The largest, NaN if any is: Python's own maximum forgets a NaN that is not the first."""
    return float(np.max(list(errors)))


def drafting_error(ops: Ops, device: torch.device, reference: Ops, generator: torch.Generator) -> float:
    """The worst relative error of `store_rows`, `take_rows`, `joined_norms`, `keep_newest` and `best_tokens`."""
    case = _case(generator)
    found, wanted = _proposal(ops, device, case), _proposal(reference, torch.device("cpu"), case)
    return worst(_error(found[name].cpu(), wanted[name]) for name in wanted)


def _case(generator: torch.Generator) -> _Case:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    def count(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    ids = torch.randperm(2 * VOCABULARY, generator=generator)[:VOCABULARY]
    ids[count(VOCABULARY, 40)] = -1
    # Slots: three rows behind, far behind, never seen, not asked; the first and the last have a window.
    lengths = torch.tensor([23, 50, 12, 31])
    slots = torch.tensor([0, 0, 0, 0, 3, 3, 3, -1])
    positions = torch.tensor([19, 20, 21, 22, 27, 28, 29, 0])
    window = (slots, positions, torch.tensor([0, 4, 4, 4]), torch.tensor([4, 0, 0, 3]))
    return _Case(
        lengths=lengths,
        depths=torch.tensor([3, 2, 1, 0]),
        history=count(VOCABULARY, SLOTS, CONTEXT),
        done=torch.tensor([19, 20, -1, -1, -1]),
        window=window,
        sources=draw(SLOTS + 1, KEPT, WIDTH),
        rows=draw(ROWS, WIDTH),
        hidden=draw(ROWS, WIDTH),
        table=draw(VOCABULARY, WIDTH),
        logits=torch.randn(DRAFTS, SLOTS, VOCABULARY, generator=generator) * 4,
        ids=ids,
        weights=torch.randn(3, WIDTH, generator=generator) * 0.1,
    )


def _proposal(ops: Ops, device: torch.device, case: _Case) -> dict[str, Tensor]:
    """What a proposal does between its matmuls, by name. Sources and hiddens are in the back end's own type."""
    dtype = ops.activation_dtype

    def there(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.dtype == torch.bfloat16 else None, copy=True)

    lengths, norms = there(case.lengths), [Norm(there(weight), 1e-6, plus_one=True) for weight in case.weights]
    valid_from = torch.zeros(SLOTS, dtype=torch.int64, device=device)
    kept = KeptRows(there(case.sources), there(case.done), valid_from)
    slots, positions, starts, counts = (there(each) for each in case.window)
    ops.store_rows(kept, SeenRows(slots, positions, starts, counts, there(case.rows)), lengths)
    texts = SlotTexts(there(case.history), lengths, there(case.depths))
    taken = ops.take_rows(kept, texts, ROWS)
    found = {f"taken {name}": value for name, value in _tensors(taken)}
    # The place beyond the slots takes rows that are nobody's, or nothing.
    found |= {"sources": kept.sources[:SLOTS], "done": kept.done[:SLOTS], "valid from": kept.valid_from}
    table = there(case.table)
    found["joined"] = ops.joined_norms(taken.token_ids, table, taken.sources, (norms[0], norms[1]), norms[2])
    again = KeptRows(kept.sources, there(case.done), valid_from.clone(), JoinedNorms(table, norms[0], norms[1]))
    found["joined as taken"] = ops.take_rows(again, texts, ROWS).sources
    newest = NewestRows(
        torch.zeros(SLOTS, WIDTH, device=device, dtype=dtype),
        torch.full((SLOTS,), -1, dtype=torch.int64, device=device),
    )
    rounds = ops.keep_newest(taken, there(case.hidden), newest, texts, DRAFTS, norms[2])
    found |= {f"rounds {name}": value for name, value in _tensors(rounds)}
    found |= {"hidden": newest.hidden, "position": newest.position}
    columns = DraftColumns.empty((SLOTS + 2, DRAFTS + 1), DRAFTS, rounds.ready, texts.depths, first=1)
    divisor = torch.tensor([1.0, 0.5, 2.0, 1.0], device=device)
    for column, logits in enumerate(case.logits):
        chosen = texts.lengths if column == 1 else None
        note = DraftNote(columns, column, chosen)
        tokens, certainty = ops.best_tokens(there(logits), divisor, there(case.ids), note)
        found |= {f"token {column}": tokens, f"certainty {column}": certainty}
    return found | {f"draft {name}": value for name, value in _tensors(columns)}


def _tensors(record: Any) -> list[tuple[str, Tensor]]:
    named = [(field.name, getattr(record, field.name)) for field in fields(record)]
    return [(name, value) for name, value in named if isinstance(value, Tensor)]


def _error(found: Tensor, wanted: Tensor) -> float:
    """Relative, or whether whole numbers differ."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(found, wanted) else DIFFERENT
    scale = max(float(wanted.double().norm()), 1e-9)
    return float((found.double() - wanted.double()).norm()) / scale

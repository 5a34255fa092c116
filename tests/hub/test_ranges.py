"""Byte span arithmetic against a set of single bytes."""

from __future__ import annotations

import random

import pytest

from localspec.hub.ranges import Span, SpanLedger


@pytest.mark.parametrize("seed", range(20))
def test_ledger_equals_a_set_of_bytes(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([0, 1, 63, 200])
    ledger, held = SpanLedger(size), set()
    for _ in range(12):
        start = rng.randint(0, size)
        end = rng.randint(start, size)
        ledger.add(Span(start, end))
        held |= set(range(start, end))
        assert {b for span in ledger.done for b in range(span.start, span.end)} == held
        assert ledger.done_bytes == len(held)
        assert ledger.front_bytes == next((b for b in range(size) if b not in held), size)
        missing = ledger.missing(7)
        assert [b for span in missing for b in range(span.start, span.end)] == [b for b in range(size) if b not in held]
        assert all(0 < span.end - span.start <= 7 for span in missing)
    assert SpanLedger(size, ledger.done).done == ledger.done


@pytest.mark.parametrize("span", [Span(-1, 3), Span(3, 2), Span(5, 11)])
def test_spans_outside_the_file_are_refused(span: Span) -> None:
    with pytest.raises(ValueError, match="does not lie in a file of 10 bytes"):
        SpanLedger(10, [span])

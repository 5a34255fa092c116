"""Page numbers: all or nothing, counted references, runs in one piece."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localspec.cache.pages import OutOfPages, PagePool


def test_sequences_lie_in_one_piece() -> None:
    pool = PagePool(32)
    first = pool.allocate(4)
    second = pool.allocate(3)
    assert first == [1, 2, 3, 4] and second == [5, 6, 7]
    assert pool.allocate(2, after=7) == [8, 9]
    pool.release(first)
    assert pool.allocate(1) == [10], "the longest free run is preferred to the hole"


def test_all_or_nothing() -> None:
    pool = PagePool(4)
    with pytest.raises(OutOfPages, match="4 pages wanted, 3 free"):
        pool.allocate(4)
    assert pool.num_free == 3


def test_a_free_page_cannot_be_retained_or_released() -> None:
    pool = PagePool(4)
    for call in (pool.retain, pool.release):
        with pytest.raises(ValueError, match="page 2"):
            call((2,))
    with pytest.raises(ValueError, match="page 0"):
        pool.release((0,))


@given(st.lists(st.tuples(st.sampled_from("arx"), st.integers(1, 5)), max_size=60))
def test_references_match_a_plain_count(actions: list[tuple[str, int]]) -> None:
    pool = PagePool(12)
    held: list[int] = []
    for action, number in actions:
        if action == "a" and number <= pool.num_free:
            pages = pool.allocate(number)
            assert 0 not in pages and not set(pages) & set(held)
            held += pages
        elif action == "r" and held:
            page = held[number % len(held)]
            pool.retain((page,))
            held.append(page)
        elif action == "x" and held:
            page = held.pop(number % len(held))
            pool.release((page,))
        assert pool.num_free == 11 - len(set(held))
        assert all(pool.references(page) == held.count(page) for page in set(held))

"""The prefix tree against a plain memory of what was written to each page."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.cache.pages import PagePool
from localspec.cache.prefix import Match, PrefixTree
from localspec.core.records import PAGE_TOKENS

NUM_PAGES = 64


class Written:
    """Pages with the tokens that were written to them, and a tree over them."""

    def __init__(self, max_snapshots: int = 99) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.dropped: list[object] = []
        self.tree = PrefixTree(self.pool, max_snapshots, self.dropped.append)
        self.tokens: dict[int, tuple[int, ...]] = {}

    def put(self, ids: tuple[int, ...], chat_id: str | None = None) -> None:
        count = -(-len(ids) // PAGE_TOKENS)
        if count > self.pool.num_free:
            self.tree.evict(count - self.pool.num_free)
        pages = self.pool.allocate(count)
        for index, page in enumerate(pages):
            self.tokens[page] = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
        self.tree.insert(ids, pages, chat_id)
        self.pool.release(pages)

    def text(self, match: Match) -> tuple[int, ...]:
        ids: tuple[int, ...] = ()
        for page in match.pages:
            ids += self.tokens[page]
        if match.partial_page is not None:
            ids += self.tokens[match.partial_page][: match.partial_tokens]
        return ids


def ids(seed: int, length: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + index * index) % 50 for index in range(length))


def test_longest_prefix_is_found_to_the_token() -> None:
    written = Written()
    written.put(ids(1, 200))
    match = written.tree.match(ids(1, 150), needs_state=False)
    assert match.total_tokens == 150 and match.num_tokens == 128 and match.partial_tokens == 22
    assert written.text(match) == ids(1, 150)
    other = ids(1, 70) + (99,) * 50
    match = written.tree.match(other, needs_state=False)
    assert match.total_tokens == 70
    assert written.tree.evidence(other, 70, None).matched_tokens == 70


def test_a_tail_that_grows_replaces_itself() -> None:
    written = Written()
    written.put(ids(1, 100))
    written.put(ids(1, 120))
    assert written.tree.num_pages == 2
    assert written.tree.match(ids(1, 130), needs_state=False).total_tokens == 120


def test_state_limits_the_hit() -> None:
    written = Written()
    written.put(ids(1, 200))
    assert written.tree.match(ids(1, 200), needs_state=True).total_tokens == 0
    assert written.tree.add_snapshot(ids(1, 64), "at 64")
    assert written.tree.add_snapshot(ids(1, 150), "at 150")
    assert not written.tree.add_snapshot(ids(2, 50), "nowhere")
    for length, expected in ((200, "at 150"), (150, "at 150"), (149, "at 64"), (64, "at 64"), (63, None)):
        match = written.tree.match(ids(1, length), needs_state=True)
        assert match.snapshot == expected
        assert written.text(match) == ids(1, 0 if expected is None else int(expected.split()[1]))


def test_snapshots_are_bounded_and_dropped_once() -> None:
    written = Written(max_snapshots=2)
    for seed in range(4):
        written.put(ids(seed, 80))
        assert written.tree.add_snapshot(ids(seed, 80), f"of {seed}")
    assert written.tree.num_snapshots == 2
    assert written.dropped == ["of 0", "of 1"]
    written.tree.clear()
    assert sorted(map(str, written.dropped)) == ["of 0", "of 1", "of 2", "of 3"]
    assert written.pool.num_free == NUM_PAGES - 1


def test_forgetting_a_chat_keeps_what_others_use() -> None:
    written = Written()
    written.put(ids(1, 64) + ids(2, 64), chat_id="a")
    written.put(ids(1, 64) + ids(3, 64), chat_id="b")
    written.tree.forget_chat("a")
    assert written.tree.match(ids(1, 64) + ids(3, 64), needs_state=False).total_tokens == 128
    assert written.tree.match(ids(1, 64) + ids(2, 64), needs_state=False).total_tokens == 64
    written.tree.forget_chat("b")
    assert written.tree.num_pages == 0 and written.pool.num_free == NUM_PAGES - 1


def test_what_came_without_a_chat_outlives_every_chat() -> None:
    written = Written()
    written.put(ids(1, 300))
    written.put(ids(1, 128) + ids(2, 64), chat_id="a")
    for chat in ("never was here", "a", ""):
        written.tree.forget_chat(chat)
    assert written.tree.match(ids(1, 300), needs_state=False).total_tokens == 300
    assert written.tree.match(ids(1, 128) + ids(2, 64), needs_state=False).num_tokens == 128
    assert written.tree.num_pages == 5, "the chat's own page went"


def test_eviction_takes_the_least_used_leaf_and_no_page_in_use() -> None:
    written = Written()
    written.put(ids(1, 128))
    written.put(ids(2, 128))
    in_use = written.tree.match(ids(2, 128), needs_state=False).pages
    written.pool.retain(in_use)
    assert written.tree.num_evictable() == 2
    assert written.tree.evict(10) == 2
    assert written.tree.match(ids(2, 128), needs_state=False).pages == in_use


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 260)), min_size=1, max_size=14))
def test_a_hit_is_always_what_was_written(conversations: list[tuple[int, int, int]]) -> None:
    written = Written()
    known: list[tuple[int, ...]] = []
    for head, tail, length in conversations:
        prompt = (ids(head, 70) + ids(10 + tail, 300))[:length]
        match = written.tree.match(prompt, needs_state=False)
        assert written.text(match) == prompt[: match.total_tokens]
        written.put(prompt)
        known.append(prompt)
        again = written.tree.match(prompt, needs_state=False)
        assert again.total_tokens == len(prompt) and written.text(again) == prompt


def test_the_oldest_snapshot_is_given_up_first() -> None:
    written = Written()
    long, short = tuple(range(PAGE_TOKENS + 3)), tuple(range(500, 510))
    for tokens in (long, short):
        written.put(tokens)
        written.tree.add_snapshot(tokens, f"after {len(tokens)}")
    written.tree.add_snapshot(long[:PAGE_TOKENS], f"after {PAGE_TOKENS}")
    written.tree.match(short, True)
    assert written.tree.give_up_snapshot() and written.tree.give_up_snapshot()
    assert written.tree.match((*short, 1), True).snapshot == f"after {len(short)}"
    assert written.tree.give_up_snapshot() and not written.tree.give_up_snapshot()
    assert sorted(map(str, written.dropped)) == sorted(
        [f"after {len(long)}", f"after {PAGE_TOKENS}", f"after {len(short)}"]
    )


def test_a_snapshot_that_somebody_reads_is_not_given_up() -> None:
    written = Written()
    tokens = tuple(range(3 * PAGE_TOKENS))
    written.put(tokens)
    reading = []
    for count in (PAGE_TOKENS, 2 * PAGE_TOKENS, 3 * PAGE_TOKENS):
        reading.append({count})
        written.tree.add_snapshot(tokens[:count], reading[-1])
    assert not written.tree.give_up_snapshot() and written.tree.num_snapshots == 3
    del reading[1]
    assert written.tree.give_up_snapshot() and not written.tree.give_up_snapshot()
    assert written.dropped == [{2 * PAGE_TOKENS}] and written.tree.match(tokens, True).total_tokens == len(tokens)

"""Why a prompt was not cached: one sentence for each cause, none where nothing is missing."""

from __future__ import annotations

from localspec.cache.miss import DAMAGED, FIRST_TIME, OTHER_MODEL, explain
from localspec.cache.pages import PagePool
from localspec.cache.prefix import PrefixTree

THINK = 900


class Tree:
    """Conversations of made-up tokens in a tree."""

    def __init__(self, num_pages: int = 64) -> None:
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, 8, lambda snapshot: None)

    def put(self, ids: tuple[int, ...], chat_id: str | None = "a") -> None:
        pages = self.pool.allocate(-(-len(ids) // 64))
        self.tree.insert(ids, pages, chat_id)
        self.pool.release(pages)

    def why(self, ids: tuple[int, ...], chat_id: str | None = "a", problem: str = "", needs_state: bool = False) -> str:
        usable = self.tree.match(ids, needs_state).total_tokens
        evidence = self.tree.evidence(ids, usable, chat_id)
        return explain(evidence, (THINK,), problem, 80 if needs_state else 0)


def ids(seed: int, count: int) -> tuple[int, ...]:
    return tuple((seed * 7919 + i * i) % 800 for i in range(count))


def test_nothing_is_said_where_nothing_is_missing() -> None:
    made = Tree()
    made.put(ids(1, 200))
    assert made.why(ids(1, 150)) == ""
    assert made.why((*ids(1, 200), 5, 6, 7)) == "", "the conversation goes on where it ended"
    made.put(ids(2, 128))
    assert made.why((*ids(2, 128), 5, 6, 7)) == "", "on a page's border too"


def test_each_cause_has_its_sentence() -> None:
    made = Tree()
    assert made.why(ids(1, 200)) == FIRST_TIME
    made.put(ids(1, 200))
    assert made.why(ids(3, 50)) == FIRST_TIME
    assert made.why(ids(3, 50), problem=OTHER_MODEL) == OTHER_MODEL
    assert made.why(ids(3, 50), problem=DAMAGED) == DAMAGED
    edited = (*ids(1, 100), 801, 802)
    assert made.why(edited) == "edited message: the prompt departs from what was computed after 100 tokens"
    assert made.why(edited, None).startswith("edited message")
    assert made.why(edited, "b") == "first time: another conversation shares the first 100 tokens"
    edited_on_a_border = (*ids(1, 128), 801, 802)
    assert made.why(edited_on_a_border).startswith("edited message")


def test_a_template_that_drops_thoughts_is_named() -> None:
    made = Tree()
    made.put((*ids(1, 100), THINK, *ids(2, 60)))
    assert made.why((*ids(1, 100), *ids(3, 40))).startswith("template dropped thinking")
    made.put((*ids(4, 128), THINK, *ids(2, 60)))
    assert made.why((*ids(4, 128), *ids(3, 40))).startswith("template dropped thinking")


def test_what_was_evicted_is_named() -> None:
    made = Tree()
    made.put(ids(1, 256))
    made.tree.evict(3)
    assert made.why(ids(1, 256)) == "evicted: 192 more tokens were computed before, but gave way to others"
    made.tree.evict(1)
    assert made.why(ids(1, 256)).startswith("evicted: 256 more")


def test_states_that_are_missing_are_told_from_those_that_left() -> None:
    made = Tree()
    made.put(ids(1, 256))
    assert made.why(ids(1, 256), needs_state=True).startswith("no state: ")
    assert made.tree.add_snapshot(ids(1, 192), "snapshot")
    assert made.why(ids(1, 256), needs_state=True) == "", "a hybrid resumes from a page's border"
    for seed in range(2, 12):
        made.put(ids(seed, 64))
        assert made.tree.add_snapshot(ids(seed, 64), "other")
    assert made.why(ids(1, 256), needs_state=True).startswith("evicted: the recurrent state")

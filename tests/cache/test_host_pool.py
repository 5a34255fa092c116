"""Blocks in host memory with made-up payloads: chains without holes, the budget, what goes first, forgetting."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.cache.host_pool import HostPool
from localspec.cache.spill_index import SEGMENT, STATE
from localspec.cache.spill_keys import fingerprint, id_bytes, root_key, segment_places, state_place
from localspec.cache.spill_lookup import Found, ModelIdentity, find

TOKEN_BYTES, STATE_BYTES = 8, 3000


@dataclass
class Budget:
    """Payloads are byte strings; the budget counts those that are referred to by the pool."""

    cap_bytes: int
    needs_state: bool = False
    pool: HostPool = field(init=False)

    def __post_init__(self) -> None:
        state_bytes = STATE_BYTES if self.needs_state else 0
        owner = ModelIdentity(fingerprint(["m"]), "m", "", TOKEN_BYTES, state_bytes, self.needs_state)
        self.pool = HostPool(
            owner, lambda size, _: bytearray(size) if self.pool.stored_bytes + size <= self.cap_bytes else None
        )

    def keep(self, ids: list[int], states: tuple[int, ...] = (), chat_id: str | None = None) -> None:
        """As the engine does it, payloads named by their tokens."""
        data = id_bytes(ids)
        root = root_key(self.pool.identity.fingerprint, "")
        places = segment_places(root, data)
        own = frozenset(place.key for place in places)
        self.pool.use(own, chat_id)
        for place in places:
            if self.pool.has(place.key) or (place is places[-1] and self.pool.covers(place, data)):
                continue
            memory = self.pool.reserve(TOKEN_BYTES * place.num_tokens, False, own)
            if memory is None:
                break
            name = str(ids[: place.end]).encode()
            self.pool.add(place, SEGMENT, data[4 * place.begin : 4 * place.end], name, chat_id, root)
        for position in states:
            memory = self.pool.reserve(STATE_BYTES, True, own)
            if memory is not None:
                self.pool.add(
                    state_place(places, data, position), STATE, b"", str(ids[:position]).encode(), chat_id, root
                )
        self.pool.settle(places, data, 2)

    def find(self, ids: list[int]) -> Found:
        found = find(self.pool.identity, self.pool, id_bytes(ids), "")
        end = 0
        for block in found.segments:
            assert block.token_begin == end
            end = block.token_end
            if end <= found.num_tokens:
                assert self.pool.payload(block.key) == str(ids[:end]).encode()
        if found.state is not None:
            assert self.pool.payload(found.state.key) == str(ids[: found.num_tokens]).encode()
        assert end >= found.num_tokens
        return found


def ids_of(seed: int, count: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(50_000) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 63, 255, 256, 257, 512, 700])
def test_what_was_kept_is_found_for_every_cut(count: int) -> None:
    budget = Budget(1 << 20)
    ids = ids_of(1, count)
    budget.keep(ids)
    for cut in {1, count // 2, count - 1, count} - {0}:
        assert budget.find([*ids[:cut], 99_999]).num_tokens == cut
    assert budget.find(ids_of(2, count)).num_tokens == 0


def test_a_tail_that_grew_goes() -> None:
    budget = Budget(1 << 20)
    ids = ids_of(1, 700)
    for count in (10, 300, 301, 600, 512):
        budget.keep(ids[:count])
    assert budget.pool.num_blocks == 3 and budget.find(ids).num_tokens == 600


def test_old_goes_before_young_and_tails_before_heads() -> None:
    budget = Budget(TOKEN_BYTES * 256 * 6)
    old, young = ids_of(1, 1024), ids_of(2, 1024)
    budget.keep(old)
    budget.keep(young)
    assert budget.find(young).num_tokens == 1024
    assert budget.find(old).num_tokens == 512, "its head stays as long as there is room"


def test_a_chain_longer_than_the_budget_keeps_its_head() -> None:
    budget = Budget(TOKEN_BYTES * 256 * 2)
    ids = ids_of(1, 1200)
    budget.keep(ids)
    assert budget.find(ids).num_tokens == 512


def test_states_decide_and_take_their_segments_along() -> None:
    budget = Budget(1 << 20, needs_state=True)
    ids = ids_of(1, 900)
    budget.keep(ids, (300, 600, 700, 800))
    assert [budget.find(ids[:n]).num_tokens for n in (900, 799, 699, 299)] == [800, 700, 300, 0]
    root = root_key(budget.pool.identity.fingerprint, "")
    places = segment_places(root, id_bytes(ids))
    for position in (300, 700, 800):
        budget.pool.drop(state_place(places, id_bytes(ids), position).key)
    assert budget.pool.num_blocks == 0, "segments without a state are worth nothing"


def test_forgetting_a_chat_keeps_what_others_use() -> None:
    budget = Budget(1 << 20)
    shared = ids_of(1, 512)
    budget.keep([*shared, *ids_of(2, 100)], chat_id="a")
    budget.keep([*shared, *ids_of(3, 100)], chat_id="b")
    assert budget.pool.forget_chat("a") == 1
    assert budget.find([*shared, *ids_of(3, 100)]).num_tokens == 612
    assert budget.find([*shared, *ids_of(2, 100)]).num_tokens == 512
    budget.pool.forget_chat("b")
    assert budget.pool.num_blocks == 0 and budget.pool.stored_bytes == 0


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900), st.integers(0, 900)), min_size=1, max_size=12),
)
def test_never_a_hole_and_never_over_budget(needs_state: bool, turns: list[tuple[int, int, int]]) -> None:
    budget = Budget(TOKEN_BYTES * 256 * 7, needs_state)
    base = ids_of(9, 400)
    for seed, length, state in turns:
        ids = [*base[: 100 * seed], *ids_of(seed, 900)][:length]
        budget.keep(ids, (min(max(state, 1), length),) if needs_state else (), chat_id=str(seed))
        assert budget.pool.stored_bytes <= budget.cap_bytes
        budget.find([*ids, 5])
    for seed in range(4):
        budget.pool.forget_chat(str(seed))
    assert budget.pool.num_blocks == 0

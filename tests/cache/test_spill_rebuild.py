"""An index that is lost: what the files alone bring back, and what they must not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from localspec.cache.spill import SpillStore
from localspec.cache.spill_admin import SpillAdmin
from localspec.storage.blockfile import HEADER_BYTES
from tests.cache.test_spill import WIDE, check_found, identity, ids_of, write


def lose_index(store: SpillStore) -> None:
    store.close()
    for path in store.folder.glob("index*"):
        path.unlink()


def reopened(store: SpillStore) -> SpillStore:
    again = SpillStore(store.folder, store.identity, WIDE)
    again.sweep()
    return again


@pytest.mark.parametrize("needs_state", [False, True])
def test_chains_come_back(tmp_path: Path, needs_state: bool) -> None:
    store = SpillStore(tmp_path / "kv", identity(needs_state=needs_state), WIDE)
    ids, branch = ids_of(1, 900), [*ids_of(1, 600), *ids_of(2, 60)]
    write(store, ids, (300, 900) if needs_state else ())
    write(store, branch, (660,) if needs_state else ())
    total_bytes = store.index.total_bytes()
    lose_index(store)
    again = reopened(store)
    assert again.index.total_bytes() == total_bytes
    for prompt, length in ((ids, 900), (branch, 660)):
        found = again.lookup([*prompt, 7])
        assert found.num_tokens == length
        check_found(again, found, prompt)
    assert again.lookup(ids_of(5, 300)).num_tokens == 0
    assert write(again, ids).written_bytes == 0
    if not needs_state:
        assert again.lookup(ids[:850]).num_tokens == 850


def test_nothing_after_a_hole_and_nothing_damaged(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    ids, other = ids_of(1, 1024), ids_of(2, 512)
    write(store, ids)
    write(store, other)
    second = store.lookup(ids).segments[1]
    store.path(second).unlink()
    first_of_other = store.path(store.lookup(other).segments[0])
    data = bytearray(first_of_other.read_bytes())
    data[random.Random(1).randrange(HEADER_BYTES)] ^= 4
    first_of_other.write_bytes(data)
    lose_index(store)
    again = reopened(store)
    assert again.lookup(ids).num_tokens == 256 and again.lookup(other).num_tokens == 0
    assert len(list(again.index.all_blocks(store.identity.fingerprint))) == 1


def test_other_models_stay_until_they_are_named_again(tmp_path: Path) -> None:
    other = SpillStore(tmp_path / "kv", identity("other", needs_state=True), WIDE)
    write(other, ids_of(1, 300), (300,))
    other.close()
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    lose_index(store)
    again = reopened(store)
    assert sorted(row.model_id for row in again.index.models()) == ["?", "m"]
    again.close()
    other = SpillStore(tmp_path / "kv", identity("other", needs_state=True), WIDE)
    assert other.lookup(ids_of(1, 300)).num_tokens == 300
    assert {row.model_id: row.needs_state for row in other.index.models()} == {"m": False, "other": True}


def test_forgetting_after_a_loss_leaves_nothing_of_the_chat(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids_of(1, 300), chat="a")
    write(store, ids_of(2, 300), chat="b")
    lose_index(store)
    again = reopened(store)
    write(again, ids_of(2, 300), chat="b")
    again.forget_chat("a")
    assert again.lookup(ids_of(1, 300)).num_tokens == 0
    assert again.lookup(ids_of(2, 300)).num_tokens == 300, "its chat is known again"


def test_the_command_sees_them_too(tmp_path: Path) -> None:
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids_of(1, 300))
    lose_index(store)
    with SpillAdmin(tmp_path / "kv") as admin:
        [row] = admin.models()
        assert row.num_blocks == 2
        assert [checked.num_blocks for _, checked in admin.verify()] == [1, 2]

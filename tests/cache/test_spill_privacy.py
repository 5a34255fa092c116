"""What is forgotten leaves no token behind, in files that stay either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.cache.spill import SpillStore
from localspec.cache.spill_admin import SpillAdmin
from localspec.cache.spill_keys import id_bytes
from tests.cache.test_spill import WIDE, identity, ids_of, write


def by_the_engine(store: SpillStore) -> None:
    store.forget_chat("secret")


def by_the_command(store: SpillStore) -> None:
    with SpillAdmin(store.folder) as admin:
        admin.remove_chat("secret")


def by_model(store: SpillStore) -> None:
    with SpillAdmin(store.folder) as admin:
        admin.remove_model("m")


@pytest.mark.parametrize("forget", [by_the_engine, by_the_command, by_model])
def test_no_file_holds_a_forgotten_token(tmp_path: Path, forget: Callable[[SpillStore], None]) -> None:
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    for seed in range(5):
        write(store, ids_of(seed, 700), chat=f"other {seed}")
    secret = ids_of(77, 700)
    write(store, secret, chat="secret")
    needles = [id_bytes(secret[start : start + 8]) for start in range(0, 690, 40)]

    def holding() -> set[str]:
        files = [path for path in store.folder.rglob("*") if path.is_file()]
        return {path.name for path in files for needle in needles if needle in path.read_bytes()}

    assert holding() >= {"index.sqlite3-wal"}
    forget(store)
    assert holding() == set()
    if forget is not by_model:
        assert store.lookup(ids_of(1, 700)).num_tokens == 700

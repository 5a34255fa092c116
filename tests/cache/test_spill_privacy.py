"""What is forgotten leaves no token behind, in files that stay either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

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


@pytest.mark.torch
def test_a_chat_is_forgotten_though_no_model_could_be_loaded(tmp_path: Path) -> None:
    from localspec.engine.engine import EngineOptions, LocalEngine

    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids_of(1, 700), chat="secret")
    write(store, ids_of(2, 700), chat="other")

    def nowhere(model_id: str, told: Callable[[str], None]) -> NoReturn:
        raise FileNotFoundError(model_id)

    async def forget() -> None:
        for folder in (tmp_path / "never", tmp_path / "kv"):
            engine = LocalEngine(nowhere, EngineOptions(device="cpu", kv_dir=folder))
            engine.start("m")
            await engine.forget("secret")

    asyncio.run(forget())
    assert store.lookup(ids_of(1, 700)).num_tokens == 0 and store.lookup(ids_of(2, 700)).num_tokens == 700
    assert not (tmp_path / "never").exists()


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

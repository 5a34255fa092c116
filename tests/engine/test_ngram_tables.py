"""The tables of an engine: which are used, what is learnt from answers and what never, and the figures shown."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from localspec.api.types import Delta, Done, GenerateRequest
from localspec.core.records import Request
from localspec.engine import ngram_tables
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.engine.ngram_tables import NgramTables
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_manifest import TableDirectory
from tests.helpers.engine import make_request

pytestmark = pytest.mark.torch
TOKENIZER = bytes(range(32))
OWN = f"own-{TOKENIZER.hex()[:8]}"
ANSWER = tuple(range(1000, 1060))


def request(chat_id: str | None = "c", private: bool = False) -> Request:
    return make_request(list(range(40)), chat_id=chat_id, private=private)


def table(folder: Path, name: str, fingerprint: bytes = TOKENIZER) -> None:
    with RunBuilder(folder / name, fingerprint) as builder:
        builder.add("text", list(range(500)))
        builder.finish()


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_tables_of_this_tokenizer_are_used_and_others_named(tmp_path: Path) -> None:
    table(tmp_path, "mine")
    table(tmp_path, "foreign", b"\x55" * 32)
    table(tmp_path, "own-55555555", b"\x55" * 32)
    table(tmp_path, "torn")
    (tmp_path / "torn" / "manifest").write_bytes(b"torn")
    (tmp_path / "stray.txt").write_text("no table")
    words: list[str] = []
    tables = NgramTables(tmp_path, TOKENIZER, False, words.append)
    try:
        assert [handle.name for handle in tables.handles] == ["mine"]
        assert len(words) == 2
        assert any("foreign" in word and "another tokenizer" in word for word in words)
        assert any("torn" in word and "damaged" in word for word in words)
        assert not (tmp_path / OWN).exists()
        tables.remember(request(), ANSWER)
    finally:
        tables.close()
    assert not (tmp_path / OWN).exists()


def test_no_folder_is_no_table(tmp_path: Path) -> None:
    tables = NgramTables(tmp_path / "absent", TOKENIZER, False, lambda word: None)
    assert tables.handles == ()
    tables.close()
    assert not (tmp_path / "absent").exists()


def test_answers_are_learnt_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_tables, "FLUSH_TOKENS", 50)
    tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    [own] = tables.handles
    assert own.name == "own" and (tmp_path / OWN).stat().st_mode & 0o777 == 0o700
    tables.remember(request(), ANSWER)
    wait(lambda: own.table.statistics().records > 0)
    context = [*range(25, 40), *ANSWER[:1]]
    own.table.prefetch([context[:-1]])
    wait(lambda: not own.table.statistics().pending_reads)
    found = own.table.lookup(context)
    assert found is not None and found.tokens == ANSWER[1:15]
    figures = tables.figures()
    assert figures["ngram_hits"] == 1 and figures["ngram_lookups"] == 1 and figures["ngram_read_p50_ms"] > 0
    tables.close()


def test_private_answers_never_reach_the_disk(tmp_path: Path) -> None:
    tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    tables.remember(request(private=True), ANSWER)
    tables.close()
    assert TableDirectory(tmp_path / OWN).load().runs == ()
    assert not list((tmp_path / OWN).glob("*.ngr"))


def test_a_forgotten_chat_is_gone_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_tables, "FLUSH_TOKENS", 50)
    tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    other = tuple(range(3000, 3060))
    tables.remember(request("gone"), ANSWER)
    tables.remember(request("kept"), other)
    wait(lambda: tables.handles[0].table.statistics().records > 100)
    tables.forget("gone")
    tables.close()
    manifest = TableDirectory(tmp_path / OWN).load()
    assert set(manifest.sources) == {"chat:kept"} and not manifest.deleted
    assert sum(entry.record_count for entry in manifest.runs) == len(other) + 15 - 8
    data = b"".join(path.read_bytes() for path in (tmp_path / OWN).glob("*.ngr"))
    assert (3001).to_bytes(3, "little") + (3002).to_bytes(3, "little") in data
    assert (1001).to_bytes(3, "little") + (1002).to_bytes(3, "little") not in data


@pytest.mark.demo
@pytest.mark.slow
async def test_an_engine_learns_answers_and_drafts_from_them(demo_folder: Path, tmp_path: Path) -> None:
    """Asked again after a restart, the answer comes from the own table: the same tokens in a fraction of the steps."""
    place = ModelPlace("demo", demo_folder, "demo")
    options = EngineOptions(device="cpu", context_tokens=512, ngram_dir=tmp_path)

    said: list[str] = []
    stopped: list[str | None] = []

    async def ask(
        prompt: str, *, private: bool, drafter: str, stop: tuple[str, ...] = ()
    ) -> tuple[tuple[int, ...], int, set[str]]:
        engine = LocalEngine(lambda model_id, report: place, options)
        engine.start("demo")
        ids: list[int] = []
        origins: set[str] = set()
        try:
            request = GenerateRequest(
                prompt=prompt, max_tokens=40, drafter=drafter, private=private, chat_id="c", stop=stop
            )
            async for event in engine.generate(request):
                if isinstance(event, Delta):
                    said.append(event.text)
                    ids.extend(event.token_ids)
                    origins.update(span.origin for span in event.spans)
                elif isinstance(event, Done):
                    steps = event.timings.verify_steps
                    stopped.append(event.stop_text)
            assert "ngram_hits" in engine.metrics().storage
        finally:
            await engine.aclose()
        return tuple(ids), steps, origins

    first = await ask("Name the planets:", private=True, drafter="off")
    assert not TableDirectory(next(tmp_path.glob("own-*"))).load().runs
    text = "".join(said)
    end = next(text[-length:] for length in range(1, 60) if text.find(text[-length:]) == len(text) - length)
    # An answer that a stop string ends is learnt too.
    again = await ask("Name the planets:", private=False, drafter="ngram_disk", stop=(end,))
    assert again[0] == first[0][: len(again[0])] and "table:own" not in again[2]
    assert len(again[0]) > len(first[0]) - 12 and stopped[-1] == end
    known = await ask("Name the planets:", private=False, drafter="ngram_disk+ngram")
    assert known[0] == first[0] and "table:own" in known[2] and known[1] < first[1] // 2


def test_an_answer_waits_while_another_process_builds(tmp_path: Path) -> None:
    tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    with TableDirectory(tmp_path / OWN).builder_lock():
        tables._waiting.append(ngram_tables._Answer("answers", ANSWER))
        tables._flush()
        assert tables._waiting
    tables.close()
    assert TableDirectory(tmp_path / OWN).load().runs


def learnt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> NgramTables:
    """Tables whose own one knows an answer of the chat "gone", with quick refreshes."""
    monkeypatch.setattr(ngram_tables, "FLUSH_TOKENS", 50)
    monkeypatch.setattr(ngram_tables, "REFRESH_S", 0.02)
    tables = NgramTables(folder, TOKENIZER, True, lambda word: None)
    tables.remember(request("gone"), ANSWER)
    wait(lambda: tables.handles[0].table.statistics().records > 0)
    return tables


def holds_answer(folder: Path) -> bool:
    data = b"".join(path.read_bytes() for path in (folder / OWN).glob("*.ngr"))
    return ANSWER[1].to_bytes(3, "little") + ANSWER[2].to_bytes(3, "little") in data


@pytest.mark.parametrize("restarted", [False, True])
def test_a_forgotten_chat_goes_once_the_table_is_free(
    restarted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = learnt(tmp_path, monkeypatch)
    with TableDirectory(tmp_path / OWN).builder_lock():
        tables.forget("gone")
        wait(lambda: not TableDirectory(tmp_path / OWN).load().sources)
        if restarted:
            tables.close()
        assert holds_answer(tmp_path)
    if restarted:
        tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    wait(lambda: not holds_answer(tmp_path))
    tables.close()
    manifest = TableDirectory(tmp_path / OWN).load()
    assert not manifest.sources and not manifest.deleted


def test_a_deletion_that_fails_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = learnt(tmp_path, monkeypatch)
    tries: list[None] = []

    def full(*arguments: object) -> int:
        tries.append(None)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(ngram_tables, "delete_sources", full)
        tables.forget("gone")
        wait(lambda: len(tries) > 2)
    wait(lambda: not holds_answer(tmp_path))
    tables.close()


def test_an_answer_that_ends_after_its_chat_was_forgotten_is_not_learnt(tmp_path: Path) -> None:
    tables = NgramTables(tmp_path, TOKENIZER, True, lambda word: None)
    tables.forget("gone")
    for chat in ("gone", "kept"):
        tables.remember(request(chat), ANSWER)
    tables.close()
    assert set(TableDirectory(tmp_path / OWN).load().sources) == {"chat:kept"}

"""Builds that are killed, run out of disk, are resumed, pruned and merged: no text lost, none twice, none invented."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.storage.aio import AsyncReader
from localspec.storage.errors import TableFull
from localspec.storage.files import TEMPORARY_PREFIX
from localspec.storage.ngram_build import RunBuilder, delete_source
from localspec.storage.ngram_format import MAX_RECORDS_PER_ADDRESS, MAX_TOKEN
from localspec.storage.ngram_manifest import TableDirectory
from localspec.storage.ngram_merge import merge_runs
from localspec.storage.ngram_run_file import Run
from localspec.storage.ngram_runs import NgramTable
from tests.storage.ngram_cases import TOKENIZER, Occurrences, Tokens, build, look_up_waiting, stdlib_documents

MODULES = ["heapq", "bisect", "queue", "copy", "stat", "abc", "shlex", "textwrap", "csv", "sched", "cmd", "code"]


@pytest.fixture(scope="module")
def documents() -> list[Tokens]:
    return stdlib_documents(MODULES)


@pytest.fixture(scope="module")
def occurrences(documents: list[Tokens]) -> Occurrences:
    return Occurrences(documents)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, documents: list[Tokens]) -> set[tuple[int, ...]]:
    """Contexts of a table that was built at one go."""
    directory = tmp_path_factory.mktemp("whole") / "t"
    build(directory, documents)
    return set(occurrences_of(all_records(directory)))


def all_records(directory: Path, *, staged: bool = False) -> np.ndarray:
    manifest = TableDirectory(directory).load()
    entries = manifest.staged if staged else manifest.runs
    runs = [Run(directory / entry.file_name, manifest.tokenizer_fingerprint) for entry in entries]
    blocks = [block for run in runs for block, damaged in run.blocks(50) if not damaged]
    return np.concatenate(blocks)


def occurrences_of(records: np.ndarray) -> dict[tuple[int, ...], int]:
    """Occurrences by context: counts stand for the first token only, the share scales them up."""
    found: Counter[tuple[int, ...]] = Counter()
    # Of an address at the cap it depends on the order of merges which of equally frequent records stay.
    address, count = np.unique(records["address"], return_counts=True)
    for record in records[~np.isin(records["address"], address[count >= MAX_RECORDS_PER_ADDRESS])]:
        last = int(record["last_length"]) & MAX_TOKEN
        key = (record["address"], record["fingerprint"], last, record["tag12"], record["tag16"])
        share = int(record["source_share"]) >> 24
        found[tuple(int(part) for part in key)] += round(int(record["count"]) * 255 / share)
    return found


@pytest.mark.parametrize(("chunk_tokens", "fan_in"), [(500, 3), (4000, 64), (1 << 21, 64)])
def test_chunking_does_not_change_what_is_counted(
    tmp_path: Path, documents: list[Tokens], chunk_tokens: int, fan_in: int
) -> None:
    documents = documents[:6]
    for name, options in (("a", {"chunk_tokens": chunk_tokens, "fan_in": fan_in}), ("b", {})):
        with RunBuilder(tmp_path / name, TOKENIZER, **options) as builder:
            for tokens in documents:
                builder.add("corpus", tokens)
            report = builder.finish()
        assert report.tokens == sum(len(tokens) for tokens in documents)
        assert report.table_bytes == sum(path.stat().st_size for path in (tmp_path / name).glob("*.ngr"))
        assert report.written_bytes >= report.table_bytes
        assert len(list((tmp_path / name).glob("*.ngr"))) == 1
    chunked, whole = (occurrences_of(all_records(tmp_path / name)) for name in ("a", "b"))
    differ = sum(chunked.get(key) != count for key, count in whole.items())
    # A share is kept in 255ths, so that a few larger counts are off by one; no context may be lost or appear.
    assert set(chunked) == set(whole)
    assert differ < 0.01 * len(whole)


def test_pages_are_sorted_full_and_never_split_an_address(tmp_path: Path, documents: list[Tokens]) -> None:
    build(tmp_path / "t", documents)
    manifest = TableDirectory(tmp_path / "t").load()
    run = Run(tmp_path / "t" / manifest.runs[0].file_name, TOKENIZER)
    pages = [block for block, _ in run.blocks(1)]
    assert len(pages) == run.header.page_count == len(run.fences)
    assert np.mean([len(page) for page in pages]) > 61
    assert sum(len(page) for page in pages) == run.header.record_count
    for before, after in itertools.pairwise(pages):
        assert before["address"][-1] < after["address"][0]
    assert [int(page["address"][0]) for page in pages] == run.fences.tolist()
    addresses = np.concatenate([page["address"] for page in pages])
    assert np.all(np.diff(addresses.astype(np.int64)) >= 0)
    assert np.unique(addresses, return_counts=True)[1].max() <= MAX_RECORDS_PER_ADDRESS


def test_pruned_corpus_is_small(tmp_path: Path, documents: list[Tokens]) -> None:
    with RunBuilder(tmp_path / "all", TOKENIZER) as builder:
        for tokens in documents:
            builder.add("corpus", tokens)
        everything = builder.finish()
    with RunBuilder(tmp_path / "pruned", TOKENIZER, chunk_tokens=3000) as builder:
        for tokens in documents:
            builder.add("corpus", tokens)
        pruned = builder.finish(min_count=2)
    assert 0 < pruned.records < 0.4 * everything.records
    seen = Counter(tuple(tokens[i : i + 8].tolist()) for tokens in documents for i in range(len(tokens) - 8))
    often = {key for key, count in seen.items() if count >= 2}
    with AsyncReader(threads=1) as reader:
        table = NgramTable.open(tmp_path / "pruned", TOKENIZER, reader)
        for tokens in documents:
            listed = tokens.tolist()
            for end in range(8, len(listed) - 1, 13):
                found = look_up_waiting(table, listed[max(0, end - 16) : end])
                if tuple(listed[end - 8 : end]) not in often:
                    assert found is None


def test_documents_larger_than_a_chunk_count_once(tmp_path: Path, documents: list[Tokens]) -> None:
    large = np.concatenate(documents)
    build(tmp_path / "a", [large], chunk_tokens=700)
    build(tmp_path / "b", [large])
    assert set(occurrences_of(all_records(tmp_path / "a"))) == set(occurrences_of(all_records(tmp_path / "b")))


def test_two_builders_and_bad_input(tmp_path: Path) -> None:
    with RunBuilder(tmp_path / "t", TOKENIZER) as builder:
        with pytest.raises(BlockingIOError), RunBuilder(tmp_path / "t", TOKENIZER):
            pass
        for bad in ([-1, 2], [1 << 24]):
            with pytest.raises(ValueError, match="16777215"):
                builder.add("x", bad)
        builder.add("empty", [])
        builder.add("short", [1, 2, 3])
        report = builder.finish()
    assert report.records == 0
    with pytest.raises(ValueError, match="order"), RunBuilder(tmp_path / "u", TOKENIZER, order=2):
        pass
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in (tmp_path / "t").iterdir())


def test_unfinished_build_is_resumed_and_another_starts_over(
    tmp_path: Path, documents: list[Tokens], whole: set[tuple[int, ...]]
) -> None:
    directory = tmp_path / "t"

    def run(name: str, stop_after: int | None) -> int:
        with RunBuilder(directory, TOKENIZER, build=name, chunk_tokens=2000) as builder:
            resumed_at = builder.documents_done
            for tokens in documents[resumed_at:stop_after]:
                builder.add("corpus", tokens)
            if stop_after is None:
                builder.finish()
        return resumed_at

    assert run("first", 6) == 0
    assert 0 < run("first", 9) <= 6
    with AsyncReader(threads=1) as reader:
        # Nothing of it answers before it is finished.
        assert NgramTable.open(directory, TOKENIZER, reader).statistics().runs == 0
    with RunBuilder(directory, TOKENIZER) as builder:
        # Upkeep alone does not give a build up.
        builder.purge_deleted()
        builder.finish()
    assert TableDirectory(directory).load().documents_done > 6
    assert run("second", 5) == 0
    assert set(TableDirectory(directory).load().sources) <= {"corpus"}
    assert 0 < run("second", None) <= 5
    assert set(occurrences_of(all_records(directory))) == whole
    manifest = TableDirectory(directory).load()
    assert manifest.without_build() == manifest
    assert set(manifest.sources) == {"corpus"}
    assert manifest.runs[0].token_count == sum(len(tokens) for tokens in documents)


def check_serves_only_truth(directory: Path, occurrences: Occurrences, documents: Sequence[Tokens]) -> int:
    hits = 0
    with AsyncReader(threads=1) as reader:
        table = NgramTable.open(directory, TOKENIZER, reader)
        figures = table.statistics()
        assert not figures.damaged_runs
        assert not figures.missing_runs
        for tokens in documents:
            listed = tokens.tolist()
            for end in range(16, len(listed) - 1, 101):
                context = listed[max(0, end - 20) : end]
                found = look_up_waiting(table, context)
                if found is not None:
                    truths = occurrences.continuations(context, found.match_tokens)
                    assert list(found.tokens) in [truth[: len(found.tokens)] for truth in truths]
                    assert found.count <= len(truths)
                    hits += 1
        assert not table.statistics().damaged_pages
    return hits


@pytest.mark.parametrize("room_bytes", [0, 5_000, 60_000, 200_000, 500_000, 900_000, 1_400_000])
def test_full_disk_loses_nothing_that_was_flushed(
    tmp_path: Path, documents: list[Tokens], occurrences: Occurrences, whole: set[tuple[int, ...]], room_bytes: int
) -> None:
    directory = tmp_path / "t"
    left = room_bytes

    def limited(fd: int, data: memoryview) -> int:
        nonlocal left
        if left <= 0:
            raise OSError(28, "No space left on device")
        written = os.write(fd, data[: max(1, min(left, len(data)))])
        left -= written
        return written

    def run() -> None:
        with RunBuilder(
            directory, TOKENIZER, build="b", chunk_tokens=3000, fan_in=4, write_function=limited
        ) as builder:
            for tokens in documents[builder.documents_done :]:
                builder.add("corpus", tokens)
            builder.finish()

    with pytest.raises(OSError, match="space"):
        run()
    if (directory / "manifest").exists():
        check_serves_only_truth(directory, occurrences, documents)
        assert not list(directory.glob(f"{TEMPORARY_PREFIX}*"))
    left = 1 << 30
    run()
    assert check_serves_only_truth(directory, occurrences, documents) > 50
    assert set(occurrences_of(all_records(directory))) == whole


BUILDER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from localspec.storage.ngram_build import RunBuilder
from tests.storage.ngram_cases import TOKENIZER, stdlib_documents
documents = stdlib_documents(sys.argv[3].split(","))
print("ready", flush=True)
options = {"chunk_tokens": 1500, "fan_in": 3, "merge_memory_bytes": 1 << 18}
with RunBuilder(Path(sys.argv[1]), TOKENIZER, build="corpus", **options) as builder:
    if builder.documents_done or not builder.sources:
        for tokens in documents[builder.documents_done:4]:
            builder.add("corpus", tokens)
        builder.finish()
for number, tokens in enumerate(documents[4:]):
    with RunBuilder(Path(sys.argv[1]), TOKENIZER, build=f"chat {number}", **options) as builder:
        if f"chat {number}" not in builder.sources:
            builder.add(f"chat {number}", tokens)
        builder.finish()
"""


def killed_builder(directory: Path, wait_s: float) -> bool:
    """Run the builder above for a while, then kill it; True when it had ended before."""
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", BUILDER, str(directory), root, ",".join(MODULES)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            assert process.wait(wait_s) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            return False
    return True


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path: Path, documents: list[Tokens], occurrences: Occurrences) -> None:
    directory = tmp_path / "t"
    rng = np.random.default_rng(13)
    finished, kills, states = False, 0, set()
    while not finished and kills < 60:
        # Past the sixth kill ever longer, so that the end is reached.
        finished = killed_builder(directory, float(rng.random()) * (0.1 if kills < 12 else 0.02 * kills))
        kills += not finished
        if not (directory / "manifest").exists():
            continue
        manifest = TableDirectory(directory).load()
        states.add((manifest.documents_done, len(manifest.staged), len(manifest.runs), len(manifest.sources)))
        # What the manifest counts as done is what is in the files it names, no more and no less.
        chats = {name: 4 + int(name[5:]) for name in manifest.sources if name.startswith("chat")}
        corpus = range(4) if manifest.runs else range(manifest.documents_done)
        if not chats and manifest.build == "corpus":
            assert sum(entry.token_count for entry in manifest.staged) == sum(len(documents[i]) for i in corpus)
        elif manifest.runs:
            done = [*corpus, *chats.values()]
            entries = (*manifest.runs, *manifest.staged)
            assert sum(entry.token_count for entry in entries) == sum(len(documents[i]) for i in done)
        if kills % 5 == 0:
            check_serves_only_truth(directory, occurrences, documents)
    assert finished
    assert kills > 4
    assert len(states) > 4
    manifest = TableDirectory(directory).load()
    assert {path.name for path in directory.glob("*.ngr")} == {entry.file_name for entry in manifest.runs}
    assert not list(directory.glob(f"{TEMPORARY_PREFIX}*"))
    assert sum(entry.token_count for entry in manifest.runs) == sum(len(tokens) for tokens in documents)
    assert check_serves_only_truth(directory, occurrences, documents) > 50
    with RunBuilder(tmp_path / "whole", TOKENIZER) as builder:
        for number, tokens in enumerate(documents):
            builder.add("corpus" if number < 4 else f"chat {number - 4}", tokens)
        builder.finish()
    found, expected = (set(occurrences_of(all_records(path))) for path in (directory, tmp_path / "whole"))
    assert found == expected


def test_merge_skips_damaged_pages_and_says_so(
    tmp_path: Path, documents: list[Tokens], occurrences: Occurrences
) -> None:
    directory = tmp_path / "t"
    with RunBuilder(directory, TOKENIZER, build="b", chunk_tokens=3000) as builder:
        for tokens in documents:
            builder.add("corpus", tokens)
        builder.flush()
        paths = sorted(directory.glob("*.ngr"))
        raw = bytearray(paths[0].read_bytes())
        raw[4096 * 3 + 100] ^= 1
        paths[0].write_bytes(raw)
        paths[1].write_bytes(paths[1].read_bytes()[:5000])
        report = builder.finish()
    assert (report.damaged_pages, report.damaged_runs) == (1, 1)
    assert check_serves_only_truth(directory, occurrences, documents) > 50


def test_a_list_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, documents: list[Tokens], monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path / "t", documents[:1])
    monkeypatch.setattr("localspec.storage.ngram_manifest.MAX_MANIFEST_BYTES", 2000)
    with RunBuilder(tmp_path / "t", TOKENIZER) as builder, pytest.raises(TableFull, match="31 sources"):
        for number in range(30):
            builder.add(f"{number} {'long name ' * 10}", documents[1][:50])
        builder.finish()
    assert len(TableDirectory(tmp_path / "t").load().sources) == 1


def test_a_run_that_was_removed_by_hand_is_counted_and_harms_nothing(tmp_path: Path, documents: list[Tokens]) -> None:
    directory = tmp_path / "t"
    for number in range(2):
        with RunBuilder(directory, TOKENIZER) as builder:
            builder.add(f"chat {number}", documents[number])
            whole = builder.finish()
    next(iter(directory.glob("*.ngr"))).unlink()
    with RunBuilder(directory, TOKENIZER) as builder:
        builder.add("chat 2", documents[2])
        report = builder.finish()
    assert report.damaged_runs == 1 and report.table_bytes < whole.table_bytes + report.written_bytes


def test_merge_in_little_memory_equals_merge_in_much(tmp_path: Path, documents: list[Tokens]) -> None:
    directory = tmp_path / "t"
    with RunBuilder(directory, TOKENIZER, build="b", chunk_tokens=2000) as builder:
        for tokens in documents:
            builder.add("corpus", tokens)
        builder.flush()
        entries = TableDirectory(directory).load().staged
        runs = [Run(directory / entry.file_name, TOKENIZER) for entry in entries]
        told: list[float] = []
        results = [merge_runs(runs, tmp_path, memory_bytes=size, progress=told.append) for size in (0, 1 << 30)]
    contents = []
    for result in results:
        run = Run(tmp_path / f"{result.header.run_id:016x}.ngr", TOKENIZER)
        contents.append(np.concatenate([block for block, _ in run.blocks(100)]))
        assert result.written_bytes == run.file.size_bytes
        assert result.read_bytes == sum(run.header.page_count for run in runs) * 4096
    assert np.array_equal(np.sort(contents[0], order="address"), np.sort(contents[1], order="address"))
    assert told[-1] > 0.99
    assert len(told) > 20
    assert sum(after < before for before, after in itertools.pairwise(told)) <= 1


def test_purge_rewrites_only_runs_that_hold_the_source(tmp_path: Path, documents: list[Tokens]) -> None:
    directory = tmp_path / "t"
    for number in range(3):
        with RunBuilder(directory, TOKENIZER) as builder:
            builder.add(f"chat {number}", documents[number])
            builder.finish()
    before = {entry.run_id for entry in TableDirectory(directory).load().runs}
    delete_source(directory, "chat 1")
    with RunBuilder(directory, TOKENIZER) as builder:
        report = builder.purge_deleted()
        assert len(before & {entry.run_id for entry in TableDirectory(directory).load().runs}) == 2
        # The number is not used again: an old record must not come back under a new name.
        builder.add("chat 1", documents[5])
        builder.finish()
    manifest = TableDirectory(directory).load()
    assert report.tokens
    assert manifest.sources["chat 1"] not in {1, 2, 3}
    sources = set((all_records(directory)["source_share"] & MAX_TOKEN).tolist())
    assert sources == set(manifest.sources.values())

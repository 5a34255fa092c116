"""The table as the decode loop sees it: right continuations, no waiting, a hard cap, damage that costs only hits."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from localspec.storage.aio import AsyncReader
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.ngram_build import RunBuilder, delete_source
from localspec.storage.ngram_cache import PageCache, PageKey
from localspec.storage.ngram_format import PAGE_BYTES
from localspec.storage.ngram_manifest import MANIFEST_NAME, TableDirectory
from localspec.storage.ngram_runs import MAX_WISHES, NgramTable
from tests.storage.ngram_cases import (
    OTHER_TOKENIZER,
    TOKENIZER,
    Occurrences,
    Tokens,
    build,
    look_up_waiting,
    settle,
    stdlib_documents,
)

MODULES = ["heapq", "bisect", "queue", "copy", "stat", "abc", "shlex", "textwrap", "calendar", "csv"]


@pytest.fixture(scope="module")
def documents() -> list[Tokens]:
    return stdlib_documents(MODULES)


@pytest.fixture(scope="module")
def occurrences(documents: list[Tokens]) -> Occurrences:
    return Occurrences(documents)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, documents: list[Tokens]) -> Path:
    directory = tmp_path_factory.mktemp("tables") / "code"
    build(directory, documents, chunk_tokens=20_000)
    return directory


@pytest.fixture
def directory(tmp_path: Path, built: Path) -> Path:
    """A copy that a test may harm."""
    target = tmp_path / "code"
    target.mkdir(mode=0o700)
    for path in built.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


@pytest.fixture
def reader() -> Iterator[AsyncReader]:
    with AsyncReader(threads=2, buffer_cap_bytes=1 << 20) as reader:
        yield reader


def contexts_of(documents: Sequence[Tokens], step: int) -> Iterator[list[int]]:
    for tokens in documents:
        listed = tokens.tolist()
        for end in range(8, len(listed) - 1, step):
            yield listed[max(0, end - 24) : end]


def test_every_context_is_answered_with_what_followed(
    built: Path, documents: list[Tokens], occurrences: Occurrences, reader: AsyncReader
) -> None:
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=16 << 20)
    asked = missing = 0
    for context in contexts_of(documents, 11):
        found = look_up_waiting(table, context)
        asked += 1
        if found is None:
            missing += 1
            continue
        truths = occurrences.continuations(context, found.match_tokens)
        assert list(found.tokens) in [truth[: len(found.tokens)] for truth in truths]
        assert 1 <= found.count <= len(truths)
        assert 0 < found.share <= 1
    # Only a hot prefix, capped to 32 records, may have lost one.
    assert missing <= 0.01 * asked
    figures = table.statistics()
    assert figures.hits == asked - missing
    assert (figures.damaged_pages, figures.damaged_runs, figures.read_errors, figures.dropped_pages) == (0, 0, 0, 0)
    assert figures.index_bytes + figures.cache_bytes <= 16 << 20


def test_unknown_contexts_are_misses(built: Path, reader: AsyncReader) -> None:
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=16 << 20)
    rng = np.random.default_rng(11)
    for _ in range(200):
        assert look_up_waiting(table, rng.integers(0, 9_000_000, size=20).tolist()) is None
    figures = table.statistics()
    # The filter spares nearly all of their reads.
    assert figures.requested_pages < 25
    assert table.lookup([1, 2, 3]) is None
    table.prefetch([[1, 2]])
    table.prefetch_step([1], [2])


def test_acceptance_is_that_of_an_exhaustive_search(tmp_path: Path, reader: AsyncReader) -> None:
    names = ["argparse", "configparser", "dataclasses", "difflib", "enum", "ftplib", "gettext", "imaplib",
             "locale", "nntplib", "optparse", "pathlib", "pdb", "poplib", "smtplib", "tempfile", "telnetlib",
             "zipfile"]  # fmt: skip
    folder = Path(os.__file__).parent
    documents = stdlib_documents([name for name in names if (folder / f"{name}.py").exists()])
    held_out, rest = documents[::6], [tokens for index, tokens in enumerate(documents) if index % 6]
    # Half a file is the user's edit of what the table knows: long matches must be served too.
    rest.append(held_out[1][: len(held_out[1]) // 2])
    build(tmp_path / "t", rest)
    table = NgramTable.open(tmp_path / "t", TOKENIZER, reader, ram_cap_bytes=32 << 20)
    reference = Occurrences(rest)
    accepted = {"table": 0, "reference": 0}
    steps = 0
    for tokens in held_out:
        listed = tokens.tolist()
        for end in range(16, min(len(listed), 7000), 17):
            context, truth = listed[max(0, end - 24) : end], listed[end : end + 14]
            found = look_up_waiting(table, context)
            draft, _ = reference.draft(context)
            for name, tokens_drafted in (("table", found.tokens if found else ()), ("reference", draft)):
                for drafted, true in zip(tokens_drafted, truth, strict=False):
                    if drafted != true:
                        break
                    accepted[name] += 1
            steps += 1
    assert accepted["reference"] > 0.3 * steps
    assert accepted["table"] >= 0.98 * accepted["reference"]


def test_pages_of_all_outcomes_are_fetched_during_verification(
    built: Path, documents: list[Tokens], reader: AsyncReader
) -> None:
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=16 << 20)
    tokens = documents[4].tolist()
    history, draft, bonus = tokens[100:140], tokens[140:148], tokens[148]
    table.prefetch_step(history, draft)
    settle(table)
    asked = table.statistics().requested_pages
    assert 9 <= asked <= 9 * 2
    # Wherever verification stops, the true next token is one that the page already covers.
    text = [*history, *draft, bonus]
    for accepted in range(9):
        assert table.lookup(text[: len(history) + accepted + 1]) is not None
    assert table.statistics().requested_pages == asked
    records = table.ready_records([*history, *draft])
    assert bonus in (records["last_length"] & 0xFFFFFF).tolist()


def test_slow_disk_costs_hits_and_no_time(built: Path, documents: list[Tokens]) -> None:
    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.05)
        return os.preadv(fd, buffers, offset)

    with AsyncReader(threads=2, read_function=slow) as reader:
        table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=2 << 20, max_pending=8)
        tokens = documents[7].tolist()
        spent = []
        for end in range(20, 400, 4):
            started = time.perf_counter()
            assert table.lookup(tokens[end - 20 : end]) is None or table.statistics().requested_pages
            table.prefetch_step(tokens[end - 20 : end], tokens[end : end + 4])
            spent.append(time.perf_counter() - started)
        assert float(np.median(spent)) < 0.005
        # Beside what the two threads have begun, and what one of them is just asking for.
        assert table._cache.pending_reads <= 8 + 2 + 5
        settle(table)
        figures = table.statistics()
        assert figures.dropped_pages > 50
        assert figures.late > 0
        # The newest wishes are the ones that were served.
        assert table.lookup(tokens[376:397]) is not None


def test_the_decode_thread_waits_for_no_worker(built: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=16 << 20)
    tokens = documents[2].tolist()
    assert look_up_waiting(table, tokens[60:90]) is not None
    requested = table.statistics().requested_pages
    with table._granting:
        # As if a worker were at work on a wish for as long as this takes.
        for end in range(100, 100 + MAX_WISHES + 30):
            table.prefetch_step(tokens[end - 20 : end], tokens[end : end + 3])
        assert table.lookup(tokens[60:90]) is not None
        figures = table.statistics()
        assert figures.requested_pages == requested
        # What nobody has looked at counts as on its way; the oldest wishes gave way.
        assert figures.pending_reads == MAX_WISHES + 1
        assert figures.dropped_pages == 30
    settle(table)
    assert table.statistics().requested_pages > requested
    assert table.lookup(tokens[end - 20 : end + 2]) is not None
    assert table.lookup(tokens[80:101]) is None


class TornCopies:
    """A cache's memory in which something happens in the middle of every copy that one thread makes."""

    def __init__(self, memory: memoryview, meanwhile: Callable[[], object]) -> None:
        self._memory = memory
        self._meanwhile = meanwhile
        self._thread = threading.current_thread()

    def __getitem__(self, at: slice) -> memoryview | bytes:
        if threading.current_thread() is not self._thread:
            return self._memory[at]
        middle = (at.start + at.stop) // 2
        first = bytes(self._memory[at.start : middle])
        self._meanwhile()
        return first + bytes(self._memory[middle : at.stop])


def test_pages_that_are_read_anew_meanwhile_are_no_wrong_answers(
    built: Path, documents: list[Tokens], occurrences: Occurrences, reader: AsyncReader
) -> None:
    """Workers take frames away while the decode thread copies from them: a page comes whole or not at all."""
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=600_000)
    cache = table._cache
    raw = next(built.glob("*.ngr")).read_bytes()
    contexts = list(contexts_of(documents, 31))[:400]
    order = random.Random(3)
    copies = hits = whole = taken_away = 0

    def others_are_read() -> None:
        nonlocal copies
        copies += 1
        for _ in range(2):
            # Fewer at once than the table drops wishes for.
            table.prefetch([context[:-1] for context in order.sample(contexts, MAX_WISHES // 2)])
            settle(table)

    others_are_read()
    cache._memory = TornCopies(cache._memory, others_are_read)  # type: ignore[assignment]
    while copies < 120:
        context = order.choice(contexts)
        found = table.lookup(context)
        if found is not None:
            hits += 1
            truths = occurrences.continuations(context, found.match_tokens)
            assert list(found.tokens) in [truth[: len(found.tokens)] for truth in truths]
        [key] = table._pages_of(order.choice(contexts)[-8:-1])
        begun = copies
        page = cache.page(key)
        assert page in (None, raw[key.page_number * PAGE_BYTES :][:PAGE_BYTES])
        whole += page is not None
        taken_away += page is None and copies > begun
    assert min(hits, whole, taken_away) > 10, (hits, whole, taken_away)
    assert table.statistics().damaged_pages == 0


@pytest.mark.parametrize("then", ["another page is there", "it is being read again", "it came back elsewhere"])
def test_a_page_whose_frame_changes_under_the_copy_is_not_here(built: Path, then: str) -> None:
    """What the test above meets now and then, at the worst moment."""
    go_on = threading.Event()
    go_on.set()

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        assert go_on.wait(60)
        return os.preadv(fd, buffers, offset)

    with AsyncReader(threads=1, read_function=read) as reader:
        table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=600_000)
        [slot] = table._view.slots
        cache = PageCache(reader, 0, max_pending=8)
        keys = [PageKey(slot.number, number) for number in range(1, cache.frame_count + 2)]
        asked, *others, late = keys

        def fetch(*wanted: PageKey) -> None:
            for key in wanted:
                cache.request([(key, slot.run)])
                while go_on.is_set() and cache.pending_reads:
                    time.sleep(0.0002)

        def take_the_frame() -> None:
            cache._memory = memory
            fetch(late)
            assert cache._frames[late] == frame
            if then == "it came back elsewhere":
                fetch(asked)
                assert cache._frames[asked] != frame
            elif then == "it is being read again":
                fetch(*others)
                go_on.clear()
                fetch(asked)
                assert cache._frames[asked] == frame and cache.pending_reads == 1

        fetch(asked, *others)
        frame, memory = cache._frames[asked], cache._memory
        cache._memory = TornCopies(memory, take_the_frame)  # type: ignore[assignment]
        try:
            assert cache.page(asked) is None
        finally:
            go_on.set()
        fetch(asked)
        assert cache.page(asked) == next(built.glob("*.ngr")).read_bytes()[PAGE_BYTES:][:PAGE_BYTES]


def test_failing_disk_is_a_miss_and_is_tried_again(built: Path, documents: list[Tokens]) -> None:
    broken = True

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if broken:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, buffers, offset)

    with AsyncReader(threads=1, read_function=failing) as reader:
        table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=2 << 20)
        context = documents[3].tolist()[30:60]
        assert look_up_waiting(table, context) is None
        assert table.statistics().read_errors == 1
        broken = False
        assert look_up_waiting(table, context) is not None
    # A closed reader is a disk that never answers.
    table.prefetch([documents[0].tolist()[50:80]])
    assert table.lookup(documents[0].tolist()[50:81]) is None


def test_flipped_bits_are_misses_and_are_counted(
    directory: Path, documents: list[Tokens], occurrences: Occurrences, reader: AsyncReader
) -> None:
    (path,) = directory.glob("*.ngr")
    raw = bytearray(path.read_bytes())
    rng = np.random.default_rng(12)
    page_count = sum(1 for _ in range(PAGE_BYTES, len(raw) - PAGE_BYTES, PAGE_BYTES))
    harmed = rng.choice(np.arange(1, page_count), size=page_count // 3, replace=False)
    for page in harmed.tolist():
        raw[page * PAGE_BYTES + int(rng.integers(PAGE_BYTES))] ^= 1 << int(rng.integers(8))
    path.write_bytes(raw)
    table = NgramTable.open(directory, TOKENIZER, reader, ram_cap_bytes=16 << 20)
    hits = misses = 0
    for context in contexts_of(documents, 11):
        found = look_up_waiting(table, context)
        if found is None:
            misses += 1
            continue
        hits += 1
        truths = occurrences.continuations(context, found.match_tokens)
        assert list(found.tokens) in [truth[: len(found.tokens)] for truth in truths]
    assert 0.2 * (hits + misses) < misses < 0.5 * (hits + misses)
    assert table.statistics().damaged_pages > 0.9 * len(harmed)


@pytest.mark.parametrize("where", ["header", "fences", "cut", "longer", "empty"])
def test_damaged_run_is_left_out(directory: Path, documents: list[Tokens], reader: AsyncReader, where: str) -> None:
    (path,) = directory.glob("*.ngr")
    raw = bytearray(path.read_bytes())
    header_pages = int.from_bytes(raw[56:64], "little")
    if where == "header":
        raw[20] ^= 1
    elif where == "fences":
        raw[PAGE_BYTES * (1 + header_pages) + 2] ^= 1
    elif where == "longer":
        raw += b"x"
    path.write_bytes(raw[: len(raw) // 2] if where == "cut" else b"" if where == "empty" else raw)
    table = NgramTable.open(directory, TOKENIZER, reader)
    assert look_up_waiting(table, documents[0].tolist()[40:70]) is None
    assert table.statistics().damaged_runs == 1


def test_damaged_filter_costs_reads_only(directory: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    (path,) = directory.glob("*.ngr")
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    table = NgramTable.open(directory, TOKENIZER, reader)
    assert look_up_waiting(table, documents[0].tolist()[40:70]) is not None


def test_file_cut_in_use_is_a_miss(directory: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    table = NgramTable.open(directory, TOKENIZER, reader)
    (path,) = directory.glob("*.ngr")
    os.truncate(path, PAGE_BYTES)
    assert look_up_waiting(table, documents[0].tolist()[40:70]) is None
    assert table.statistics().read_errors == 1


def test_pages_of_another_run_are_not_taken(directory: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    table = NgramTable.open(directory, TOKENIZER, reader)
    (path,) = directory.glob("*.ngr")
    raw = bytearray(path.read_bytes())
    # Whole pages, each with a good checksum, one place further on: what a file system may do to lost writes.
    raw[PAGE_BYTES * 2 : PAGE_BYTES * 20] = raw[PAGE_BYTES : PAGE_BYTES * 19]
    path.write_bytes(raw)
    damaged = 0
    for context in contexts_of(documents, 23):
        look_up_waiting(table, context)
        damaged = table.statistics().damaged_pages
    assert damaged > 10


@pytest.mark.parametrize("position", [0, 5, 20, 200, -2])
def test_damaged_manifest_is_said(directory: Path, reader: AsyncReader, position: int) -> None:
    path = directory / MANIFEST_NAME
    raw = bytearray(path.read_bytes())
    raw[position] ^= 4
    path.write_bytes(raw)
    with pytest.raises(DamagedFile, match="build it again"):
        NgramTable.open(directory, TOKENIZER, reader)


def test_other_tokenizer_and_missing_table(directory: Path, tmp_path: Path, reader: AsyncReader) -> None:
    with pytest.raises(WrongOwner, match="another tokenizer"):
        NgramTable.open(directory, OTHER_TOKENIZER, reader)
    with pytest.raises(WrongOwner, match="another tokenizer"), RunBuilder(directory, OTHER_TOKENIZER):
        pass
    with pytest.raises(WrongOwner, match="order 8"), RunBuilder(directory, TOKENIZER, order=6):
        pass
    with pytest.raises(FileNotFoundError):
        NgramTable.open(tmp_path / "none", TOKENIZER, reader)
    with pytest.raises(ValueError, match="cap"):
        NgramTable.open(directory, TOKENIZER, reader, ram_cap_bytes=1000)


def test_cap_is_kept_while_everything_is_asked_for(built: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    cap = 600_000
    table = NgramTable.open(built, TOKENIZER, reader, ram_cap_bytes=cap)
    assert table.statistics().table_bytes > 3 * cap
    hits = asked = 0
    for context in contexts_of(documents, 9):
        hits += look_up_waiting(table, context) is not None
        asked += 1
        figures = table.statistics()
        assert figures.index_bytes + figures.cache_bytes <= cap
    assert hits > 0.98 * asked
    assert table.statistics().cached_pages < table.statistics().requested_pages


def test_deleted_source_is_not_served_and_then_gone(
    tmp_path: Path, documents: list[Tokens], reader: AsyncReader
) -> None:
    directory = tmp_path / "t"
    build(directory, documents[:4])
    table = NgramTable.open(directory, TOKENIZER, reader)
    secret = documents[2].tolist()
    own = [context for context in contexts_of(documents[2:3], 9)]
    assert sum(look_up_waiting(table, context) is not None for context in own) == len(own)
    assert delete_source(directory, "document 2")
    assert not delete_source(directory, "document 2")
    assert table.refresh()
    assert not table.refresh()
    others = Occurrences([tokens for index, tokens in enumerate(documents[:4]) if index != 2])
    for context in own:
        found = look_up_waiting(table, context)
        assert found is None or others.places(context, 8)
    with RunBuilder(directory, TOKENIZER) as builder:
        builder.purge_deleted()
    assert table.refresh()
    packed = b"".join(token.to_bytes(3, "little") for token in secret[500:506])
    assert all(packed not in path.read_bytes() for path in directory.glob("*.ngr"))
    assert TableDirectory(directory).load().deleted == frozenset()
    assert look_up_waiting(table, documents[0].tolist()[40:70]) is not None


def test_changed_file_is_deleted_and_added_again(tmp_path: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    directory = tmp_path / "t"
    before, after = documents[2], documents[3]
    with RunBuilder(directory, TOKENIZER) as builder:
        builder.add("kept", documents[0])
        builder.add("file", before)
        assert builder.delete("file")
        assert not builder.delete("file")
        builder.add("file", after)
        builder.finish()
    table = NgramTable.open(directory, TOKENIZER, reader)
    old, new = Occurrences([documents[0], after]), list(contexts_of([after], 9))
    assert all(look_up_waiting(table, context) is not None for context in new)
    for context in contexts_of([before], 9):
        assert look_up_waiting(table, context) is None or old.places(context, 8)


def test_table_removed_in_use(directory: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    table = NgramTable.open(directory, TOKENIZER, reader)
    TableDirectory(directory).remove()
    assert not directory.exists()
    # What is open still answers, until the removal is noticed.
    context = documents[0].tolist()[40:70]
    assert look_up_waiting(table, context) is not None
    assert table.refresh()
    assert table.statistics().gone
    assert look_up_waiting(table, context) is None
    build(directory, documents[:1])
    assert table.refresh()
    assert not table.statistics().gone
    assert look_up_waiting(table, context) is not None


def test_new_text_is_taken_up_and_merged_in_use(tmp_path: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    directory = tmp_path / "t"
    build(directory, documents[:1])
    table = NgramTable.open(directory, TOKENIZER, reader)
    for number in range(1, 8):
        context = documents[number].tolist()[100:130]
        with RunBuilder(directory, TOKENIZER) as builder:
            builder.add(f"chat {number}", documents[number])
            builder.finish()
        assert table.refresh()
        assert look_up_waiting(table, context) is not None
        assert table.statistics().runs <= 3
    assert len(list(directory.glob("*.ngr"))) == table.statistics().runs


def test_lookups_go_on_while_another_thread_builds_and_merges(
    tmp_path: Path, documents: list[Tokens], occurrences: Occurrences, reader: AsyncReader
) -> None:
    directory = tmp_path / "t"
    build(directory, documents[:1])
    table = NgramTable.open(directory, TOKENIZER, reader, ram_cap_bytes=2 << 20)
    failures: list[BaseException] = []

    def build_on() -> None:
        try:
            for number in range(1, len(documents)):
                with RunBuilder(directory, TOKENIZER) as builder:
                    builder.add(f"chat {number}", documents[number])
                    builder.finish()
                table.refresh()
                if number % 3 == 0:
                    delete_source(directory, f"chat {number - 1}")
                    table.refresh()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=build_on)
    thread.start()
    hits = rounds = 0
    while thread.is_alive() or rounds < 2:
        rounds += 1
        for context in contexts_of(documents, 211):
            found = look_up_waiting(table, context)
            if found is not None:
                hits += 1
                truths = occurrences.continuations(context, found.match_tokens)
                assert list(found.tokens) in [truth[: len(found.tokens)] for truth in truths]
    thread.join()
    assert not failures
    assert hits > 50
    figures = table.statistics()
    assert (figures.damaged_pages, figures.damaged_runs, figures.read_errors) == (0, 0, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"order": 99},
        {"order": "8"},
        {"tokenizer_fingerprint": "00"},
        {"runs": [{"run_id": 1}]},
        {"runs": 5},
        {"sources": {"a": 1 << 30}},
        {"sources": {"a": "1"}},
        {"deleted": [0]},
        {"build": 3},
        {"documents_done": "x"},
    ],
    ids=str,
)
def test_manifest_that_is_whole_but_impossible(directory: Path, reader: AsyncReader, change: dict[str, object]) -> None:
    path = directory / MANIFEST_NAME
    body = json.dumps(json.loads(path.read_bytes().partition(b"\n")[2]) | change).encode()
    path.write_bytes(f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body)
    with pytest.raises(DamagedFile, match="build it again"):
        NgramTable.open(directory, TOKENIZER, reader)


def test_table_that_is_wholly_deleted_is_empty(tmp_path: Path, documents: list[Tokens], reader: AsyncReader) -> None:
    build(tmp_path / "t", documents[:1])
    delete_source(tmp_path / "t", "document 0")
    with RunBuilder(tmp_path / "t", TOKENIZER) as builder:
        report = builder.purge_deleted()
    assert (report.records, report.table_bytes) == (0, 0)
    assert list((tmp_path / "t").glob("*.ngr")) == []
    table = NgramTable.open(tmp_path / "t", TOKENIZER, reader)
    assert look_up_waiting(table, documents[0].tolist()[40:70]) is None

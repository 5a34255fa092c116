"""Tables on the SSD as a drafter: what they propose, when they fall silent, and what a bad disk or table does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.records import MAX_SLOTS, Draft, Forward, Rows
from localspec.core.state import SequenceState
from localspec.drafters import Depths, Drafter, NgramTableHandle
from localspec.drafters._ngram_policy import NgramPolicy, Worth
from localspec.drafters.ngram import NgramDrafter, NgramOptions
from localspec.drafters.ngram_disk import IDLE_STEPS, NgramDiskDrafter
from localspec.engine.drafting import NO_CACHE
from localspec.runner.slots import make_state
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_format import PAGE_BYTES
from localspec.storage.ngram_manifest import TableDirectory
from localspec.storage.ngram_runs import NgramTable

pytestmark = pytest.mark.torch
TOKENIZER = bytes(range(32))
CAP_BYTES = 4 << 20


def text_of(seed: int, length: int = 600) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(5000) for _ in range(length)]


@pytest.fixture
def reader() -> Iterator[AsyncReader]:
    with AsyncReader(threads=2) as opened:
        yield opened


def make_table(folder: Path, documents: Sequence[Sequence[int]], reader: AsyncReader) -> NgramTable:
    with RunBuilder(folder, TOKENIZER) as builder:
        for number, tokens in enumerate(documents):
            builder.add(f"document {number}", tokens)
        builder.finish()
    return NgramTable.open(folder, TOKENIZER, reader, ram_cap_bytes=CAP_BYTES)


def settle(*tables: NgramTable) -> None:
    deadline = time.monotonic() + 20
    while any(table.pending_reads for table in tables):
        assert time.monotonic() < deadline
        time.sleep(0.0005)


class Replay:
    """One slot whose text is given; a step proposes, verifies against the text and shows the drafter what came."""

    def __init__(self, drafter: Drafter, text: Sequence[int], start: int, tables: Sequence[NgramTable] = ()) -> None:
        self.drafter, self.text, self.tables = drafter, list(text), tables
        self.state: SequenceState = make_state(2048, 8, torch.device("cpu"))
        self.state.history[0, : len(text)] = torch.tensor(self.text)
        self.state.lengths[0] = start
        drafter.observe(self._rows("prefill", [0] * (start - 1)), Forward(torch.zeros(1)), self.state, NO_CACHE)
        settle(*tables)

    @property
    def length(self) -> int:
        return int(self.state.lengths[0])

    def _rows(self, kind: Any, tokens: Sequence[int]) -> Rows:
        first = torch.zeros(MAX_SLOTS, dtype=torch.int64)
        windows = first.clone()
        windows[0] = len(tokens)
        slots = torch.zeros(len(tokens), dtype=torch.int64)
        positions = torch.arange(len(tokens))
        tables = self.state.block_tables
        return Rows(
            kind, torch.tensor(list(tokens)), positions, slots, tables, self.state.lengths, first, windows, first, 0, 1
        )

    def propose(self, depth: int = 14) -> Draft:
        by_slot = torch.tensor([depth] + [0] * (MAX_SLOTS - 1))
        return self.drafter.propose(Depths(by_slot, depth, (0,), (self.length,)), self.state, NO_CACHE)

    def step(self, depth: int = 14) -> tuple[list[int], int]:
        """What was drafted, and how much of it was right."""
        draft = self.propose(depth)
        settle(*self.tables)
        tokens = draft.token_ids[0, : int(draft.num_drafts[0])].tolist()
        came = self.text[self.length :]
        right = next((at for at, token in enumerate(tokens) if token != came[at]), len(tokens))
        window = [self.text[self.length - 1], *tokens]
        self.state.lengths[0] += right + 1
        self.drafter.observe(self._rows("verify", window), Forward(torch.zeros(1)), self.state, NO_CACHE)
        settle(*self.tables)
        return tokens, right


def drafter_over(*tables: tuple[str, NgramTable], policy: NgramPolicy = NgramPolicy()) -> NgramDiskDrafter:  # noqa: B008
    return NgramDiskDrafter(tuple(NgramTableHandle(name, table) for name, table in tables), policy)


def test_known_text_is_drafted_as_long_as_the_match_allows(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    drafter = drafter_over(("code", table))
    # Eight known tokens behind foreign ones: the match grows with every step.
    replay = Replay(drafter, [*text_of(2, 40), *text[100:300]], 48, [table])
    draft = replay.propose()
    assert draft.origin_names == ("table:code",)
    lengths = []
    while replay.length < 200:
        tokens, right = replay.step()
        assert right == len(tokens)
        lengths.append(right)
    assert lengths[:2] == [4, 8], "8 tokens agree, then 13 of which 12 are told apart"
    assert set(lengths[2:]) == {14}
    counts = drafter.advisor.handles[0].counts
    assert counts.drafts == len(lengths) and counts.accepted_tokens == sum(lengths)


def test_unknown_text_gets_no_draft(tmp_path: Path, reader: AsyncReader) -> None:
    table = make_table(tmp_path / "t", [text_of(1)], reader)
    replay = Replay(drafter_over(("code", table)), text_of(3, 120), 20, [table])
    for _ in range(60):
        assert replay.step() == ([], 0)
    assert table.statistics().lookups == 60 and table.statistics().hits == 0


def test_the_longer_match_speaks_then_the_clearer(tmp_path: Path, reader: AsyncReader) -> None:
    common, ours, theirs = text_of(4, 40), text_of(5, 20), text_of(6, 20)
    short = make_table(tmp_path / "short", [[*text_of(7, 30), *common[-8:], *theirs]], reader)
    long = make_table(tmp_path / "long", [[*common, *ours]], reader)
    unsure = make_table(
        tmp_path / "unsure", [[*common, *theirs], [*common, *theirs], [*common, *text_of(8, 20)]], reader
    )
    text = [*common, *ours]
    drafter = drafter_over(("short", short), ("long", long), ("unsure", unsure))
    draft = Replay(drafter, text, 40, [short, long, unsure]).propose()
    assert draft.token_ids[0, :14].tolist() == ours[:14]
    assert draft.origins[0, 0] == 1 and draft.confidence is not None and draft.confidence[0, 0] == 1.0
    alone = Replay(drafter_over(("short", short), ("unsure", unsure)), text, 40, [short, unsure]).propose()
    assert alone.token_ids[0, :14].tolist() == theirs[:14] and alone.origins[0, 0] == 1
    assert alone.confidence is not None and 0.6 < float(alone.confidence[0, 0]) < 0.7


def test_an_unclear_continuation_is_short_or_unsaid(tmp_path: Path, reader: AsyncReader) -> None:
    common = text_of(4, 40)
    for ways, expected in ((1, 14), (3, 7), (8, 0)):
        table = make_table(tmp_path / f"t{ways}", [[*common, *text_of(20 + way, 20)] for way in range(ways)], reader)
        draft = Replay(drafter_over(("t", table)), [*common, 1], 40, [table]).propose()
        assert int(draft.num_drafts[0]) == expected, ways


def test_depth_bounds_the_draft_and_other_slots_stay_empty(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    replay = Replay(drafter_over(("t", table)), text, 50, [table])
    draft = replay.propose(depth=3)
    assert draft.token_ids.shape == (MAX_SLOTS, 3) and draft.token_ids[0].tolist() == text[50:53]
    assert draft.num_drafts.tolist() == [3, 0, 0, 0]


def test_a_table_that_does_not_pay_falls_silent_and_comes_back(tmp_path: Path, reader: AsyncReader) -> None:
    pieces = [text_of(seed, 40) for seed in range(100, 180)]
    table = make_table(tmp_path / "t", pieces, reader)
    drafter = drafter_over(("t", table))

    def ask(piece: list[int], right: bool) -> bool:
        drafter.forget(0)
        came = piece[20:] if right else [token + 5000 for token in piece[20:]]
        replay = Replay(drafter, [*piece[:20], *came], 20, [table])
        return bool(replay.step()[0])

    spoken = [ask(piece, right=False) for piece in pieces[:40]]
    assert all(spoken[:5]) and not any(spoken[20:])
    assert drafter.advisor.handles[0].counts.silent >= 20
    again = [ask(piece, right=True) for piece in pieces[40:]]
    assert not any(again[:8]) and all(again[-2:]), "judged now and then while silent, trusted after some good guesses"


def test_worth_of_a_guess_moves_with_what_came() -> None:
    worth = Worth(NgramPolicy())
    for _ in range(200):
        worth.see(False)
    assert not worth.speaks
    seen = 0
    while not worth.speaks:
        worth.see(True)
        seen += 1
    assert 8 < seen <= 8 * 6


def test_nothing_is_read_for_a_slot_that_nobody_asks_about(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    replay = Replay(drafter_over(("t", table)), text, 50, [table])
    replay.step()
    for _ in range(IDLE_STEPS + 5):
        before = table.statistics().requested_pages
        window = replay._rows("verify", [text[replay.length - 1]])
        replay.state.lengths[0] += 1
        replay.drafter.observe(window, Forward(torch.zeros(1)), replay.state, NO_CACHE)
    assert table.statistics().requested_pages == before


def slow(delay_s: float) -> Callable[[int, Sequence[memoryview], int], int]:
    import os

    def read(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(delay_s)
        return os.preadv(fd, buffers, offset)

    return read


def test_a_slow_disk_costs_the_step_nothing_and_others_take_over(tmp_path: Path) -> None:
    """50 ms a read, steps of 2 ms: the table is late, the text itself speaks, and no call waits."""
    phrase = text_of(9, 50)
    text = phrase * 10
    # Many documents, so that the steps need many pages.
    with AsyncReader(threads=2) as fast:
        make_table(tmp_path / "t", [text, *(text_of(seed, 400) for seed in range(200))], fast)
    with AsyncReader(threads=2, read_function=slow(0.05)) as reader:
        table = NgramTable.open(tmp_path / "t", TOKENIZER, reader, ram_cap_bytes=CAP_BYTES)
        disk, context = drafter_over(("t", table)), NgramDrafter(NgramOptions(), host_knows=True)
        replay = Replay(disk, text, 60)
        spent_s, spoken, others = [], 0, 0
        while replay.length < 450:
            begun_s = time.perf_counter()
            tokens, _ = replay.step(depth=4)
            spent_s.append(time.perf_counter() - begun_s)
            spoken += bool(tokens)
            replay.drafter = context
            others += bool(replay.propose(4).num_drafts[0])
            replay.drafter = disk
            time.sleep(0.002)
        # A step that waited for one read would take 50 ms.
        assert sorted(spent_s)[len(spent_s) // 2] < 0.02
        assert others == len(spent_s) and spoken < others
        statistics = table.statistics()
        assert statistics.late > 0


def test_a_table_removed_in_use_falls_silent(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    replay = Replay(drafter_over(("t", table)), text, 50, [table])
    assert replay.step()[1] == 14
    TableDirectory(tmp_path / "t").remove()
    assert replay.step()[1] == 14, "what is open stays readable"
    table.refresh()
    assert table.statistics().gone
    for _ in range(5):
        assert replay.step() == ([], 0)


def test_a_damaged_page_is_a_miss(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1, 1500)
    make_table(tmp_path / "t", [text], reader)
    [run] = (tmp_path / "t").glob("*.ngr")
    data = bytearray(run.read_bytes())
    for page in range(1, 25):
        data[page * PAGE_BYTES + 1000] ^= 0x40
    run.write_bytes(data)
    table = NgramTable.open(tmp_path / "t", TOKENIZER, reader, ram_cap_bytes=CAP_BYTES)
    replay = Replay(drafter_over(("t", table)), text, 50, [table])
    while replay.length < 1400:
        tokens, right = replay.step(depth=4)
        assert right == len(tokens), "never a wrong token from a damaged page"
    assert table.statistics().damaged_pages > 0

"""The device's table of n-grams on CPU tensors: same hashes, same answers a step late, nothing wrong from rubbish."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from localspec.core.records import MAX_SLOTS, Draft
from localspec.drafters import Depths, NgramTableHandle
from localspec.drafters._ngram_device import (
    _LAST_FACTOR,
    NUM_BUCKETS,
    DeviceNgramDrafter,
    DeviceTable,
    _signed,
    bucket_of,
)
from localspec.drafters._ngram_policy import NgramPolicy
from localspec.engine.drafting import NO_CACHE
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.ngram_probe import BUCKET_RECORDS, mixed
from localspec.runner.slots import make_state
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_format import MIX_FACTORS, RECORD, mix
from localspec.storage.ngram_runs import NgramTable
from tests.drafters.test_ngram_disk import make_table, settle, text_of

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
FACTORS = (_signed(MIX_FACTORS[0]), _signed(MIX_FACTORS[1]))


@pytest.fixture
def reader() -> Iterator[AsyncReader]:
    with AsyncReader(threads=2) as opened:
        yield opened


def drafter_over(*tables: tuple[str, NgramTable]) -> DeviceNgramDrafter:
    return DeviceNgramDrafter(
        tuple(NgramTableHandle(*table) for table in tables), NgramPolicy(), ReferenceOps(CPU), 5000
    )


class LateReplay:
    """One slot; the host follows each step only when the next one is already under way."""

    def __init__(self, drafter: DeviceNgramDrafter, text: Sequence[int], start: int) -> None:
        self.drafter, self.text = drafter, list(text)
        self.state = make_state(2048, 8, CPU)
        self.state.history[0, : len(text)] = torch.tensor(self.text)
        self.state.lengths[0] = start
        self.landed: list[tuple[int, int]] = []

    @property
    def length(self) -> int:
        return int(self.state.lengths[0])

    def propose(self, depth: int = 14) -> Draft:
        by_slot = torch.tensor([depth] + [0] * (MAX_SLOTS - 1))
        return self.drafter.propose(Depths(by_slot, depth, (0,), (2048,)), self.state, NO_CACHE)

    def step(self, depth: int = 14) -> tuple[list[int], int]:
        draft = self.propose(depth)
        tokens = draft.token_ids[0, : int(draft.num_drafts[0])].tolist()
        came = self.text[self.length :]
        right = next((at for at, token in enumerate(tokens) if token != came[at]), len(tokens))
        self.landed.append((self.length, self.length + right + 1))
        self.state.lengths[0] += right + 1
        if len(self.landed) > 1:
            before, after = self.landed.pop(0)
            self.drafter._feed.follow(0, self.text[max(0, after - 16) : after], self.text[before:after])
        return tokens, right


def test_hashes_are_those_of_the_format() -> None:
    generator = random.Random(3)
    values = [generator.getrandbits(64) for _ in range(500)] + [0, 1, (1 << 64) - 1, 1 << 63]
    signed = torch.tensor([value - (1 << 64) if value >> 63 else value for value in values])
    assert [value & ((1 << 64) - 1) for value in mixed(signed, FACTORS).tolist()] == [mix(value) for value in values]
    last = [generator.randrange(1 << 24) for _ in values]
    expected = [bucket_of(value, token) for value, token in zip(values, last, strict=True)]
    buckets = mixed(signed + torch.tensor(last) * _signed(_LAST_FACTOR), FACTORS) & (NUM_BUCKETS - 1)
    assert buckets.tolist() == expected


def test_known_text_is_drafted_one_step_late(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    replay = LateReplay(drafter_over(("code", table)), [*text_of(2, 40), *text[100:420]], 45)
    lengths = []
    while replay.length < 300:
        tokens, right = replay.step()
        assert right == len(tokens)
        lengths.append(right)
    assert replay.propose().origin_names == ("table:code",)
    assert lengths.index(14) < 16 and set(lengths[lengths.index(14) :]) == {14}


def test_the_longest_match_of_several_tables_speaks(tmp_path: Path, reader: AsyncReader) -> None:
    common, ours, theirs = text_of(4, 60), text_of(5, 30), text_of(6, 30)
    short = make_table(tmp_path / "short", [[*text_of(7, 30), *common[-8:], *theirs]], reader)
    long = make_table(tmp_path / "long", [[*common, *ours]], reader)
    drafter = drafter_over(("short", short), ("long", long))
    replay = LateReplay(drafter, [*common, *ours], 60)
    for _ in range(2):
        drafter._feed.follow(0, common[-17:-1], common[-18:-17])
        settle(short, long)
    draft = replay.propose()
    assert draft.token_ids[0].tolist() == ours[:14] and draft.origins[0].tolist() == [1] * 14
    assert draft.num_drafts.tolist() == [14, 0, 0, 0]
    drafter.set_speaking({(1, 16): False})
    draft = replay.propose()
    assert draft.token_ids[0, :5].tolist() == [*theirs[:4], -1] and draft.origins[0, 0] == 0
    wide = drafter.propose(Depths(torch.tensor([15, 0, 0, 0]), 15, (0,), (60,)), replay.state, NO_CACHE)
    assert wide.token_ids.shape == (MAX_SLOTS, 15)


def test_rubbish_in_the_table_drafts_no_impossible_token(tmp_path: Path, reader: AsyncReader) -> None:
    """Every record but its key torn: whatever is drafted is a token of the model, and shapes hold."""
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    drafter = drafter_over(("t", table))
    replay = LateReplay(drafter, text, 40)
    for _ in range(6):
        replay.step()
    words = drafter.table.words
    generator = torch.Generator().manual_seed(2)
    kept_last = words[:, 1] & ((1 << 24) - 1)
    words[:, 1:] = torch.randint(-(1 << 62), 1 << 62, words[:, 1:].shape, generator=generator)
    words[:, 1] = (words[:, 1] & ~((1 << 24) - 1)) | kept_last
    for length in range(20, 300):
        replay.state.lengths[0] = length
        draft = replay.propose()
        count = int(draft.num_drafts[0])
        assert all(0 <= token < 5000 for token in draft.token_ids[0, :count].tolist())
        assert draft.token_ids[0, count:].tolist() == [-1] * (14 - count) and draft.origins.tolist()[0] == [0] * 14


def test_a_full_bucket_gives_way_and_an_equal_record_is_not_copied_twice() -> None:
    table = DeviceTable(CPU)
    records = np.zeros(20, dtype=RECORD)
    records["address"], records["fingerprint"], records["last_length"] = 7, 9, 5 | 14 << 24
    records["tag16"] = np.arange(1, 21)
    assert table.insert(records[:8], 3) == 8 and table.insert(records[:8], 3) == 0
    bucket = bucket_of(7 << 32 | 9, 5) * BUCKET_RECORDS
    tags = (table.words[bucket : bucket + BUCKET_RECORDS, 2] >> 16) & 0xFFFF
    assert sorted(tags.tolist()) == list(range(1, 9))
    assert int((table.words[:, 0] != 0).sum()) == 8
    assert ((table.words[bucket, 1] >> 32) & 0xFFFFFF).item() == 3
    newer = records[:1].copy()
    newer["count"] = 4
    assert table.insert(newer, 3) == 1 and int((table.words[:, 0] != 0).sum()) == 8
    table.insert(records[8:], 3)
    assert int((table.words[:, 0] != 0).sum()) == 8 and len(table.words) == NUM_BUCKETS * BUCKET_RECORDS


def test_the_thread_follows_and_ends(tmp_path: Path, reader: AsyncReader) -> None:
    text = text_of(1)
    table = make_table(tmp_path / "t", [text], reader)
    drafter = drafter_over(("t", table))
    for length in range(40, 80):
        drafter.follow(7, text[length - 16 : length], text[length - 1 : length], length == 79)
        time.sleep(0.005)
    drafter.close()
    drafter.close()
    assert int((drafter.table.words[:, 0] != 0).sum()) > 10
    assert not drafter._feed._guesses


def test_the_thread_outlives_a_step_that_fails(
    tmp_path: Path, reader: AsyncReader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    text = text_of(1)
    drafter = drafter_over(("t", make_table(tmp_path / "t", [text], reader)))
    follow, seen = drafter._feed.follow, []

    def twice_broken(*item: object) -> None:
        seen.append(item)
        if len(seen) <= 2:
            raise RuntimeError("as asked")
        follow(*item)  # type: ignore[arg-type]

    monkeypatch.setattr(drafter._feed, "follow", twice_broken)
    for length in range(40, 80):
        drafter.follow(7, text[length - 16 : length], text[length - 1 : length], False)
        time.sleep(0.005)
    drafter.close()
    assert len(seen) == 40 and int((drafter.table.words[:, 0] != 0).sum()) > 10
    assert [record.getMessage() for record in caplog.records] == ["no n-gram drafts"]


def test_what_a_table_was_worth_is_counted(tmp_path: Path, reader: AsyncReader) -> None:
    """By what the step says of its drafts: those of other drafters do not count."""
    text = [number % 7 for number in range(80)]
    drafter = drafter_over(*((name, make_table(tmp_path / name, [text], reader)) for name in ("a", "b")))
    for drafted_by, accepted in ((("table:b",) * 3, 2), (("table:b", "ngram", "ngram"), 3), (("mtp",), 1), ((), 0)):
        drafter.follow(1, text[:16], text[15:16], True, drafted_by, accepted)
    drafter.close()
    counts = [handle.counts for handle in drafter.advisor.handles]
    assert [(c.drafts, c.accepted_tokens) for c in counts] == [(0, 0), (2, 3)]

"""What a server that runs for weeks must not do: grow, fall behind the work, or stumble over its own threads."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localspec.api.types import MetricsSnapshot
from localspec.core.records import SlotResult
from localspec.drafters import NgramTableHandle
from localspec.drafters._ngram_device import MAX_SEQUENCES, DeviceNgramDrafter
from localspec.drafters._ngram_policy import NgramPolicy
from localspec.engine import ngram_tables
from localspec.engine.confidence import Calibration
from localspec.engine.metrics import MetricsRecorder, StepCount
from localspec.engine.ngram_tables import NgramTables
from localspec.engine.tokenizer import TokenMemory
from localspec.kernels.backends.reference import ReferenceOps
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_runs import NgramTable
from tests.helpers.engine import make_request

pytestmark = pytest.mark.torch
FINGERPRINT = bytes(32)


@pytest.mark.parametrize("windows_before", [0, 30_000])
def test_confidence_follows_the_work_however_long_it_was_another(windows_before: int) -> None:
    known = Calibration()
    for window in range(windows_before):
        known.see([0.8], int(window % 10 < 8))
    for window in range(10_000):
        known.see([0.8], int(window % 10 < 3))
    assert known.chance(0.8, 0) == pytest.approx(0.3, abs=0.08)


def test_texts_are_remembered_and_looked_up_side_by_side() -> None:
    memory, failures, ended = TokenMemory(), list[Exception](), threading.Event()

    def look_up() -> None:
        while not ended.is_set():
            try:
                memory.longest_prefix("text 7 and more")
            except RuntimeError as error:
                failures.append(error)

    threads = [threading.Thread(target=look_up) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(4000):
        memory.remember(f"text {number % 90}", (number,))
        if number % 500 == 0:
            memory.clear()
    ended.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_recent_steps_are_forgotten_though_nobody_asks() -> None:
    now = [0.0]
    recorder = MetricsRecorder(MetricsSnapshot(), lambda: now[0])
    result = SlotResult(0, 1, (1, 2), ("target",) * 2, 1, 1, "mtp", "")
    for step in range(1000):
        now[0] = 0.1 * step
        recorder.count_step([StepCount(result, "answer", "", 1.0)], 0.0, 1.0)
    assert len(recorder._recent) < 50


def test_sequences_whose_end_nobody_told_are_let_go(tmp_path: Path) -> None:
    class PatientOps(ReferenceOps):
        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))
            self.waits = False

    text = [token % 97 for token in range(3000)]
    with RunBuilder(tmp_path, FINGERPRINT, order=8) as builder:
        builder.add("text", text)
        builder.finish()
    with AsyncReader(threads=1) as reader:
        table = NgramTable.open(tmp_path, FINGERPRINT, reader, ram_cap_bytes=8 << 20)
        feed = DeviceNgramDrafter((NgramTableHandle("text", table),), NgramPolicy(), PatientOps(), 1000)._feed
        for sequence_id in range(3 * MAX_SEQUENCES):
            feed.follow(sequence_id, text[500:516], text[515:516])
        assert len(feed._guesses) <= MAX_SEQUENCES
        assert 3 * MAX_SEQUENCES - 1 in feed._guesses


def test_a_full_table_of_answers_stays_usable_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ngram_tables, "REFRESH_S", 0.02)
    monkeypatch.setattr(ngram_tables, "FLUSH_S", 0.0)
    tables = NgramTables(tmp_path, FINGERPRINT, True, lambda text: None)
    own = tables.handles[0].table
    monkeypatch.setattr(own, "_index_cap_bytes", 3000)
    generator = np.random.default_rng(1)
    answers = 0
    deadline_s = time.monotonic() + 60
    while not own.is_full and time.monotonic() < deadline_s:
        records = own.statistics().records
        tables.remember(make_request([1]), tuple(int(token) for token in generator.integers(0, 90_000, 3000)))
        answers += 1
        while own.statistics().records == records and time.monotonic() < deadline_s:
            time.sleep(0.01)
    assert own.is_full and answers > 2
    known = own.statistics().records
    for _ in range(3):
        tables.remember(make_request([1]), tuple(range(3000)))
        time.sleep(0.1)
    tables.close()
    assert own.statistics().records == known
    assert sum("is full" in record.getMessage() for record in caplog.records) == 1
    assert sum(slot.run.fences.nbytes for slot in own._view.slots) <= own._index_cap_bytes, "it would not open again"


def test_a_table_that_is_refused_is_refused_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator: Any = np.random.default_rng(1)

    def grow(tokens: int) -> None:
        with RunBuilder(tmp_path, FINGERPRINT, order=8) as builder:
            builder.add("text", generator.integers(0, 90_000, tokens))
            builder.finish()

    grow(2000)
    with AsyncReader(threads=1) as reader:
        table = NgramTable.open(tmp_path, FINGERPRINT, reader, ram_cap_bytes=2 << 20)
        monkeypatch.setattr(table, "_index_cap_bytes", 3000)
        known = table.statistics().records
        grow(80_000)
        with pytest.raises(ValueError, match="needs a memory cap"):
            table.refresh()
        assert table.refresh() is False and table.statistics().records == known

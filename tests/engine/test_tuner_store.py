"""What the tuner learnt survives a restart exactly, and nothing that a file may hold harms it."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from localspec.api.types import EngineError, Sampling
from localspec.core.records import Request
from localspec.engine.tuner import Tuner
from localspec.engine.tuner_store import TunerKeeper, TunerKey, TunerStore, read_document, saved_tuner, to_json
from localspec.scheduler.sequence import Sequence

KEY = TunerKey("cpu", "m", ("ngram", "mtp"), "build 1")
LIMITS = {"ngram": 7, "mtp": 3}


def busy_tuner(steps: int = 400) -> Tuner:
    tuner = Tuner(dict(LIMITS))
    rng = random.Random(4)
    sequence = Sequence(1, Request("", (1, 2), Sampling(), 1, 10, ()))
    for step in range(steps):
        sequence.phase = "thinking" if step % 7 < 3 else "answer"
        sequence.length_bound_tokens = step * 30
        arm = tuner.choose(sequence, 1)
        accepted = min(rng.randrange(4), arm[1])
        tuner.see_window(sequence, 1, arm, (arm[0],) * arm[1], accepted)
        tuner.known.see_step(step * 30, 1 + arm[1], [arm], 0.1 * arm[1], 2.0 + rng.random())
    return tuner


def test_a_restart_keeps_what_was_learnt(tmp_path: Path) -> None:
    tuner = busy_tuner()
    store = TunerStore(tmp_path / "tuner", KEY)
    store.write(to_json(tuner))
    again = Tuner(dict(LIMITS))
    assert TunerStore(tmp_path / "tuner", KEY).restore(again)
    assert to_json(again) == to_json(tuner)
    assert again.explain() == tuner.explain()
    assert store.path.stat().st_mode & 0o077 == 0
    document = read_document(store.path)
    assert document is not None
    assert [line.split(":")[0] for line in saved_tuner(document).explain()] == [
        line.split(":")[0] for line in tuner.explain()
    ]


def test_other_machines_and_missing_drafters_do_not_count(tmp_path: Path) -> None:
    TunerStore(tmp_path, KEY).write(to_json(busy_tuner()))
    assert not TunerStore(tmp_path, TunerKey("other", "m", ("ngram", "mtp"), "build 1")).restore(Tuner(dict(LIMITS)))
    fewer = Tuner({"ngram": 7})
    assert TunerStore(tmp_path, KEY).restore(fewer)
    assert all(method != "mtp" for method, _ in fewer.learnt.acceptance)
    assert all(work.current[0] != "mtp" for work in fewer.work.values())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(format=99),
        lambda d: d.update(acceptance=[["ngram", "answer", [2.0], [0.0] * 16, [0.0] * 16, 3.0, 1]]),
        lambda d: d.update(acceptance=[["ngram", "answer", [0.5], [0.0] * 15, [0.0] * 15, 3.0, 1]]),
        lambda d: d.update(acceptance=[["ngram", "answer", [0.5], [2.0] * 16, [1.0] * 16, 3.0, 1]]),
        lambda d: d.update(acceptance=[["ngram", "answer", [0.5], [0.0] * 16, [1e999] * 16, 3.0, 1]]),
        lambda d: d.update(speech=[["ngram", "answer", 1.5, 1]]),
        lambda d: d.update(drafted=[["ngram", "answer", -1, 1]]),
        lambda d: d.update(costs=[[0, [[17, 1.0, 1]], []]]),
        lambda d: d.update(costs=[[0, [[1, -1.0, 1]], []]]),
        lambda d: d.update(costs=[[0, [], [["ngram", 1, "1", 1]]]]),
        lambda d: d.update(costs=7),
        lambda d: d.update(work=[["answer", 1, ["ngram"]]]),
        lambda d: d.update(work=[["answer", 1, ["ngram", -1]]]),
        lambda d: d.pop("work"),
    ],
)
def test_damaged_files_are_left_out(tmp_path: Path, change: Callable[[dict[str, object]], object]) -> None:
    store = TunerStore(tmp_path, KEY)
    store.write(to_json(busy_tuner(50)))
    document = json.loads(store.path.read_text())
    change(document)
    store.path.write_text(json.dumps(document))
    fresh = Tuner(dict(LIMITS))
    assert not store.restore(fresh)
    assert to_json(fresh) == to_json(Tuner(dict(LIMITS)))


def test_a_step_that_took_no_time_is_none(tmp_path: Path) -> None:
    store, fresh = TunerStore(tmp_path, KEY), Tuner(dict(LIMITS))
    store.write({**to_json(busy_tuner(50)), "costs": [[0, [[1, 5e-324, 9], [2, 1e-9, 9]], [["mtp", 1, 0.0, 9]]]]})
    assert store.restore(fresh)
    sequence = Sequence(1, Request("", (1, 2), Sampling(), 1, 10, ()))
    assert [fresh.choose(sequence, 1) for _ in range(40)] and fresh.explain()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[" * 100_000, b"null"])
def test_rubbish_is_left_out(tmp_path: Path, content: bytes) -> None:
    store = TunerStore(tmp_path, KEY)
    store.path.write_bytes(content)
    assert not store.restore(Tuner(dict(LIMITS)))


def at_once(function: Callable[[], None]) -> Future[None]:
    future: Future[None] = Future()
    function()
    future.set_result(None)
    return future


def test_the_keeper_writes_now_and_then_and_at_the_end(tmp_path: Path) -> None:
    tuner, store = busy_tuner(50), TunerStore(tmp_path, KEY)
    steps = [0]
    keeper = TunerKeeper(tuner, store, at_once, lambda: steps[0], every_s=0.01)
    time.sleep(0.1)
    assert not store.path.exists(), "nothing ran, so nothing is written"
    steps[0] = 5
    deadline = time.monotonic() + 60
    while not store.path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    keeper.reset()
    assert not store.path.exists() and not tuner.learnt.costs
    steps[0] = 9
    keeper.close()
    assert store.path.exists()


def test_the_keeper_outlives_the_decode_thread(tmp_path: Path) -> None:
    tuner, store, calls = busy_tuner(50), TunerStore(tmp_path, KEY), [0]

    def ended(function: Callable[[], None]) -> Future[None]:
        calls[0] += 1
        future: Future[None] = Future()
        future.set_exception(EngineError("not_ready", "the model was unloaded"))
        return future

    steps = iter(range(10_000))
    keeper = TunerKeeper(tuner, store, ended, lambda: next(steps), every_s=0.01)
    deadline = time.monotonic() + 60
    while calls[0] < 3:
        assert time.monotonic() < deadline, "it did not go on after the first refusal"
        time.sleep(0.01)
    assert not store.path.exists()
    keeper.close()
    assert store.path.exists()


def test_a_disk_that_refuses_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    TunerStore(tmp_path / "file", KEY).write(to_json(busy_tuner(10)))

"""How the decode thread ends, and what outlives callers that leave: nobody waits for ever, and nobody else is hurt."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import Assembled
from localspec.models import architectures
from tests.helpers.engine import Collected, make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
LIMIT = 512
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6] * 12


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Assembled]:
    ops = reference_ops()
    model = load_model(random_checkpoint(architectures()[0], 3, tmp_path), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=4, context_limit_tokens=LIMIT)
    with token_engine(model, ops, LIMIT, {"ngram": drafter_module("ngram").tiny(setup)}) as engine:
        yield engine


def submitted(parts: Assembled, **more: Any) -> Collected:
    collected = Collected()
    parts.loop.submit(make_request(PROMPT, **more), collected.see)
    return collected


def ended(collected: Collected) -> str:
    """How it ended, by its error's code if it has one."""
    assert collected.done.wait(60), "nobody was told of the end"
    assert collected.end is not None
    return collected.end.error.code if collected.end.error is not None else collected.end.finish


def test_a_caller_that_leaves_hurts_nobody(parts: Assembled) -> None:
    [expected] = run(parts, [make_request(PROMPT, max_tokens=60)])
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(60)

    done: list[int] = []
    holding = parts.loop.call(hold)
    running = submitted(parts, max_tokens=60)
    assert reached.wait(60)
    for number in range(5):
        assert parts.loop.call(lambda number=number: done.append(number)).cancel()
    go_on.set()
    assert holding.result(60) is None and ended(running) == "length"
    assert running.token_ids == expected.token_ids and done == list(range(5))
    [again] = run(parts, [make_request(PROMPT, max_tokens=60)])
    assert again.cached_tokens > len(PROMPT) // 2, "what was cached is gone"


def test_requests_of_an_engine_that_has_ended_are_told(parts: Assembled) -> None:
    parts.loop.stop()
    assert ended(submitted(parts)) == "not_ready"
    assert parts.loop.call(lambda: None).exception(0) is not None


def test_a_step_that_fails_ends_its_requests_and_no_more(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise IndexError("as asked")

    with monkeypatch.context() as broken:
        broken.setattr(parts.loop.stages.device, "verify", fail)
        assert ended(submitted(parts)) == "internal"
    assert ended(submitted(parts, max_tokens=5)) == "length"
    assert parts.metrics.snapshot().state == "ready"


def test_a_device_that_is_gone_ends_everything_in_words(parts: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    """After some errors of a card every further call fails."""

    def gone(*arguments: Any) -> Any:
        raise RuntimeError("unspecified launch failure")

    monkeypatch.setattr(parts.loop.stages.device, "verify", gone)
    monkeypatch.setattr(parts.loop.stages.runner, "release", gone)
    victims = [submitted(parts), submitted(parts)]
    assert [ended(victim) for victim in victims] in (["internal"] * 2, ["internal", "not_ready"])
    parts.loop._thread.join(60)
    assert ended(submitted(parts)) == "not_ready"
    snapshot = parts.metrics.snapshot()
    assert snapshot.state == "failed" and "unspecified launch failure" in snapshot.stage
    parts.loop.stop()


def test_a_prediction_counts_while_its_request_runs(parts: Assembled) -> None:
    requests = [make_request(PROMPT, drafter="ngram", depth=4, prediction_ids=tuple(PROMPT)) for _ in range(3)]
    run(parts, requests)
    assert parts.loop.stages.drafters.corpus_bound() == 0

"""Conversations larger than the device: the same bits as where everything fits, beside other streams too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from localspec.api.types import EngineError, Sampling
from localspec.core.cache_spec import CacheSpec
from localspec.core.records import PAGE_TOKENS
from localspec.engine import overflow_layout
from localspec.engine.build import Assembled, EngineOptions, assemble
from localspec.engine.memory_budget import MemoryLayout
from localspec.kernels.ops import Ops
from localspec.models import Model
from localspec.scheduler.sequence import Stage
from tests.engine.tier_machine import Machine, facts, prompt_ids, wait
from tests.helpers.engine import Collected, make_request, run

pytestmark = pytest.mark.torch
LIMIT = 2048
LAW = Sampling(temperature=0.9, top_k=30)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    drafters = ("ngram", "mtp") if request.param == "llama" else ("ngram",)
    return Machine(request.param, tmp_path_factory.mktemp(request.param), drafters)


@contextmanager
def engine(machine: Machine, resident_tokens: int | None, kv_dir: Path | None = None) -> Iterator[Assembled]:
    options = EngineOptions(device="cpu", resident_tokens=resident_tokens, kv_dir=kv_dir, host_bytes=1 << 26)
    parts = assemble(machine.model, machine.ops, LIMIT, machine.drafters(), options)
    parts.loop.start()
    try:
        yield parts
    finally:
        parts.loop.stop()


# 16 device pages of which a sequence may have 4 + 7: everything beyond 704 tokens moves some.
def test_the_bits_are_those_of_a_device_that_holds_all(machine: Machine) -> None:
    """One outgrows the device by its answer, the other by its prompt."""
    num_tokens, max_tokens = (930, 60) if "mtp" in machine.drafter_names else (1250, 20)
    ask = dict(max_tokens=max_tokens, logprobs=0, sampling=LAW)
    request = make_request(prompt_ids(3, num_tokens), drafter="ngram", depth=3, **ask)
    with engine(machine, None) as parts:
        assert parts.runner.cold is None
        [whole] = run(parts, [request])
    with engine(machine, 256) as parts:
        assert parts.scheduler.pool.num_pages == 16
        [split] = run(parts, [request])
        assert split.end is not None and split.end.timings.draft_n > 0
        cold = parts.runner.cold
        assert cold is not None and cold.count > 0 and not parts.runner.overflows
        assert parts.scheduler.prefix.num_pages <= 4
        # The next turn goes on where this one ended.
        second = [*request.prompt_ids, *split.token_ids, *prompt_ids(1, 5)]
        [after] = run(parts, [make_request(second, **{**ask, "max_tokens": 8})])
        assert after.cached_tokens == num_tokens + max_tokens - 1
    assert facts([split]) == facts([whole])
    with engine(machine, None) as parts:
        assert facts(run(parts, [make_request(second, **{**ask, "max_tokens": 8})])) == facts([after])


def test_beside_other_streams_and_one_after_the_other(machine: Machine) -> None:
    long = [make_request(prompt_ids(seed, 960), max_tokens=16, logprobs=0, sampling=LAW) for seed in (1, 2)]
    short = make_request(prompt_ids(5, 40), drafter="ngram", depth=4, max_tokens=40, logprobs=0, sampling=LAW)
    with engine(machine, None) as parts:
        wanted = run(parts, [*long, short])
    with engine(machine, 256) as parts:
        # Passes of the short one come between any two layers of the large one's prompt.
        parts.scheduler.pace.beside_streams = lambda num_tokens: 1  # type: ignore[method-assign]
        items = [Collected() for _ in range(3)]
        for request, item in zip([*long, short], items, strict=True):
            parts.loop.submit(request, item.see)
        most = 0
        short_was_first: list[bool] = []

        def overflowing() -> bool:
            nonlocal most
            running = [s for s in parts.scheduler.active if s.num_ring and s.stage is not Stage.FINISHED]
            most = max(most, len(running))
            if items[2].done.is_set() and not short_was_first:
                short_was_first.append(not items[1].done.is_set())
            return all(item.done.is_set() for item in items)

        wait(overflowing, 120.0)
        assert most == 1 and short_was_first == [True], "it passes the second large one, which waits for the first"
    assert facts(items) == facts(wanted)


def test_several_large_ones_take_turns_and_none_starves(machine: Machine) -> None:
    """Three of them, two turns each, while there is always a short one waiting too."""
    ask = dict(max_tokens=6, logprobs=0, sampling=LAW)
    firsts = [make_request(prompt_ids(seed, 960), chat_id=f"c{seed}", **ask) for seed in (1, 2, 3)]
    with engine(machine, None) as parts:
        wanted = [run(parts, [each])[0] for each in firsts]
        seconds = [
            make_request([*each.prompt_ids, *item.token_ids, *prompt_ids(4, 7)], chat_id=each.chat_id, **ask)
            for each, item in zip(firsts, wanted, strict=True)
        ]
        wanted += [run(parts, [each])[0] for each in seconds]
    with engine(machine, 256) as parts:
        large = [Collected() for _ in range(6)]
        for request, item in zip([*firsts, *seconds], large, strict=True):
            parts.loop.submit(request, item.see)
        ended: list[int] = []
        shorts: list[Collected] = []

        def another_short() -> bool:
            ended.extend(i for i, item in enumerate(large) if item.done.is_set() and i not in ended)
            if sum(not short.done.is_set() for short in shorts) < 5:
                shorts.append(Collected())
                parts.loop.submit(make_request(prompt_ids(50 + len(shorts), 40), max_tokens=12), shorts[-1].see)
            return len(ended) == 6

        wait(another_short, 120.0)
        assert ended == sorted(ended), "in the order in which they came"
        assert all(short.done.wait(20) for short in shorts) and len(shorts) > 6
    assert facts(large) == facts(wanted)


def test_a_short_chat_that_might_grow_is_like_any_other(machine: Machine) -> None:
    """Nobody said how long the answer may be: drafters with planes draft, and all of it is found again."""
    first = prompt_ids(1, 300)
    with engine(machine, 256) as parts:
        drafter = "mtp" if "mtp" in machine.drafter_names else "ngram"
        item = Collected()
        ticket = parts.loop.submit(make_request(first, drafter=drafter, depth=3, max_tokens=1700), item.see)
        wait(lambda: len(item.token_ids) > 20)
        [other] = run(parts, [make_request(prompt_ids(2, 40), max_tokens=4)])
        assert not item.done.is_set() or len(other.token_ids) == 4
        parts.loop.cancel(ticket)
        assert item.done.wait(20) and item.end is not None and item.end.timings.draft_n > 0
        assert parts.scheduler._parked is None
        [again] = run(parts, [make_request([*first, *item.token_ids[:8], 1, 2], max_tokens=4)])
        assert again.cached_tokens >= (256 if parts.scheduler.needs_state else 300)


def test_the_last_one_is_kept_as_long_as_its_pages_are_not_wanted(machine: Machine) -> None:
    ask = dict(max_tokens=6, logprobs=0, sampling=LAW, chat_id="a")
    first = prompt_ids(1, 1000)
    edited = [*first[:990], *prompt_ids(2, 30)]
    early = [*first[:300], *prompt_ids(2, 800)]
    with engine(machine, None) as parts:
        wanted = [run(parts, [make_request(ids, cache_salt=str(n), **ask)])[0] for n, ids in enumerate((edited, early))]
    with engine(machine, 256) as parts:
        run(parts, [make_request(first, **ask)])
        [one] = run(parts, [make_request(edited, **ask)])
        assert one.cached_tokens == (960 if parts.scheduler.needs_state else 990)
        [two] = run(parts, [make_request(early, **ask)])
        assert two.cached_tokens <= 4 * PAGE_TOKENS, "what lies between has left the device"
        assert facts([one, two]) == facts(wanted)
        # A chat that is forgotten, a prompt that needs the pages: nothing of it stays.
        parts.loop.forget("a").result(20)
        assert parts.scheduler.pool.num_free == parts.scheduler.pool.num_pages - 1
        run(parts, [make_request(first, **ask)])
        run(parts, [make_request(prompt_ids(7, 880), max_tokens=4)])
        assert parts.scheduler._parked is None
        parts.loop.call(parts.scheduler.clear).result(20)
        assert parts.scheduler.pool.num_free == parts.scheduler.pool.num_pages - 1


def test_one_room_for_states_is_enough_to_go_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is larger than the device keeps its states itself: the newest goes last, and to whoever needs room."""
    ask = dict(max_tokens=6, logprobs=0, sampling=LAW)
    requests, wanted = [], []
    with engine(machine, None) as parts:
        for ids in (prompt_ids(1, 1000), prompt_ids(3, 90)):
            for more in ([], prompt_ids(2, 20)):
                said = wanted[-1].token_ids if more else []
                requests.append(make_request([*ids, *said, *more], **ask))
                wanted += run(parts, requests[-1:])
    monkeypatch.setattr("localspec.engine.memory_budget.MAX_SNAPSHOTS", 1)
    with engine(machine, 256) as parts:
        found = [run(parts, [request])[0] for request in requests]
        assert found[1].cached_tokens == 1005, "its newest state was kept"
        assert found[3].cached_tokens == 95, "the next conversation found room"
        assert parts.scheduler.prefix.num_snapshots == int(parts.scheduler.needs_state)
    assert facts(found) == facts(wanted)


def test_a_cancelled_one_gives_everything_back(machine: Machine) -> None:
    request = make_request(prompt_ids(1, 900), max_tokens=200)
    with engine(machine, 256) as parts:
        item = Collected()
        ticket = parts.loop.submit(request, item.see)
        wait(lambda: parts.runner.overflows)
        parts.loop.cancel(ticket)
        assert item.done.wait(20)
        parts.loop.call(parts.scheduler.clear).result(20)
        assert parts.scheduler.pool.num_free == parts.scheduler.pool.num_pages - 1
        assert not parts.runner.overflows
        [again] = run(parts, [make_request(prompt_ids(1, 980), max_tokens=4, logprobs=0)])
    with engine(machine, None) as parts:
        assert facts(run(parts, [make_request(prompt_ids(1, 980), max_tokens=4, logprobs=0)])) == facts([again])


def test_what_stays_is_kept_below_the_device(machine: Machine, tmp_path: Path) -> None:
    """Only the head of a conversation is copied and written, and never a page that was used twice."""
    request = make_request(prompt_ids(1, 980), max_tokens=6, logprobs=0)
    with engine(machine, 256, tmp_path / "kv") as parts:
        [one] = run(parts, [request])
    with engine(machine, None, tmp_path / "kv") as parts:
        [again] = run(parts, [request])
        assert again.cached_tokens <= 4 * PAGE_TOKENS and facts([again]) == facts([one])


def test_a_context_that_does_not_fit_is_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for more than the device holds, without a word about how much stays there."""
    machine = Machine("llama", tmp_path)
    lay_out = overflow_layout.lay_out

    def small(
        model: Model, ops: Ops, specs: list[CacheSpec], tokens: int, limit: int | None, beside: int = 0
    ) -> MemoryLayout:
        if tokens > 512:
            raise ValueError("a context of that size does not fit")
        return lay_out(model, ops, specs, tokens, limit)

    monkeypatch.setattr(overflow_layout, "lay_out", small)
    monkeypatch.setattr(overflow_layout, "fitting_tokens", lambda *_: 512)
    layout = overflow_layout.split(machine.model, machine.ops, [machine.model.cache_spec], LIMIT, None, None)
    assert 0 < layout.memory.num_pages < LIMIT // PAGE_TOKENS and layout.cold_pages > 0
    monkeypatch.setattr(overflow_layout, "fitting_tokens", lambda *_: 0)
    with pytest.raises(ValueError, match="does not fit"):
        overflow_layout.split(machine.model, machine.ops, [machine.model.cache_spec], LIMIT, None, None)


def test_a_machine_without_the_memory_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overflow_layout, "HOST_SHARE", 0.0)
    with pytest.raises(EngineError, match="choose a smaller --context"):
        assemble(machine.model, machine.ops, LIMIT, {}, EngineOptions(device="cpu", resident_tokens=256))

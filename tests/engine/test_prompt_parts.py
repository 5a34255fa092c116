"""A long prompt beside streams is read some layers at a time: the same bits for all, whoever leaves when."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.build import Assembled
from localspec.runner.runner import Reading
from localspec.scheduler.sequence import Stage
from tests.engine.tier_machine import Machine, facts, prompt_ids, wait
from tests.helpers.engine import Collected, make_request, run

pytestmark = pytest.mark.torch
LAW = Sampling(temperature=0.9, top_k=30)


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return Machine(request.param, tmp_path_factory.mktemp(request.param))


def requests() -> list[Request]:
    ask: dict[str, Any] = dict(logprobs=0, sampling=LAW, depth=3)
    return [
        make_request(prompt_ids(1, 30), max_tokens=90, drafter="mtp", **ask),
        make_request(prompt_ids(2, 700), max_tokens=20, drafter="mtp", seed=3, **ask),
        make_request(prompt_ids(3, 400), max_tokens=20, drafter="ngram", seed=4, **ask),
    ]


def one_layer_at_a_time(parts: Assembled) -> list[int]:
    """Returns a list to which every part adds its number of layers."""
    counts: list[int] = []
    begin = parts.loop._prefills.run

    def run_part(plan: object, num_layers: int | None) -> bool:
        counts.append(0 if num_layers is None else num_layers)
        return begin(plan, num_layers)  # type: ignore[arg-type]

    parts.loop._prefills.run = run_part  # type: ignore[method-assign]
    parts.scheduler.pace.beside_streams = lambda num_tokens: 1  # type: ignore[method-assign]
    return counts


def test_tokens_do_not_depend_on_who_reads_beside(machine: Machine) -> None:
    with machine.engine_without() as parts:
        alone = [run(parts, [each])[0] for each in requests()]
    with machine.engine_without() as parts:
        counts = one_layer_at_a_time(parts)
        items = [Collected() for _ in range(3)]
        parts.loop.submit(requests()[0], items[0].see)
        wait(lambda: len(items[0].token_ids) > 0)
        for request, item in zip(requests()[1:], items[1:], strict=True):
            parts.loop.submit(request, item.see)
        assert all(item.done.wait(60) for item in items)
        assert counts.count(1) > 2 * machine.model.num_layers
        assert all(item.end is not None and item.end.timings.draft_n > 0 for item in items[:2])
    assert facts(items) == facts(alone)


def test_drafters_see_each_chunk_once_in_a_part_of_its_own(machine: Machine) -> None:
    with machine.engine_without() as parts:
        one_layer_at_a_time(parts)
        device, drafters = parts.loop.stages.device, parts.loop.stages.drafters
        advance, observe = device.advance_prefill, drafters.observe
        ran: list[tuple[int, int, bool]] = []
        seen: list[str] = []

        def advanced(reading: Any, num_layers: int) -> bool:
            before = reading.num_done
            ended = advance(reading, num_layers)
            ran.append((before, reading.num_done, ended))
            return ended

        def observed(rows: Any, *others: Any) -> None:
            seen.append(rows.kind)
            observe(rows, *others)

        device.advance_prefill = advanced  # type: ignore[method-assign]
        drafters.observe = observed  # type: ignore[method-assign]
        stream, long = Collected(), Collected()
        parts.loop.submit(make_request(prompt_ids(1, 30), max_tokens=900), stream.see)
        wait(lambda: len(stream.token_ids) > 0)
        ran.clear()
        seen.clear()
        ticket = parts.loop.submit(make_request(prompt_ids(2, 700), max_tokens=2), long.see)
        assert long.done.wait(60) and ticket.sequence is not None
        ends = [before for before, _, ended in ran if ended]
        assert len(ends) == seen.count("prefill") >= 3
        # The last chunk may be read after the stream has ended, at once.
        assert ends[:-1] == [machine.model.num_layers] * (len(ends) - 1)


@pytest.mark.parametrize("at_the_end", [False, True])
def test_a_prompt_that_leaves_between_two_layers_leaves_nothing_wrong(
    machine: Machine, at_the_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when all layers have run and the drafters have not seen the chunk."""
    num_layers = machine.model.num_layers
    long = prompt_ids(2, 700)
    with machine.engine_without() as parts:
        [alone] = run(parts, [make_request(long, max_tokens=8, logprobs=0)])
    with machine.engine_without() as parts:
        one_layer_at_a_time(parts)
        stream, leaving = Collected(), Collected()
        ticket = parts.loop.submit(make_request(prompt_ids(1, 30), max_tokens=900), stream.see)
        wait(lambda: len(stream.token_ids) > 0)
        half: list[int] = []
        advance = parts.loop.stages.device.advance_prefill

        def advancing(reading: Reading, count: int) -> bool:
            done = advance(reading, count)
            in_the_middle = not done and (reading.num_done == num_layers) == at_the_end
            if in_the_middle and reading.plan.start_tokens >= 256 and not half:
                assert gone.sequence is not None and gone.sequence.stage is Stage.PREFILL
                half.append(reading.num_done)
                # Before the next turn, which would go on.
                parts.loop.cancel(gone)
            return done

        monkeypatch.setattr(parts.loop.stages.device, "advance_prefill", advancing)
        gone = parts.loop.submit(make_request(long, max_tokens=8), leaving.see)
        assert leaving.done.wait(60) and half and 0 < half[0] <= num_layers
        wait(lambda: parts.metrics.snapshot().prefill_total_tokens == 0)
        [again] = run(parts, [make_request(long, max_tokens=8, logprobs=0)])
        assert again.cached_tokens % 256 == 0, "what was read whole is found, what was read in half is not"
        parts.loop.cancel(ticket)
        assert stream.done.wait(20)
        parts.loop.call(parts.scheduler.clear).result(20)
        assert parts.scheduler.pool.num_free == parts.scheduler.pool.num_pages - 1
    assert facts([again]) == facts([alone])


def test_alone_a_chunk_is_read_at_once(machine: Machine) -> None:
    with machine.engine_without() as parts:
        counts = one_layer_at_a_time(parts)
        run(parts, [make_request(prompt_ids(5, 600), max_tokens=2)])
        assert set(counts) == {0} and len(counts) <= 4
        assert 256 in parts.scheduler.pace.measured_ms()

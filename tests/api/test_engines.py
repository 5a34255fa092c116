"""Every engine that ships without weights meets the same tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from localspec.api.closing import closing
from localspec.api.echo import EchoEngine
from localspec.api.engine import DrafterChoice, Engine
from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.replay import ReplayEngine, record
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import Delta, Done, EngineError, Event, GenerateRequest, Message, Phase, Prefill, Queued
from tests.server.conftest import KEY, serving

TEXT = "Grüße, 日本! " + "word " * 40
REQUEST = GenerateRequest(messages=(Message("user", TEXT),))


async def collect(engine: Engine, request: GenerateRequest) -> list[Event]:
    async with closing(engine.generate(request)) as events:
        return [event async for event in events]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def scripted(tok_per_s: float = 0.0, **changes: object) -> ScriptedEngine:
    return ScriptedEngine(Script(replies=(Reply(TEXT),), tok_per_s=tok_per_s, **changes))  # type: ignore[arg-type]


async def replayed(path: Path, tok_per_s: float) -> Engine:
    recorder = record(scripted(tok_per_s), path)
    await collect(recorder, REQUEST)
    await recorder.aclose()
    return ReplayEngine(path)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(3):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture(params=["echo", "scripted", "replay", "remote"])
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    """An engine that says TEXT to REQUEST at 400 tokens a second."""
    if request.param == "remote":
        async with serving(scripted(400)) as address:
            remote = RemoteEngine(RemoteSettings(address, control_key=KEY, poll_s=0.05))
            await remote.wait_ready()
            yield remote
            await remote.aclose()
        return
    if request.param == "replay":
        made = await replayed(tmp_path / "run.jsonl", 400)
    else:
        made = EchoEngine(400) if request.param == "echo" else scripted(400)
    yield made
    await made.aclose()


async def test_events_come_in_order_and_cover_the_text(engine: Engine) -> None:
    info = await engine.wait_ready()
    assert engine.model() == info
    events = await collect(engine, REQUEST)
    kinds = [type(event) for event in events]
    order = {Queued: 0, Prefill: 1, Delta: 2, Done: 3}
    assert [order[kind] for kind in kinds] == sorted(order[kind] for kind in kinds)
    assert kinds.count(Done) == 1
    assert text_of(events) == TEXT
    tokens = [token for event in events if isinstance(event, Delta) for token in event.token_ids]
    assert await engine.detokenize(tuple(tokens)) == TEXT
    done = events[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "stop"
    assert done.usage.completion_tokens == len(tokens)


async def test_spans_cover_each_delta(engine: Engine) -> None:
    allowed = {"target", *(await engine.wait_ready()).drafters}
    origins = set()
    for event in await collect(engine, REQUEST):
        if isinstance(event, Delta):
            assert sum(span.n_chars for span in event.spans) == len(event.text)
            origins |= {span.origin for span in event.spans}
    assert "target" in origins
    assert len(origins) > 1
    assert origins <= allowed


async def test_closing_early_frees_the_slot(engine: Engine) -> None:
    async with closing(engine.generate(REQUEST)) as events:
        async for event in events:
            if isinstance(event, Delta):
                await until(lambda: engine.metrics().active_requests == 1)
                break
    await until(lambda: engine.metrics().active_requests == 0)
    assert text_of(await collect(engine, REQUEST)) == TEXT


async def test_stopping_the_engine_cancels_running_requests(engine: Engine) -> None:
    running = asyncio.create_task(collect(engine, REQUEST))
    await until(lambda: engine.metrics().active_requests == 1)
    await engine.aclose()
    done = (await asyncio.wait_for(running, 2))[-1]
    assert isinstance(done, Done)
    assert done.finish_reason == "cancelled"
    with pytest.raises(EngineError) as refused:
        await collect(engine, REQUEST)
    assert refused.value.code == "not_ready"


async def test_control_calls(engine: Engine) -> None:
    info = await engine.wait_ready()
    assert await engine.load(info.id) == info
    with pytest.raises(EngineError) as unknown:
        await engine.load("nothing-of-that-name")
    assert unknown.value.code == "model_not_found"
    assert info.id in unknown.value.message
    await engine.choose_drafter(DrafterChoice("auto"))
    with pytest.raises(EngineError) as lacking:
        await engine.choose_drafter(DrafterChoice("ngram+nonsense"))
    assert lacking.value.code == "unsupported"
    assert await engine.warm(REQUEST) == 0
    await engine.forget("chat")
    assert await engine.count_tokens(REQUEST) > len(TEXT)
    ids = await engine.tokenize(TEXT)
    assert await engine.detokenize(ids) == TEXT
    with pytest.raises(EngineError):
        await engine.detokenize((10**6,))


async def test_explain_says_what_is_chosen_among_what(engine: Engine) -> None:
    info = await engine.wait_ready()
    report = await engine.explain()
    assert report.drafter in info.drafters
    assert len(report.choices) == 1
    choice = report.choices[0]
    names = [candidate.drafter for candidate in choice.candidates]
    assert choice.drafter in names and set(names) == set(info.drafters)
    rates = [candidate.tok_per_s for candidate in choice.candidates]
    assert rates == sorted(rates, reverse=True) and rates[-1] > 0


async def test_a_hand_made_choice_is_told_as_such() -> None:
    engine = scripted()
    assert not (await engine.explain()).by_hand
    await engine.choose_drafter(DrafterChoice("off"))
    report = await engine.explain()
    assert report.by_hand and (report.drafter, report.depth) == ("off", 0)


async def test_metrics_move(engine: Engine) -> None:
    before = engine.metrics()
    await collect(engine, REQUEST)
    await until(lambda: engine.metrics().requests_total == before.requests_total + 1)
    after = engine.metrics()
    assert after.completion_tokens_total > before.completion_tokens_total
    assert any(drafter.accepted_tokens for drafter in after.drafters)
    for drafter in after.drafters:
        assert drafter.accepted_tokens == sum(drafter.accepted_per_position)


@pytest.mark.parametrize("max_run", [1, 2, 7])
async def test_stop_strings_are_cut_at_any_run_length(max_run: int) -> None:
    for seed in range(5):
        engine = ScriptedEngine(Script(replies=(Reply("one two STstop STOP three"),), seed=seed, max_run=max_run))
        events = await collect(engine, GenerateRequest(prompt="x", stop=("STOP", "never")))
        assert text_of(events) == "one two STstop "
        assert events[-1].stop_text == "STOP"  # type: ignore[union-attr]
        assert events[-1].finish_reason == "stop"  # type: ignore[union-attr]


async def test_max_tokens_and_context() -> None:
    engine = scripted(context_limit_tokens=200)
    events = await collect(engine, GenerateRequest(prompt="x", max_tokens=4))
    assert events[-1].finish_reason == "length"  # type: ignore[union-attr]
    assert text_of(events) == "Grü"  # four bytes: G, r and two of ü
    events = await collect(engine, GenerateRequest(prompt="y" * 150))
    assert events[-1].usage.completion_tokens == 50  # type: ignore[union-attr]
    with pytest.raises(EngineError) as refused:
        await collect(engine, GenerateRequest(prompt="y" * 250))
    assert refused.value.code == "context_length_exceeded"
    assert "250" in refused.value.message
    assert "200" in refused.value.message


async def test_failures_and_phases_of_a_script() -> None:
    thought = Reply("hm</think>yes<tool_call>{}</tool_call>", thought_is_open=True)
    refused = Reply(refuse=EngineError("overloaded", "Too many."))
    breaks = Reply(TEXT, fail_after_tokens=10)
    engine = ScriptedEngine(Script(replies=(thought, refused, breaks)))
    events = await collect(engine, REQUEST)
    by_phase = {phase: "" for phase in Phase}
    for event in events:
        at = 0
        for span in event.spans if isinstance(event, Delta) else ():
            by_phase[span.phase] += event.text[at : at + span.n_chars]
            at += span.n_chars
    assert by_phase == {
        Phase.THINKING: "hm</think>",
        Phase.ANSWER: "yes",
        Phase.TOOL_CALL: "<tool_call>{}</tool_call>",
    }
    with pytest.raises(EngineError):
        await anext(engine.generate(REQUEST))
    seen: list[Event] = []
    with pytest.raises(EngineError) as broken:
        async with closing(engine.generate(REQUEST)) as stream:
            async for event in stream:
                seen += [event]
    assert broken.value.code == "internal"
    assert text_of(seen)
    assert engine.metrics().active_requests == 0


async def test_drafting_changes_runs_but_no_text() -> None:
    runs: list[Callable[[], ScriptedEngine]] = [lambda seed=seed: scripted(seed=seed) for seed in range(3)]
    lengths = set()
    for make in runs:
        events = await collect(make(), REQUEST)
        assert text_of(events) == TEXT
        lengths.add(tuple(len(event.token_ids) for event in events if isinstance(event, Delta)))
    assert len(lengths) == 3
    off = await collect(scripted(), GenerateRequest(prompt="x", drafter="off"))
    assert {len(event.token_ids) for event in off if isinstance(event, Delta)} == {1}


async def test_requests_beyond_the_slots_wait_their_turn() -> None:
    engine = scripted(tok_per_s=2000, slots=1)
    first, second = await asyncio.gather(collect(engine, REQUEST), collect(engine, REQUEST))
    assert text_of(first) == text_of(second) == TEXT
    assert isinstance(second[0], Queued)
    assert not isinstance(first[0], Queued)


async def test_a_recording_replays_events_and_errors_exactly(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    script = Script(replies=(Reply(TEXT), Reply(TEXT, fail_after_tokens=3)))
    recorder = record(ScriptedEngine(script), path)
    first = await collect(recorder, REQUEST)
    with pytest.raises(EngineError):
        await collect(recorder, REQUEST)
    await recorder.aclose()
    assert path.stat().st_mode & 0o077 == 0
    replay = ReplayEngine(path, speed=0)
    assert await collect(replay, REQUEST) == first
    with pytest.raises(EngineError) as again:
        await collect(replay, REQUEST)
    assert again.value.code == "internal"
    assert await collect(replay, REQUEST) == first


async def test_a_replay_shows_the_figures_after_each_request(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = record(scripted(), path)
    for _ in range(2):
        await collect(recorder, REQUEST)
    after_both = recorder.metrics()
    await recorder.aclose()
    replay = ReplayEngine(path, speed=0)
    await collect(replay, REQUEST)
    half = replay.metrics()
    await collect(replay, REQUEST)
    assert 0 < half.verify_steps < after_both.verify_steps == replay.metrics().verify_steps
    assert half.completion_tokens_total * 2 == replay.metrics().completion_tokens_total
    assert (await replay.explain()).choices


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"request": "x"}', '{"request": 0, "at_s": 0, "event": {"kind": "delta", "text": 1}}']
)
def test_a_bad_recording_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl line 1"):
        ReplayEngine(path)

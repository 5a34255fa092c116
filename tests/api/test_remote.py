"""The client of a port: exact against our own, sensible against others, clear when nothing is there."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.api.closing import closing
from localspec.api.engine import DrafterChoice
from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.remote_metrics import MetricsReader, read_metrics
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import (
    Delta,
    Done,
    EngineError,
    Event,
    GenerateRequest,
    Grammar,
    Message,
    MetricsSnapshot,
    ModelInfo,
    Phase,
    Sampling,
    ToolCall,
)
from tests.server.conftest import KEY, serving

TEXT = "<think>\nhm é\n</think>\n\nYes: <tool_call>{}</tool_call>"
REQUEST = GenerateRequest(messages=(Message("user", "hi"),))


async def collect(engine: Any, request: GenerateRequest = REQUEST) -> list[Event]:
    async with closing(engine.generate(request)) as events:
        return [event async for event in events]


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def timeless(events: list[Event]) -> list[Event]:
    """Events without measured times."""
    return [
        dataclasses.replace(event, timings=dataclasses.replace(event.timings, prefill_ms=0, decode_ms=0, tok_per_s=0))
        if isinstance(event, Done)
        else event
        for event in events
    ]


async def test_events_of_our_own_port_are_exact() -> None:
    script = Script(replies=(Reply(TEXT),), seed=3)
    direct = await collect(ScriptedEngine(script), dataclasses.replace(REQUEST, logprobs=2))
    async with serving(ScriptedEngine(script)) as address:
        for control_key in (KEY, None):
            remote = RemoteEngine(RemoteSettings(address + "/v1", control_key=control_key))
            request = dataclasses.replace(REQUEST, logprobs=2)
            if control_key is None:  # the engine's second request draws other runs
                assert said(await collect(remote, request)) == TEXT
            else:
                assert timeless(await collect(remote, request)) == timeless(direct)
            await remote.aclose()


async def test_every_field_of_a_request_arrives() -> None:
    seen: list[GenerateRequest] = []

    def choose(request: GenerateRequest, index: int) -> Reply:
        seen.append(request)
        return Reply("x")

    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    request = GenerateRequest(
        messages=(
            Message("system", "s"),
            Message("user", "u", name="me"),
            Message("assistant", "a", "r", (ToolCall("1", "f", '{"a": 1}'),)),
            Message("tool", "t", tool_call_id="1", name="f"),
        ),
        sampling=Sampling(0.5, 0.9, 40, 0.05, 0.1, 0.2, 1.1, ((5, -2.0),), 42),
        max_tokens=9,
        stop=("a", "b"),
        ignore_eos=True,
        drafter="ngram",
        depth=2,
        tools=(tool,),
        template_options={"enable_thinking": False},
        thinking_budget_tokens=7,
        prediction="p",
        logprobs=1,
        grammar=Grammar("lark", "start: 'x'"),
        client="me",
        chat_id="chat",
        private=True,
    )
    plain = GenerateRequest(prompt_token_ids=(1, 2, 3), client="me", drafter="off")
    async with serving(ScriptedEngine(choose=choose)) as address:
        remote = RemoteEngine(RemoteSettings(address))
        await collect(remote, request)
        await collect(remote, plain)
        await collect(remote, dataclasses.replace(plain, prompt_token_ids=(), prompt="text"))
        await remote.aclose()
    assert seen[0] == request
    assert seen[1] == plain
    assert seen[2].prompt == "text"


async def test_control_calls_and_pushed_metrics() -> None:
    engine = ScriptedEngine(Script(models=("second",), load_s=0.4))
    async with serving(engine) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY))
        assert remote.model() is None
        assert (await remote.wait_ready()).id == "scripted"
        assert (await remote.load("second")).id == "second"
        with pytest.raises(EngineError) as missing:
            await remote.load("third")
        assert missing.value.code == "model_not_found"
        await remote.choose_drafter(DrafterChoice("off"))
        assert engine.metrics().drafter == "off"
        with pytest.raises(EngineError) as lacking:
            await remote.choose_drafter(DrafterChoice("eagle9"))
        assert lacking.value.code == "unsupported"
        ids = await remote.tokenize("é!")
        assert ids == await engine.tokenize("é!")
        assert await remote.detokenize(ids) == "é!"
        assert await remote.count_tokens(REQUEST) == await engine.count_tokens(REQUEST)
        assert await remote.warm(REQUEST) == 0
        await remote.forget("chat")
        await collect(remote)
        await until(lambda: remote.metrics().completion_tokens_total > 0)
        await remote.aclose()


async def until(holds: Any, seconds: float = 4) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_it_finds_a_port_again_that_went_away() -> None:
    async with serving(ScriptedEngine()) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY))
        await remote.wait_ready()
    await until(lambda: remote.metrics().state == "loading")
    assert "trying again" in remote.metrics().stage
    async with serving(ScriptedEngine(), port=int(address.rpartition(":")[2])):
        await until(lambda: remote.metrics().state == "ready", 6)
        assert said(await collect(remote)) == "Scripted answer."
    await remote.aclose()


async def test_a_question_asked_while_the_engine_restarts_is_sent_when_it_is_back() -> None:
    async with serving(ScriptedEngine()) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY, find_url=lambda: url, poll_s=0.05))
        url = address
        await remote.wait_ready()
    # Asked at once, before the loss is noticed, and answered by an engine at another place that still loads.
    asked = asyncio.create_task(collect(remote))
    # Whoever notices first, the question or the poll, names another stage; the poll's is the one that stays.
    await until(lambda: remote.metrics().stage == "starting the engine")
    assert remote.model() is None and remote.metrics().state == "loading"
    async with serving(ScriptedEngine(Script(load_s=0.3))) as url:
        assert said(await asyncio.wait_for(asked, 6)) == "Scripted answer."
        assert remote.model() is not None
        await remote.aclose()


async def test_an_engine_that_still_loads_is_waited_for_although_it_was_ready_before() -> None:
    engine = ScriptedEngine(Script(load_s=0.3))
    async with serving(engine) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY, poll_s=0.05))
        ready = ModelInfo("scripted", "of the process before", 100, 10)
        await remote.connect()
        await until(lambda: remote._kind == "localspec")
        remote._model = ready
        assert said(await asyncio.wait_for(collect(remote), 6)) == "Scripted answer."
        await remote.aclose()


async def test_an_engine_that_is_not_started_again_is_an_error_at_once() -> None:
    def find() -> str:
        raise EngineError("not_ready", "The engine ended 4 times.")

    remote = RemoteEngine(RemoteSettings("http://127.0.0.1:9", control_key=KEY, find_url=find))
    with pytest.raises(EngineError, match="ended 4 times"):
        await collect(remote)
    assert (remote.metrics().state, remote.metrics().stage) == ("failed", "The engine ended 4 times.")
    await remote.aclose()
    silent = RemoteSettings(
        "http://127.0.0.1:9", find_url=lambda: "http://127.0.0.1:9", unreachable="See the log.", connect_timeout_s=0.2
    )
    remote = RemoteEngine(silent)
    with pytest.raises(EngineError, match=r"^See the log\.$"):
        await collect(remote)
    await remote.aclose()


async def test_nothing_there_and_wrong_keys_are_said_in_words() -> None:
    remote = RemoteEngine(RemoteSettings("http://127.0.0.1:9", connect_timeout_s=0.3))
    with pytest.raises(EngineError, match=r"Nothing answers at http://127\.0\.0\.1:9") as gone:
        await remote.wait_ready()
    assert gone.value.code == "not_ready"
    await remote.aclose()
    with pytest.raises(ValueError, match="no address"):
        RemoteEngine(RemoteSettings("127.0.0.1:80"))
    async with serving(ScriptedEngine(), api_key="secret") as address:
        for settings in (RemoteSettings(address), RemoteSettings(address, api_key="secret", control_key="no")):
            remote = RemoteEngine(settings)
            with pytest.raises(EngineError, match="key"):
                await remote.wait_ready()
            await remote.aclose()
        remote = RemoteEngine(RemoteSettings(address, api_key="secret"))
        assert said(await collect(remote)) == "Scripted answer."
        await remote.aclose()


async def test_errors_of_the_engine_come_through() -> None:
    script = Script(
        replies=(
            Reply(refuse=EngineError("overloaded", "Too many.")),
            Reply("x" * 50, fail_after_tokens=20),
            Reply("y"),
        ),
        context_limit_tokens=60,
    )
    async with serving(ScriptedEngine(script)) as address:
        remote = RemoteEngine(RemoteSettings(address))
        for code in ("overloaded", "internal"):
            with pytest.raises(EngineError) as refused:
                await collect(remote)
            assert refused.value.code == code
        with pytest.raises(EngineError, match="60") as over:
            await collect(remote, GenerateRequest(prompt="x" * 100))
        assert over.value.code == "context_length_exceeded"
        await remote.aclose()


async def test_cancelling_and_closing() -> None:
    engine = ScriptedEngine(Script(replies=(Reply("word " * 2000),), tok_per_s=300))
    async with serving(engine) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY))
        async with closing(remote.generate(REQUEST)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    break
        await until(lambda: engine.metrics().active_requests == 0)
        running = asyncio.create_task(collect(remote))
        await until(lambda: engine.metrics().active_requests == 1)
        await asyncio.sleep(0.2)
        await remote.aclose()
        done = (await asyncio.wait_for(running, 2))[-1]
        assert isinstance(done, Done)
        assert done.finish_reason == "cancelled"
        await until(lambda: engine.metrics().active_requests == 0)
        with pytest.raises(EngineError):
            await collect(remote)


VLLM_METRICS = """# HELP vllm:spec_decode_num_drafts_total x
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 50.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 12.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 8.0
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:generation_tokens_total{engine="0",model_name="m"} 3.0e+01
"""


class OtherServer(httpx.AsyncBaseTransport):
    """A server of another make, scripted chunk by chunk."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks
        self.bodies: list[dict[str, Any]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/v1/models":
            listed = [{"id": "m", "owned_by": "vllm", "max_model_len": 4096}, {"id": "n", "owned_by": "vllm"}]
            return httpx.Response(200, json={"data": listed})
        if path == "/metrics":
            return httpx.Response(200, text=VLLM_METRICS)
        if path == "/v1/chat/completions":
            self.bodies.append(json.loads(request.content))
            return httpx.Response(200, content=self._frames())
        return httpx.Response(404, json={"detail": "Not Found"})

    async def _frames(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"
        yield b"data: [DONE]\n\n"


def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


async def test_another_server() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": '{"a": 1}'}}
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": None}}
    server = OtherServer(
        [
            chunk(role="assistant", content=""),
            chunk(reasoning="why"),
            chunk(content="be"),
            chunk(content="cause"),
            chunk(tool_calls=[call]),
            chunk(tool_calls=[more]),
            chunk("tool_calls"),
            usage,
        ]
    )
    remote = RemoteEngine(RemoteSettings("http://gpu.box:8000/v1"), server)
    assert (await remote.wait_ready()).context_limit_tokens == 4096
    events = await collect(remote, dataclasses.replace(REQUEST, sampling=Sampling(0.5, seed=1)))
    expected = "<think>\nwhy\n</think>\n\nbecause" + '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
    assert said(events) == expected
    phases = {phase: "" for phase in Phase}
    for event in events:
        at = 0
        for span in event.spans if isinstance(event, Delta) else ():
            phases[span.phase] += event.text[at : at + span.n_chars]  # type: ignore[union-attr]
            at += span.n_chars
    assert phases[Phase.ANSWER] == "because"
    assert phases[Phase.THINKING] == "<think>\nwhy\n</think>\n\n"
    done = events[-1]
    assert isinstance(done, Done)
    assert (done.finish_reason, done.usage.prompt_tokens, done.usage.completion_tokens) == ("tool_calls", 5, 7)
    assert server.bodies[0]["seed"] == 1
    assert not {"top_k", "localspec", "min_p"} & set(server.bodies[0])
    metrics = remote.metrics()
    assert metrics.mean_accepted_run == 3.0
    assert metrics.drafters[0].acceptance_rate == 0.4
    assert metrics.drafters[0].accepted_per_position == (12, 8)
    assert (await remote.load("n")).id == "n"
    for refused in (remote.tokenize("x"), remote.choose_drafter(DrafterChoice("off")), remote.load("z")):
        with pytest.raises(EngineError):
            await refused
    await remote.aclose()


SEPARATORS = "a\u2028b\u2029c\x85d\x1ee\vf\r\ng"
"""Lines to Unicode, and only characters to a stream of events."""


async def test_an_answer_may_hold_line_separators() -> None:
    async with serving(ScriptedEngine(Script(replies=(Reply(SEPARATORS),)))) as address:
        remote = RemoteEngine(RemoteSettings(address, control_key=KEY))
        assert said(await collect(remote)) == SEPARATORS
        await remote.aclose()
    raw = json.dumps(chunk(content=SEPARATORS), ensure_ascii=False).encode()
    for separator in (b"\r", b"\r\n"):
        server = OtherServer([raw + separator, chunk("stop")])
        remote = RemoteEngine(RemoteSettings("http://gpu.box/v1"), server)
        assert said(await collect(remote)) == SEPARATORS
        await remote.aclose()


class EndlessServer(OtherServer):
    """Sends one line that never ends; notes how much of it was taken."""

    def __init__(self, status: int) -> None:
        super().__init__([])
        self.status = status
        self.sent_bytes = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/chat/completions":
            return httpx.Response(self.status, content=self._line())
        return await super().handle_async_request(request)

    async def _line(self) -> AsyncIterator[bytes]:
        yield b"data: "
        while self.sent_bytes < 64 << 20:
            self.sent_bytes += 1 << 20
            yield bytes(1 << 20)


@pytest.mark.parametrize("status", [200, 500])
async def test_a_line_without_end_is_not_kept(status: int) -> None:
    server = EndlessServer(status)
    remote = RemoteEngine(RemoteSettings("http://gpu.box/v1"), server)
    with pytest.raises(EngineError):
        await collect(remote)
    assert server.sent_bytes < 16 << 20
    await remote.aclose()


@pytest.mark.parametrize("bad", [b"{", b"[1]", {"error": {"message": "boom", "code": 500}}])
async def test_nonsense_of_another_server_is_an_engine_error(bad: Any) -> None:
    remote = RemoteEngine(RemoteSettings("http://gpu.box/v1"), OtherServer([chunk(content="a"), bad]))
    with pytest.raises(EngineError) as broken:
        await collect(remote)
    assert broken.value.code == "internal"
    await remote.aclose()


def test_rates_of_sglang() -> None:
    text = 'sglang:spec_accept_length{m="x"} 2.5\nsglang:spec_accept_rate{m="x"} 0.6\nsglang:gen_throughput{m="x"} 99.5'
    metrics = read_metrics(text + "\nnot a metric\nsglang:odd{} x", MetricsSnapshot())
    assert (metrics.mean_accepted_run, metrics.tok_per_s) == (2.5, 99.5)
    assert metrics.drafters[0].acceptance_rate == 0.6


def test_a_rate_that_lasts_is_not_shown_of_an_idle_server() -> None:
    text = "sglang:gen_throughput 99.5\nsglang:num_running_reqs "
    assert read_metrics(text + "0", MetricsSnapshot()).tok_per_s == 0
    assert read_metrics(text + "1", MetricsSnapshot()).tok_per_s == 99.5


def test_rate_between_pages_forgets_a_server_that_began_anew() -> None:
    reader = MetricsReader(window_s=1.0)
    counts = [(0.0, 100), (0.5, 150), (1.0, 200), (1.5, 300), (2.0, 400), (2.5, 20), (3.0, 60)]
    rates = [reader.read(f"vllm:generation_tokens_total {n}", MetricsSnapshot(), at).tok_per_s for at, n in counts]
    assert rates == [0, 100, 100, 150, 200, 0, 80]


def test_engines_are_added_and_copies_and_other_models_are_not() -> None:
    text = """vllm:generation_tokens_total{engine="0",model_name="m"} 5
vllm:generation_tokens_total{engine="1",model_name="m"} 7
vllm:generation_tokens_total{engine="0",model_name="other"} 100
vllm:num_requests_running{dp_rank="0",tp_rank="0",model_name="m"} 3
vllm:num_requests_running{dp_rank="0",tp_rank="1",model_name="m"} 3
vllm:num_requests_running{dp_rank="1",tp_rank="2",model_name="m"} 1
sglang:spec_accept_length{dp_rank="0",model_name="m"} 2
sglang:spec_accept_length{dp_rank="1",model_name="m"} 3
"""
    metrics = read_metrics(text, MetricsSnapshot(model_id="m"))
    assert (metrics.completion_tokens_total, metrics.active_requests, metrics.mean_accepted_run) == (12, 4, 2.5)
    assert read_metrics(text, MetricsSnapshot(model_id="named otherwise")).completion_tokens_total == 112


def test_llama_cpp() -> None:
    text = """llamacpp:tokens_predicted_total 18722
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
llamacpp:predicted_tokens_seconds 41.5
llamacpp:spec_decode_num_draft_tokens_total 2.0e+3
llamacpp:spec_decode_num_accepted_tokens_total 1500
llamacpp:spec_decode_num_drafts_total 500
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="0"} 480
llamacpp:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 400
"""
    metrics = read_metrics(text, MetricsSnapshot())
    assert (metrics.tok_per_s, metrics.mean_accepted_run, metrics.queued_requests) == (41.5, 4.0, 2)
    (drafter,) = metrics.drafters
    assert (drafter.acceptance_rate, drafter.accepted_per_position) == (0.75, (480, 0, 400))
    assert drafter.drafted_per_position == (500, 500, 500)


async def test_our_own_port_from_afar_tells_all_its_drafters() -> None:
    engine = ScriptedEngine(Script(replies=(Reply("word " * 40),), seed=5))
    async with serving(engine) as address:
        remote = RemoteEngine(RemoteSettings(address, poll_s=0.02))
        await collect(remote)
        await until(lambda: remote.metrics().completion_tokens_total == engine.metrics().completion_tokens_total > 0)
        here, there = engine.metrics(), remote.metrics()
        assert there.drafters == here.drafters and here.drafters[0].accepted_tokens > 0
        assert (there.drafter, there.depth) == (here.drafter, here.depth)
        assert there.mean_accepted_run == pytest.approx(here.mean_accepted_run)
        await remote.aclose()


_PIECES = [
    "vllm:a", "sglang:spec_accept_rate", "{", "}", 'position="1"', "=", '"', "\\", " ", "1e309", "nan", "-1",
    "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens", "7", "\n", ",",
]  # fmt: skip


@given(st.text() | st.lists(st.sampled_from(_PIECES)).map("".join))
@settings(max_examples=200, deadline=None)
def test_no_page_of_figures_raises(text: str) -> None:
    metrics = read_metrics(text, MetricsSnapshot(state="ready"))
    assert metrics.state == "ready" and all(0 <= d.acceptance_rate <= 1 for d in metrics.drafters)


_DELTAS = [[1], "x", {"tool_calls": ["x"]}, {"tool_calls": {"a": 1}}, {"tool_calls": [{"function": 3}]}]


@pytest.mark.parametrize("delta", _DELTAS, ids=str)
async def test_chunks_of_another_form_are_an_engine_error(delta: Any) -> None:
    bad = {"choices": [{"delta": delta}]}
    remote = RemoteEngine(RemoteSettings("http://gpu.box/v1"), OtherServer([chunk(content="a"), bad]))
    with pytest.raises(EngineError) as broken:
        await collect(remote)
    assert broken.value.code == "internal"
    await remote.aclose()

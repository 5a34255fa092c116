"""The app on an engine behind the port, in another process that is killed and started again."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from localspec.api.remote import RemoteEngine, RemoteSettings
from tests.tui.fakes import NARROW, ask, started, until
from tests.tui.openai_server import OtherServer, listening, sglang_page, vllm_page

ROOT = Path(__file__).parent.parent.parent
KEY = "control-key-of-the-tests"
SERVER = """
import asyncio, sys
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.server.serve import serve
from localspec.server.settings import ServerSettings
engine = ScriptedEngine(Script(replies=(Reply("word " * 400),), tok_per_s=float(sys.argv[2])))
settings = ServerSettings(port=int(sys.argv[1]), control_key=sys.argv[3])
asyncio.run(serve(engine, settings, None, lambda address: print(address, flush=True)))
"""


class Server:
    """A port in a process of its own, always on the same number."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[str] | None = None

    def start(self, tok_per_s: float) -> str:
        command = [sys.executable, "-c", SERVER, str(self.port), str(tok_per_s), KEY]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.kill()


async def test_killed_engine_process_is_survived(server: Server, tmp_path: Path) -> None:
    address = server.start(tok_per_s=200)
    engine = RemoteEngine(RemoteSettings(address, control_key=KEY))
    async with started(engine, tmp_path) as (app, pilot):
        await engine.wait_ready()
        await pilot.press("q", "enter")
        await until(lambda: "word word" in app.chat.transcript.plain_text)
        server.kill()
        await until(lambda: not app.chat.busy)
        broken = app.chat.conversation.messages[-1]
        assert broken.state == "error" and broken.content.startswith("word word")
        assert broken.stats["status"] == f"The server at {address} stopped in mid-answer; the text so far is kept."
        await until(lambda: any("The chat is kept" in notice.message for notice in app._notifications))
        server.start(tok_per_s=0)
        await until(lambda: any("The engine is back" in notice.message for notice in app._notifications), 20)
        await pilot.press("ctrl+g")
        await until(lambda: app.chat.conversation.messages[-1].state == "done", 20)
        whole = app.chat.conversation.messages[-1]
        assert whole.content == "word " * 400
        assert sum(count for count, _, _ in whole.spans) == 2000 and {o for _, o, _ in whole.spans} == {
            "target",
            "ngram",
        }
        assert app.chat.conversation.places[whole.id] == (2, 2)
    await engine.aclose()


async def test_opening_the_app_holds_the_engine(server: Server, tmp_path: Path) -> None:
    address = server.start(tok_per_s=0)
    engine = RemoteEngine(RemoteSettings(address, control_key=KEY))
    async with started(engine, tmp_path):
        await until(lambda: engine.metrics().state == "ready")
        async with httpx.AsyncClient(base_url=address) as other:
            said = (await other.get("/localspec/v1/state", headers={"x-localspec-key": KEY})).json()
        assert said["holders"] == 1
    await engine.aclose()


async def test_a_client_that_leaves_does_not_disturb_another(server: Server, tmp_path: Path) -> None:
    address = server.start(tok_per_s=1500)
    engine = RemoteEngine(RemoteSettings(address, control_key=KEY))
    async with started(engine, tmp_path) as (app, pilot):
        await engine.wait_ready()
        async with httpx.AsyncClient(base_url=address, timeout=20) as other:
            body = {"model": "x", "stream": True, "messages": [{"role": "user", "content": "q"}]}
            async with other.stream("POST", "/v1/chat/completions", json=body) as response:
                await anext(response.aiter_bytes())
                await pilot.press("q", "enter")
                await until(lambda: "word" in app.chat.transcript.plain_text)
        await until(lambda: not app.chat.busy)
        assert app.chat.conversation.messages[-1].content == "word " * 400
        await ask(app, pilot, "again")
    await engine.aclose()


async def test_acceptance_and_speed_of_vllm_are_shown(tmp_path: Path) -> None:
    server = OtherServer(vllm_page, "word " * 299, tok_per_s=250)
    async with listening(server) as address:
        engine = RemoteEngine(RemoteSettings(address + "/v1", poll_s=0.1))
        async with started(engine, tmp_path, address=address) as (app, pilot):
            await engine.wait_ready()
            panel = app.chat.query_one("#panel")
            await pilot.press("q", "enter")
            await until(lambda: 180 < engine.metrics().tok_per_s < 320)
            await until(lambda: not app.chat.busy)
            await until(lambda: engine.metrics().drafters[0].drafts == 100)

            def sampled() -> str:
                app.chat.sample()
                return panel.plain_text

            # The port says so with its next answer to whoever polls.
            await until(lambda: "0 running" in sampled())
            shown = sampled()
            assert "accepted 67%  mean run 3.00" in shown
            assert " 1 " in shown and "100%" in shown and "server 67% 200/300" in shown
            assert "0 running · 2 waiting" in shown and "kv cache used %: 34.1" in shown
            assert "prefix found %: 75" in shown and "against plain: not said" in shown
            assert app.chat.transcript.plain_text.count("word") == 299
            assert server.bodies[0]["messages"] == [{"role": "user", "content": "q"}]
            metrics = engine.metrics()
            assert (metrics.completion_tokens_total, metrics.drafters[0].accepted_per_position) == (300, (100, 100, 0))
        await engine.aclose()


async def test_acceptance_of_sglang_is_shown(tmp_path: Path) -> None:
    server = OtherServer(sglang_page, "word " * 300)
    async with listening(server) as address:
        engine = RemoteEngine(RemoteSettings(address, poll_s=0.1))
        async with started(engine, tmp_path, NARROW) as (app, pilot):
            await engine.wait_ready()
            await pilot.press("q", "enter")
            await until(lambda: engine.metrics().tok_per_s == 99.5)
            # Copies of a rank and parts of the queue are counted once.
            assert (engine.metrics().active_requests, engine.metrics().queued_requests) == (1, 3)
            app.chat.sample()
            strip = app.chat.query_one("#strip")
            assert "accepted 60%  run 2.50" in strip.plain_text and "99.5 tok/s" in strip.plain_text
            await pilot.press("escape")
            await until(lambda: engine.metrics().active_requests == 0)
            # The gauge keeps its last value; an idle server writes no tokens.
            assert engine.metrics().tok_per_s == 0
        await engine.aclose()


NONSENSE = """vllm:generation_tokens_total NaN
vllm:spec_decode_num_drafts_total +Inf
vllm:spec_decode_num_draft_tokens_total{a="b
vllm:spec_decode_num_accepted_tokens_total -5
vllm:num_requests_running{x="}\\"{"} 1e400
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999999999999999999"} 1
vllm:spec_decode_num_accepted_tokens_per_pos_total{position="²"} 1
\x00\x1b[2J{}
sglang:spec_accept_rate 7e300
"""


@pytest.mark.parametrize("page", [NONSENSE, "", "<html>" * 10_000, "{" * 100_000, None], ids=lambda p: str(p)[:6])
async def test_malformed_metrics_do_no_harm(page: str | None, tmp_path: Path) -> None:
    async with listening(OtherServer(lambda now: page, tok_per_s=5000)) as address:
        engine = RemoteEngine(RemoteSettings(address, poll_s=0.05))
        async with started(engine, tmp_path) as (app, pilot):
            await engine.wait_ready()
            await ask(app, pilot, "q")
            for _ in range(3):
                await pilot.pause(0.05)
                app.chat.sample()
            assert engine.metrics().state == "ready" and app.chat.conversation.messages[-1].state == "done"
            assert (engine.metrics().drafter == "unknown") == (page is None)
            assert "\x1b" not in app.chat.query_one("#panel").plain_text
        await engine.aclose()


async def test_a_foreign_server_is_not_asked_for_its_models_all_the_time(tmp_path: Path) -> None:
    server = OtherServer(vllm_page)
    async with listening(server) as address:
        engine = RemoteEngine(RemoteSettings(address, poll_s=0.02))
        await engine.wait_ready()
        await until(lambda: len(engine._reader._readings) > 5)
        assert server.lists <= 3
        await engine.aclose()


async def test_a_foreign_server_that_goes_in_mid_answer_and_comes_back(tmp_path: Path) -> None:
    port = Server().port
    engine = RemoteEngine(RemoteSettings(f"http://127.0.0.1:{port}/v1", poll_s=0.05))
    async with started(engine, tmp_path) as (app, pilot):
        async with listening(OtherServer(vllm_page, "word " * 2000, tok_per_s=100), port):
            await engine.wait_ready()
            await pilot.press("q", "enter")
            await until(lambda: "word" in app.chat.transcript.plain_text)
        await until(lambda: not app.chat.busy)
        broken = app.chat.conversation.messages[-1]
        assert broken.state == "error" and broken.content.startswith("word")
        await until(lambda: "the text so far is kept" in app.chat.transcript.plain_text.replace("\n", " "))
        await until(lambda: engine.metrics().state == "loading" and engine.model() is None)
        assert "trying again" in engine.metrics().stage and engine.metrics().tok_per_s == 0
        app.chat.sample()
        await pilot.pause()
        assert "trying again" in app.chat.query_one("#panel").plain_text.replace("\n", " ")
        async with listening(OtherServer(vllm_page, "A whole answer."), port):
            await pilot.press("ctrl+g")
            await until(lambda: "A whole answer." in app.chat.transcript.plain_text, 20)
            await engine.aclose()

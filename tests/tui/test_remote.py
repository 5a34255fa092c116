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
from tests.tui.fakes import ask, started, until

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

"""What clients see of an answer that a stop cuts off, and what the terminal sees of signals."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from localspec.api.scripted import ScriptedEngine
from tests.server.conftest import says, serving

ASK = {"messages": [{"role": "user", "content": "x"}], "model": "scripted"}
WORDS = "the server is stopping"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASK,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {**ASK, "max_tokens": 4000},
    "/api/chat": ASK,
    "/api/generate": {"prompt": "x", "model": "scripted"},
    "/completion": {"prompt": "x"},
}


def slow() -> ScriptedEngine:
    return says("@" * 4000, tok_per_s=300)


async def _stop_in_midst(engine: ScriptedEngine) -> None:
    async with asyncio.timeout(60):
        while engine.metrics().completion_tokens_total < 20:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await engine.aclose()


@pytest.mark.parametrize("route", ROUTES)
async def test_a_whole_answer_that_was_cut_is_a_503(route: str) -> None:
    engine = slow()
    async with serving(engine) as address, httpx.AsyncClient(base_url=address, timeout=20) as client:
        stopping = asyncio.create_task(_stop_in_midst(engine))
        reply = await client.post(route, json={**ROUTES[route], "stream": False})
        await stopping
    assert reply.status_code == 503, reply.text
    assert WORDS in str(reply.json()["error"])
    assert "@" not in reply.text


@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_that_was_cut_ends_with_an_error(route: str) -> None:
    engine = slow()
    async with serving(engine) as address, httpx.AsyncClient(base_url=address, timeout=20) as client:
        stopping = asyncio.create_task(_stop_in_midst(engine))
        reply = await client.post(route, json={**ROUTES[route], "stream": True})
        await stopping
    assert (reply.status_code, "@" in reply.text) == (200, True)
    parts = [part for part in reply.text.split("\n\n" if "data: " in reply.text else "\n") if part.strip()]
    if route.startswith("/v1/chat") or route in ("/v1/completions", "/completion"):
        assert parts.pop() == "data: [DONE]"
    last = parts[-1]
    assert WORDS in last
    data = json.loads(last.partition("data: ")[2] or last)
    if route == "/v1/responses":
        assert (data["type"], data["response"]["status"]) == ("response.failed", "failed")
        assert data["response"]["error"]["code"] == "not_ready"
    elif route == "/v1/messages":
        assert last.startswith("event: error\n")
        assert (data["type"], data["error"]["type"]) == ("error", "overloaded_error")
    else:
        assert "error" in data
    ends = ('"finish_reason":"stop"', '"done":true', '"stop":true', "message_stop", "response.completed")
    assert not any(end in reply.text for end in ends)


SERVER = """
import sys, time
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.server.serve import run_server
from localspec.server.settings import ServerSettings
engine = ScriptedEngine(Script((Reply("@" * 4000),), tok_per_s=300))
try:
    run_server(engine, ServerSettings(port=0))
except KeyboardInterrupt:
    print("closing", flush=True)
    time.sleep(0.3)
    sys.exit(130)
finally:
    print(engine.metrics().state, flush=True)
"""


@contextmanager
def started(program: str = SERVER) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = process.stdout.readline().split()[2]
            # An answer means that signals are taken; the address is said a moment before.
            assert httpx.get(f"{address}/health", trust_env=False, timeout=20).status_code == 200
            yield process, address
        finally:
            process.kill()


def test_sigterm_in_midstream_reaches_the_client_as_an_error() -> None:
    with started() as (process, address), httpx.Client(trust_env=False, timeout=20) as client:
        with client.stream("POST", address + "/v1/chat/completions", json={**ASK, "stream": True}) as reply:
            lines = reply.iter_lines()
            while "@" not in next(lines):
                pass
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert process.wait(10) == 0
    assert rest[-1] == "data: [DONE]"
    assert WORDS in json.loads(rest[-2].removeprefix("data: "))["error"]["message"]


@pytest.mark.parametrize("pause_s", [0.0, 0.02, 0.1, 0.3])
def test_a_second_interrupt_makes_no_noise(pause_s: float) -> None:
    with started() as (process, address), httpx.Client(trust_env=False, timeout=20) as client:
        with client.stream("POST", address + "/v1/chat/completions", json={**ASK, "stream": True}) as reply:
            lines = reply.iter_lines()
            while "@" not in next(lines):
                pass
            process.send_signal(signal.SIGINT)
            time.sleep(pause_s)
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert err == ""
    assert (process.returncode, out.split()) == (130, ["closing", "stopped"])


def test_an_interrupt_after_the_end_makes_no_noise() -> None:
    with started() as (process, _):
        assert process.stdout is not None
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "closing\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "stopped\n", "")


def test_a_third_signal_ends_a_stop_that_hangs() -> None:
    hangs = "async def hang(): await asyncio.sleep(60)\nengine.aclose = hang\n"
    with started("import asyncio\n" + SERVER.replace("try:\n", hangs + "try:\n")) as (process, _):
        for _ in range(3):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        _, err = process.communicate(timeout=40)
    assert (process.returncode, err) == (-signal.SIGINT, "")

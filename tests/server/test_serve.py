"""Sockets, keys on disk, control calls, metrics, and what the import costs."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from localspec.api.codec import from_json
from localspec.api.scripted import ScriptedEngine
from localspec.api.types import DrafterMetrics, MetricsSnapshot
from localspec.server.context import ControlHooks
from localspec.server.metrics import prometheus_text
from localspec.server.serve import PortInUse, base_address, bind, load_or_create_key, serve
from localspec.server.settings import ServerSettings
from tests.server.conftest import KEY, says, serving

CONTROL = {"x-localspec-key": KEY}


def test_the_import_brings_no_torch() -> None:
    code = "import sys, localspec.server.serve; print([m for m in ('torch', 'numpy', 'pydantic') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


async def test_a_taken_port_names_its_holder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"Port {port} on 127.0.0.1 is in use by .*pid \d+.*--port 0"):
            await serve(ScriptedEngine(), ServerSettings(port=port))
    assert issubclass(PortInUse, OSError)


async def test_an_address_of_another_machine() -> None:
    with pytest.raises(OSError, match=r"no address 203\.0\.113\.9"):
        await serve(ScriptedEngine(), ServerSettings(host="203.0.113.9", api_key="k", port=0))


def test_both_loopback_addresses_share_a_port() -> None:
    sockets = bind(ServerSettings(port=0))
    assert len({item.getsockname()[1] for item in sockets}) == 1
    for item in sockets:
        item.close()
    assert base_address("0.0.0.0", 1) == "http://127.0.0.1:1"
    assert base_address("::1", 1) == "http://[::1]:1"


def test_the_control_key_is_made_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "data" / "control.key"
    key = load_or_create_key(path)
    assert len(key) >= 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_or_create_key(path) == key
    path.write_text("torn")
    assert len(load_or_create_key(path)) >= 32
    assert [item.name for item in path.parent.iterdir()] == ["control.key"]


async def test_control_calls() -> None:
    engine = says("a b c")
    async with (
        serving(engine) as address,
        httpx.AsyncClient(base_url=address + "/localspec/v1", headers=CONTROL) as http,
    ):
        state = (await http.get("/state")).json()
        assert state["model"]["id"] == "scripted"
        assert from_json(MetricsSnapshot, state["metrics"]).state == "ready"
        assert (await http.post("/drafter", json={"drafter": "off"})).status_code == 200
        assert engine.metrics().drafter == "off"
        refused = await http.post("/drafter", json={"drafter": "eagle9"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported")
        assert (await http.post("/load", json={"model": "no"})).status_code == 404
        assert (await http.post("/load", json={"model": "scripted"})).json()["model"]["id"] == "scripted"
        messages = [{"role": "user", "content": "x"}]
        assert (await http.post("/warm", json={"messages": messages, "localspec": {"chat_id": "c"}})).json() == {
            "cached_tokens": 0
        }
        assert (await http.post("/forget", json={"chat_id": "c"})).status_code == 200
        assert (await http.post("/forget", json={})).status_code == 400
        assert (await http.post("/count_tokens", json={"messages": messages})).json()["tokens"] > 1
        tokens = (await http.post("/tokenize", json={"text": "é"})).json()["tokens"]
        assert (await http.post("/detokenize", json={"tokens": tokens})).json()["text"] == "é"
        assert (await http.post("/detokenize", json={"tokens": [-1]})).status_code == 400
        assert (await http.post("/pull", json={"model": "x"})).status_code == 404


async def test_pull_and_shutdown_go_through_hooks() -> None:
    async def pull(model_id: str) -> AsyncIterator[dict[str, Any]]:
        yield {"model": model_id, "done_bytes": 1}

    engine = ScriptedEngine()
    async with serving(engine, ControlHooks(pull=pull)) as address, httpx.AsyncClient(headers=CONTROL) as http:
        reply = await http.post(address + "/localspec/v1/pull", json={"model": "m"})
        frames = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line]
        assert frames == [{"model": "m", "done_bytes": 1}, {"done": True}]
        assert (await http.post(address + "/localspec/v1/shutdown", json={})).status_code == 200
        async with asyncio.timeout(60):
            while engine.metrics().state != "stopped":  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_the_last_holder_stops_an_engine_that_a_chat_started() -> None:
    engine = says("word " * 2000, tok_per_s=200)
    http = httpx.AsyncClient(headers=CONTROL)
    async with serving(engine, stop_when_unused=True, unused_grace_s=0.1) as address, http:
        async with http.stream("GET", address + "/localspec/v1/metrics?hz=20") as first:
            # Held on to: a generator that is dropped closes its connection.
            lines = first.aiter_lines()
            assert json.loads((await anext(lines))[6:])["holders"] == 1
            async with http.stream("GET", address + "/localspec/v1/metrics") as second:
                assert json.loads((await anext(second.aiter_lines()))[6:])["holders"] == 2
            await asyncio.sleep(0.4)
            assert engine.metrics().state == "ready"
        async with asyncio.timeout(60):
            while engine.metrics().state != "stopped":  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def test_an_engine_that_nobody_claims_stops() -> None:
    engine = ScriptedEngine()
    async with serving(engine, stop_when_unused=True, unclaimed_s=0.2), asyncio.timeout(60):
        while engine.metrics().state != "stopped":  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_the_server_in_good_order(number: signal.Signals, code: int) -> None:
    program = """
import sys
from localspec.api.scripted import ScriptedEngine
from localspec.server.serve import run_server
from localspec.server.settings import ServerSettings
engine = ScriptedEngine()
try:
    run_server(engine, ServerSettings(port=0))
except KeyboardInterrupt:
    sys.exit(130)
finally:
    print(engine.metrics().state, flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[2]
        assert httpx.get(address + "/health", trust_env=False).status_code == 200
        process.send_signal(number)
        assert process.wait(10) == code
        assert process.stdout.read().strip() == "stopped"


async def test_metrics_text() -> None:
    async with serving(says("word " * 30)) as address, httpx.AsyncClient(base_url=address) as http:
        body = {"messages": [{"role": "user", "content": "x"}]}
        await http.post("/v1/chat/completions", json=body, headers={"user-agent": 'Ed"it\n/1.0 x'.replace("\n", "")})
        text = (await http.get("/metrics")).text
    assert re.search(r'^localspec_spec_decode_num_accepted_tokens_total\{drafter="ngram"\} [1-9]', text, re.M)
    assert re.search(r'^localspec_client_requests_total\{client="Edit/1.0"\} 1$', text, re.M)
    assert re.search(
        r'^localspec_spec_decode_num_accepted_tokens_per_pos_total\{drafter="ngram",position="0"\}', text, re.M
    )
    for line in text.splitlines():
        assert line.startswith("# TYPE ") or re.fullmatch(r"[a-z_]+(\{[^}]*\})? [0-9.e+-]+", line), line


def test_labels_are_escaped_and_missing_figures_left_out() -> None:
    text = prometheus_text(MetricsSnapshot(drafters=(DrafterMetrics('a"\\\n'),)))
    assert '{drafter="a\\"\\\\\\n"} 0' in text
    assert "speedup" not in text

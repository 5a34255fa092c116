"""Who gets in, by which names, with which keys."""

from __future__ import annotations

import httpx
import pytest

from localspec.api.scripted import ScriptedEngine
from localspec.server.app import create_app
from localspec.server.security import UnsafeAddress
from localspec.server.settings import ServerSettings

ASK = {"messages": [{"role": "user", "content": "x"}]}
CONTROL = {"x-localspec-key": "k" * 40}


def client(peer: str = "127.0.0.1", **settings: object) -> httpx.AsyncClient:
    app = create_app(ScriptedEngine(), ServerSettings(control_key="k" * 40, **settings))  # type: ignore[arg-type]
    transport = httpx.ASGITransport(app, client=(peer, 1234))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8012")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8012", 200),
        ("localhost", 200),
        ("LocalHost:1", 200),
        ("[::1]:8012", 200),
        ("evil.example", 403),
        ("evil.example:8012", 403),
        ("127.0.0.1.evil.example", 403),
        ("127.0.0.1@evil.example", 403),
        ("", 403),
    ],
)
async def test_rebound_names_are_refused(host: str, status: int) -> None:
    async with client() as http:
        assert (await http.get("/v1/models", headers={"host": host})).status_code == status


async def test_names_that_are_allowed_or_guarded_by_a_key() -> None:
    async with client(allowed_hosts=("box.lan",)) as http:
        assert (await http.get("/v1/models", headers={"host": "box.lan:8012"})).status_code == 200
    async with client(api_key="secret") as http:
        headers = {"host": "anything.example", "authorization": "Bearer secret"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("https://127.0.0.1", 200),
        ("vscode-webview://abc", 200),
        ("tauri://localhost", 200),
        ("http://tauri.localhost", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
        ("http://[", 403),
    ],
)
async def test_origins(origin: str, status: int) -> None:
    async with client() as http:
        reply = await http.post("/v1/chat/completions", json=ASK, headers={"origin": origin})
        assert reply.status_code == status
        assert reply.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
        asked = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
        before = await http.options("/v1/chat/completions", headers=asked)
        assert before.status_code == (204 if status == 200 else 403)
        if status == 200:
            assert before.headers["access-control-allow-headers"] == "x-a"


async def test_origins_can_be_widened() -> None:
    async with client(cors_origins=("https://my.app",)) as http:
        assert (await http.get("/v1/models", headers={"origin": "https://my.app"})).status_code == 200
        assert (await http.get("/v1/models", headers={"origin": "https://my.app.evil"})).status_code == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer secret"}, 200),
        ({"authorization": "bearer secret"}, 200),
        ({"x-api-key": "secret"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secre"}, 401),
        ({"authorization": "Basic secret"}, 401),
        ({"x-api-key": "é"}, 401),
        ({}, 401),
    ],
)
async def test_keys(headers: dict[str, str], status: int) -> None:
    async with client(api_key="secret") as http:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        reply = await http.get("/v1/models", headers=raw)
        assert reply.status_code == status
        if status == 401:
            assert reply.json()["error"]["code"] == "invalid_api_key"
        assert (await http.get("/health")).status_code == 200
        assert (await http.post("/v1/messages", json={})).json()["type"] == "error"


@pytest.mark.parametrize(
    ("peer", "headers", "status"),
    [
        ("127.0.0.1", CONTROL, 200),
        ("127.8.0.1", CONTROL, 200),
        ("::1", CONTROL, 200),
        ("192.168.1.4", CONTROL, 403),
        ("127.0.0.1", {}, 401),
        ("127.0.0.1", {"x-localspec-key": "k" * 39}, 401),
        ("127.0.0.1", {**CONTROL, "origin": "http://localhost:3000"}, 403),
    ],
)
async def test_control_calls_are_for_this_machine(peer: str, headers: dict[str, str], status: int) -> None:
    async with client(peer) as http:
        assert (await http.get("/localspec/v1/state", headers=headers)).status_code == status


async def test_without_a_control_key_there_are_no_control_calls() -> None:
    transport = httpx.ASGITransport(create_app(ScriptedEngine()))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        reply = await http.get("/localspec/v1/state", headers={"x-localspec-key": ""})
        assert reply.status_code == 403


async def test_bodies_over_the_limit() -> None:
    async with client(max_body_bytes=1000) as http:
        declared = await http.post("/v1/chat/completions", content=b" " * 1001)
        assert (declared.status_code, declared.json()["error"]["code"]) == (413, "request_too_large")

        async def drip() -> object:
            for _ in range(30):
                yield b" " * 100

        chunked = await http.post("/v1/chat/completions", content=drip())  # type: ignore[arg-type]
        assert chunked.status_code == 413


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.7", "box.lan"])
def test_no_open_port_without_a_key(host: str) -> None:
    with pytest.raises(UnsafeAddress, match="--api-key"):
        create_app(ScriptedEngine(), ServerSettings(host=host))
    create_app(ScriptedEngine(), ServerSettings(host=host, api_key="secret"))

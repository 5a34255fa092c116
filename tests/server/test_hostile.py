"""Requests that once got a wrong or an unclear answer."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from localspec.api.scripted import Script, ScriptedEngine
from localspec.server.request import LEAST_TOP_P
from localspec.server.security import UnsafeAddress, check_settings
from localspec.server.serve import bind
from localspec.server.settings import ServerSettings
from tests.server.conftest import says, serving
from tests.server.test_contract import ASK, CHAT, Listening

FORM = {"type": "regex"}
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}]
DIALECTS = {
    CHAT: {"messages": ASK, "tools": TOOLS},
    "/v1/responses": {"input": "x", "tools": [{"type": "function", "name": "f", "parameters": PARAMETERS}]},
    "/v1/messages": {"messages": ASK, "max_tokens": 99, "tools": [{"name": "f", "input_schema": PARAMETERS}]},
    "/api/chat": {"messages": ASK, "tools": TOOLS},
}
CALLS = [
    *(f'<tool_call>\n{{"name": "f", "arguments": {{"n": {value}}}}}\n</tool_call>' for value in ("NaN", "1e999")),
    r'<tool_call>{"name": "f", "arguments": {"n": "\ud800"}}</tool_call>',
    r'<tool_call>{"name": "f", "arguments": "\ud800"}</tool_call>',
    *(
        f"<tool_call>\n<function=f>\n<parameter=n>\n{value}\n</parameter>\n</function>\n</tool_call>"
        for value in ("NaN", r'"\ud800"', "9" * 5000, "[" * 1200)
    ),
]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/messages", {"messages": ASK, "max_tokens": 3, "stop_sequences": [1]}, "stop_sequences must be"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 3, "stop_sequences": ["a"] * 17}, "stop_sequences may hold"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 3, "output_format": FORM}, "output_format.type must be"),
        ("/v1/messages", {"messages": [{"role": "user", "content": []}], "max_tokens": 3}, "no content"),
        ("/v1/messages", {"messages": [], "max_tokens": 3}, "messages is empty"),
        ("/v1/responses", {"input": []}, "input is empty"),
        (
            CHAT,
            {"messages": ASK, "chat_template_kwargs": {"messages": []}},
            "chat_template_kwargs may not set messages",
        ),
    ],
)
async def test_refusals_name_the_field_that_was_sent(
    echo_port: httpx.AsyncClient, path: str, body: dict[str, Any], words: str
) -> None:
    reply = await echo_port.post(path, json=body)
    assert reply.status_code == 400
    assert words in reply.json()["error"]["message"]


async def test_top_p_of_zero_takes_the_likeliest_token() -> None:
    heard = Listening()
    async with serving(heard.engine) as address, httpx.AsyncClient(base_url=address) as http:
        for top_p in (0, 0.5, 1):
            reply = await http.post(CHAT, json={"messages": ASK, "top_p": top_p})
            assert reply.status_code == 200
    assert [request.sampling.top_p for request in heard.seen] == [LEAST_TOP_P, 0.5, 1]


def test_an_empty_key_is_no_key() -> None:
    for key in ("", "  "):
        with pytest.raises(UnsafeAddress, match="API key is empty"):
            check_settings(ServerSettings(api_key=key))
    check_settings(ServerSettings(api_key="k"))


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(OSError, match=r"The name no-such-host\.invalid has no address"):
        bind(ServerSettings(host="no-such-host.invalid", port=0))


async def test_a_model_that_does_not_load_is_said_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    async with (
        serving(ScriptedEngine(Script(load_error="there is no model 'x'"))) as address,
        httpx.AsyncClient(base_url=address) as http,
    ):
        assert (await http.get("/health")).status_code == 503
    assert capsys.readouterr().err == "The model failed to load: there is no model 'x'\n"
    async with serving(says("x")) as address, httpx.AsyncClient(base_url=address) as http:
        assert (await http.get("/health")).status_code == 200
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("said", CALLS, ids=range(len(CALLS)))
async def test_what_a_model_writes_in_a_call_never_fails_a_request(said: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(says(said)) as address, httpx.AsyncClient(base_url=address) as http:
        for path, body in DIALECTS.items():
            for stream in (False, True):
                reply = await http.post(path, json={**body, "stream": stream})
                assert reply.status_code == 200, path
                assert "its log has the details" not in reply.text, path
                if not stream:
                    json.loads(reply.text, parse_constant=pytest.fail)
    assert not caplog.records


async def test_a_past_call_that_cannot_be_written_again_is_kept_as_text() -> None:
    heard = Listening()
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": r'{"a": "\ud800"}'}}
    said = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c", "content": "r"}]
    async with serving(heard.engine) as address, httpx.AsyncClient(base_url=address) as http:
        assert (await http.post(CHAT, json={"messages": said})).status_code == 200
    arguments = json.loads(heard.seen[0].messages[1].tool_calls[0].arguments)
    assert arguments == {"input": r'{"a": "\ud800"}'}

"""Points of the contract with clients that no other file covers: what their own code looks for in our answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import GenerateRequest
from tests.server.conftest import says, serving
from tests.server.test_stream import TOOLS

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]
OVERFLOW = (r"prompt is too long", r"maximum context length is \d+ tokens")
"""What agents search an error for, to shorten the conversation instead of giving up."""
LLM_YAML = "- model_id: local\n  model_name: scripted\n  api_base: BASE/v1\n  supports_tools: true\n"
LLM_TOOL = "def read(path: str) -> str:\n    'reads'\n    return 'blue-heron for ' + path\n"


class Listening:
    """An engine that notes its requests."""

    def __init__(self, *replies: str) -> None:
        self.seen: list[GenerateRequest] = []
        self._replies = replies or ("x",)
        self.engine = ScriptedEngine(Script(), self._choose)

    def _choose(self, request: GenerateRequest, index: int) -> Reply:
        self.seen.append(request)
        return Reply(self._replies[index % len(self._replies)])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 300}], "max_tokens": 5}),
        ("/v1/responses", {"input": "x" * 300, "stream": True}),
        ("/v1/completions", {"prompt": [97] * 300}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 300}]}),
        ("/completion", {"prompt": [97] * 300}),
    ],
)
async def test_overflow_in_words_that_clients_know(path: str, body: dict[str, Any]) -> None:
    async with (
        serving(says("x", context_limit_tokens=256)) as address,
        httpx.AsyncClient(base_url=address) as http,
    ):
        reply = await http.post(path, json=body)
    assert reply.status_code == 400
    assert all(re.search(pattern, reply.text) for pattern in OVERFLOW), reply.text
    numbers = [int(number) for number in re.findall(r"\d+", reply.text)]
    assert 256 in numbers and max(numbers) >= 300
    if path.startswith("/v1") and "messages" not in path:
        assert reply.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("extra", "last", "continues"),
    [
        ({}, {"role": "assistant", "content": "The answer is"}, True),
        ({"continue_final_message": True}, {"role": "assistant", "content": "The answer is"}, True),
        ({"continue_final_message": False}, {"role": "assistant", "content": "The answer is"}, False),
        ({"add_generation_prompt": True}, {"role": "assistant", "content": "The answer is"}, False),
        ({}, {"role": "assistant", "content": ""}, False),
        (
            {},
            {"role": "assistant", "content": "I look", "tool_calls": [{"id": "1", "function": {"name": "read"}}]},
            False,
        ),
        ({}, {"role": "user", "content": "and?"}, False),
    ],
)
async def test_an_answer_that_is_begun_is_continued(
    extra: dict[str, Any], last: dict[str, Any], continues: bool
) -> None:
    listening = Listening()
    async with serving(listening.engine) as address, httpx.AsyncClient(base_url=address) as http:
        assert (await http.post(CHAT, json={"messages": [*ASK, last], **extra})).status_code == 200
        refused = await http.post(CHAT, json={"messages": ASK, "continue_final_message": True})
        assert refused.json()["error"]["param"] == "continue_final_message"
    request = listening.seen[0]
    assert request.continue_final_message is continues
    assert (request.template_options.get("enable_thinking") is False) is continues


async def test_anthropics_prefill_is_continued() -> None:
    listening = Listening()
    body = {"max_tokens": 9, "messages": [*ASK, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}]}
    async with serving(listening.engine) as address, httpx.AsyncClient(base_url=address) as http:
        assert (await http.post("/v1/messages", json=body)).status_code == 200
    assert listening.seen[0].continue_final_message


@pytest.mark.parametrize("place", ["output_config", "output_format"])
async def test_anthropics_schema_for_the_answer(place: str) -> None:
    listening = Listening()
    form = {"type": "json_schema", "schema": {"type": "object"}}
    extra = {place: {"format": form} if place == "output_config" else form}
    async with serving(listening.engine) as address, httpx.AsyncClient(base_url=address) as http:
        assert (await http.post("/v1/messages", json={"max_tokens": 9, "messages": ASK, **extra})).status_code == 200
    grammar = listening.seen[0].grammar
    assert grammar is not None and (grammar.kind, json.loads(grammar.source)) == ("json_schema", {"type": "object"})


async def test_how_tools_may_be_called_reaches_the_engine() -> None:
    named = {"type": "function", "function": {"name": "edit"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    cases: list[tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = [
        ({}, ("read", "edit"), {}),
        ({"parallel_tool_calls": False}, ("read", "edit"), {"parallel_tool_calls": False}),
        ({"tool_choice": "none"}, (), {}),
        ({"tool_choice": "required"}, ("read", "edit"), {"tool_choice": "required"}),
        ({"tool_choice": named}, ("edit",), {"tool_choice": "required", "parallel_tool_calls": False}),
        ({"tool_choice": allowed}, ("edit",), {"tool_choice": "required"}),
    ]
    listening = Listening()
    async with serving(listening.engine) as address, httpx.AsyncClient(base_url=address) as http:
        for extra, _, _ in cases:
            assert (await http.post(CHAT, json={"messages": ASK, "tools": TOOLS, **extra})).status_code == 200
    for request, (_, names, options) in zip(listening.seen, cases, strict=True):
        assert tuple(tool["function"]["name"] for tool in request.tools) == names
        assert request.template_options == options


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/embeddings", "/embedding", "/api/embed", "/api/embeddings", "/api/v0/embeddings"]
)
async def test_embeddings_are_refused_in_words(echo_port: httpx.AsyncClient, path: str) -> None:
    reply = await echo_port.post(path, json={"model": "m", "input": "x"})
    assert reply.status_code == 400
    assert "no embedding model" in reply.text


async def test_lm_studio_asks_for_one_model_too(echo_port: httpx.AsyncClient) -> None:
    listed = (await echo_port.get("/api/v0/models")).json()["data"][0]
    assert (await echo_port.get("/api/v0/models/scripted")).json() == listed
    assert (await echo_port.get("/api/v0/models/other/one")).json()["error"]["code"] == "model_not_found"
    assert (await echo_port.post("/api/v0/completions", json={"prompt": "a"})).json()["choices"][0]["text"]


async def test_a_response_repeats_what_it_was_asked(echo_port: httpx.AsyncClient) -> None:
    body = {"input": "x", "max_output_tokens": 5, "temperature": 0.5, "instructions": "i"}
    response = (await echo_port.post("/v1/responses", json=body)).json()
    assert {name: response[name] for name in ("max_output_tokens", "temperature", "instructions")} == {
        "max_output_tokens": 5, "temperature": 0.5, "instructions": "i"
    }  # fmt: skip
    assert response["text"] == {"format": {"type": "text"}}
    assert response["truncation"] == "disabled"


async def test_one_call_waits_for_the_end_that_the_model_makes() -> None:
    """A call that is whole ends the answer, but the engine's own figures come with its end token."""
    call = '<tool_call>\n{"name": "read", "arguments": {"path": "x"}}\n</tool_call>'
    body = {"messages": ASK, "tools": TOOLS, "parallel_tool_calls": False}
    async with (
        serving(says(call, call + " and much more" * 90)) as address,
        httpx.AsyncClient(base_url=address) as http,
    ):
        ended, cut = [(await http.post(CHAT, json=body)).json() for _ in range(2)]
    for reply in (ended, cut):
        assert reply["choices"][0]["finish_reason"] == "tool_calls"
        assert len(reply["choices"][0]["message"]["tool_calls"]) == 1
        assert reply["choices"][0]["message"]["content"] is None
    assert ended["timings"]["predicted_ms"] > 0
    assert cut["usage"]["completion_tokens"] < ended["usage"]["completion_tokens"] + 40


@pytest.mark.slow
async def test_the_llm_program(tmp_path: Path) -> None:
    """A chat with a tool call, in an empty home."""
    pytest.importorskip("llm")
    call = '<tool_call>{"name": "read", "arguments": {"path": "note.txt"}}</tool_call>'
    async with serving(says(call, "It says so.")) as address:
        (tmp_path / "extra-openai-models.yaml").write_text(LLM_YAML.replace("BASE", address))
        command = [sys.executable, "-m", "llm", "-m", "local", "--functions", LLM_TOOL, "--td", "read it"]
        env = {**os.environ, "LLM_USER_PATH": str(tmp_path), "HOME": str(tmp_path)}
        done = await asyncio.to_thread(subprocess.run, command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert "blue-heron for note.txt" in said and "It says so." in said

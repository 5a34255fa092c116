"""Requests made at random: every route answers in words, never with a 500, and whole and streamed replies agree."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.api.closing import closing
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import GenerateRequest, Message
from localspec.server.app import create_app
from localspec.server.generation import Finished, collect, run
from localspec.server.generation import Reply as WholeReply
from localspec.server.openai_reply import chat_deltas
from localspec.server.settings import ServerSettings
from tests.server.test_stream import ALPHABET, TOOLS

KEY = "k" * 32
ROUTES = [
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/completion",
    "/infill",
    "/tokenize",
    "/detokenize",
    "/localspec/v1/warm",
    "/localspec/v1/drafter",
    "/localspec/v1/count_tokens",
    "/localspec/v1/tokenize",
    "/localspec/v1/detokenize",
    "/localspec/v1/forget",
]
NAMES = [
    "model", "messages", "prompt", "suffix", "stream", "stream_options", "tools", "tool_choice", "stop", "seed",
    "temperature", "top_k", "logit_bias", "logprobs", "top_logprobs", "n", "prediction", "response_format",
    "chat_template_kwargs", "reasoning", "reasoning_effort", "max_tokens", "localspec", "echo", "input",
    "instructions", "text", "system", "thinking", "stop_sequences", "options", "format", "think", "content", "tokens",
    "n_predict", "input_extra", "response_fields", "t_max_predict_ms", "drafter", "depth", "chat_id", "guided_json",
    "continue_final_message", "metadata", "with_pieces", "images", "raw", "grammar",
]  # fmt: skip
INNER = ["role", "content", "type", "text", "function", "name", "arguments", "parameters", "tool_calls", "tool_call_id",
         "id", "call_id", "output", "input", "summary", "schema", "json_schema", "spans", "raw", "drafter", "grammar",
         "kind", "source", "include_usage", "effort", "format", "budget_tokens", "filename", "tools"]  # fmt: skip
WORDS = ["user", "assistant", "system", "tool", "function", "text", "json_schema", "json_object", "auto", "required",
         "none", "message", "function_call", "function_call_output", "reasoning", "tool_use", "tool_result", "custom",
         "regex", "lark", "enabled", "a", ""]  # fmt: skip
LEAF = st.none() | st.booleans() | st.integers(-3, 70000) | st.floats(-2, 2) | st.sampled_from(WORDS)
VALUE = st.recursive(
    LEAF,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(INNER), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(ROUTES), st.dictionaries(st.sampled_from(NAMES), VALUE, max_size=5), st.booleans())
def test_no_request_is_answered_with_a_500(route: str, body: dict[str, Any], helped: bool) -> None:
    if helped:  # most bodies would fall over a missing prompt
        body = {"messages": [{"role": "user", "content": "hi"}], "input": "hi", "max_tokens": 3, **body}

    async def ask() -> httpx.Response:
        app = create_app(ScriptedEngine(), ServerSettings(control_key=KEY))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return await http.post(route, json=body, headers={"x-localspec-key": KEY})

    reply = asyncio.run(ask())
    assert reply.status_code in (200, 400, 404), (route, body, reply.text)
    assert '"code":"internal"' not in reply.text.replace(": ", ":"), (route, body, reply.text)
    assert "its log has the details" not in reply.text, (route, body, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error if isinstance(error, str) else error["message"], reply.text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(ALPHABET), max_size=10), st.integers(0, 1000), st.integers(1, 9), st.booleans())
def test_any_run_length_gives_the_whole_reply(parts: list[str], seed: int, max_run: int, thinks: bool) -> None:
    script = Script((Reply("".join(parts), thought_is_open=thinks),), seed=seed, max_run=max_run)
    request = GenerateRequest(messages=(Message("user", "x"),), tools=TOOLS)

    async def both() -> tuple[dict[str, Any], WholeReply]:
        whole = await collect(ScriptedEngine(dataclasses_off(script)), request)
        shown: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
        async with closing(run(ScriptedEngine(script), request)) as steps:
            async for step in steps:
                if isinstance(step, Finished):
                    shown["finish"] = step.finish_reason
                    continue
                for delta in chat_deltas(getattr(step, "pieces", ()), False):
                    add(shown, delta)
        return shown, whole

    shown, whole = asyncio.run(both())
    assert shown["content"] == whole.content
    assert shown["reasoning_content"] == whole.reasoning
    assert shown["calls"] == [[call.name, call.arguments] for call in whole.calls]
    assert shown["finish"] == whole.finished.finish_reason


def dataclasses_off(script: Script) -> Script:
    """The same script without drafts: one token a step."""
    import dataclasses

    return dataclasses.replace(script, drafters=("off",))


def add(shown: dict[str, Any], delta: dict[str, Any]) -> None:
    for key in ("content", "reasoning_content"):
        shown[key] += delta.get(key, "")
    for call in delta.get("tool_calls", ()):
        if "id" in call:
            shown["calls"].append([call["function"]["name"], ""])
        shown["calls"][call["index"]][1] += call["function"]["arguments"]


@pytest.mark.parametrize("route", ROUTES[:6])
async def test_bodies_of_every_other_type_are_refused(route: str) -> None:
    transport = httpx.ASGITransport(create_app(ScriptedEngine(), ServerSettings(control_key=KEY)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
        for body in ("[]", "1", '"x"', "null", "{", "{'a': 1}", json.dumps({"messages": {"a": 1}, "input": 3})):
            reply = await http.post(route, content=body)
            assert reply.status_code == 400, (route, body)

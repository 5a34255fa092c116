"""The OpenAI routes over a real socket."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from localspec.api.scripted import Reply, ScriptedEngine
from localspec.api.types import Delta, EngineError, Event, GenerateRequest
from tests.server.conftest import says, serving
from tests.server.test_stream import HERMES, TOOLS, XML

CHAT = "/v1/chat/completions"
ASK = [{"role": "user", "content": "hello"}]


def events(text: str) -> list[Any]:
    """Payloads of a stream; `[DONE]` as it is."""
    frames = [part for part in text.split("\n\n") if part and not part.startswith(":")]
    assert all(part.startswith("data: ") for part in frames)
    return [part[6:] if part[6:] == "[DONE]" else json.loads(part[6:]) for part in frames]


async def stream(client: httpx.AsyncClient, path: str = CHAT, **body: Any) -> list[Any]:
    reply = await client.post(path, json={"messages": ASK, "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    return events(reply.text)


def joined(chunks: list[Any], key: str) -> str:
    return "".join(
        choice["delta"].get(key) or "" for chunk in chunks if chunk != "[DONE]" for choice in chunk["choices"]
    )


async def test_whole_and_streamed_chat_agree() -> None:
    text = "<think>\nhm\n</think>\n\nI look.\n" + XML + "\n" + HERMES
    for seed in range(4):
        async with serving(says(text, seed=seed)) as address, httpx.AsyncClient(base_url=address) as client:
            whole = (await client.post(CHAT, json={"messages": ASK, "tools": TOOLS})).json()
            chunks = await stream(client, tools=TOOLS)
        message = whole["choices"][0]["message"]
        assert message["content"] == joined(chunks, "content") == "I look."
        assert message["reasoning_content"] == joined(chunks, "reasoning_content") == "hm"
        calls: list[list[str]] = []
        for chunk in chunks[:-1]:
            for call in chunk["choices"][0]["delta"].get("tool_calls", []):
                if call.get("id"):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
        assert calls == [[c["function"]["name"], c["function"]["arguments"]] for c in message["tool_calls"]]
        assert json.loads(calls[0][1]) == {"path": 'a/"b".py', "lines": 12}
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"


async def test_frames_of_a_stream(echo_port: httpx.AsyncClient) -> None:
    chunks = await stream(echo_port)
    assert chunks[-1] == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks[:-1]}) == 1
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert joined(chunks, "content") == "Scripted answer."
    assert not any("usage" in chunk or "localspec" in chunk for chunk in chunks[:-1])
    timings = chunks[-2]["timings"]
    assert timings["draft_n"] >= timings["draft_n_accepted"] == sum(timings["accepted_per_position"])
    decoding = chunks[-2]["metrics"]["speculative_decoding"]
    assert decoding["mean_acceptance_length"] == 1 + timings["draft_n_accepted"] / timings["verify_steps"]


async def test_usage_only_on_request(echo_port: httpx.AsyncClient) -> None:
    chunks = await stream(echo_port, stream_options={"include_usage": True}, prediction={"content": "x"})
    assert chunks[-2]["choices"] == []
    usage = chunks[-2]["usage"]
    assert usage["completion_tokens"] == 16
    assert usage["total_tokens"] == 16 + usage["prompt_tokens"]
    assert "accepted_prediction_tokens" in usage["completion_tokens_details"]
    whole = (await echo_port.post(CHAT, json={"messages": ASK})).json()
    assert whole["usage"]["completion_tokens"] == 16
    assert "accepted_prediction_tokens" not in whole["usage"]["completion_tokens_details"]


async def test_draft_view_covers_what_is_shown() -> None:
    async with (
        serving(says("<think>one two</think>three four " * 3, seed=5)) as address,
        httpx.AsyncClient(base_url=address) as client,
    ):
        chunks = await stream(client, localspec={"spans": True})
    shown, spans, tokens, refused = {"thinking": "", "answer": ""}, {"thinking": 0, "answer": 0}, 0, 0
    origins = set()
    for chunk in chunks[:-1]:
        delta = chunk["choices"][0]["delta"]
        shown["thinking"] += delta.get("reasoning_content", "")
        shown["answer"] += delta.get("content", "")
        view = chunk.get("localspec", {"spans": [], "rejected_at": None, "token_ids": []})
        tokens += len(view["token_ids"])
        refused += view["rejected_at"] is not None
        for n_chars, origin, phase in view["spans"]:
            spans[phase] += n_chars
            origins.add(origin)
    assert {phase: len(text) for phase, text in shown.items()} == spans
    assert origins == {"target", "ngram"}
    assert refused > 0
    assert tokens == chunks[-2]["timings"]["predicted_n"]


async def test_choices_logprobs_and_stop(echo_port: httpx.AsyncClient) -> None:
    body = {"messages": ASK, "n": 3, "seed": 1, "logprobs": True, "top_logprobs": 2, "stop": [" ans"]}
    whole = (await echo_port.post(CHAT, json=body)).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["Scripted"] * 3
    entries = whole["choices"][2]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith("Scripted")
    assert all(len(entry["top_logprobs"]) == 2 and entry["logprob"] < 0 for entry in entries)
    chunks = await stream(echo_port, n=2, stop=" ans")
    for index in range(2):
        mine = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Scripted"
        assert mine[-1]["finish_reason"] == "stop"


async def test_completions(echo_port: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "echo": True}
    whole = (await echo_port.post("/completions", json=body)).json()
    assert [choice["text"] for choice in whole["choices"]] == ["aScri", "aScri", "bScri", "bScri"]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    assert whole["usage"]["prompt_tokens"] == 2
    assert whole["usage"]["completion_tokens"] == 16
    reply = await echo_port.post("/v1/completions", json={"prompt": [104, 105], "stream": True})
    chunks = events(reply.text)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "Scripted answer."
    assert chunks[-1] == "[DONE]"
    refused = await echo_port.post("/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "unsupported"


class CutEngine(ScriptedEngine):
    """Gives two alternatives a token, neither the chosen one and one of them cut."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        async for event in super().generate(request):
            if isinstance(event, Delta):
                top = ((88, "X", -0.1), (89, "Y", -math.inf), (90, "Z", -9999.0))
                yield replace(event, logprobs=tuple(replace(entry, top=top) for entry in event.logprobs))
            else:
                yield event


async def test_logprobs_of_completions() -> None:
    async with serving(CutEngine()) as address, httpx.AsyncClient(base_url=address) as client:
        body = {"prompt": "a", "max_tokens": 4, "logprobs": 3}
        found = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert found["tokens"] == list("Scri")
        assert found["text_offset"] == [0, 1, 2, 3]
        assert found["token_logprobs"] == [-0.25] * 4
        assert found["top_logprobs"] == [{"X": -0.1, token: -0.25} for token in "Scri"]
        refused = await client.post("/v1/completions", json={**body, "echo": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
        chat = {"messages": ASK, "logprobs": True, "top_logprobs": 3}
        entries = (await client.post(CHAT, json=chat)).json()["choices"][0]["logprobs"]["content"]
        assert [[top["token"] for top in entry["top_logprobs"]] for entry in entries] == [["X"]] * 16


async def test_long_prompts_of_ids_are_refused_by_their_length(echo_port: httpx.AsyncClient) -> None:
    for route, prompt in (("/v1/completions", [5] * 70_000), ("/v1/completions", [[5] * 70_000])):
        reply = await echo_port.post(route, json={"prompt": prompt})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
    for route in ("/v1/completions", "/completion"):
        reply = await echo_port.post(route, json={"prompt": [5] * 70_000})
        assert "70000" in reply.json()["error"]["message"]
        reply = await echo_port.post(route, json={"prompt": [5, -1]})
        assert (reply.status_code, "no token -1" in reply.json()["error"]["message"]) == (400, True)
        assert (await echo_port.post(route, json={"prompt": [5, "a"]})).status_code == 400


@pytest.mark.parametrize(("number", "words"), [("1" * 5000, "whole number"), ("1e999", "1e999"), ("NaN", "NaN")])
async def test_numbers_that_cannot_be_read(echo_port: httpx.AsyncClient, number: str, words: str) -> None:
    reply = await echo_port.post(CHAT, content=f'{{"messages": [], "seed": {number}}}')
    assert reply.status_code == 400
    message = reply.json()["error"]["message"]
    assert words in message and "sys." not in message


async def test_one_call_where_more_are_not_wanted() -> None:
    async with serving(says(HERMES + HERMES)) as address, httpx.AsyncClient(base_url=address) as client:
        body = {"messages": ASK, "tools": TOOLS, "parallel_tool_calls": False}
        whole = (await client.post(CHAT, json=body)).json()
        assert len(whole["choices"][0]["message"]["tool_calls"]) == 1
        assert whole["choices"][0]["finish_reason"] == "tool_calls"
        named = {"type": "function", "function": {"name": "read"}}
        whole = (await client.post(CHAT, json={"messages": ASK, "tools": TOOLS, "tool_choice": named})).json()
        assert whole["choices"][0]["finish_reason"] == "stop"
        none = (await client.post(CHAT, json={"messages": ASK, "tools": TOOLS, "tool_choice": "none"})).json()
        assert none["choices"][0]["message"]["content"] == HERMES + HERMES


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": ASK, "temperature": "hot"}, "temperature"),
        ({"messages": ASK, "temperature": -1}, "temperature"),
        ({"messages": ASK, "n": 99}, "n"),
        ({"messages": ASK, "stop": ["x"] * 17}, "stop"),
        ({"messages": ASK, "stop": [1]}, "stop"),
        ({"messages": ASK, "stream": "yes"}, "stream"),
        ({"messages": ASK, "tools": [{"type": "function", "function": {}}]}, "tools[].function.name"),
        ({"messages": ASK, "tool_choice": "required"}, "tool_choice"),
        ({"messages": ASK, "tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        (
            {
                "messages": ASK,
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            },
            "tool_choice",
        ),
        ({"messages": ASK, "logit_bias": {"99999": 1}}, "logit_bias"),
        ({"messages": ASK, "logit_bias": {"x": 5}}, "logit_bias"),
        ({"messages": ASK, "logit_bias": [["ab", 1]]}, "logit_bias"),
        ({"messages": ASK, "presence_penalty": 2.5}, "presence_penalty"),
        ({"messages": ASK, "frequency_penalty": -3}, "frequency_penalty"),
        ({"messages": ASK, "frequency_penalty": 10**400}, "frequency_penalty"),
        ({"messages": ASK, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": ASK, "logprobs": False, "top_logprobs": 3}, "top_logprobs"),
        ({"messages": ASK * 20_000}, "messages"),
        ({"messages": [{"role": "user", "content": ["a"] * 20_000}]}, "messages[0].content"),
        ({"messages": ASK, "tools": [{}] * 20_000}, "tools"),
        ({"messages": ASK, "response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": ASK, "response_format": {"type": "json_schema"}}, "response_format"),
        ({"messages": ASK, "localspec": {"drafter": 1}}, "localspec.drafter"),
        ({"messages": ASK, "max_tokens": 1.5}, "max_tokens"),
    ],
)
async def test_bad_fields_are_named(echo_port: httpx.AsyncClient, body: dict[str, Any], param: str) -> None:
    reply = await echo_port.post(CHAT, json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert re.split(r"\W", param)[0] in error["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff{}", b'{"a": NaN}', b"[" * 200_000, b'{"messages": "\\ud800"}'])
async def test_bodies_that_are_no_json_object(echo_port: httpx.AsyncClient, body: bytes) -> None:
    reply = await echo_port.post(CHAT, content=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_what_clients_send_by_habit_is_accepted(echo_port: httpx.AsyncClient) -> None:
    body = {
        "messages": [{"role": "developer", "content": [{"type": "text", "text": "a"}]}, *ASK],
        "max_tokens": -1,
        "tools": [{"type": "web_search"}, *TOOLS],
        "logit_bias": [["65", -100], ["A", 1]],
        "top_logprobs": 0,
        "reasoning_effort": "high",
        "invented": {"x": 1},
        "user": "me",
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
        "temperature": 0,
        "top_k": -1,
        "seed": -1,
        "model": "gpt-4o",
    }
    reply = await echo_port.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == "scripted"


async def test_refusals_of_the_engine_get_their_status() -> None:
    long = {"messages": [{"role": "user", "content": "x" * 300}]}
    overload = Reply(refuse=EngineError("overloaded", "Too many."))
    async with (
        serving(says(overload, "ok", context_limit_tokens=200)) as address,
        httpx.AsyncClient(base_url=address) as client,
    ):
        for streams in (False, True):
            busy = await client.post(CHAT, json={"messages": ASK, "stream": streams})
            assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
            over = await client.post(CHAT, json={**long, "stream": streams})
            assert over.status_code == 400
            assert over.json()["error"]["code"] == "context_length_exceeded"
            assert "200" in over.json()["error"]["message"]


async def test_a_failure_after_the_headers_is_an_event_and_done() -> None:
    async with (
        serving(says(Reply("a" * 50, fail_after_tokens=20))) as address,
        httpx.AsyncClient(base_url=address) as client,
    ):
        chunks = await stream(client)
        assert chunks[-1] == "[DONE]"
        assert set(chunks[-2]["error"]) == {"message", "type", "param", "code"}
        assert joined(chunks[:-2], "content")
        assert (await client.post(CHAT, json={"messages": ASK})).status_code == 500


async def test_a_client_that_leaves_ends_its_request() -> None:
    engine = says("word " * 4000, tok_per_s=500)
    async with serving(engine) as address, httpx.AsyncClient(base_url=address) as client:
        async with client.stream("POST", CHAT, json={"messages": ASK, "stream": True}) as reply:
            async for _ in reply.aiter_lines():
                if engine.metrics().completion_tokens_total:
                    break
            assert engine.metrics().active_requests == 1
        await _until(lambda: engine.metrics().active_requests == 0)
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json={"messages": ASK}, timeout=0.3)
        await _until(lambda: engine.metrics().active_requests == 0)


async def _until(holds: Any) -> None:
    async with asyncio.timeout(6):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_silence_is_filled_with_comments_and_headers_come_at_once() -> None:
    async with (
        serving(says("x", prefill_s=0.5), keep_alive_s=0.2, first_event_s=0.05) as address,
        httpx.AsyncClient(base_url=address) as client,
    ):
        reply = await client.post(CHAT, json={"messages": ASK, "stream": True})
    assert reply.text.count(": ping\n\n") >= 2
    assert events(reply.text)[-1] == "[DONE]"


async def test_more_requests_than_places_get_429() -> None:
    engine = says("word " * 1000, tok_per_s=500, slots=8)
    async with serving(engine, max_requests=2) as address, httpx.AsyncClient(base_url=address) as client:
        running = [asyncio.create_task(client.post(CHAT, json={"messages": ASK, "stream": i == 0})) for i in range(2)]
        await _until(lambda: engine.metrics().active_requests == 2)
        for streams in (False, True):
            refused = await client.post(CHAT, json={"messages": ASK, "stream": streams})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) > 0
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await _until(lambda: engine.metrics().active_requests == 0)
        brief = {"messages": ASK, "max_tokens": 1}
        assert (await client.post(CHAT, json=brief)).status_code == 200


async def test_loading_and_health() -> None:
    async with serving(says("x", load_s=0.4)) as address, httpx.AsyncClient(base_url=address) as client:
        health = await client.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["error"]["code"] == "not_ready"
        assert (await client.get("/v1/models")).json()["data"] == []
        assert (await client.post(CHAT, json={"messages": ASK})).status_code == 503
        await asyncio.sleep(0.5)
        assert (await client.get("/health")).status_code == 200
        models = (await client.get("/models")).json()
        assert models["data"][0]["id"] == "scripted"
        assert models["data"][0]["meta"]["n_ctx"] == 65536
        assert (await client.get("/v1/models/scripted")).status_code == 200
        missing = await client.get("/v1/models/other")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_strict_names_unknown_routes_and_methods() -> None:
    async with serving(ScriptedEngine(), strict_model=True) as address, httpx.AsyncClient(base_url=address) as client:
        wrong = await client.post(CHAT, json={"messages": ASK, "model": "gpt-4o"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (404, "model")
        assert (await client.post(CHAT, json={"messages": ASK, "model": "scripted"})).status_code == 200
        assert set((await client.get("/nothing")).json()["error"]) == {"message", "type", "param", "code"}
        assert (await client.get(CHAT)).status_code == 405
        assert (await client.post("/v1/embeddings", json={})).json()["error"]["code"] == "unsupported"


async def test_what_the_engine_refuses_is_named_too() -> None:
    refuse = Reply(refuse=EngineError("bad_request", "The schema cannot be compiled.", "response_format"))
    ask: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    async with serving(says(refuse, refuse)) as address, httpx.AsyncClient(base_url=address) as http:
        for stream in (False, True):
            reply = await http.post("/v1/chat/completions", json={**ask, "stream": stream})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "response_format")

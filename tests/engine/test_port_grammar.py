"""Grammars asked for in the words of the port, answered by a tiny model that would write noise without them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch

from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.server.app import create_app
from tests.helpers.tiny_text import byte_tokenizer, tiny_text_model

pytestmark = pytest.mark.torch
SCHEMA = {
    "type": "object",
    "properties": {"of": {"enum": ["red", "green"]}, "on": {"type": "boolean"}},
    "required": ["of", "on"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "", "parameters": {**SCHEMA, "required": ["on"]}},
    }
    for name in ("get", "put")
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    torch.set_num_threads(1)
    folder: Path = tiny_text_model("llama", 4, tmp_path_factory.mktemp("tiny"))
    place = ModelPlace("tiny", folder, "tiny")
    local = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=512))
    local.start("tiny")
    asyncio.run(local.wait_ready())
    yield local
    asyncio.run(local.aclose())


def ask(engine: LocalEngine, path: str = "/v1/chat/completions", status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "say something"}],
        "max_tokens": 200,
        "temperature": 1,
        "seed": 3,
        "enable_thinking": False,
        **fields,
    }

    async def post() -> dict[str, Any]:
        transport = httpx.ASGITransport(app=create_app(engine))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8012") as client:
            reply = await client.post(path, json=body, timeout=60)
        assert reply.status_code == status, reply.text
        found: dict[str, Any] = reply.json()
        return found

    return asyncio.run(post())


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"guided_json": SCHEMA},
        {"json_schema": SCHEMA},
    ],
    ids=["openai", "llama.cpp", "guided", "plain"],
)
def test_a_schema_is_kept(engine: LocalEngine, asked: dict[str, Any]) -> None:
    choice = ask(engine, **asked)["choices"][0]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


@pytest.mark.parametrize(
    "asked",
    [
        {"guided_choice": ["red", "green / blue"]},
        {"structured_outputs": {"choice": ["red", "green / blue"]}},
        {"guided_regex": "red|green / blue"},
        {"guided_grammar": 'start: "red" | "green / blue"'},
        {"grammar": 'root ::= "red" | green " / blue"\ngreen ::= "green"\n'},
    ],
    ids=["choice", "outputs", "regex", "lark", "gbnf"],
)
def test_other_ways_to_ask_for_a_form(engine: LocalEngine, asked: dict[str, Any]) -> None:
    assert ask(engine, **asked)["choices"][0]["message"]["content"] in ("red", "green / blue")


@pytest.mark.parametrize(
    "source", ["root ::= (", "root ::= missing", "root ::= " + "(" * 5000, "x ::= " + "y" * 70_000]
)
def test_a_bad_gbnf_is_a_bad_request(engine: LocalEngine, source: str) -> None:
    error = ask(engine, status=400, grammar=source)["error"]
    assert "grammar" in error["message"] and error["type"] == "invalid_request_error"


def test_any_object(engine: LocalEngine) -> None:
    """Noise may not find its end, but what there is begins an object."""
    content = ask(engine, response_format={"type": "json_object"}, max_tokens=12)["choices"][0]["message"]["content"]
    assert content.startswith("{")


def test_a_bad_schema_is_a_bad_request_in_the_compilers_words(engine: LocalEngine) -> None:
    error = ask(engine, status=400, guided_json={"type": "strange"})["error"]
    assert "strange" in error["message"] and error["type"] == "invalid_request_error"


def test_a_stream_with_a_bad_schema_is_refused_before_it_begins(engine: LocalEngine) -> None:
    assert "strange" in ask(engine, status=400, stream=True, guided_json={"type": "strange"})["error"]["message"]


PUT = {"type": "function", "function": {"name": "put"}}


@pytest.mark.parametrize(
    ("how", "names"),
    [
        ("required", ("get", "put")),
        (PUT, ("put",)),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [PUT]}}, ("put",)),
    ],
    ids=["required", "named", "allowed"],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_demanded_call_arrives_as_a_call(
    engine: LocalEngine, how: Any, names: tuple[str, ...], parallel: bool
) -> None:
    choice = ask(engine, tools=TOOLS, tool_choice=how, parallel_tool_calls=parallel)["choices"][0]
    calls = choice["message"]["tool_calls"]
    assert len(calls) == 1 or (parallel and how is not PUT)
    for call in calls[: None if choice["finish_reason"] != "length" else -1]:
        assert call["function"]["name"] in names
        jsonschema.validate(json.loads(call["function"]["arguments"]), {**SCHEMA, "required": ["on"]})


def test_the_model_ends_behind_its_one_call_by_itself(engine: LocalEngine) -> None:
    """Not cut by the port: the end token and the engine's own figures are there."""
    reply = ask(engine, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert reply["usage"]["prompt_tokens"] > 0 and reply["timings"]["decode_ms"] > 0
    assert reply["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("bias", [100, -100])
def test_an_answer_under_a_schema_may_still_call(engine: LocalEngine, bias: int) -> None:
    """A word for or against the opening tag decides what the noise does."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    bias_of_tag = {str(byte_tokenizer().token_to_id("<tool_call>")): bias}
    common = {"tools": TOOLS, "response_format": form, "parallel_tool_calls": False}
    message = ask(engine, logit_bias=bias_of_tag, **common)["choices"][0]["message"]
    assert bool(message.get("tool_calls")) == (bias > 0)
    if bias < 0:
        jsonschema.validate(json.loads(message["content"]), SCHEMA)

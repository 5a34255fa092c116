"""Other shapes of the port: llama.cpp, LM Studio, Ollama's corners; and how messages are normalised."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.api.scripted import Reply, ScriptedEngine
from localspec.api.types import GenerateRequest
from localspec.server.normalise import read_messages
from localspec.server.ollama import _messages
from tests.server.conftest import says, serving


class MarkedEngine(ScriptedEngine):
    """A scripted engine whose vocabulary has markers for filling gaps; notes what it is asked."""

    def __init__(self) -> None:
        self.seen: list[GenerateRequest] = []
        super().__init__(choose=self._note)

    def _note(self, request: GenerateRequest, index: int) -> Reply:
        self.seen.append(request)
        return Reply("filled" * 10)

    async def tokenize(self, text: str) -> tuple[int, ...]:
        return (7,) if text.startswith("<|fim_") else await super().tokenize(text)


async def test_infill() -> None:
    engine = MarkedEngine()
    async with serving(engine) as address, httpx.AsyncClient(base_url=address) as http:
        body: dict[str, Any] = {
            "input_prefix": "def f(",
            "input_suffix": "return 1",
            "input_extra": [{"filename": "a.py", "text": "x = 1"}],
            "prompt": "x",
            "n_predict": 6,
            "samplers": ["top_k"],
            "response_fields": ["content", "timings/predicted_n", "nothing/there"],
        }
        reply = (await http.post("/infill", json=body)).json()
        assert reply == {"content": "filled", "timings/predicted_n": 6}
        assert engine.seen[0].prompt == (
            "<|repo_name|>project\n<|file_sep|>a.py\nx = 1\n<|file_sep|>current\n"
            "<|fim_prefix|>def f(<|fim_suffix|>return 1<|fim_middle|>x"
        )
        warm = (await http.post("/infill", json={**body, "n_predict": 0, "response_fields": None})).json()
        assert (warm["content"], warm["stop"], engine.seen[1].max_tokens) == ("", True, 1)
        suffix = (await http.post("/v1/completions", json={"prompt": "a", "suffix": "b", "max_tokens": 2})).json()
        assert suffix["choices"][0]["text"] == "fi"
        assert engine.seen[2].prompt == "<|fim_prefix|>a<|fim_suffix|>b<|fim_middle|>"
        ollama = (await http.post("/api/generate", json={"prompt": "a", "suffix": "b", "stream": False})).json()
        assert ollama["response"].startswith("filled")
        assert (await http.post("/infill", json={"input_extra": [1]})).status_code == 400


async def test_completion_and_its_deadline() -> None:
    async with serving(says("word " * 400, tok_per_s=300)) as address, httpx.AsyncClient(base_url=address) as http:
        cut = (await http.post("/completion", json={"prompt": "a", "t_max_predict_ms": 200})).json()
        assert cut["stop_type"] == "limit"
        assert 0 < cut["tokens_predicted"] < 300
        whole = (await http.post("/completion", json={"prompt": [97], "n_predict": 4, "stop": ["d"]})).json()
        assert (whole["content"], whole["stop_type"], whole["stopping_word"]) == ("wor", "word", "d")
        reply = await http.post("/completion", json={"prompt": "a", "n_predict": 8, "stream": True})
        frames = [json.loads(part[6:]) for part in reply.text.split("\n\n") if part]
        assert "".join(frame["content"] for frame in frames) == "word wor"
        assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
        assert (await http.post("/completion", json={"prompt": [99999]})).status_code == 400
        assert (await http.post("/completion", json={"prompt": {"a": 1}})).status_code == 400


async def test_small_calls() -> None:
    async with serving(says("x")) as address, httpx.AsyncClient(base_url=address) as http:
        tokens = (await http.post("/tokenize", json={"content": "é"})).json()["tokens"]
        assert tokens == [0xC3, 0xA9]
        pieces = (await http.post("/tokenize", json={"content": "ab", "with_pieces": True})).json()["tokens"]
        assert pieces == [{"id": 97, "piece": "a"}, {"id": 98, "piece": "b"}]
        counted = (await http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]})).json()
        assert counted["count"] > 1
        assert (await http.post("/detokenize", json={"tokens": tokens})).json()["content"] == "é"
        assert (await http.post("/detokenize", json={"tokens": ["a"]})).status_code == 400
        assert (await http.get("/props")).json()["default_generation_settings"]["n_ctx"] == 65536
        assert (await http.get("/slots")).json()[0]["is_processing"] is False
        assert (await http.get("/api/v0/models")).json()["data"][0]["max_context_length"] == 65536
        assert (await http.get("/")).status_code == 200
        assert (await http.post("/api/chat", json={"messages": 1})).json()["error"].startswith("messages")


def test_messages_are_put_in_order() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = read_messages(
        [
            {"role": "user", "content": None},
            {"role": "system", "content": "late"},
            {"role": "assistant", "content": None, "tool_calls": [{**call, "id": "1"}, {**call, "id": "2"}]},
            {"role": "user", "content": "between"},
            {"role": "tool", "tool_call_id": "2", "content": "two"},
            {"role": "tool", "tool_call_id": "1", "content": ["o", {"type": "text", "text": "ne"}]},
            {"role": "tool", "tool_call_id": "9", "content": "stray"},
            {"role": "developer", "content": "later"},
        ]
    )
    assert [(message.role, message.content) for message in messages] == [
        ("system", "late\n\nlater"),
        ("user", ""),
        ("assistant", ""),
        ("tool", "one"),
        ("tool", "two"),
        ("user", "between"),
        ("tool", "stray"),
    ]
    assert messages[3].name == "f"


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "", None, {"a": 1}, 7])
def test_arguments_of_past_calls_are_always_an_object(arguments: Any) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": arguments}}
    message = read_messages([{"role": "user"}, {"role": "assistant", "tool_calls": [call]}])[1]
    assert isinstance(json.loads(message.tool_calls[0].arguments), dict)


def test_a_conversation_without_a_question_gets_one() -> None:
    messages = read_messages([{"role": "system", "content": "s"}])
    assert [message.role for message in messages] == ["system", "user"]


def test_results_of_ollama_find_their_calls() -> None:
    said = _messages(
        [
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": n}} for n in ("a", "b", "b")]},
            {"role": "tool", "content": "1", "tool_name": "b"},
            {"role": "tool", "content": "2"},
            {"role": "tool", "content": "3"},
        ]
    )
    assert [message.get("tool_call_id") for message in said[1:]] == ["call_0_1", "call_0_0", "call_0_2"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=3),
    lambda x: st.lists(x, max_size=3),
    max_leaves=4,
)
KEYS = ["role", "content", "tool_calls", "tool_call_id", "name", "reasoning", "function_call"]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.dictionaries(st.sampled_from(KEYS), JSON | st.sampled_from(["user", "tool", "assistant"])), max_size=4)
)
def test_any_messages_are_read_or_refused_in_words(items: list[Any]) -> None:
    from localspec.server.errors import ApiError

    try:
        messages = read_messages(items)
    except ApiError as error:
        assert error.status == 400
        assert error.param
    else:
        assert any(message.role == "user" for message in messages)

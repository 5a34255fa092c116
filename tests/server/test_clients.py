"""The official Python clients against a real socket: chat, stream, tools, errors, cancelling."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from localspec.api.scripted import Reply
from localspec.api.types import EngineError
from tests.server.conftest import says, serving
from tests.server.test_stream import HERMES, TOOLS, XML

openai = pytest.importorskip("openai")
anthropic = pytest.importorskip("anthropic")

TEXT = "<think>\nhm\n</think>\n\nI look.\n" + XML + "\n" + HERMES
ASK: Any = [{"role": "user", "content": "hello"}]
ARGUMENTS = [{"path": 'a/"b".py', "lines": 12}, {"path": 'a</tool_call>{"}', "lines": 3}]


def gpt(address: str, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=address + "/v1", api_key="any", max_retries=0, **options)


def claude(address: str, **options: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=address, api_key="any", max_retries=0, **options)


async def test_openai_chat_and_tools() -> None:
    async with serving(says(TEXT)) as address, gpt(address) as client:
        whole = await client.chat.completions.create(model="x", messages=ASK, tools=TOOLS)
        assert whole.choices[0].message.content == "I look."
        assert [json.loads(call.function.arguments) for call in whole.choices[0].message.tool_calls] == ARGUMENTS
        async with client.chat.completions.stream(model="x", messages=ASK, tools=TOOLS) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        assert final.choices[0].finish_reason == "tool_calls"
        assert [json.loads(call.function.arguments) for call in final.choices[0].message.tool_calls] == ARGUMENTS
        assert [model.id async for model in await client.models.list()] == ["scripted"]
        plain = await client.completions.create(model="x", prompt="a", max_tokens=5)
        assert plain.usage.completion_tokens == 5


async def test_openai_errors_and_cancelling() -> None:
    refuse = Reply(refuse=EngineError("overloaded", "Too many."))
    breaks = Reply("a" * 60, fail_after_tokens=20)
    long = Reply("word " * 3000)
    engine = says(refuse, breaks, long, long, context_limit_tokens=40000, tok_per_s=2000)
    async with serving(engine) as address, gpt(address) as client:
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="x", messages=ASK)
        with pytest.raises(openai.APIError, match="fails here"):
            async for _ in await client.chat.completions.create(model="x", messages=ASK, stream=True):
                pass
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="x", messages=ASK, temperature=-3)
        assert bad.value.param == "temperature"
        with pytest.raises(openai.BadRequestError) as over:
            await client.chat.completions.create(model="x", messages=[{"role": "user", "content": "x" * 50000}])
        assert over.value.code == "context_length_exceeded"
        async with await client.chat.completions.create(model="x", messages=ASK, stream=True) as stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    break
        async with asyncio.timeout(3):
            while engine.metrics().active_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    async with serving(says("x"), api_key="secret") as address, gpt(address) as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_openai_responses() -> None:
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS] + [{"type": "web_search"}]
    async with serving(says(TEXT)) as address, gpt(address) as client:
        whole = await client.responses.create(model="x", input="hello", tools=tools)
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output_text == "I look."
        assert whole.status == "completed"
        kinds: list[str] = []
        async with client.responses.stream(model="x", input="hello", tools=tools) as stream:
            numbers = []
            async for event in stream:
                kinds.append(event.type)
                numbers.append(event.sequence_number)
            final = await stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert [json.loads(item.arguments) for item in final.output[2:]] == ARGUMENTS
        once = [kind for index, kind in enumerate(kinds) if index == 0 or kinds[index - 1] != kind]
        call = ["response.function_call_arguments.delta", "response.function_call_arguments.done"]
        added, done = "response.output_item.added", "response.output_item.done"
        assert once == [
            "response.created",
            "response.in_progress",
            added,
            "response.reasoning_summary_part.added",
            "response.reasoning_summary_text.delta",
            "response.reasoning_summary_text.done",
            "response.reasoning_summary_part.done",
            done,
            added,
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            done,
            *(added, *call, done) * 2,
            "response.completed",
        ]
        with pytest.raises(openai.BadRequestError, match="keeps none"):
            await client.responses.create(model="x", input="x", previous_response_id="resp_1")


async def test_openai_responses_whole_conversation_and_ends() -> None:
    items: Any = [
        {"role": "developer", "content": "a"},
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "user", "content": "q"},
        {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "why"}]},
        {"type": "function_call", "call_id": "1", "name": "read", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "read", "arguments": "not json"},
        {"type": "function_call_output", "call_id": "2", "output": "two"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"type": "web_search_call", "id": "w"},
    ]
    seen: list[Any] = []

    def choose(request: Any, index: int) -> Reply:
        seen.append(request)
        return [Reply("<think>t</think>" + "a" * 40), Reply("b" * 40, fail_after_tokens=9)][index % 2]

    from localspec.api.scripted import ScriptedEngine

    async with serving(ScriptedEngine(choose=choose)) as address, gpt(address) as client:
        cut = await client.responses.create(model="x", input=items, instructions="i", max_output_tokens=10)
        assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        kinds = [event.type async for event in await client.responses.create(model="x", input="x", stream=True)]
        assert kinds[-1] == "response.failed"
        assert "response.completed" not in kinds
    roles = [(message.role, message.content) for message in seen[0].messages]
    assert roles == [("system", "i\n\na\n\nb"), ("user", "q"), ("assistant", ""), ("tool", "one"), ("tool", "two")]
    assistant = seen[0].messages[2]
    assert assistant.reasoning == "why"
    assert [json.loads(call.arguments) for call in assistant.tool_calls] == [{}, {"input": "not json"}]


async def test_free_text_tools_of_responses() -> None:
    text = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin\\n+x"}}</tool_call>'
    tools: Any = [{"type": "custom", "name": "patch", "description": "d"}]
    async with serving(says(text)) as address, gpt(address) as client:
        whole = await client.responses.create(model="x", input="hello", tools=tools)
        assert (whole.output[0].type, whole.output[0].input) == ("custom_tool_call", "*** Begin\n+x")
        events = [
            event async for event in await client.responses.create(model="x", input="x", tools=tools, stream=True)
        ]
        deltas = [event.delta for event in events if event.type == "response.custom_tool_call_input.delta"]
        assert "".join(deltas) == "*** Begin\n+x"


async def test_anthropic_messages_and_tools() -> None:
    tools: Any = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in TOOLS
    ] + [{"type": "web_search_20260209", "name": "web_search"}]
    async with serving(says(TEXT)) as address, claude(address) as client:
        whole = await client.messages.create(model="claude-x", max_tokens=500, messages=ASK, tools=tools)
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert [block.input for block in whole.content[2:]] == ARGUMENTS
        assert whole.stop_reason == "tool_use"
        async with client.messages.stream(model="claude-x", max_tokens=500, messages=ASK, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_message()
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"
        assert [block.type for block in final.content] == [block.type for block in whole.content]
        assert final.content[0].thinking == "hm"
        assert final.content[1].text == "I look."
        assert [block.input for block in final.content[2:]] == ARGUMENTS
        assert final.usage.output_tokens == whole.usage.output_tokens > 0
        assert final.usage.input_tokens == whole.usage.input_tokens > 0
        counted = await client.messages.count_tokens(model="claude-x", messages=ASK, tools=tools)
        assert counted.input_tokens == whole.usage.input_tokens


async def test_anthropic_conversation_stops_and_errors() -> None:
    seen: list[Any] = []

    def choose(request: Any, index: int) -> Reply:
        seen.append(request)
        return Reply("one STOP two", fail_after_tokens=5 if index == 2 else None)

    from localspec.api.scripted import ScriptedEngine

    conversation: Any = [
        {"role": "user", "content": [{"type": "text", "text": "q", "cache_control": {"type": "ephemeral"}}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "why", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "read", "input": {"path": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "so?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
            ],
        },
    ]
    system: Any = [{"type": "text", "text": "x-anthropic-billing-header: a=1"}, {"type": "text", "text": "Be kind."}]
    async with serving(ScriptedEngine(choose=choose)) as address, claude(address) as client:
        common: Any = {"model": "claude-x", "max_tokens": 50, "messages": conversation, "system": system}
        stopped = await client.messages.create(
            **common, stop_sequences=["STOP"], thinking={"type": "enabled", "budget_tokens": 1024}
        )
        assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == (
            "stop_sequence",
            "STOP",
            "one ",
        )
        cut = await client.messages.create(**{**common, "max_tokens": 3})
        assert cut.stop_reason == "max_tokens"
        with pytest.raises(anthropic.APIStatusError, match="fails here"):
            async with client.messages.stream(**common) as stream:
                async for _ in stream:
                    pass
        image: Any = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
        with pytest.raises(anthropic.BadRequestError, match="text only"):
            await client.messages.create(model="claude-x", max_tokens=5, messages=image)
    roles = [(message.role, message.content) for message in seen[0].messages]
    assert roles == [
        ("system", "Be kind."), ("user", "q"), ("assistant", ""), ("tool", "Error: no"), ("user", "so?")
    ]  # fmt: skip
    assert seen[0].messages[2].reasoning == "why"
    assert seen[0].thinking_budget_tokens == 1024
    assert seen[0].template_options["enable_thinking"] is True


async def test_ollama() -> None:
    ollama = pytest.importorskip("ollama")
    async with serving(says(TEXT, "plain <b>", Reply("a" * 50, fail_after_tokens=9))) as address:
        client = ollama.AsyncClient(address)
        whole = await client.chat("scripted:latest", ASK, tools=list(TOOLS))
        assert (whole.message.thinking, whole.message.content) == ("hm", "I look.")
        assert [call.function.arguments for call in whole.message.tool_calls] == ARGUMENTS
        assert whole.done
        said = [part.response async for part in await client.generate("scripted", "hi", stream=True)]
        assert "".join(said) == "plain <b>"
        with pytest.raises(ollama.ResponseError, match="fails here"):
            async for _ in await client.chat("scripted", ASK, stream=True):
                pass
        parts = [part async for part in await client.chat("scripted", ASK, tools=list(TOOLS), stream=True)]
        assert "".join(part.message.content or "" for part in parts) == "I look."
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert [dict(call.function.arguments) for call in calls] == ARGUMENTS
        assert parts[-1].done_reason == "stop"
        assert [model.model for model in (await client.list()).models] == ["scripted"]
        shown = await client.show("scripted")
        assert shown.modelinfo["localspec.context_length"] == 65536
        assert "tools" in shown.capabilities
        assert (await client.generate("scripted", "")).done_reason == "load"
        with pytest.raises(ollama.ResponseError):
            await client.chat("scripted", [{"role": "user", "content": "x", "images": ["eA=="]}])

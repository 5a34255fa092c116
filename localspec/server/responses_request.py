"""What /v1/responses takes, in the form that the rest of the port reads.

Stateless: everything of a conversation comes with the request. Knows items and tools; knows nothing of replies.
"""

from __future__ import annotations

from typing import Any

from localspec.server.errors import bad
from localspec.server.fields import Fields
from localspec.server.normalise import json_object_text, text_of

CUSTOM_ARGUMENT = "input"
"""Name of the one argument that a tool with free text has for the model."""

_CALL_KINDS = ("function_call", "custom_tool_call")
_RESULT_KINDS = ("function_call_output", "custom_tool_call_output")
_PASSED_ON = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "stream",
    "max_output_tokens",
    "parallel_tool_calls",
    "seed",
    "stop",
    "prediction",
    "chat_template_kwargs",
    "localspec",
    "thinking_budget",
    "enable_thinking",
)


def openai_form(fields: Fields) -> dict[str, Any]:
    """The same request in the form of /v1/chat/completions. Raises ApiError 400."""
    for name in ("previous_response_id", "conversation"):
        if fields.has(name):
            raise bad(f"{name} needs stored answers, and this server keeps none; send the whole input again.", name)
    if fields.flag("background"):
        raise bad("background is not supported; ask with stream instead.", "background", "unsupported")
    body = {name: fields.value(name) for name in _PASSED_ON if fields.has(name)}
    instructions = text_of(fields.value("instructions"), "instructions")
    said = [{"role": "system", "content": instructions}] if instructions else []
    body["messages"] = said + read_items(fields)
    tools = [tool for tool in map(_tool, fields.items("tools")) if tool is not None]
    if tools:
        body["tools"] = tools
        if fields.has("tool_choice"):
            body["tool_choice"] = fields.value("tool_choice")
    effort = (fields.object("reasoning") or Fields({})).text("effort")
    if effort:
        body["reasoning_effort"] = effort
    form = (fields.object("text") or Fields({}, "text")).object("format")
    if form is not None:
        body["response_format"] = form.data
    return body


def custom_names(fields: Fields) -> frozenset[str]:
    """Names of the tools whose argument is free text."""
    tools = [tool for tool in fields.items("tools") if isinstance(tool, dict)]
    return frozenset(str(tool.get("name")) for tool in tools if tool.get("type") == "custom")


def read_items(fields: Fields) -> list[dict[str, Any]]:
    """Messages of `input`: a thought and calls join the assistant's turn that they belong to."""
    value = fields.value("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    said: list[dict[str, Any]] = []
    thought = ""
    if not fields.items("input"):
        raise bad("input is empty; give a text or at least one message.", "input")
    for index, item in enumerate(fields.items("input")):
        entry = Fields(item, f"input[{index}]")
        kind = entry.text("type", "message")
        if kind == "item_reference":
            raise bad(f"{entry.path} refers to a stored item, and this server keeps none.", entry.path)
        if kind == "reasoning":
            thought = _thought(entry)
        elif kind in _RESULT_KINDS:
            output = text_of(entry.value("output"), entry.name("output"))
            said.append({"role": "tool", "tool_call_id": entry.need_text("call_id"), "content": output})
        elif kind == "message" or kind in _CALL_KINDS:
            message = _message(entry) if kind == "message" else _call(entry)
            _join(said, message, thought)
            thought = "" if message["role"] == "assistant" else thought
    return said


def _join(said: list[dict[str, Any]], message: dict[str, Any], thought: str) -> None:
    if message["role"] == "assistant" and thought:
        message["reasoning_content"] = thought
    last = said[-1] if said else {}
    if message.get("tool_calls") and last.get("role") == "assistant" and not thought:
        last["tool_calls"] = last.get("tool_calls", []) + message["tool_calls"]
    else:
        said.append(message)


def _message(entry: Fields) -> dict[str, Any]:
    return {"role": entry.need_text("role"), "content": text_of(entry.value("content"), entry.name("content"))}


def _call(entry: Fields) -> dict[str, Any]:
    if entry.text("type") == "custom_tool_call":
        arguments = json_object_text({CUSTOM_ARGUMENT: entry.text("input") or ""})
    else:
        arguments = json_object_text(entry.value("arguments"))
    call_id = entry.need_text("call_id")
    function = {"name": entry.need_text("name"), "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": call_id, "type": "function", "function": function}],
    }


def _thought(entry: Fields) -> str:
    """Text of a thought that we sent earlier; what others encrypted says nothing here."""
    key = "content" if entry.has("content") and entry.items("content") else "summary"
    return text_of(entry.value(key), entry.name(key))


def _tool(item: Any) -> dict[str, Any] | None:
    tool = Fields(item, "tools[]")
    kind = tool.text("type", "function")
    if kind == "custom":
        parameters = {
            "type": "object",
            "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
            "required": [CUSTOM_ARGUMENT],
        }
    elif kind == "function":
        parameters = dict(tool.mapping("parameters"))
    else:
        return None
    description = tool.text("description") or ""
    return {
        "type": "function",
        "function": {"name": tool.need_text("name"), "description": description, "parameters": parameters},
    }

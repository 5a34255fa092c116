"""Messages of any client to the messages that a chat template takes.

Clients send developer roles, several system messages, null contents, lists of parts and tool results in any
order; strict templates refuse most of that. Knows the OpenAI form of messages; knows nothing of templates.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from localspec.api.types import Message, ToolCall
from localspec.server.errors import bad
from localspec.server.fields import Fields, check_count
from localspec.server.model_json import read_json

_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXT_PARTS = frozenset(("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"))


def read_messages(items: list[Any], path: str = "messages") -> tuple[Message, ...]:
    """Checked and normalised messages. Raises ApiError 400 that names the field."""
    check_count(items, path)
    if not items:
        raise bad(f"{path} is empty; give at least one message.", path)
    return normalise([_read_message(Fields(item, f"{path}[{index}]")) for index, item in enumerate(items)])


def normalise(messages: list[Message]) -> tuple[Message, ...]:
    """One system message in front, tool results behind their calls, at least one user turn."""
    system = [message.content for message in messages if message.role == "system" and message.content]
    rest = _order_results([message for message in messages if message.role != "system"])
    if not any(message.role == "user" for message in rest):
        # Templates that look for the last question fail without one.
        rest.insert(0, Message("user", ""))
    return (*((Message("system", "\n\n".join(system)),) if system else ()), *rest)


def text_of(value: Any, path: str) -> str:
    """Text of a content: null, a string, or a list of text parts. Raises ApiError 400 for anything else."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise bad(f"{path} must be a string or a list of parts.", path)
    check_count(value, path)
    texts = []
    for index, item in enumerate(value):
        if isinstance(item, str):
            texts.append(item)
            continue
        part = Fields(item, f"{path}[{index}]")
        kind = part.text("type", "text")
        if kind not in _TEXT_PARTS:
            raise bad(f"{part.path} is of type {kind!r}; this model reads text only.", part.path, code="unsupported")
        texts.append(part.text("refusal" if kind == "refusal" else "text") or "")
    return "".join(texts)


def json_object_text(value: Any) -> str:
    """Arguments of a past call as text of a JSON object, whatever the client kept of them."""
    if isinstance(value, str):
        try:
            if isinstance(read_json(value or "{}"), dict):
                return value or "{}"
        except ValueError:
            pass
    return json.dumps(value if isinstance(value, dict) else {"input": value}, ensure_ascii=False)


def _read_message(fields: Fields) -> Message:
    given = fields.need_text("role")
    role = _ROLES.get(given)
    if role is None:
        raise bad(f"{fields.name('role')} is {given!r}; known are {', '.join(_ROLES)}.", fields.name("role"))
    calls = tuple(_read_call(Fields(item, fields.name(f"tool_calls[{n}]")), n) for n, item in _calls(fields))
    reasoning = fields.value(fields.first("reasoning_content", "reasoning"))
    return Message(
        role=role,
        content=text_of(fields.value("content"), fields.name("content")),
        reasoning=reasoning if isinstance(reasoning, str) and reasoning and role == "assistant" else None,
        tool_calls=calls if role == "assistant" else (),
        tool_call_id=fields.text("tool_call_id") if role == "tool" else None,
        name=fields.text("name"),
    )


def _calls(fields: Fields) -> list[tuple[int, Any]]:
    calls = fields.items("tool_calls")
    if not calls and fields.has("function_call"):
        calls = [{"function": fields.data["function_call"]}]
    return list(enumerate(calls))


def _read_call(fields: Fields, number: int) -> ToolCall:
    function = fields.object("function") or fields.object("custom")
    if function is None:
        raise bad(f"{fields.name('function')} is missing.", fields.name("function"))
    arguments = function.data.get("arguments", function.value("input"))
    return ToolCall(fields.text("id") or f"call_{number}", function.need_text("name"), json_object_text(arguments))


def _order_results(messages: list[Message]) -> list[Message]:
    """Each result directly behind its call and in the order of the calls; results without a call stay in place."""
    results: dict[str, list[Message]] = {}
    for message in messages:
        if message.role == "tool" and message.tool_call_id:
            results.setdefault(message.tool_call_id, []).append(message)
    known = {call.id for message in messages for call in message.tool_calls}
    ordered: list[Message] = []
    for message in messages:
        if message.role == "tool" and message.tool_call_id in known:
            continue
        ordered.append(message)
        for call in message.tool_calls:
            found = results.get(call.id)
            if found:
                # Ids that a client uses twice: the first result belongs to the first call.
                result = found.pop(0)
                ordered.append(dataclasses.replace(result, name=result.name or call.name))
    return ordered

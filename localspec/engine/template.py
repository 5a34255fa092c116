"""Chat templates: the model's own Jinja, rendered in a sandbox. Knows nothing of tokens.

Follows what model authors test against: `trim_blocks`, `lstrip_blocks`, loop controls, `tojson` without HTML escapes,
`raise_exception` and `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, Undefined
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from localspec.api.types import EngineError, Message

MAX_RENDERED_CHARS = 32 << 20


class ChatTemplate:
    """One template. `clock` gives the time that templates may print; a test passes a fixed one."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise EngineError("unsupported", f"the model's chat template does not parse: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        add_generation_prompt: bool = True,
    ) -> str:
        """Text of the prompt. Raises EngineError (`bad_request`) with the template's own words if it refuses."""
        try:
            text = self._template.render(
                {
                    **self._special_tokens,
                    **options,
                    "messages": [_as_dict(message) for message in messages],
                    "tools": [dict(tool) for tool in tools] or None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # the model's own program may divide by zero as well as refuse
            what = f"the model's chat template refuses these messages: {error}"
            raise EngineError("bad_request", what, "messages") from error
        if len(text) > MAX_RENDERED_CHARS:
            what = f"the rendered prompt has {len(text)} characters; send a shorter one"
            raise EngineError("bad_request", what, "messages")
        return text


def _as_dict(message: Message) -> dict[str, Any]:
    entry: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning is not None:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": _arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    if message.name is not None:
        entry["name"] = message.name
    return entry


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    if isinstance(value, Undefined):
        raise TemplateError("tojson of an undefined value")
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> str:
    raise TemplateError(message)

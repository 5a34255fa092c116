"""Tool calls in the text of an answer: which parts of it are calls, their names, and arguments fit to be read.

Knows the two notations that models write between `<tool_call>` tags, JSON (Hermes) and XML (Qwen-coder); another one,
and a call that is still being written, is shown as it stands. Knows no widget and runs no tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from localspec.tui.text import clean, clean_line

_TAGGED = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_XML_NAME = re.compile(r"\s*<function=([^>\s]*)")
_XML_PARAMETER = re.compile(r"<parameter=([^>]*)>\n?(.*?)(?:\n?</parameter>|\Z)", re.DOTALL)
_JSON_NAME = re.compile(r'"name"\s*:\s*"((?:[^"\\]|\\.)*)"')
# Arguments are model output: JSON nested deeper than this is shown as it stands.
LONGEST_READ_CHARS = 200_000


@dataclass(frozen=True)
class Call:
    """One call. `arguments` are lines to read, `brief` is one line, `source` is what the model wrote.

    `is_whole` says that the model has ended it.
    """

    name: str
    arguments: str
    brief: str
    source: str
    is_whole: bool = True


def split_calls(content: str, spans: Sequence[tuple[int, str, str]]) -> list[tuple[bool, str]]:
    """(is a call, text) for the parts of an answer, in order; `spans` as stored, of thoughts and answer.

    The engine says which characters belong to calls; an answer that only talks of `<tool_call>` has none.
    """
    if not any(phase == "tool_call" for _, _, phase in spans):
        return [(False, content)] if content else []
    parts: list[tuple[bool, str]] = []
    position = 0
    for count, _, phase in spans:
        if phase == "thinking" or position >= len(content):
            continue
        is_call, text = phase == "tool_call", content[position : position + count]
        position += count
        if parts and parts[-1][0] == is_call:
            parts[-1] = (is_call, parts[-1][1] + text)
        else:
            parts.append((is_call, text))
    if position < len(content):
        parts.append((False, content[position:]))
    return [(is_call, text) for is_call, text in parts if text.strip()]


def read_calls(text: str) -> list[Call]:
    """The calls of one part, whole or still being written."""
    found = [(match[1], bool(match[2])) for match in _TAGGED.finditer(text)] or [(text, True)]
    return [replace(_read_call(body.strip("\n")), is_whole=is_whole) for body, is_whole in found]


def pretty(text: str) -> str:
    """A tool's result: JSON in lines, other text as it is."""
    value = _loads(text)
    return clean(json.dumps(value, indent=2, ensure_ascii=False)) if isinstance(value, (dict, list)) else clean(text)


def _read_call(body: str) -> Call:
    value = _loads(body)
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        given = value.get("arguments", value.get("parameters", {}))
        if isinstance(given, str):
            # OpenAI's form: the arguments are JSON text inside the JSON.
            inner = _loads(given)
            given = inner if isinstance(inner, Mapping) else {"": given}
        return _call(value["name"], given if isinstance(given, Mapping) else {"": given}, body)
    xml = _XML_NAME.match(body)
    if xml is not None:
        return _call(xml[1], dict(_XML_PARAMETER.findall(body)), body)
    name = _JSON_NAME.search(body[:LONGEST_READ_CHARS])
    raw = clean(body)
    return Call(clean_line(name[1]) if name else "", raw, clean_line(raw), body)


def _call(name: str, arguments: Mapping[str, Any], source: str) -> Call:
    brief = ", ".join(f"{key}: {_word(value)}" if key else _word(value) for key, value in arguments.items())
    lines = [line for key, value in arguments.items() for line in _argument(key, value)]
    return Call(clean_line(name), clean("\n".join(lines)), clean_line(brief), source)


def _argument(key: str, value: Any) -> list[str]:
    label = f"{key}: " if key else ""
    if isinstance(value, str) and "\n" in value:
        # Code and prose as they are, not as one line full of \n.
        return [label.rstrip(), *(f"  {line}" for line in value.split("\n"))]
    first, *others = json.dumps(value, indent=2, ensure_ascii=False, default=str).split("\n")
    return [label + first, *others]


def _word(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)


def _loads(text: str) -> Any:
    if len(text) > LONGEST_READ_CHARS or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None

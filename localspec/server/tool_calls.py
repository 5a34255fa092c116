"""Readers of one tool call in the text that a model writes: JSON (Hermes, Llama) and XML (Qwen3-coder).

A reader takes text in pieces of any size and gives the name, then the arguments as pieces of JSON text as early
as they are certain. It knows the notation; it does not know where in an answer a call may stand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from localspec.server.model_json import read_json

_TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CALL_KEYS = ("name", "type", "arguments", "parameters", "id")
MAX_REFERENCES = 8
"""How deep types are looked for; schemas may refer to themselves."""
_PARAMETER_OPEN, _PARAMETER_CLOSE, _FUNCTION_CLOSE = "<parameter=", "</parameter>", "</function>"


@dataclass(frozen=True)
class CallName:
    """A call begins."""

    name: str


@dataclass(frozen=True)
class CallText:
    """More of the arguments' JSON text."""

    text: str


CallEvent = CallName | CallText


class CallReader(Protocol):
    """`closed` after the last character of the call; `failed` if this is no call and nothing was given."""

    closed: bool
    failed: bool

    def feed(self, text: str, last: bool) -> tuple[list[CallEvent], str]:
        """Read on. Gives events and the text behind the call (empty until `closed`)."""
        ...


class JsonCall:
    """`{"name": ..., "arguments": {...}}`; `parameters` is the other name of the arguments.

    `only_names` (for calls without a tag around them) makes every other name fail, None takes any.
    """

    def __init__(self, only_names: frozenset[str] | None) -> None:
        self.closed = False
        self.failed = False
        self._only_names = only_names
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._value: list[str] = []
        self._in_value = False
        self._name: str | None = None
        self._arguments: list[str] = []
        self._has_arguments = False
        self._streams = False
        self._given = False

    def feed(self, text: str, last: bool) -> tuple[list[CallEvent], str]:
        """See CallReader."""
        events: list[CallEvent] = []
        for at, character in enumerate(text):
            self._step(character)
            if self.failed:
                return [], ""
            if self._name is not None and not self._given:
                self._given = True
                events.append(CallName(self._name))
            if self.closed:
                self._flush(events)
                if not self._given:
                    self.failed = True
                    return [], ""
                return events, text[at + 1 :]
        self._flush(events)
        if last and not self._given:
            self.failed = True
        return events, ""

    def _flush(self, events: list[CallEvent]) -> None:
        if self._given and self._arguments:
            events.append(CallText("".join(self._arguments)))
            self._arguments = []

    def _step(self, character: str) -> None:
        if self._in_string:
            self._take(character)
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
            return
        if character == '"':
            self._in_string = True
            self._take(character)
        elif character in "{[":
            self._open(character)
        elif character in "}]":
            self._close(character)
        elif self._depth == 1 and character in ":,":
            self._separate(character)
        else:
            self._take(character)

    def _open(self, character: str) -> None:
        self._depth += 1
        if self._depth == 1:
            return
        if self._depth == 2 and self._in_value and not "".join(self._value).strip():
            self._streams = character == "{" and self._may_be_arguments()
        self._take(character)

    def _close(self, character: str) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._finish_value()
            self.closed = True
            return
        self._take(character)
        if self._depth == 1 and self._streams:
            self._streams = False
            self._value, self._in_value = [], False

    def _separate(self, character: str) -> None:
        if character == ":" and not self._in_value:
            self._key = _text_of("".join(self._value))
            self._value, self._in_value = [], True
            # A call without a tag around it is told from other JSON by its first key.
            if self._only_names is not None and self._name is None and self._key not in _CALL_KEYS:
                self.failed = True
        elif character == ",":
            self._finish_value()
        else:
            self._take(character)

    def _take(self, character: str) -> None:
        if self._streams:
            self._arguments.append(character)
        elif self._depth >= 1:
            self._value.append(character)

    def _finish_value(self) -> None:
        source = "".join(self._value).strip()
        if self._in_value and self._key == "name" and self._name is None:
            name = _text_of(source)
            allowed = name is not None and (self._only_names is None or name in self._only_names)
            if name is None or not allowed or not _TOOL_NAME.fullmatch(name):
                self.failed = True
            self._name = name
        elif self._in_value and self._may_be_arguments():
            # Some models write the arguments as JSON text inside a string, or null for none.
            self._arguments = [_text_of(source) or "{}"]
        self._key, self._value, self._in_value = None, [], False

    def _may_be_arguments(self) -> bool:
        """Whether the value at hand is the call's arguments, which are then given: only the first ones count."""
        if self._has_arguments or self._key not in ("arguments", "parameters"):
            return False
        self._has_arguments = True
        return True


class XmlCall:
    """`<function=NAME> <parameter=KEY> value </parameter> ... </function>`; begins at the first `<`.

    Values become JSON by the schema of the tool: strings are passed on as they come, others when they are whole.
    """

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]], only_known: bool) -> None:
        self.closed = False
        self.failed = False
        self._schemas = schemas
        self._only_known = only_known
        self._buffer = ""
        self._name: str | None = None
        self._key: str | None = None
        self._types: frozenset[str] = frozenset()
        self._n_parameters = 0
        self._value_began = False

    def feed(self, text: str, last: bool) -> tuple[list[CallEvent], str]:
        """See CallReader."""
        self._buffer += text
        events: list[CallEvent] = []
        while not self.closed and not self.failed:
            if self._name is None:
                moved = self._read_name(events)
            elif self._key is None:
                moved = self._read_body(events)
            else:
                moved = self._read_value(events)
            if not moved:
                break
        if last and self._name is None:
            self.failed = True
        if last and self._key is not None:
            self._end_of_text(events)
        rest, self._buffer = (self._buffer, "") if self.closed else ("", self._buffer)
        return events, rest

    def _read_name(self, events: list[CallEvent]) -> bool:
        head, tag, rest = self._buffer.partition(">")
        name = head.removeprefix("<function=").strip()
        self.failed = len(head) > 160 or "\n" in head
        if not tag or self.failed:
            return False
        self.failed = not _TOOL_NAME.fullmatch(name) or (self._only_known and name not in self._schemas)
        if not self.failed:
            self._name, self._buffer = name, rest
            events.append(CallName(name))
        return True

    def _read_body(self, events: list[CallEvent]) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer.startswith(_FUNCTION_CLOSE):
            self._buffer = self._buffer.removeprefix(_FUNCTION_CLOSE)
            events.append(CallText("}" if self._n_parameters else "{}"))
            self.closed = True
            return True
        if self._buffer.startswith(_PARAMETER_OPEN):
            head, tag, rest = self._buffer.partition(">")
            if not tag:
                return False
            self._begin_parameter(head.removeprefix(_PARAMETER_OPEN).strip(), events)
            self._buffer = rest
            return True
        if any(marker.startswith(self._buffer) for marker in (_PARAMETER_OPEN, _FUNCTION_CLOSE)):
            return False
        # Text between parameters means nothing in this notation.
        at = self._buffer.find("<", 1)
        self._buffer = self._buffer[at:] if at > 0 else ""
        return True

    def _begin_parameter(self, key: str, events: list[CallEvent]) -> None:
        self._key = key
        self._types = _types_of(self._schemas.get(self._name or "", {}), key)
        self._value_began = False
        lead = ", " if self._n_parameters else "{"
        self._n_parameters += 1
        events.append(CallText(f"{lead}{json.dumps(key, ensure_ascii=False)}: "))

    def _read_value(self, events: list[CallEvent]) -> bool:
        if not self._value_began:
            if not self._buffer:
                return False
            # The notation puts the value on lines of its own.
            self._buffer = self._buffer.removeprefix("\n")
            self._value_began = True
            if self._is_plain_text():
                events.append(CallText('"'))
        at = self._buffer.find(_PARAMETER_CLOSE)
        if at < 0:
            keep = _held_back(self._buffer, "\n" + _PARAMETER_CLOSE, _PARAMETER_CLOSE)
            self._pass_text(len(self._buffer) - keep, events)
            return False
        value = self._buffer[:at].removesuffix("\n")
        if self._is_plain_text():
            self._pass_text(len(value), events)
            events.append(CallText('"'))
        else:
            events.append(CallText(_json_value(value, self._types)))
        self._buffer = self._buffer[self._buffer.index(_PARAMETER_CLOSE) + len(_PARAMETER_CLOSE) :]
        self._key = None
        return True

    def _end_of_text(self, events: list[CallEvent]) -> None:
        """The answer ended inside a value: what is there is passed on, the JSON text stays open."""
        if self._is_plain_text():
            self._pass_text(len(self._buffer), events)

    def _pass_text(self, n_chars: int, events: list[CallEvent]) -> None:
        if self._is_plain_text() and n_chars > 0:
            events.append(CallText(json.dumps(self._buffer[:n_chars], ensure_ascii=False)[1:-1]))
            self._buffer = self._buffer[n_chars:]

    def _is_plain_text(self) -> bool:
        return self._types <= {"string"}


def tool_schemas(tools: tuple[Mapping[str, Any], ...]) -> dict[str, Mapping[str, Any]]:
    """Parameter schema of each function tool, by its name."""
    schemas: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schemas[function["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return schemas


def _types_of(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """JSON types that the schema allows for a parameter; empty when it does not say."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    return frozenset(_each_type(found, schema, 0)) if isinstance(found, Mapping) else frozenset()


def _each_type(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> Iterator[str]:
    if depth > MAX_REFERENCES:
        return
    target = _target(schema, root)
    if target is not None:
        yield from _each_type(target, root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, str):
        yield kind
    elif isinstance(kind, list):
        yield from (item for item in kind if isinstance(item, str))
    for word in ("anyOf", "oneOf", "allOf"):
        options = schema.get(word)
        for option in options if isinstance(options, list) else ():
            if isinstance(option, Mapping):
                yield from _each_type(option, root, depth + 1)
    if kind is None and isinstance(schema.get("properties"), Mapping):
        yield "object"


def _target(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a reference into the tool's own schema points to, such as `#/$defs/Point`."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    found: Any = root
    for part in reference[2:].split("/"):
        found = found.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _json_value(text: str, types: frozenset[str]) -> str:
    """JSON text of a value that is not plain text: as written where it is JSON of an allowed type, else a string."""
    source = text.strip()
    if source in ("True", "False", "None"):  # models that learned Python write these
        source = {"True": "true", "False": "false", "None": "null"}[source]
    try:
        value = read_json(source)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    if "string" in types and _type_name(value) not in types:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _type_name(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    names = {float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "null")


def _text_of(source: str) -> str | None:
    try:
        value = read_json(source)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def _held_back(text: str, *markers: str) -> int:
    """Characters at the end of `text` that may begin one of the markers."""
    longest = 0
    for marker in markers:
        for n_chars in range(min(len(text), len(marker) - 1), longest, -1):
            if text.endswith(marker[:n_chars]):
                longest = n_chars
                break
    return longest

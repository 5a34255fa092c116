"""A Lark grammar for "call one of these tools now", in the form that a model's chat template writes calls.

Two forms are known: JSON between tool-call tags (Hermes, Qwen) and XML-like functions and parameters (Qwen3-coder).
Knows nothing of tokens but the ids of the two tags.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localspec.api.types import Grammar
from localspec.sampling.grammar import WHITESPACE

MAX_CALLS = 8
_XML_MARK, _JSON_MARK = "<function=", '"arguments"'
_STOP = "\n</parameter>\n"


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], template_source: str, marks: tuple[int | None, ...]
) -> Grammar | None:
    """Grammar of one call (one tool) or up to MAX_CALLS calls (several tools); None for a form that is not known.

    marks: ids of the opening and the closing tag, None where the tag is no token of its own.
    """
    if not tools or "<tool_call>" not in template_source:
        return None
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    if _XML_MARK in template_source:
        rules = [_xml_call(index, function) for index, function in enumerate(functions)]
    elif _JSON_MARK in template_source:
        rules = [_json_call(index, function) for index, function in enumerate(functions)]
    else:
        return None
    opening, closing = (
        f"<[{mark}]>" if mark is not None else _quoted(tag) for mark, tag in zip(marks, _TAGS, strict=True)
    )
    alternatives = " | ".join(f"call_{index}" for index in range(len(rules)))
    more = f' ("\\n" tagged){{0,{MAX_CALLS - 1}}}' if len(rules) > 1 else ""
    head = [f"start: tagged{more}", f'tagged: {opening} "\\n" call "\\n" {closing}', f"call: {alternatives}"]
    return Grammar("lark", "\n".join([*head, *rules]) + "\n")


_TAGS = ("<tool_call>", "</tool_call>")


def _json_call(index: int, function: Mapping[str, Any]) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    opening = _quoted(f'{{"name": {name}, "arguments": ')
    return f'call_{index}: {opening} arguments_{index} "}}"\narguments_{index}: %json {_schema(function)}'


def _schema(function: Mapping[str, Any]) -> str:
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return _json_rule(parameters)


def _json_rule(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}}, ensure_ascii=False)


def _xml_call(index: int, function: Mapping[str, Any]) -> str:
    """Parameters come in the order of the schema; those that are not required may be left out."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties") or {}
    required = set(parameters.get("required") or ())
    parts, rules = [], []
    for number, (name, schema) in enumerate(properties.items()):
        rule = f"call_{index}_{number}"
        parts.append(rule if name in required else f"{rule}?")
        opening = _quoted(f"<parameter={name}>\n")
        value, rule_of_value = _xml_value(f"{rule}_value", schema if isinstance(schema, Mapping) else {})
        rules += [f"{rule}: {opening} {value}", *rule_of_value]
    body = " ".join([_quoted(f"<function={function['name']}>\n"), *parts, _quoted("</function>")])
    return "\n".join([f"call_{index}: {body}", *rules])


def _xml_value(rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What stands for a value with its closing tag, and the rules that it needs. Strings are written bare."""
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(_quoted, choices))}) {_quoted(_STOP)}", []
    if schema.get("type", "string") == "string":
        return rule, [f"{rule}[suffix={_quoted(_STOP)}]: /(?s:.*)/"]
    return f"{rule} {_quoted(_STOP)}", [f"{rule}: %json {_json_rule(schema)}"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

"""Lark grammars for answers that call tools, in the form that a model's chat template writes calls.

Three forms are known: XML-like functions and parameters (Qwen3-coder), JSON between tool-call tags (Hermes, Qwen), and
bare JSON (Llama). Knows nothing of tokens but the ids of the two tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from localspec.api.types import Grammar
from localspec.sampling.grammar import WHITESPACE

MAX_CALLS = 8
_TAGS = ("<tool_call>", "</tool_call>")
_XML_MARK, _LLAMA_MARK = "<function=", '"parameters"'
_STOP = "\n</parameter>\n"
_LOOKS_AROUND = re.compile(r"\(\?(=|!|<=|<!)")
_DEFINITIONS = ("$defs", "definitions")


class CallForm(Enum):
    """How a model writes calls."""

    XML = "xml"
    HERMES = "hermes"
    LLAMA = "llama"


@dataclass(frozen=True)
class CallRule:
    """What the answer may be.

    is_demanded: a call and nothing else; several: more calls may follow the first; answer: the JSON grammar of an
    answer that calls nothing, None for any text.
    """

    is_demanded: bool
    several: bool
    answer: Grammar | None = None


def call_form(template_source: str) -> CallForm:
    """The form of this template; Hermes' for templates that say nothing of calls, since the port reads it anywhere."""
    if "<tool_call>" in template_source:
        return CallForm.XML if _XML_MARK in template_source else CallForm.HERMES
    return CallForm.LLAMA if _LLAMA_MARK in template_source else CallForm.HERMES


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], template_source: str, marks: tuple[int | None, ...], rule: CallRule
) -> Grammar | None:
    """The grammar of a whole answer; None where the rule asks for none: any text, and calls without end.

    marks: ids of the opening and the closing tag, None where the tag is no token of its own. Unless a call is demanded,
    it is None too for an answer that cannot be told from a call at its first character.
    """
    functions = [tool["function"] for tool in tools if isinstance(tool.get("function"), Mapping)]
    form = call_form(template_source)
    if not functions or not (rule.is_demanded or _can_choose(rule, form)):
        return None
    write = {CallForm.XML: _xml_call, CallForm.HERMES: _hermes_call, CallForm.LLAMA: _llama_call}[form]
    rules = [write(index, function) for index, function in enumerate(functions)]
    choice = " | ".join(f"call_{index}" for index in range(len(rules)))
    opening, closing = (
        f"<[{mark}]>" if mark is not None else _quoted(tag) for mark, tag in zip(marks, _TAGS, strict=True)
    )
    tagged = "call" if form is CallForm.LLAMA else f'{opening} "\\n" call "\\n" {closing}'
    between = '"; "' if form is CallForm.LLAMA else '"\\n"'
    more = f" ({between} one){{0,{MAX_CALLS - 1}}}" if rule.several else ""
    head = [f"one: {tagged}", f"calls: one{more}", f"call: {choice}", 'lead: ("\\n\\n" | "\\n")?']
    if rule.is_demanded:
        head.insert(0, "start: lead calls")
    elif rule.answer is not None:
        schema = json.loads(rule.answer.source) if rule.answer.kind == "json_schema" else {"type": "object"}
        head[:0] = ["start: lead (answer | calls)", f"answer: %json {_json_rule(schema)}"]
    else:
        head[:0] = _text_then_call(form, functions, marks[0] is not None)
    return Grammar("lark", "\n".join([*head, *rules]) + "\n")


def argument_grammars(tools: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Grammar]]:
    """Each function's name with the grammar of its arguments alone, to find the one that a compiler refuses."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping):
            yield function["name"], Grammar("json_schema", _tool_rule(function.get("parameters") or {}))


def _can_choose(rule: CallRule, form: CallForm) -> bool:
    if rule.answer is None:
        return not rule.several
    return rule.answer.kind in ("json_object", "json_schema") and form is not CallForm.LLAMA


def _text_then_call(form: CallForm, functions: Sequence[Mapping[str, Any]], mark_is_token: bool) -> list[str]:
    """Any text with at most one call at its end. What the port would read as a call is no text."""
    if form is CallForm.LLAMA:
        names = "|".join(_escaped(function["name"]) for function in functions)
        text = rf'TEXT: /(?s:.*)/ & ~/\s*\{{\s*"name"\s*:\s*"({names})"(?s:.*)/'
        return ["start: TEXT | calls", text]
    text = f"TEXT: /(?s:.*)/ & ~/(?s:.*)({_TAGS[0]}|{_XML_MARK})(?s:.*)/"
    if mark_is_token:
        return ["start: TEXT calls?", text]
    # The tag is text like all before it: the first one ends what comes before.
    behind = f'behind: "\\n" call "\\n" {_quoted(_TAGS[1])}'
    return ["start: TEXT | before behind", text, f"before[lazy]: /(?s:.*){_TAGS[0]}/", behind]


def _hermes_call(index: int, function: Mapping[str, Any]) -> str:
    return _json_call(index, function, "arguments")


def _llama_call(index: int, function: Mapping[str, Any]) -> str:
    return _json_call(index, function, "parameters")


def _json_call(index: int, function: Mapping[str, Any], key: str) -> str:
    name = json.dumps(function["name"], ensure_ascii=False)
    opening = _quoted(f'{{"name": {name}, "{key}": ')
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return f'call_{index}: {opening} arguments_{index} "}}"\narguments_{index}: %json {_tool_rule(parameters)}'


def _json_rule(schema: Any) -> str:
    return json.dumps({**_as_object(schema), "x-guidance": {"whitespace_pattern": WHITESPACE}}, ensure_ascii=False)


def _tool_rule(schema: Mapping[str, Any]) -> str:
    """What the compiler cannot do of a tool's schema is passed over: a call of about that shape is better than none."""
    options = {"whitespace_pattern": WHITESPACE, "lenient": True}
    return json.dumps({**_without_look_around(schema), "x-guidance": options}, ensure_ascii=False)


def _without_look_around(value: Any) -> Any:
    """The schema without patterns that look ahead or behind, which a compiler to automata refuses."""
    if isinstance(value, list):
        return [_without_look_around(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    kept = {
        key: item
        for key, item in value.items()
        if not (
            _LOOKS_AROUND.search(key) or (key == "pattern" and isinstance(item, str) and _LOOKS_AROUND.search(item))
        )
    }
    return {key: _without_look_around(item) for key, item in kept.items()}


def _as_object(schema: Any) -> Mapping[str, Any]:
    """JSON schemas may be true or false too."""
    if isinstance(schema, Mapping):
        return schema
    return {} if schema else {"not": {}}


def _xml_call(index: int, function: Mapping[str, Any]) -> str:
    """Parameters come in the order of the schema; those that are not required may be left out."""
    parameters = function.get("parameters") or {}
    properties = parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = [name for name in _list(parameters.get("required")) if isinstance(name, str)]
    definitions = {word: parameters[word] for word in _DEFINITIONS if word in parameters}
    parts, rules = [], []
    for number, (name, schema) in enumerate(properties.items()):
        rule = f"call_{index}_{number}"
        parts.append(rule if name in required else f"{rule}?")
        opening = _quoted(f"<parameter={name}>\n")
        value, rule_of_value = _xml_value(f"{rule}_value", {**definitions, **_as_object(schema)})
        rules += [f"{rule}: {opening} {value}", *rule_of_value]
    body = " ".join([_quoted(f"<function={function['name']}>\n"), *parts, _quoted("</function>")])
    return "\n".join([f"call_{index}: {body}", *rules])


def _xml_value(rule: str, schema: Mapping[str, Any]) -> tuple[str, list[str]]:
    """What stands for a value with its closing tag, and the rules that it needs. Strings are written bare."""
    choices = schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        return f"({' | '.join(map(_quoted, choices))}) {_quoted(_STOP)}", []
    if _may_be_text(schema):
        return rule, [f"{rule}[suffix={_quoted(_STOP)}]: /(?s:.*)/"]
    return f"{rule} {_quoted(_STOP)}", [f"{rule}: %json {_tool_rule(schema)}"]


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether a string is allowed, which a model writes without quotes; so it is where the schema says nothing."""
    kinds = set(_kinds(schema))
    return "string" in kinds or not (kinds or "$ref" in schema or "enum" in schema or "const" in schema)


def _kinds(schema: Mapping[str, Any]) -> Iterator[str]:
    kind = schema.get("type")
    yield from [kind] if isinstance(kind, str) else (item for item in _list(kind) if isinstance(item, str))
    for option in (*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))):
        if isinstance(option, Mapping):
            yield from ("object",) if "$ref" in option else _kinds(option)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _escaped(text: str) -> str:
    """For a regular expression between slashes; the name as JSON writes it."""
    return re.escape(json.dumps(text, ensure_ascii=False)[1:-1]).replace("/", r"\/")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

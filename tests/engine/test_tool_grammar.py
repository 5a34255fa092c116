"""Grammars of tool calls accept what a model would write in each form, as many calls as asked, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from localspec.api.types import Grammar
from localspec.engine.tool_grammar import CallRule, tool_call_grammar
from localspec.sampling.grammar import GrammarCompiler
from tests.helpers.tiny_text import byte_tokenizer

TOKENIZER = byte_tokenizer()
HERMES = '<tool_call>{"name": <function-name>, "arguments": <args>}</tool_call>'
XML = "<tool_call><function=example><parameter=a></tool_call>"
LLAMA = 'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
FORMS = {"hermes": HERMES, "xml": XML, "llama": LLAMA}
ONE, SEVERAL = CallRule(is_demanded=True, several=False), CallRule(is_demanded=True, several=True)
AT_MOST_ONE = CallRule(is_demanded=False, several=False)
FIND: dict[str, Any] = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "kind": {"enum": ["file", "word"]}, "limit": {"type": "integer"}},
    "required": ["text", "limit"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = (tool("find", FIND), tool("stop", {"type": "object", "properties": {}, "additionalProperties": False}))
GOOD = {
    HERMES: (
        '<tool_call>\n{"name": "find", "arguments": {"text": "a\\"b", "limit": 3}}\n</tool_call>',
        '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>',
    ),
    XML: (
        "<tool_call>\n<function=find>\n<parameter=text>\na <b>\nc\n</parameter>\n<parameter=kind>\nword\n</parameter>\n"
        "<parameter=limit>\n12\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n<parameter=text>\n\n</parameter>\n<parameter=limit>\n0\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
    ),
    LLAMA: (
        '{"name": "find", "parameters": {"text": "a\\"b", "limit": 3}}',
        '{"name": "stop", "parameters": {}}',
    ),
}
BAD = {
    HERMES: (
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "find", "arguments": {"text": 1, "limit": 3}}\n</tool_call>',
    ),
    XML: (
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=find>\n<parameter=text>\na\n</parameter>\n<parameter=limit>\nmany\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=other>\n</function>\n</tool_call>",
    ),
    LLAMA: ('{"name": "other", "parameters": {}}', '{"name": "find", "parameters": {"text": 1, "limit": 3}}'),
}


class Judge:
    """Says whether a grammar lets a text be written to its end."""

    def __init__(self, tokenizer: Tokenizer, folder: Path) -> None:
        file = folder / "tokenizer.json"
        tokenizer.save(str(file))
        self._tokenizer = tokenizer
        self._stop = tokenizer.token_to_id("<|end|>") or 0
        self._compiler = GrammarCompiler(file, (self._stop,))

    def __call__(self, template: str, rule: CallRule, text: str, tools: Any = TOOLS) -> bool:
        marks = tuple(self._tokenizer.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>"))
        grammar = tool_call_grammar(tools, template, marks, rule)
        assert grammar is not None
        ids = [*self._tokenizer.encode(text).ids, self._stop]
        last = self._compiler.compile(grammar).window_masks(ids)[len(ids) - 1]
        return last is not None and bool(last[self._stop >> 3] >> (self._stop & 7) & 1)


@pytest.fixture(scope="module", params=["tags are tokens", "tags are text"])
def judge(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Judge:
    tokenizer = TOKENIZER
    if request.param == "tags are text":
        data = json.loads(TOKENIZER.to_str())
        data["added_tokens"] = [entry for entry in data["added_tokens"] if entry["special"]]
        tokenizer = Tokenizer.from_str(json.dumps(data))
    return Judge(tokenizer, tmp_path_factory.mktemp("tokenizer"))


@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_demanded_calls(judge: Judge, template: str) -> None:
    joined = ("; " if template is LLAMA else "\n").join(GOOD[template])
    for call in GOOD[template]:
        for rule in (ONE, SEVERAL):
            assert judge(template, rule, call), call
            assert judge(template, rule, "\n\n" + call), "models leave a line between thought and call"
    assert judge(template, SEVERAL, joined)
    assert not judge(template, ONE, joined)
    for call in (*BAD[template], "no call", "", "text " + GOOD[template][0]):
        assert not judge(template, SEVERAL, call), call


@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_at_most_one_call_behind_any_text(judge: Judge, template: str) -> None:
    calls = GOOD[template]
    for text in ("", "hello", "a < b, {x}\n\n", *calls):
        assert judge(template, AT_MOST_ONE, text), text
    # Bare JSON that names no tool is text like any other.
    bad = BAD[template][1:] if template is LLAMA else BAD[template]
    for text in (("; " if template is LLAMA else "\n").join(calls), *bad, calls[0] + "more"):
        assert not judge(template, AT_MOST_ONE, text), text
    if template is not LLAMA:
        assert judge(template, AT_MOST_ONE, "I look.\n" + calls[0])


@pytest.mark.parametrize("template", [HERMES, XML], ids=["hermes", "xml"])
def test_a_schema_for_the_answer_leaves_calls_possible(judge: Judge, template: str) -> None:
    answer = Grammar("json_schema", json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}}))
    rule = CallRule(is_demanded=False, several=True, answer=answer)
    for text in ('{"n": 3}', GOOD[template][0], "\n".join(GOOD[template])):
        assert judge(template, rule, text), text
    for text in ('{"n": "x"}', "text", '{"n": 3}' + GOOD[template][0]):
        assert not judge(template, rule, text), text


def test_schemas_of_real_tools(judge: Judge) -> None:
    """References, patterns that no automaton knows, words from other drafts, several types for one parameter."""
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email", "pattern": "^(?!\\.)x"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "point": {"$ref": "#/$defs/Point"},
            "any": {},
        },
        "required": ["mail", "point"],
        "$defs": {"Point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
        "unevaluatedProperties": False,
        "dependentRequired": {"note": ["any"]},
    }
    tools = (tool("send", parameters),)
    hermes = '<tool_call>\n{"name": "send", "arguments": {"mail": "a@b.de", "point": {"x": 1}}}\n</tool_call>'
    assert judge(HERMES, ONE, hermes, tools)
    assert not judge(HERMES, ONE, hermes.replace('{"x": 1}', "{}"), tools)
    xml = (
        "<tool_call>\n<function=send>\n<parameter=mail>\na@b.de\n</parameter>\n<parameter=note>\nbare words\n"
        '</parameter>\n<parameter=point>\n{"x": 1}\n</parameter>\n<parameter=any>\nbare\n</parameter>\n</function>\n'
        "</tool_call>"
    )
    assert judge(XML, ONE, xml, tools)
    assert not judge(XML, ONE, xml.replace('{"x": 1}', "x"), tools)


def test_where_nothing_is_asked_there_is_no_grammar() -> None:
    free = CallRule(is_demanded=False, several=True)
    regex = CallRule(is_demanded=False, several=False, answer=Grammar("regex", "a"))
    schema = CallRule(is_demanded=False, several=True, answer=Grammar("json_object"))
    assert tool_call_grammar(TOOLS, HERMES, (None, None), free) is None
    assert tool_call_grammar(TOOLS, HERMES, (None, None), regex) is None
    assert tool_call_grammar(TOOLS, LLAMA, (None, None), schema) is None, "both would begin with a brace"
    assert tool_call_grammar((), HERMES, (None, None), ONE) is None
    silent = tool_call_grammar(TOOLS, "{{ messages }}", (None, None), ONE)
    assert silent == tool_call_grammar(TOOLS, HERMES, (None, None), ONE), "the port reads this form for any model"


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"properties": {"a": {"type": 5}, "b": {"anyOf": 3}, "c": True, "d": None}, "required": 7},
        {"properties": {"a": {"type": ["string", 1]}}, "required": [[], "a"]},
    ],
)
@pytest.mark.parametrize("template", FORMS.values(), ids=FORMS)
def test_nonsense_for_schemas_makes_some_grammar(template: str, parameters: Any) -> None:
    """What the compiler makes of it is its own affair; here nothing may fail."""
    assert tool_call_grammar((tool("odd", parameters),), template, (None, None), ONE) is not None

"""The splitter: what it finds, and that cutting the text anywhere changes nothing."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.server.stream import CallArguments, CallEnd, CallStart, Piece, SplitOptions, Splitter, TextPiece


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = (
    tool("read", path={"type": "string"}, lines={"type": "integer"}),
    tool(
        "edit",
        text={"type": "string"},
        flags={"type": "array"},
        level={"anyOf": [{"type": "integer"}, {"type": "string"}]},
    ),
)


def split(parts: Iterable[str], tools: tuple[dict[str, Any], ...] = TOOLS, **options: Any) -> dict[str, Any]:
    """Fold what the splitter gives for these parts into one reply."""
    numbers = itertools.count()
    splitter = Splitter(SplitOptions(tools=tools, **options), lambda: f"call_{next(numbers)}")
    pieces: list[Piece] = []
    parts = list(parts)
    for part in parts:
        pieces += splitter.feed(part)
    pieces += splitter.finish()
    raw = "".join(parts)
    reply: dict[str, Any] = {"reasoning": "", "content": "", "calls": [], "ended": []}
    for piece in pieces:
        if isinstance(piece, TextPiece):
            assert raw[piece.start : piece.end] == piece.text
            reply[piece.kind] += piece.text
        elif isinstance(piece, CallStart):
            assert piece.index == len(reply["calls"])
            reply["calls"].append([piece.id, piece.name, ""])
        elif isinstance(piece, CallArguments):
            reply["calls"][piece.index][2] += piece.text
        elif isinstance(piece, CallEnd):
            reply["ended"].append(piece.index)
    return reply


XML = (
    '<tool_call>\n<function=read>\n<parameter=path>\na/"b".py\n</parameter>\n<parameter=lines>\n12\n</parameter>\n'
    "</function>\n</tool_call>"
)
XML_MANY = (
    "<tool_call>\n<function=edit>\n<parameter=text>\nif a < b:\n\n  x = '</p>'\n\n</parameter>\n"
    '<parameter=flags>\n[1, "é"]\n</parameter>\n<parameter=level>\nhigh\n</parameter>\n</function>\n</tool_call>'
)
HERMES = '<tool_call>\n{"name": "read", "arguments": {"path": "a</tool_call>{\\"}", "lines": 3}}\n</tool_call>'
HERMES_LATE_NAME = '<tool_call>{"arguments": {"lines": [1, {}]}, "name": "read"}</tool_call>'
HERMES_STRING = '<tool_call>{"name": "read", "arguments": "{\\"path\\": \\"x\\"}"}</tool_call>'
LLAMA = '{"name": "read", "parameters": {"path": "x", "lines": "2"}}'

CASES: list[tuple[str, dict[str, Any]]] = [
    ("plain <b>text</b>\n", {"content": "plain <b>text</b>\n"}),
    ("<think>\nhm <x>\n</think>\n\nyes", {"reasoning": "hm <x>", "content": "yes"}),
    ("<think></think>yes", {"content": "yes"}),
    ("<think>never ends ", {"reasoning": "never ends "}),
    ("I look.\n\n" + XML, {"content": "I look.", "calls": [("read", {"path": 'a/"b".py', "lines": 12})]}),
    (
        XML_MANY,
        {"calls": [("edit", {"text": "if a < b:\n\n  x = '</p>'\n", "flags": [1, "é"], "level": "high"})]},
    ),
    (HERMES, {"calls": [("read", {"path": 'a</tool_call>{"}', "lines": 3})]}),
    (HERMES_LATE_NAME, {"calls": [("read", {"lines": [1, {}]})]}),
    (HERMES_STRING, {"calls": [("read", {"path": "x"})]}),
    (
        "<think>t</think>" + XML + "\n" + HERMES + " tail",
        {
            "reasoning": "t",
            "calls": [("read", {"path": 'a/"b".py', "lines": 12}), ("read", {"path": 'a</tool_call>{"}', "lines": 3})],
            "content": "tail",
        },
    ),
    (LLAMA, {"calls": [("read", {"path": "x", "lines": "2"})]}),
    (f"<|python_tag|>{LLAMA}; {LLAMA}", {"calls": [("read", {"path": "x", "lines": "2"})] * 2}),
    ("<function=read>\n</function>", {"calls": [("read", {})]}),
    ("The tag `<tool_call>` opens a call.", {"content": "The tag `<tool_call>` opens a call."}),
    ("Use <function=other> here", {"content": "Use <function=other> here"}),
    ('{"answer": 42, "name": "read"}', {"content": '{"answer": 42, "name": "read"}'}),
    ('{"name": "stranger", "parameters": {}}', {"content": '{"name": "stranger", "parameters": {}}'}),
    (' {"name": ', {"content": ' {"name": '}),
    ("<tool_call>{}</tool_call>x", {"content": "<tool_call>{}</tool_call>x"}),
    ("a <tool_call>", {"content": "a"}),
    ("a <tool_ca", {"content": "a <tool_ca"}),
    ('<tool_call>{"name": "read", "arguments": {}}}\n</tool_call>\n', {"calls": [("read", {})]}),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=[text[:24] for text, _ in CASES])
def test_what_is_found_for_every_cut(text: str, expected: dict[str, Any]) -> None:
    whole = split([text])
    assert whole["content"] == expected.get("content", "")
    assert whole["reasoning"] == expected.get("reasoning", "")
    assert [(name, json.loads(arguments)) for _, name, arguments in whole["calls"]] == expected.get("calls", [])
    assert whole["ended"] == list(range(len(whole["calls"])))
    assert split(text) == whole, "one character at a time"
    for at in range(1, len(text)):
        assert split([text[:at], text[at:]]) == whole, at


ALPHABET = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "read>", "</function>", "<parameter=", "path>",
    "</parameter>", "<|python_tag|>", '{"name": "read"', ', "arguments": ', "{}", "}", '"', "\\", "\n", " ", "é",
    "<", ">", "x", "; ", LLAMA, XML, HERMES,
]  # fmt: skip


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_text_gives_the_same_for_any_cut(data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(ALPHABET), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    options = {
        "thought_is_open": data.draw(st.booleans()),
        "max_calls": data.draw(st.sampled_from([None, 1])),
        "tools": data.draw(st.sampled_from([TOOLS, ()])),
    }
    parts = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    whole = split([text], **options)
    assert split(parts, **options) == whole
    assert split(text, **options) == whole


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab<>{}\n /", max_size=40))
def test_text_without_tools_is_kept_whole(text: str) -> None:
    assert split([text], tools=())["content"] == text


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["path", "text", "extra"]), st.text(alphabet='x"\\\n{}é<>', max_size=12), min_size=1
    )
)
def test_string_arguments_come_back_exactly(arguments: dict[str, str]) -> None:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    xml = f"<tool_call>\n<function=edit>\n{body}</function>\n</tool_call>"
    hermes = "<tool_call>" + json.dumps({"name": "edit", "arguments": arguments}) + "</tool_call>"
    for text in (xml, hermes):
        [(_, name, source)] = split(text)["calls"]
        assert (name, json.loads(source)) == ("edit", arguments)


def test_arguments_stream_before_the_call_is_whole() -> None:
    splitter = Splitter(SplitOptions(tools=TOOLS), lambda: "id")
    head = XML[: XML.index(".py")]
    seen = splitter.feed(head)
    assert [piece.name for piece in seen if isinstance(piece, CallStart)] == ["read"]
    assert "".join(piece.text for piece in seen if isinstance(piece, CallArguments)) == '{"path": "a/\\"b\\"'
    text = Splitter(SplitOptions(), lambda: "id").feed("word ")
    assert text == [TextPiece("content", "word ", 0, 5)]


def test_the_answer_ends_behind_the_last_allowed_call() -> None:
    splitter = Splitter(SplitOptions(tools=TOOLS, max_calls=1), lambda: "id")
    splitter.feed(HERMES + HERMES)
    assert splitter.done
    assert splitter.n_calls == 1


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"$ref": "#/$defs/Point"}, {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}, {"x": 1}),
        ({"$ref": "#/$defs/Name"}, '{"x": 1}'),
        ({"$ref": "#/$defs/Loop"}, '{"x": 1}'),
        ({"$ref": "#/$defs/missing"}, '{"x": 1}'),
        ({"$ref": "https://example.com/schema"}, '{"x": 1}'),
    ],
)
def test_types_behind_references(schema: dict[str, Any], value: Any) -> None:
    """Schemas that libraries write keep the types of nested objects apart."""
    defs = {"Point": {"type": "object"}, "Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}}
    parameters = {"type": "object", "properties": {"at": schema}, "$defs": defs}
    tools = ({"type": "function", "function": {"name": "go", "parameters": parameters}},)
    text = '<tool_call>\n<function=go>\n<parameter=at>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>'
    assert json.loads(split([text], tools)["calls"][0][2]) == {"at": value}


@pytest.mark.parametrize("before", ["", "hi", "<think>", HERMES, HERMES.removesuffix("</tool_call>")])
def test_a_long_run_of_space_costs_no_more_than_text(before: str) -> None:
    began_s = time.process_time()
    found = split([before, *[" \n  "] * 50_000, "x"])
    assert time.process_time() - began_s < 3
    assert found == split([before + " \n  " * 50_000 + "x"])


@pytest.mark.parametrize("values", [("", "", ""), ("{}", '"{}"'), ("{}", '{"a": 1}'), ('"{}"', "{}"), ("null", "[{}]")])
def test_only_the_first_arguments_of_a_call_count(values: tuple[str, ...]) -> None:
    text = '{"name": "read"' + "".join(f', "arguments": {value}' for value in values) + "}"
    for parts in ([text], list(text)):
        assert [arguments for _, _, arguments in split(parts)["calls"]] == ["{}"]

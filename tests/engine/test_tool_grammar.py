"""Grammars of demanded tool calls accept what a model would write in each form, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from localspec.engine.tool_grammar import tool_call_grammar
from localspec.sampling.grammar import GrammarCompiler
from tests.helpers.tiny_text import byte_tokenizer

TOKENIZER = byte_tokenizer()
HERMES = '<tool_call>{"name": <function-name>, "arguments": <args>}</tool_call>'
XML = "<tool_call><function=example><parameter=a></tool_call>"
TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in (
        (
            "find",
            {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "kind": {"enum": ["file", "word"]},
                    "limit": {"type": "integer"},
                },
                "required": ["text", "limit"],
                "additionalProperties": False,
            },
        ),
        ("stop", {"type": "object", "properties": {}, "additionalProperties": False}),
    )
)
GOOD = {
    HERMES: (
        '\n{"name": "find", "arguments": {"text": "a\\"b", "limit": 3}}\n',
        '\n{"name": "stop", "arguments": {}}\n',
    ),
    XML: (
        "\n<function=find>\n<parameter=text>\na <b>\nc\n</parameter>\n<parameter=kind>\nword\n</parameter>\n"
        "<parameter=limit>\n12\n</parameter>\n</function>\n",
        "\n<function=find>\n<parameter=text>\n\n</parameter>\n<parameter=limit>\n0\n</parameter>\n</function>\n",
        "\n<function=stop>\n</function>\n",
    ),
}
BAD = {
    HERMES: ('\n{"name": "other", "arguments": {}}\n', '\n{"name": "find", "arguments": {"text": 1, "limit": 3}}\n'),
    XML: (
        "\n<function=find>\n<parameter=text>\na\n</parameter>\n</function>\n",
        "\n<function=find>\n<parameter=text>\na\n</parameter>\n<parameter=limit>\nmany\n</parameter>\n</function>\n",
        "\n<function=other>\n</function>\n",
    ),
}


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(file))
    return GrammarCompiler(file, (TOKENIZER.token_to_id("<|end|>") or 0,))


def may_end(compiler: GrammarCompiler, template: str, text: str) -> bool:
    """Whether the grammar lets `text` be written to its end."""
    marks = tuple(TOKENIZER.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>"))
    grammar = tool_call_grammar(TOOLS, template, marks)
    assert grammar is not None
    ids = [*TOKENIZER.encode(text).ids, TOKENIZER.token_to_id("<|end|>") or 0]
    masks = compiler.compile(grammar).window_masks(ids)
    last = masks[len(ids) - 1]
    stop = ids[-1]
    return last is not None and bool(last[stop >> 3] >> (stop & 7) & 1)


@pytest.mark.parametrize("template", [HERMES, XML], ids=["hermes", "xml"])
def test_calls(compiler: GrammarCompiler, template: str) -> None:
    calls = [f"<tool_call>{body}</tool_call>" for body in GOOD[template]]
    for call in (*calls, "\n".join(calls)):
        assert may_end(compiler, template, call), call
    for body in BAD[template]:
        assert not may_end(compiler, template, f"<tool_call>{body}</tool_call>"), body
    assert not may_end(compiler, template, "no call")


def test_unknown_forms_are_left_alone() -> None:
    assert tool_call_grammar(TOOLS, "{{ messages }}", (None, None)) is None
    assert tool_call_grammar((), HERMES, (None, None)) is None

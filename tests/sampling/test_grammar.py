"""Masks along drafts equal the masks of the plainly advanced state, whatever the drafts are."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localspec.api.types import Grammar
from localspec.core.records import SlotPlan, ThinkingRule, VerifyPlan
from localspec.sampling.allowed import packed_rows, unpacked
from localspec.sampling.grammar import MAX_COMPILED, GrammarCompiler, GrammarRefused, RequestGrammar
from tests.helpers.tiny_text import byte_tokenizer

pytestmark = pytest.mark.torch
TOKENIZER = byte_tokenizer()
SIZE = TOKENIZER.get_vocab_size()
END = TOKENIZER.token_to_id("<|end|>") or 0
THINK, END_THINK, TOOL = (TOKENIZER.token_to_id(text) or 0 for text in ("<think>", "</think>", "<tool_call>"))
PROPERTIES = {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz"]}}
SCHEMA = Grammar("json_schema", json.dumps({"type": "object", "properties": PROPERTIES, "required": ["a"]}))
GRAMMARS = (SCHEMA, Grammar("regex", "(ab|12)*c"), Grammar("lark", 'start: "a"+ | "abc"'))


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    TOKENIZER.save(str(file))
    return GrammarCompiler(file, (END,))


def allowed(mask: bytes | None) -> list[int]:
    assert mask is not None
    return [token for token in range(SIZE) if mask[token >> 3] >> (token & 7) & 1]


def mask_now(grammar: RequestGrammar) -> bytes | None:
    return grammar.window_masks(())[0]


@pytest.mark.parametrize("kind", GRAMMARS, ids=["schema", "regex", "lark"])
@pytest.mark.parametrize("seed", range(6))
def test_masks_along_drafts_equal_masks_after_tokens(compiler: GrammarCompiler, kind: Grammar, seed: int) -> None:
    rng = random.Random(seed)
    rule = ThinkingRule(None, (THINK,), (END_THINK,), seed % 3 == 1, (TOOL,)) if seed % 3 else None
    grammar, twin = (compiler.compile(kind, rule, may_think=seed % 3 == 2) for _ in range(2))
    said: list[int] = []
    for _ in range(40):
        # The twin walks the drafts for real; a walk of its own each time, since it cannot go back.
        walker = compiler.compile(kind, rule, may_think=seed % 3 == 2)
        walker.advance(said)
        drafts: list[int] = []
        expected: list[bytes | None] = [mask_now(walker)]
        for _ in range(rng.randrange(6)):
            legal = allowed(expected[-1])
            draft = rng.choice(legal) if rng.random() < 0.85 else rng.randrange(-1, SIZE)
            drafts.append(draft)
            if draft < 0 or draft not in legal or draft == END:
                break
            walker.advance([draft])
            expected.append(mask_now(walker))
        drafts += [rng.randrange(SIZE) for _ in range(rng.randrange(3))] if len(expected) <= len(drafts) else []
        assert grammar.window_masks(drafts) == expected + [None] * (1 + len(drafts) - len(expected))
        assert mask_now(grammar) == mask_now(twin), "looking ahead left a trace"
        token = rng.choice(allowed(mask_now(grammar)))
        if token == END:
            return
        said.append(token)
        grammar.advance([token])
        twin.advance([token])
        assert not grammar.error


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Grammar("regex", "(ab|ac)+"))
    ab, a, b, c = (TOKENIZER.token_to_id(text) or 0 for text in ("ab", "a", "b", "c"))
    assert allowed(mask_now(grammar)) == sorted([ab, a])
    grammar.advance([a])
    assert allowed(mask_now(grammar)) == sorted([b, c])
    grammar.advance([b])
    assert allowed(mask_now(grammar)) == sorted([ab, a, END])
    grammar.advance([END])
    only = compiler.compile(Grammar("regex", "c"))
    only.advance(TOKENIZER.encode("c").ids)
    assert allowed(mask_now(only)) == [END], "a finished grammar allows nothing but the end"


def test_in_the_thought_all_may_be_said_but_its_end_by_another_way(compiler: GrammarCompiler) -> None:
    rule = ThinkingRule(5, (THINK,), (END_THINK,), True, (TOOL,))
    grammar = compiler.compile(Grammar("regex", "c"), rule)
    assert allowed(mask_now(grammar)) == [token for token in range(SIZE) if token not in (END, TOOL)]
    c = TOKENIZER.encode("c").ids
    masks = grammar.window_masks([0, END_THINK, *c])
    assert allowed(masks[2]) == c and allowed(masks[3]) == [END]
    opened = compiler.compile(Grammar("regex", "c"), ThinkingRule(None, (THINK,), (END_THINK,), False), may_think=True)
    assert allowed(mask_now(opened)) == sorted([*c, THINK])
    opened.advance([THINK, 0, END_THINK])
    assert allowed(mask_now(opened)) == c


def test_a_token_against_the_grammar_is_an_error_and_nothing_else(compiler: GrammarCompiler) -> None:
    grammar = compiler.compile(Grammar("regex", "c"))
    grammar.advance([0])
    assert "could not be followed" in grammar.error
    assert allowed(mask_now(grammar)) == [END]


def test_compiled_grammars_do_not_share_their_state(compiler: GrammarCompiler) -> None:
    first, second = compiler.compile(SCHEMA), compiler.compile(SCHEMA)
    start = mask_now(second)
    first.advance(TOKENIZER.encode('{"a":').ids)
    assert mask_now(second) == start != mask_now(first)
    for number in range(MAX_COMPILED + 3):
        compiler.compile(Grammar("regex", f"c{{{number + 1}}}"))
    assert mask_now(compiler.compile(SCHEMA)) == start


def test_a_model_without_an_end_token_cannot_follow_a_grammar(tmp_path: Path) -> None:
    with pytest.raises(GrammarRefused, match="ends an answer"):
        GrammarCompiler(tmp_path / "none", ()).compile(SCHEMA)


@pytest.mark.parametrize("vocab_size", [SIZE, SIZE + 3, SIZE + 27, 8 * (SIZE // 8)])
def test_rows_lie_as_the_plan_lays_them_out(compiler: GrammarCompiler, vocab_size: int) -> None:
    """Slot 2 has a grammar, slot 0 none; two padding rows; the model may have rows that no tokenizer knows."""
    plan = VerifyPlan((SlotPlan(2, 7, "x", 2, 10), SlotPlan(0, 8, "x", 1, 10)))
    c = TOKENIZER.encode("c").ids[0]
    drafts = [[5, 5, 5], [-1, -1, -1], [c, 0, -1], [-1, -1, -1]]
    packed = packed_rows(plan, drafts, {2: compiler.compile(Grammar("regex", "cd?"))}, 7, vocab_size)
    found = unpacked(packed, vocab_size)
    assert found.shape == (7, vocab_size) and found.dtype == torch.bool
    d = TOKENIZER.encode("d").ids[0]
    assert found[0].nonzero()[:, 0].tolist() == [c]
    assert found[1].nonzero()[:, 0].tolist() == sorted(token for token in (d, END) if token < vocab_size)
    assert found[2].all(), "behind a refused draft nothing matters"
    assert found[3:].all()


def test_without_the_library_only_requests_with_a_grammar_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = "import sys; sys.modules['llguidance'] = None; import localspec.sampling.grammar"
    subprocess.run([sys.executable, "-c", check], check=True)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(GrammarRefused, match="pip install llguidance"):
        GrammarCompiler(tmp_path / "none", (END,)).compile(SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_a_schema_that_only_names_itself_is_refused(compiler: GrammarCompiler, schema: dict[str, object]) -> None:
    with pytest.raises(GrammarRefused, match="allows no text at all"):
        compiler.compile(Grammar("json_schema", json.dumps(schema)))


def test_a_grammar_that_gives_up_at_a_mask_says_so(compiler: GrammarCompiler) -> None:
    schema = {"type": "string", "pattern": "^(a{1000}){1000}$"}
    try:
        grammar = compiler.compile(Grammar("json_schema", json.dumps(schema)))
    except GrammarRefused:
        return
    for _ in range(4):
        mask = grammar.window_masks([])[0]
        assert grammar.error or allowed(mask) != [END]

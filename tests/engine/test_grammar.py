"""Grammars through the whole engine: what comes parses and validates, and no drafter or neighbour changes a token."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import torch

from localspec.api.types import Delta, Done, EngineError, GenerateRequest, Grammar, Message, Sampling, ToolCall
from localspec.core.records import MAX_SLOTS, Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.server.generation import Reply, Step
from localspec.server.stream import SplitOptions, Splitter
from tests.helpers.tiny_text import byte_tokenizer, tiny_text_model

pytestmark = pytest.mark.torch
TOKENIZER = byte_tokenizer()
POINT = {
    "type": "object",
    "properties": {
        "on": {"type": "boolean"},
        "of": {"enum": ["red", "green", "greenish"]},
        "ab": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "s": {"type": "string", "maxLength": 4},
    },
    "required": ["on", "of", "ab", "s"],
    "additionalProperties": False,
}
SCHEMA = Grammar("json_schema", json.dumps(POINT))
LAWS = (Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.7, top_k=20, min_p=0.01, seed=6))


class Guesser:
    """Guesses at random: now legal pieces of JSON, now nonsense, now the end of the answer."""

    name = "guess"
    max_depth = 15
    needs = HiddenNeeds()

    def __init__(self, inner: object) -> None:
        self.cache_spec = inner.cache_spec  # type: ignore[attr-defined]
        self._rng = random.Random(1)
        self._texts = [TOKENIZER.encode(t).ids for t in ('{"on":true,"of":"green', ',"s":"', "[1,2]", "<|end|>", "x{")]

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        ids = torch.full((MAX_SLOTS, depths.max_depth), -1, dtype=torch.int64)
        for slot in depths.slots:
            depth = int(depths.depths[slot])
            guess: list[int] = []
            while len(guess) < depth:
                guess += self._rng.choice(self._texts)
            if self._rng.random() < 0.4:
                known = TOKENIZER.encode(_FIRST).ids
                done = int(state.lengths[slot] - state.prompt_lengths[slot])
                guess = [*known[done : done + depth], *guess]
            ids[slot, :depth] = torch.tensor(guess[:depth])
        return Draft(ids, torch.zeros_like(ids), (ids >= 0).sum(dim=1), ("guess",))

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        pass

    def forget(self, slot: int) -> None:
        pass


_FIRST = '{"on":true,"of":"green","ab":[1,2],"s":"ab"}'


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    folder: Path = tiny_text_model(request.param, 4, tmp_path_factory.mktemp(request.param))
    place = ModelPlace("tiny", folder, "tiny")
    local = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=512))
    local.start("tiny")
    asyncio.run(local.wait_ready())
    yield local
    asyncio.run(local.aclose())


@pytest.fixture
def guessing(engine: LocalEngine) -> Iterator[LocalEngine]:
    """The n-gram drafter is replaced by one that guesses."""
    drafters = engine._built.parts.loop.stages.drafters._drafters  # type: ignore[union-attr]
    before = drafters["ngram"]
    drafters["ngram"] = Guesser(before)  # type: ignore[assignment]
    yield engine
    drafters["ngram"] = before


async def answer(engine: LocalEngine, **fields: object) -> tuple[list[int], str, Done]:
    ids: list[int] = []
    text = ""
    done: Done | None = None
    fields = {"messages": (Message("user", 'say {"on":true,"of":"green"}'),), "max_tokens": 200, **fields}
    fields.setdefault("template_options", {"enable_thinking": False})
    async with aclosing(engine.generate(GenerateRequest(**fields))) as events:  # type: ignore[arg-type]
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
                text += event.text
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return ids, text, done


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled", "filtered"])
def test_no_draft_changes_a_token_and_every_answer_validates(guessing: LocalEngine, law: Sampling) -> None:
    async def compare() -> None:
        for seed in (1, 2) if law.temperature else (1,):
            common = {"grammar": SCHEMA, "sampling": replace(law, seed=seed)}
            plain, text, done = await answer(guessing, drafter="off", **common)
            assert done.finish_reason == "stop", text
            jsonschema.validate(json.loads(text), POINT)
            depths = (2, 15)
            both = await asyncio.gather(*(answer(guessing, drafter="ngram", depth=depth, **common) for depth in depths))
            for depth, (drafted, _, end) in zip(depths, both, strict=True):
                assert drafted == plain, depth
                assert end.timings.draft_n > 0

    asyncio.run(compare())


def test_copying_from_the_prompt_helps_and_changes_nothing(engine: LocalEngine) -> None:
    async def compare() -> int:
        plain, _, _ = await answer(engine, drafter="off", grammar=SCHEMA)
        drafted, _, done = await answer(engine, drafter="ngram", depth=6, grammar=SCHEMA)
        assert drafted == plain
        return done.timings.draft_n

    assert asyncio.run(compare()) > 0


def test_neighbours_keep_their_tokens(guessing: LocalEngine) -> None:
    """One request with a grammar beside three free ones, which run longer and shorter."""

    async def compare() -> None:
        free = [
            {"sampling": replace(law, seed=3), "max_tokens": 20 + 30 * index, "ignore_eos": True}
            for index, law in enumerate(LAWS)
        ]
        alone = [(await answer(guessing, drafter="off", **fields))[0] for fields in free]
        bound = (await answer(guessing, drafter="off", grammar=SCHEMA, sampling=LAWS[1]))[0]
        together = await asyncio.gather(
            *(answer(guessing, drafter="ngram", depth=3, **fields) for fields in free),
            answer(guessing, drafter="ngram", depth=4, grammar=SCHEMA, sampling=LAWS[1]),
        )
        assert [ids for ids, _, _ in together] == [*alone, bound]

    asyncio.run(compare())


@pytest.mark.parametrize("budget", [0, 5])
def test_a_grammar_begins_behind_the_thought(guessing: LocalEngine, budget: int) -> None:
    async def compare() -> None:
        common = {"grammar": SCHEMA, "template_options": {}, "thinking_budget_tokens": budget, "sampling": LAWS[1]}
        plain, _, done = await answer(guessing, drafter="off", **common)
        assert done.finish_reason == "stop"
        end = plain.index(TOKENIZER.token_to_id("</think>") or -1)
        assert end <= budget
        stop = TOKENIZER.token_to_id("<|end|>")
        assert plain[-1] == stop and stop not in plain[:-1]
        jsonschema.validate(json.loads(TOKENIZER.decode(plain[end + 1 : -1])), POINT)
        both = await asyncio.gather(*(answer(guessing, drafter="ngram", depth=depth, **common) for depth in (3, 15)))
        assert [ids for ids, _, _ in both] == [plain, plain]

    asyncio.run(compare())


def test_other_kinds_and_what_they_refuse(engine: LocalEngine) -> None:
    async def ask() -> None:
        assert (await answer(engine, grammar=Grammar("regex", "(ab|12){3}x?"), sampling=LAWS[1]))[2].usage
        _, text, _ = await answer(engine, grammar=Grammar("lark", 'start: "yes" | "no"'), ignore_eos=True)
        assert text in ("yes", "no")
        for kind, source, word in (
            ("json_schema", '{"type": "strange"}', "strange"),
            ("json_schema", "{", "JSON"),
            ("regex", "(", "unclosed"),
            ("lark", "start: missing", "missing"),
        ):
            with pytest.raises(EngineError, match=word) as refused:
                await answer(engine, grammar=Grammar(kind, source))  # type: ignore[arg-type]
            assert refused.value.code == "bad_request"

    asyncio.run(ask())


TOOL = {
    "type": "function",
    "function": {
        "name": "get",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}, "on": {"type": "boolean"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
}


FORMS = {
    "hermes": '<tool_call> {"name": ..., "arguments": ...}',
    "xml": "<tool_call><function=...><parameter=...>",
    "llama": '{"name": ..., "parameters": ...}',
}
HOW = {
    "one": {"tool_choice": "required", "parallel_tool_calls": False},
    "several": {"tool_choice": "required"},
    "at most one": {"parallel_tool_calls": False},
}


def calls_in(text: str) -> list[ToolCall]:
    """Calls as the port reads them; whole ones only."""
    reply = Reply()
    splitter = Splitter(SplitOptions(tools=(TOOL,)), lambda: "id")
    reply.add(Step((*splitter.feed(text), *splitter.finish()), None))
    return reply.calls


@pytest.mark.parametrize(
    ("engine", "form"),
    [("llama", "hermes"), ("llama", "llama"), ("qwen3_5", "xml")],
    indirect=["engine"],
    scope="module",
)
@pytest.mark.parametrize("how", HOW)
def test_calls_in_every_form_are_the_same_with_drafts(
    guessing: LocalEngine, monkeypatch: pytest.MonkeyPatch, form: str, how: str
) -> None:
    text_stage = guessing._built.text  # type: ignore[union-attr]
    monkeypatch.setattr(text_stage, "_template_source", FORMS[form])
    options = {**HOW[how], "enable_thinking": False}
    # Noise does not end by itself, neither its text nor its list of calls.
    limit = 250 if how == "one" else 40

    async def compare() -> None:
        for law in LAWS[:2] if how == "one" else LAWS[1:2]:
            common = {"tools": (TOOL,), "template_options": options, "sampling": law, "max_tokens": limit}
            plain, text, done = await answer(guessing, drafter="off", **common)
            drafted, _, end = await answer(guessing, drafter="ngram", depth=7, **common)
            assert drafted == plain
            assert end.timings.draft_n > 0
            calls = calls_in(text)
            assert len(calls) <= 1 or how == "several", text
            if "tool_choice" in options:
                assert calls, text
                assert done.finish_reason == "stop" or how == "several"
            for call in calls:
                assert call.name == "get"
                if done.finish_reason == "stop":
                    jsonschema.validate(json.loads(call.arguments), TOOL["function"]["parameters"])  # type: ignore[index]

    asyncio.run(compare())


def test_tools_that_make_no_grammar_are_called_without_one(engine: LocalEngine) -> None:
    """Where a call is demanded, that is refused in the compiler's words."""
    bad = {"type": "function", "function": {"name": "get", "parameters": {"type": "strange"}}}

    async def ask() -> None:
        common = {"tools": (bad,), "max_tokens": 5}
        _, _, done = await answer(engine, template_options={"parallel_tool_calls": False}, **common)
        assert done.usage.completion_tokens == 5
        with pytest.raises(EngineError, match="strange"):
            await answer(engine, template_options={"tool_choice": "required"}, **common)

    asyncio.run(ask())

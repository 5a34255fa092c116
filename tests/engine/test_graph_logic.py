"""What the captured form of a step does around its graphs, on the CPU: a stand-in graph calls its function again.

Checks keys, layouts, warm-ups and masks. Whether a card's graphs hold what they should is checked on a card.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.api.types import Grammar, Sampling
from localspec.core.records import MAX_SLOTS, Draft, SlotResult, StepResult, ThinkingRule, VerifyPlan
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import Assembled
from localspec.engine.captured import Captured, Families, Family
from localspec.engine.confidence import RowBudget
from localspec.engine.device_step import HostClock, StepNeeds
from localspec.engine.graphs import GraphStep
from localspec.engine.ring import ResultRing
from localspec.engine.verify_schedule import VerifySchedule
from localspec.kernels.backends.reference import ReferenceOps
from localspec.sampling.grammar import GrammarCompiler
from tests.helpers.engine import Collected, make_request, token_engine
from tests.helpers.models import load_model
from tests.helpers.tiny_text import byte_tokenizer, tiny_text_model

pytestmark = pytest.mark.torch
LIMIT = 256
TOKENIZER = byte_tokenizer()
END = TOKENIZER.token_to_id("<|end|>") or 0
THINK, END_THINK = ((TOKENIZER.token_to_id(text) or 0,) for text in ("<think>", "</think>"))
PATTERN = Grammar("regex", "(ab|12|true,?){3,9}")


def copy_into(old: Any, new: Any) -> None:
    """Tensors of a record into those of another, as a replay leaves its results where the capture put them."""
    if isinstance(old, torch.Tensor):
        old.copy_(new)
    elif dataclasses.is_dataclass(old):
        for item in dataclasses.fields(old):
            copy_into(getattr(old, item.name), getattr(new, item.name))
    elif isinstance(old, dict):
        for key, value in old.items():
            copy_into(value, new[key])


class StandIn:
    """A graph that runs its function again."""

    def __init__(self, function: Callable[[], Any], output: Any) -> None:
        self._function = function
        self._output = output

    def replay(self) -> None:
        copy_into(self._output, self._function())


class CpuGraphStep(GraphStep):
    captures = 0

    def clock(self) -> HostClock:  # type: ignore[override]
        return HostClock()

    def _wait(self) -> None:
        """Nothing is under way here."""

    def _capture(self, function: Callable[[], Any]) -> Captured[Any]:
        type(self).captures += 1
        output = function()
        return Captured(StandIn(function, output), output)  # type: ignore[arg-type]

    def verify(self, plan: VerifyPlan, draft: Draft, needs: StepNeeds) -> StepResult:
        """A copy, as the ring of a card makes one before the next replay."""
        result = super().verify(plan, draft, needs)
        values: dict[str, Any] = {f.name: getattr(result, f.name) for f in dataclasses.fields(result)}
        return StepResult(**{k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in values.items()})


class PatientOps(ReferenceOps):
    """Says that the host does not know device values at once, as a card does."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.waits = False


class Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_text_model(request.param, 4, tmp_path_factory.mktemp(request.param))


def engine(folder: Path, ops: ReferenceOps) -> Any:
    model = load_model(folder, ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
    return token_engine(model, ops, LIMIT, {name: drafter_module(name).tiny(setup) for name in ("mtp", "ngram")})


@pytest.fixture
def patient(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Assembled]:
    CpuGraphStep.captures = 0
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    monkeypatch.setattr(
        "localspec.engine.build._device_step", lambda runner, drafters, *_: CpuGraphStep(runner, drafters)
    )
    monkeypatch.setattr("localspec.engine.build.ResultRing", lambda lag: ResultRing(1))
    with engine(folder, PatientOps()) as parts:
        yield parts


@pytest.fixture
def plain(folder: Path) -> Iterator[Assembled]:
    with engine(folder, ReferenceOps(torch.device("cpu"))) as parts:
        yield parts


def run(
    parts: Assembled, compiler: GrammarCompiler, drafter: str, depth: int | None, rules: Sequence[int] = (0, 1, 2, 3)
) -> list[list[int]]:
    """Four requests at once: free, with a budget, with a grammar, and with both; or those of them in `rules`."""
    rule = ThinkingRule(4, THINK, END_THINK, open_at_start=True)
    law = Sampling(temperature=0.9, top_k=40)
    prompt = TOKENIZER.encode("ab12ab12trueab12").ids
    kinds: list[tuple[ThinkingRule | None, Grammar | None]] = [
        (None, None),
        (rule, None),
        (None, PATTERN),
        (rule, PATTERN),
    ]
    collected = []
    for index, (thinking, grammar) in ((index, kinds[index]) for index in rules):
        request = make_request(
            prompt, drafter=drafter, depth=depth, max_tokens=24 + index, sampling=law, seed=index, stop_ids=(END,),
            thinking=thinking, grammar=grammar,
        )  # fmt: skip
        collected.append(Collected())
        matcher = compiler.compile(grammar, thinking) if grammar is not None else None
        parts.loop.submit(request, collected[-1].see, matcher)
    for item in collected:
        assert item.done.wait(120)
        assert item.end is not None and item.end.error is None, item.end
    return [item.token_ids for item in collected]


def test_replays_do_what_calls_do(folder: Path, plain: Assembled, patient: Assembled) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    expected = run(plain, compiler, "off", 0)
    assert expected[1][4] == expected[3][4] == END_THINK[0]
    assert TOKENIZER.decode(expected[2][:2]).startswith(("ab", "12", "tr"))
    for drafter, depth in (("off", 0), ("ngram", 1), ("ngram", 3)):
        assert run(patient, compiler, drafter, depth) == expected
    assert 0 < CpuGraphStep.captures < 120, "nothing was replayed"


def test_captures_that_are_given_up_are_made_again(
    folder: Path, plain: Assembled, patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    step: Any = patient.loop.stages.device
    most = 5
    step.captured = Families(most)
    counts: list[int] = []
    monkeypatch.setattr(step, "_wait", lambda: counts.append(step.captured.num_graphs))
    expected = run(plain, compiler, "off", 0, (0, 2))
    for depth in (1, 3, 1):
        assert run(patient, compiler, "ngram", depth, (0, 2)) == expected
        assert 0 < step.captured.num_graphs <= most
    assert counts and all(most - 2 < count <= most for count in counts)


def test_families_are_given_up_whole_and_the_newest_last() -> None:
    def family(families: Families, key: str, steps: int) -> Family:
        found = families.use(key)
        found.proposal = entry[0]
        found.verifications |= {((index, 0), law): entry for index in range(steps)}
        return found

    entry: Any = (Captured(None, None), None)  # type: ignore[arg-type]
    law: Any = ("law", None, False)
    families = Families(10)
    first, second = family(families, "first", 3), family(families, "second", 3)
    assert families.num_graphs == 8 and families.has_room(2) and not families.has_room(3)
    families.use("first")
    families.make_room(3, first)
    assert families.num_graphs == 4 and families.use("second") is not second, "the second was used before the first"
    assert families.use("first") is first
    first.forwards = {(16, 0): entry, (4, 0): entry}
    first.acceptances = {((16, 0), law): entry, ((4, 0), law): entry}
    families.make_room(3, first)
    assert list(first.verifications) == [((2, 0), law)] and first.proposal is entry[0]
    assert list(first.forwards) == [(4, 0)] and list(first.acceptances) == [((4, 0), law)]


def test_rows_that_are_shared_by_confidence_change_no_token(
    folder: Path, plain: Assembled, patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences, one with a grammar, and a budget of rows below what they ask for that moves from step to step."""
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    expected = run(plain, compiler, "off", 0)
    turns = itertools.cycle((12, 8, 5, 3))
    budgets: list[int] = []
    cut: list[int] = []
    see = VerifySchedule.see

    def rows(self: RowBudget, num_windows: int) -> int:
        budgets.append(next(turns))
        return budgets[-1]

    def seen(self: VerifySchedule, result: SlotResult) -> list[float]:
        cut.append(len(result.offered_by) - result.num_drafted)
        return see(self, result)

    monkeypatch.setattr(RowBudget, "rows", rows)
    monkeypatch.setattr(VerifySchedule, "see", seen)
    monkeypatch.setattr(type(patient.tuner), "choose", lambda self, sequence, num_active: ("mtp", 7))
    monkeypatch.setattr(type(patient.scheduler), "_may_share", lambda self, sequence: sequence.request.thinking is None)
    for _ in range(2):
        found = run(patient, compiler, "auto", None, rules=(0, 2))
        assert found == [expected[0], expected[2]]
    assert budgets and max(cut) > 0

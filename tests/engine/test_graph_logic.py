"""What the captured form of a step does around its graphs, on the CPU: a stand-in graph calls its function again.

Checks keys, layouts, warm-ups and masks. Whether a card's graphs hold what they should is checked on a card.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
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
from localspec.engine.tuner import Tuner
from localspec.engine.verify_schedule import VerifySchedule
from localspec.kernels.backends.reference import ReferenceOps
from localspec.sampling.grammar import GrammarCompiler
from tests.helpers.engine import Collected, make_request, token_engine
from tests.helpers.engine import run as run_requests
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

    def wait(self) -> None:
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


def test_what_the_device_waits_for_the_host_is_known_of_steps_in_a_row(folder: Path, patient: Assembled) -> None:
    landed: list[float | None] = []
    see_step = patient.tuner.known.see_step

    def see(*arguments: Any) -> None:
        landed.append(arguments[-1])
        see_step(*arguments)

    patient.tuner.known.see_step = see  # type: ignore[method-assign]
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    for _ in range(2):
        run(patient, compiler, "off", 0, rules=(0,))
    unknown = [place for place, wait_ms in enumerate(landed) if wait_ms is None]
    assert len(unknown) == 2 and unknown[0] == 0, "the first step of an answer follows none"
    assert all(wait_ms >= 0.0 for wait_ms in landed if wait_ms is not None)
    assert patient.tuner.learnt.costs[0].wait[1].count == len(landed) - 2


def test_a_step_without_drafts_is_one_replay(folder: Path, patient: Assembled, monkeypatch: pytest.MonkeyPatch) -> None:
    replays, replay = [0], StandIn.replay

    def counted(self: StandIn) -> None:
        replays[0] += 1
        replay(self)

    monkeypatch.setattr("localspec.engine.capture_ahead.QUIET_S", 600.0)
    monkeypatch.setattr(StandIn, "replay", counted)
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    [tokens] = run(patient, compiler, "off", 0, rules=(0,))
    steps = patient.metrics.snapshot().verify_steps
    assert len(tokens) <= steps <= replays[0] <= steps + 2


def test_a_step_reads_nothing_that_an_earlier_graph_may_have_written_over(
    folder: Path, plain: Assembled, patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All graphs share their memory: what one leaves is gone once one that was captured before it runs again."""
    proposals: list[StandIn] = []
    made, replay = StandIn.__init__, StandIn.replay

    def make(self: StandIn, function: Callable[[], Any], output: Any) -> None:
        made(self, function, output)
        proposals.extend([self] if isinstance(output, Draft) else [])

    def replayed(self: StandIn) -> None:
        for later in proposals[proposals.index(self) + 1 :] if self in proposals else ():
            later._output.num_drafts.fill_(-7)
        replay(self)

    monkeypatch.setattr(StandIn, "__init__", make)
    monkeypatch.setattr(StandIn, "replay", replayed)
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    expected = run(plain, compiler, "off", 0, rules=(0,))
    for drafter, depth in (("ngram", 3), ("off", 0), ("ngram", 3), ("off", 0)):
        assert run(patient, compiler, drafter, depth, rules=(0,)) == expected
    assert all(counted.drafted_tokens >= 0 for counted in patient.metrics.snapshot().drafters)


def test_captures_that_are_given_up_are_made_again(
    folder: Path, plain: Assembled, patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = GrammarCompiler(folder / "tokenizer.json", (END,))
    step: Any = patient.loop.stages.device
    most = 5
    step.captured = Families(most)
    counts: list[int] = []
    monkeypatch.setattr(step, "wait", lambda: counts.append(step.captured.num_graphs))
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


def captured_ahead(parts: Assembled) -> int:
    """Steps that are captured now; all that are wanted, if there is room."""
    before, more = CpuGraphStep.captures, [True]
    while more[-1]:
        parts.loop.call(lambda: more.append(parts.loop.capture_ahead())).result(120)
    return CpuGraphStep.captures - before


def test_choices_are_captured_before_an_answer_needs_them(
    folder: Path, plain: Assembled, patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last request asked, and without a trace in what the engine keeps: a second turn finds the first."""
    # Nothing is captured in the pauses of this test, however long they are.
    monkeypatch.setattr("localspec.engine.capture_ahead.QUIET_S", 600.0)
    prompt = TOKENIZER.encode("ab12ab12trueab12" * 10).ids
    law = Sampling(temperature=0.9, top_k=40)

    def answer(parts: Assembled, ids: list[int], drafter: str, depth: int | None) -> Collected:
        [collected] = run_requests(parts, [make_request(ids, drafter=drafter, depth=depth, sampling=law, logprobs=0)])
        return collected

    first = answer(patient, prompt, "off", None)
    choices = patient.tuner.foreseen()
    assert ("off", 0) in choices and ("mtp", 1) in choices and ("ngram+mtp", 2) in choices
    monkeypatch.setattr(patient.loop.stages.device, "captured", Families(1000))
    # As on a card: an answer's last windows are as wide as the others.
    monkeypatch.setattr(patient.scheduler, "limits", dataclasses.replace(patient.scheduler.limits, steady_depth=True))
    assert captured_ahead(patient) >= 2 * len(choices) - 1, "without drafts there is one graph, else two"
    assert captured_ahead(patient) == 0
    second_ids = [*prompt, *first.token_ids, *TOKENIZER.encode("ab12").ids]
    for drafter, depth in (("mtp", 3), ("ngram", 7), ("ngram+mtp", 4), ("off", None)):
        before = CpuGraphStep.captures
        second = answer(patient, second_ids, drafter, depth)
        assert second.cached_tokens > len(prompt)
        fresh = answer(plain, second_ids, "off", None)
        assert (second.token_ids, second.logprobs) == (fresh.token_ids, fresh.logprobs)
        assert CpuGraphStep.captures == before, "captured while an answer was written"


def test_steps_are_captured_while_nobody_asks_and_their_cost_is_known(
    patient: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localspec.engine.capture_ahead.QUIET_S", 0.01)
    step: Any = patient.loop.stages.device
    # The wait that is under way still has the longer patience.
    patient.loop.call(lambda: None).result(60)
    deadline_s = time.monotonic() + 120
    while step.spare_graphs() >= 18 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    patient.loop.call(lambda: None).result(60)
    assert 16 <= step.spare_graphs() < 18, "room is kept for steps that nobody foresaw"
    known = patient.tuner.known
    for _ in range(2):
        assert known.verify_curve(0) and known.draft_curve("mtp", 0)[1] > 0
        assert patient.tuner.known.rates("answer", 1, 0)
        patient.loop.call(patient.tuner.reset).result(60)


def test_a_step_that_cannot_be_captured_ahead_hurts_nobody(
    patient: Assembled, plain: Assembled, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = TOKENIZER.encode("ab12ab12trueab12").ids
    [expected] = run_requests(plain, [make_request(prompt)])
    capture = CpuGraphStep._capture

    def failing(self: CpuGraphStep, function: Callable[[], Any]) -> Captured[Any]:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(CpuGraphStep, "_capture", failing)
    assert captured_ahead(patient) == 0
    monkeypatch.setattr(CpuGraphStep, "_capture", capture)
    assert captured_ahead(patient) == 0, "tried again"
    [found] = run_requests(patient, [make_request(prompt, drafter="mtp", depth=2)])
    assert found.token_ids == expected.token_ids


def test_a_drafter_that_was_chosen_by_hand_is_all_that_is_foreseen() -> None:
    tuner = Tuner({"mtp": 5, "ngram": 15}, default_drafter="mtp", default_depth=9)
    assert tuner.foreseen() == [("mtp", 5)]
    tuner.default_depth = 2
    assert tuner.foreseen() == [("mtp", 2)]
    tuner.default_drafter = "off"
    assert tuner.foreseen() == [("off", 0)]


def test_what_requests_took_stands_beside_what_was_measured_ahead() -> None:
    tuner = Tuner({"mtp": 5})
    sequence_arm = ("mtp", 3)
    for _ in range(3):
        tuner.known.see_step(100, 4, [sequence_arm], 2.0, 20.0)
    tuner.known.see_ahead(sequence_arm, 4, 1.0, 10.0)
    tuner.known.see_ahead(("off", 0), 1, 0.0, 9.0)
    assert tuner.known.verify_curve(0)[4] == pytest.approx(20.0) and tuner.known.verify_curve(0)[1] == 9.0
    assert tuner.known.draft_curve("mtp", 0)[3] == pytest.approx(2.0)
    tuner.reset()
    assert tuner.known.verify_curve(0)[4] == 10.0 and tuner.known.draft_curve("mtp", 0)[3] == 1.0
    tuner.known.see_step(100, 4, [sequence_arm], 2.0, 20.0)
    tuner.reset()
    assert tuner.known.verify_curve(0)[4] == 10.0, "what is known ahead is no part of what is learnt"

"""The tuner on replayed texts with costs measured on a card: near the best fixed choice, never far below plain."""

from __future__ import annotations

import math
import random
from statistics import mean

import pytest

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.acceptance import Acceptance
from localspec.engine.knowledge import Knowledge
from localspec.engine.step_costs import OUTLIER, Mean, StepCosts
from localspec.engine.tuner import OFF, Arm, Tuner, TunerSettings
from localspec.scheduler.sequence import Sequence
from tests.engine.tuner_stream import (
    CODE,
    EDITING,
    HOPELESS,
    LIMITS,
    PROSE,
    REASONING,
    VERIFY_MS,
    Kind,
    Log,
    Text,
    best_fixed,
    replay_tuned,
    worst_window,
)

PART_TOKENS = 3000
USUAL: list[Arm] = [OFF, *(("mtp", depth) for depth in (2, 3, 5, 7)), ("ngram", 15), ("ngram+mtp", 15)]
"""Those that are best somewhere; scripts/simulate_tuner.py looks at all."""
PARTS = (CODE, PROSE, REASONING)


def texts_of(kinds: list[Kind], num: int, seed: int, part_tokens: int = PART_TOKENS) -> list[Text]:
    return [Text([(kind, part_tokens) for kind in kinds], 1000 * seed + i) for i in range(num)]


def tuned(texts: list[Text], seed: int, shadow: bool = True) -> Log:
    return replay_tuned(texts, Tuner(dict(LIMITS), fixed_rows=True), seed, shadow)


@pytest.mark.parametrize("num", [1, 2, 4])
def test_each_part_runs_near_the_best_fixed_choice(num: int) -> None:
    """Kinds of text follow one another in any order; every part counts from its first token."""
    ratios: dict[str, list[float]] = {kind.name: [] for kind in PARTS}
    for seed in range(2 if num == 1 else 1):
        kinds = list(PARTS)
        random.Random(seed).shuffle(kinds)
        texts = texts_of(kinds, num, seed)
        log = tuned(texts, seed)
        for name, (rate, _) in best_fixed(texts, USUAL).items():
            ratios[name].append(log.rate(name) / rate)
        assert worst_window(log, num / VERIFY_MS[num]) > 0.98
    for name, values in ratios.items():
        assert mean(values) > 0.97, (name, values)
        assert min(values) > 0.94, (name, values)


@pytest.mark.parametrize("num", [1, 4])
def test_never_far_below_plain_where_drafting_cannot_help(num: int) -> None:
    texts = texts_of([CODE, HOPELESS, EDITING, HOPELESS], num, 5, 3000)
    log = tuned(texts, 5)
    assert worst_window(log, num / VERIFY_MS[num]) > 0.98
    assert log.rate("hopeless") * VERIFY_MS[num] / num > 0.98


def test_text_that_repeats_itself_is_noticed_without_drafting_it() -> None:
    texts = texts_of([PROSE, EDITING], 1, 2)
    best = best_fixed(texts, USUAL)
    log = tuned(texts, 2)
    assert log.rate("editing") / best["editing"][0] > 0.95
    assert log.rate("prose") / best["prose"][0] > 0.97
    assert tuned(texts, 2, shadow=False).rate("editing") < log.rate("editing")


def request(**more: object) -> Request:
    return Request("", (1,), Sampling(), 1, 9, (), **more)  # type: ignore[arg-type]


def test_wishes_come_first() -> None:
    tuner = Tuner(dict(LIMITS))
    assert tuner.choose(Sequence(1, request(drafter="mtp", depth=3)), 1) == ("mtp", 3)
    assert tuner.choose(Sequence(1, request(drafter="off")), 1) == OFF
    tuner.default_drafter, tuner.default_depth = "ngram", 99
    assert tuner.choose(Sequence(1, request()), 1) == ("ngram", 15)


def test_sequences_of_a_step_get_the_same_choice() -> None:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    replay_tuned(texts_of([REASONING], 4, 1, 500), tuner)
    sequences = [Sequence(i, request()) for i in range(10, 14)]
    for _ in range(200):
        assert len({tuner.choose(sequence, 4) for sequence in sequences}) == 1


def test_a_window_counts_for_the_phase_it_was_planned_in() -> None:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    sequence = Sequence(1, request())
    sequence.phase = "thinking"
    tuner.choose(sequence, 1)
    sequence.phase = "answer"
    assert tuner.see_window(sequence, 1, ("mtp", 2), ("mtp", "mtp"), 1) == "thinking"
    assert tuner.learnt.acceptance["mtp", "thinking"].steps == 1
    tuner.see_echo(sequence, True)
    tuner.choose(sequence, 1)
    tuner.see_echo(sequence, False)
    assert tuner.see_window(sequence, 1, OFF, (), 0) == "echo"
    tuner.choose(sequence, 2)
    assert tuner.see_window(sequence, 2, OFF, (), 0) == "answer", "several sequences do best alike"


def test_explains_itself() -> None:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    replay_tuned(texts_of([PROSE], 1, 1, 500), tuner)
    assert any("answer, 1 active" in line and "tok/s" in line for line in tuner.explain())
    tuner.reset()
    assert tuner.explain() == [] and tuner.reason == "not started"


def test_dictated_tokens_and_drafters_that_catch_up_teach_nothing() -> None:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    sequence = Sequence(1, request())
    for drafted in (("thinking_budget", "thinking_budget"), ()):
        tuner.choose(sequence, 1)
        tuner.see_window(sequence, 1, ("mtp", 2), drafted, 2 if drafted else 0)
    assert all(not known.steps for known in tuner.learnt.acceptance.values())


def test_acceptance_counts_only_what_was_reached() -> None:
    acceptance = Acceptance()
    for _ in range(400):
        acceptance.see(drafted=3, accepted=1)
    assert acceptance.rate(0) > 0.97 and acceptance.rate(1) < 0.03
    assert acceptance.now.seen[2] == 0, "position 3 was never reached"
    assert acceptance.curve()[3] == pytest.approx(2.0, abs=0.1)


@pytest.mark.parametrize(("before", "after"), [(0.9, 0.4), (0.2, 0.8)])
def test_a_change_is_noticed_and_steadiness_is_not(before: float, after: float) -> None:
    generator = random.Random(3)
    acceptance = Acceptance()

    def run(rate: float, steps: int) -> None:
        for _ in range(steps):
            accepted = next((i for i in range(3) if generator.random() >= rate), 3)
            acceptance.see(3, accepted)

    run(before, 100)
    learning = acceptance.changes
    run(before, 400)
    assert acceptance.changes - learning <= 2
    run(after, 25)
    assert acceptance.rate(0) == pytest.approx(after, abs=0.15)
    run(after, 400)
    assert acceptance.rate(0) == pytest.approx(after, abs=0.05)


def test_costs_are_told_from_neighbours() -> None:
    costs = StepCosts()
    assert costs.verify_curve() == [] and costs.draft_curve("mtp") == []
    costs.verify[1] = Mean(4.0, 2)
    assert costs.verify_curve()[7] == 4.0
    costs.verify[5] = Mean(6.0, 2)
    curve = costs.verify_curve()
    assert curve[3] == pytest.approx(5.0) and curve[9] == pytest.approx(6.0), "a width that never ran is hoped for"
    costs.verify[8] = Mean(5.0, 9)
    assert costs.verify_curve()[5] == costs.verify_curve()[8] == 5.5, "more rows never cost less"
    costs.draft["mtp", 4] = Mean(2.0, 2)
    assert costs.draft_curve("mtp")[2] == pytest.approx(1.0) and costs.draft_curve("mtp")[6] == pytest.approx(3.0)


def test_a_compilation_in_between_does_not_count() -> None:
    means = [Mean(), Mean()]
    for mean_, values in zip(means, ([900.0, 7.0, 7.0], [7.0] * 30 + [900.0]), strict=True):
        for value in values:
            mean_.see(value, 1)
    assert means[0].value < 7.0 * OUTLIER and means[1].value < 7.8


def test_a_choice_whose_first_step_was_captured_is_not_written_off() -> None:
    """On a card the first step of every shape takes a second; nothing may keep a method away for that."""
    costs = StepCosts()
    for depth, values in ((3, [1000.0, 1.5, 1.5, 1.5]), (5, [1200.0])):
        for value in values:
            costs.draft.setdefault(("mtp", depth), Mean()).see(value, 1)
    assert costs.draft_curve("mtp")[5] < 5.0
    costs.draft["mtp", 5].see(2.5, 2)
    assert costs.draft_curve("mtp")[5] < 8.0


def test_times_and_counts_of_nothing_do_not_stay() -> None:
    """A device that waited for nothing once, and a copying method that had nothing to say at first."""
    knowledge = Knowledge({"ngram": 7})
    for step in range(400):
        knowledge.see_step(0, 1, [OFF], 0.0, 1.0, 0.0 if step < 3 else 2.0)
        knowledge.see_window(("ngram", 7), "answer", ("ngram",) * (0 if step % 5 else 5), 0)
    assert knowledge.learnt.costs[0].wait[1].value == pytest.approx(2.0, rel=0.01)
    assert knowledge.learnt.drafted["ngram", "answer"].value == pytest.approx(1.0, rel=0.4)


@pytest.mark.parametrize("odd", [0.0, -1.0, 1e-320, math.inf, math.nan])
@pytest.mark.parametrize("fixed_rows", [True, False])
def test_no_odd_time_ends_the_choosing(odd: float, fixed_rows: bool) -> None:
    for times in ((0.1, 1.0, odd), (0.1, odd, 0.2), (odd, 1.0, 0.2), (odd, odd, None)):
        tuner, sequence = Tuner({"ngram": 7, "mtp": 3}, fixed_rows=fixed_rows), Sequence(1, request())
        for step in range(120):
            method, depth = tuner.choose(sequence, 1)
            tuner.see_window(sequence, 1, (method, depth), (method,) * depth, depth // 2)
            draft_ms, verify_ms, wait_ms = times if step % 4 < 2 else (0.1, 1.0, 0.2)
            tuner.known.see_step(step, 1 + depth, [(method, depth)], draft_ms, verify_ms, wait_ms)
        assert all(math.isfinite(rate) and rate > 0 for rate in tuner.known.rates("answer", 1, 0).values())


def test_other_contexts_begin_with_what_is_known() -> None:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    replay_tuned(texts_of([REASONING], 1, 1, 1000), tuner)
    near = tuner.known.rates("answer", 1, 0)
    assert tuner.known.rates("answer", 1, 3) == near
    tuner.known.see_step(3 * 4096, 1, [OFF], 0.0, 2 * VERIFY_MS[1])
    far = tuner.known.rates("answer", 1, 3)
    assert far[OFF] == pytest.approx(near[OFF] / 2, rel=0.02) and far["mtp", 5] < near["mtp", 5]


@pytest.mark.parametrize(("step_ms", "fewest", "most"), [(1.0, 8, 30), (50.0, 60, 110)])
def test_quick_steps_are_decided_about_seldom(step_ms: float, fewest: int, most: int) -> None:
    """A decision takes the host a millisecond or more, as long as such a step."""
    tuner, sequence = Tuner({"mtp": 3}), Sequence(1, request())
    decided = set()
    for at in range(400):
        method, depth = tuner.choose(sequence, 1)
        tuner.see_window(sequence, 1, (method, depth), (method,) * depth, min(depth, 2))
        tuner.known.see_step(at, 1 + depth, [(method, depth)], 0.1 * step_ms * depth, step_ms)
        decided.add(tuner.work_of(sequence.phase, 1).decided_at)
    assert fewest <= len(decided) <= most


def test_a_host_that_the_device_waits_for_makes_drafting_worth_more() -> None:
    """The device's own times, and what passes between two steps: a small model on a fast card is bound by the host."""
    choices = {}
    for waits in (False, True):
        tuner, sequence = Tuner({"mtp": 3}, fixed_rows=True), Sequence(1, request())
        random_numbers, drafted = random.Random(3), 0
        for at in range(600):
            method, depth = tuner.choose(sequence, 1)
            stood = next((n for n in range(depth) if random_numbers.random() > 0.6), depth)
            tuner.see_window(sequence, 1, (method, depth), (method,) * depth, stood)
            device_ms = (0.9 * depth, 1.0 + 0.02 * depth)
            whole_ms = max(3.0, sum(device_ms))
            wait_ms = whole_ms - sum(device_ms) if waits and at else None
            tuner.known.see_step(at, 1 + depth, [(method, depth)], *device_ms, wait_ms)
            drafted += depth > 0 and at >= 300
        choices[waits] = drafted
    assert choices[True] > 250 and choices[False] < 100


def test_settings_are_kept() -> None:
    assert Tuner({}, TunerSettings(margin=0.5)).settings.margin == 0.5
    assert Tuner({}).choose(Sequence(1, request()), 1) == OFF


def test_costs_are_worked_out_anew_when_one_has_moved() -> None:
    """Noise changes nothing that was told; a cost that moves, a new one, and other knowledge do."""
    known = Knowledge({"mtp": 3, "ngram": 7, "ngram+mtp": 7}, fixed_rows=True)
    for _ in range(9):
        known.see_step(0, 4, [("mtp", 3)], 1.0, 5.0)
    told = known.step_ms("answer", 1, 0)
    known.see_step(0, 4, [("mtp", 3)], 1.01, 5.01)
    assert known.step_ms("answer", 1, 0) is told
    for _ in range(9):
        known.see_step(0, 4, [("mtp", 3)], 2.0, 5.0)
    dearer = known.step_ms("answer", 1, 0)
    assert all(dearer[arm] > told[arm] + 0.2 for arm in (("mtp", 3), ("ngram+mtp", 3))), "and what it is part of"
    for _ in range(2):
        known.see_step(0, 1, [OFF], 0.0, 2.0)
    assert known.step_ms("answer", 1, 0)[OFF] == pytest.approx(2.0)
    known.costs_of(0).verify[1] = Mean(3.0, 5)
    assert known.step_ms("answer", 1, 0)[OFF] == pytest.approx(3.0)
    known.learnt = known.nothing_learnt()
    assert known.step_ms("answer", 1, 0) == {}

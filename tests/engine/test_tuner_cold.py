"""A tuner that begins with nothing on quick steps: drafters tell of each other, few hearings, quick second thoughts."""

from __future__ import annotations

import random

import pytest

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.acceptance import Acceptance, Kin
from localspec.engine.knowledge import ECHO
from localspec.engine.step_costs import OFF, Arm, graph_rows
from localspec.engine.tuner import Tuner, TunerSettings
from localspec.scheduler.sequence import Sequence

LIMITS = {"ngram": 15, "good": 7, "poor": 7, "dear": 7}
DEAR_MS = 0.5


def cost_ms(arm: Arm) -> tuple[float, float]:
    """To draft, and to verify together with the wait for the host: a step of a small model."""
    method, depth = arm
    return (0.1 + 0.07 * depth + DEAR_MS * (method == "dear") if depth else 0.0), 1.1


def cold_tuner() -> Tuner:
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    for arm in tuner.foreseen():
        tuner.known.see_ahead(arm, graph_rows(1 + arm[1]), *cost_ms(arm))
    tuner.reset()
    return tuner


def sequence_of(number: int = 1) -> Sequence:
    return Sequence(number, Request("", (1,), Sampling(), 1, 10**9, ()))


def run(tuner: Tuner, steps: int, seed: int, rates: dict[str, float], right: float = 0.0) -> dict[str, int]:
    """Steps of a text; how many each method got. right: share of the tokens that the text's own n-grams say."""
    generator, sequence, counts = random.Random(seed), sequence_of(), dict.fromkeys((*LIMITS, "off"), 0)
    for at in range(steps):
        method, depth = tuner.choose(sequence, 1)
        counts[method.split("+")[-1]] += 1
        rate = right if method == "ngram" else rates.get(method, 0.0)
        stood = next((place for place in range(depth) if generator.random() >= rate), depth)
        tuner.see_window(sequence, 1, (method, depth), (method,) * depth, stood)
        tuner.see_shadow(sequence, 1, 0, False, False)
        for _ in range(stood + 1):
            tuner.see_text(sequence, 1, False, generator.random() < right)
        tuner.known.see_step(at, graph_rows(1 + depth), [(method, depth) if depth else OFF], *cost_ms((method, depth)))
    return counts


def test_a_drafter_that_was_not_heard_is_taken_to_be_like_its_kin() -> None:
    kin, heard, silent, alone = Kin(), Acceptance(), Acceptance(), Acceptance()
    for member in (heard, silent):
        kin.add(member)
    before = silent.rate(0)
    for _ in range(40):
        heard.see(3, 0)
    assert silent.rate(0) < 0.5 * before and alone.rate(0) == before
    assert silent.rate(0) == pytest.approx(heard.rate(0), abs=0.15)


def test_a_far_worse_drafter_is_found_out() -> None:
    kin, good, bad = Kin(), Acceptance(), Acceptance()
    for member in (good, bad):
        kin.add(member)
    for _ in range(30):
        good.see(3, 2)
        bad.see(3, 0)
    assert good.rate(0) > bad.rate(0) + 0.4


def test_what_was_counted_before_a_restart_is_a_drafters_lead() -> None:
    kin, member = Kin(), Acceptance()
    for _ in range(30):
        member.see(2, 2)
    rate = member.rate(0)
    member.kin = Kin()
    kin.add(member)
    kin.add(Acceptance())
    assert member.lead > 0.5 and member.rate(0) == pytest.approx(rate, abs=0.1)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_drafter_is_used_most_from_the_start_and_a_dear_one_hardly_heard(seed: int) -> None:
    counts = run(cold_tuner(), 400, seed, {"good": 0.75, "poor": 0.5, "dear": 0.7})
    assert counts["good"] > 300 and counts["dear"] < 40 and counts["ngram"] < 20, counts


def test_copies_alone_need_more_than_a_lucky_run() -> None:
    settings = TunerSettings()
    copies, other = (settings.margin_of(arm, ("good", 3), is_dear=True) for arm in (("ngram", 7), ("poor", 3)))
    assert copies > 2 * other > 2 * settings.margin
    for arm, is_dear in ((("good", 4), True), (OFF, True), (("ngram", 7), False), (("poor", 3), False)):
        assert settings.margin_of(arm, ("good", 3), is_dear) == settings.margin
    tuner = cold_tuner()
    run(tuner, 60, 1, {"good": 0.6})
    counts = run(tuner, 60, 2, {"good": 0.6}, right=0.35)
    assert counts["ngram"] < 12, counts


def test_what_brings_less_than_expected_is_compared_before_its_time() -> None:
    tuner = cold_tuner()
    run(tuner, 200, 1, {"good": 0.8, "poor": 0.75})
    work = tuner.work_of("answer", 1)
    assert work.is_dear and work.in_use == "good"
    work.decided_at, work.paid_every_steps = work.step, 1000
    counts = run(tuner, 60, 2, {"good": 0.0, "poor": 0.75})
    assert counts["good"] < 40, counts


def test_what_keeps_its_pace_is_not_compared_again() -> None:
    """Windows vary; a few short ones of what is still expected to do best cost no decision."""
    tuner = cold_tuner()
    run(tuner, 200, 1, {"good": 0.8})
    work = tuner.work_of("answer", 1)
    decided = set()
    for seed in range(60):
        run(tuner, 1, seed, {"good": 0.8})
        decided.add(work.decided_at)
    assert len(decided) < 12


def test_a_text_that_changes_says_nothing_of_drafters() -> None:
    """Only a drafter's own change makes the others start over."""
    tuner = cold_tuner()
    run(tuner, 120, 1, {"good": 0.75, "poor": 0.5, "dear": 0.7})
    seen = dict(tuner.learnt.acceptance["good", "answer"].now.__dict__)
    heard = dict(tuner.work_of("answer", 1).heard_at)
    tuner._alarm("answer")
    assert tuner.learnt.acceptance["good", "answer"].now.seen == seen["seen"]
    assert tuner.work_of("answer", 1).heard_at == heard and tuner.work_of("answer", 1).alarmed
    other = tuner.known.acceptance_of("poor", "answer")
    other.see(2, 2)
    tuner._alarm("answer", of="good")
    assert not any(other.now.seen) and any(tuner.learnt.acceptance["good", "answer"].now.seen)


def test_where_copies_are_in_use_one_drafter_is_heard_for_all() -> None:
    tuner = cold_tuner()
    run(tuner, 60, 1, {"good": 0.7, "poor": 0.65, "dear": 0.7})
    work = tuner.work_of("answer", 1)
    work.current, work.hearing = ("ngram", 7), None
    prices = tuner.known.prices("answer", 1, 0)
    work.heard_at = {"good": work.step, "ngram": work.step}
    assert all(tuner._hearings.due_in(work, method, prices) > 0 for method in ("good", "poor", "dear"))
    work.heard_at = {"good": work.step - 2000}
    due = [method for method in ("good", "poor", "dear") if tuner._hearings.due_in(work, method, prices) <= -900]
    assert due == ["good"]
    assert tuner.known.prices(ECHO, 1, 0).best["good"]


def test_a_drafter_that_might_win_is_heard_until_it_is_known() -> None:
    """Listed last and the best: the one that was used first keeps the others away only while they could not win."""
    counts = run(cold_tuner(), 900, 4, {"good": 0.5, "poor": 0.8})
    assert counts["poor"] > 600, counts
    kin, member = Kin(), Acceptance()
    kin.add(member)
    kin.add(Acceptance())
    before = member.hope(3)
    for _ in range(40):
        member.see(3, 1)
    assert member.hope(3) < 0.6 * before

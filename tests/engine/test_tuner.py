"""The tuner on simulated streams with a known cost staircase: near the best fixed choice, never far below plain."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.acceptance import Acceptance, StepCosts
from localspec.engine.tuner import OFF, Arm, Tuner
from localspec.scheduler.sequence import Sequence

Rates = dict[str, tuple[float, ...]]
REASONING: Rates = {"mtp": (0.92, 0.91, 0.78, 0.83, 0.84, 0.77), "ngram": (0.3, 0.5, 0.6)}
PROSE: Rates = {"mtp": (0.6, 0.5, 0.45, 0.4), "ngram": (0.02, 0.1)}
HOPELESS: Rates = {"mtp": (0.12, 0.1), "ngram": (0.0,)}
LIMITS = {"mtp": 7, "ngram": 15}


def cost_ms(arm: Arm) -> float:
    """A staircase as a card has it: nearly flat to 8 rows, a step above."""
    verify = 4.5 * (1 + 0.015 * arm[1]) if arm[1] < 8 else 5.4
    return verify + (0.45 * arm[1] if arm[0] == "mtp" else 0.02)


def best_fixed(rates: Rates) -> float:
    def rate(arm: Arm) -> float:
        tokens, survival = 1.0, 1.0
        for position in range(arm[1]):
            known = rates[arm[0]]
            survival *= known[min(position, len(known) - 1)]
            tokens += survival
        return tokens / cost_ms(arm)

    arms = [OFF, *((method, depth) for method, limit in LIMITS.items() for depth in range(1, limit + 1))]
    return max(map(rate, arms))


@dataclass
class Stream:
    """Steps of one sequence whose drafts are accepted at given rates."""

    tuner: Tuner
    seed: int

    def run(self, rates: Rates, tokens: int) -> list[tuple[int, float]]:
        generator = random.Random(self.seed)
        sequence = Sequence(1, Request("", (1,), Sampling(), 1, 10**9, ()))
        steps: list[tuple[int, float]] = []
        emitted = 0
        while emitted < tokens:
            arm = self.tuner.choose(sequence, 1)
            accepted = 0
            while accepted < arm[1]:
                known = rates[arm[0]]
                if generator.random() >= known[min(accepted, len(known) - 1)]:
                    break
                accepted += 1
            ms = cost_ms(arm) * (1 + generator.gauss(0, 0.03))
            self.tuner.see(sequence, 1, arm, arm[1], accepted, ms)
            steps.append((accepted + 1, ms))
            emitted += accepted + 1
        return steps


def rate_of(steps: list[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in steps) / sum(ms for _, ms in steps)


@pytest.mark.parametrize("rates", [REASONING, PROSE, HOPELESS], ids=["reasoning", "prose", "hopeless"])
def test_settles_near_the_best_fixed_choice(rates: Rates) -> None:
    ratios = [rate_of(Stream(Tuner(dict(LIMITS)), seed).run(rates, 8000)) / best_fixed(rates) for seed in range(5)]
    assert sum(ratios) / len(ratios) > 0.95


def test_follows_a_change_of_work() -> None:
    stream = Stream(Tuner(dict(LIMITS)), seed=3)
    for rates in (REASONING, PROSE, REASONING, HOPELESS):
        steps = stream.run(rates, 6000)
        assert rate_of(steps[len(steps) // 3 :]) / best_fixed(rates) > 0.93


def test_never_far_below_plain_where_drafting_cannot_help() -> None:
    steps = Stream(Tuner(dict(LIMITS)), seed=1).run(HOPELESS, 12000)
    plain = 1 / cost_ms(OFF)
    window: list[tuple[int, float]] = []
    for step in steps[200:]:
        window.append(step)
        while sum(tokens for tokens, _ in window) > 2000:
            window.pop(0)
        if sum(tokens for tokens, _ in window) > 1990:
            assert rate_of(window) > 0.96 * plain


def test_wishes_come_first() -> None:
    tuner = Tuner(dict(LIMITS))
    asked = Sequence(1, Request("", (1,), Sampling(), 1, 9, (), drafter="mtp", depth=3))
    assert tuner.choose(asked, 1) == ("mtp", 3)
    asked = Sequence(1, Request("", (1,), Sampling(), 1, 9, (), drafter="off"))
    assert tuner.choose(asked, 1) == OFF
    tuner.default_drafter, tuner.default_depth = "ngram", 99
    assert tuner.choose(Sequence(1, Request("", (1,), Sampling(), 1, 9, ())), 1) == ("ngram", 15)


def test_explains_itself() -> None:
    tuner = Tuner(dict(LIMITS))
    Stream(tuner, 1).run(PROSE, 500)
    assert any("answer, 1 active" in line and "tok/s" in line for line in tuner.explain())


def test_acceptance_counts_only_what_was_reached() -> None:
    acceptance = Acceptance(smoothing=0.01)
    for _ in range(400):
        acceptance.see(drafted=3, accepted=1)
    assert acceptance.rate(0) > 0.97 and acceptance.rate(1) < 0.03
    assert len(acceptance.rates) == 2, "position 3 was never reached"
    assert acceptance.tokens_per_step(3) == pytest.approx(2.0, abs=0.1)


def test_costs_are_told_from_neighbours() -> None:
    costs = StepCosts(smoothing=1.0)
    assert costs.of("mtp", 3) is None
    costs.see("off", 0, 4.0)
    assert costs.of("mtp", 3) == 4.0
    costs.see("mtp", 4, 6.0)
    assert costs.of("mtp", 2) == pytest.approx(5.0) and costs.of("mtp", 6) == pytest.approx(7.0)

"""What a choice would have done with a text, counted by hand."""

from __future__ import annotations

import pytest

from localspec.engine.step_costs import OFF, Arm
from localspec.engine.text_replay import ENOUGH_TOKENS, KEPT_TOKENS, Policy, RecentText, in_question, replayed_rate

MTP, NGRAM, BOTH = ("mtp", 3), ("ngram", 15), ("ngram+mtp", 15)


def text_of(runs: list[int]) -> RecentText:
    """For each run one token that nothing foretold, then so many that the text's own n-grams say."""
    text = RecentText()
    for run in runs:
        text.see(False, False)
        for place in range(run):
            text.see(place >= 8, True)
    return text


def rate(text: RecentText, usual: Arm, echo: Arm, late: bool = False, tokens: float = 3.0) -> float:
    return replayed_rate(text, Policy(usual, echo, lambda arm: 1.0 if arm == OFF else 2.0, lambda *_: tokens, late))


def test_plain_and_copies_are_counted() -> None:
    text = text_of([0] * 64)
    assert rate(text, OFF, OFF) == pytest.approx(1.0) and rate(text, NGRAM, NGRAM) == pytest.approx(0.5)
    assert rate(text, MTP, MTP) == pytest.approx(1.5, rel=0.05)
    # A window of one token, then one with the whole run of fifteen and the token behind it.
    assert rate(text_of([15] * 8), NGRAM, NGRAM) == pytest.approx(16 / 2, rel=0.15)


def test_a_chain_drafts_with_its_second_part_until_the_match_is_long() -> None:
    chain, copies = rate(text_of([60] * 5), BOTH, BOTH), rate(text_of([60] * 5), MTP, MTP)
    assert 3 * copies / 2 < chain < 16 / 2
    assert rate(text_of([2] * 60), BOTH, BOTH) == pytest.approx(rate(text_of([2] * 60), MTP, MTP))


def test_a_late_plan_is_one_window_behind() -> None:
    """The window behind a break is planned as if there were none: n-grams get it, which say nothing."""
    text = text_of([14, *[0] * 200])
    assert rate(text, MTP, NGRAM, late=True) < rate(text, MTP, NGRAM)


def test_it_keeps_little_and_says_when_it_knows_too_little() -> None:
    text = text_of([0] * (ENOUGH_TOKENS - 1))
    assert not text.is_enough(None)
    text = text_of([0] * ENOUGH_TOKENS)
    assert text.is_enough(False) and not text.is_enough(True)
    text = text_of([50] * 40)
    assert len(text.right) == KEPT_TOKENS and text.is_enough(True)
    text.forget_old()
    assert len(text.right) == len(text.sure) < KEPT_TOKENS


def test_few_choices_come_into_question() -> None:
    rates = {
        OFF: 1.0,
        **{("mtp", depth): float(depth) for depth in range(1, 8)},
        NGRAM: 0.5,
        ("ngram", 3): 0.4,
        BOTH: 2,
    }
    assert in_question(rates, ("mtp", 2)) == sorted([OFF, ("mtp", 2), ("mtp", 7), NGRAM, ("ngram", 3), BOTH])

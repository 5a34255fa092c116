"""What a choice would have done with a text, counted by hand."""

from __future__ import annotations

import random

import pytest

from localspec.engine.step_costs import OFF, Arm
from localspec.engine.text_replay import BLOCK_TOKENS, ENOUGH_TOKENS, KEPT_BLOCKS, Policy, RecentText, in_question

MTP, NGRAM, BOTH = ("mtp", 3), ("ngram", 15), ("ngram+mtp", 15)


def text_of(runs: list[int], late: bool = False) -> RecentText:
    """For each run one token that nothing foretold, then so many that the text's own n-grams say."""
    text = RecentText(late)
    for run in runs:
        text.see(1, False, False)
        for place in range(run):
            text.see(1, place >= 8, True)
    return text


def rate(text: RecentText, usual: Arm, echo: Arm, tokens: float = 3.0) -> float:
    costs = {arm: 1.0 if arm == OFF else 2.0 for arm in (usual, echo)}
    policy = Policy(usual, echo)
    return text.rates([policy], costs, lambda *_: tokens)[policy]


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
    runs = [14, *[0] * 200]
    assert rate(text_of(runs, late=True), MTP, NGRAM) < rate(text_of(runs), MTP, NGRAM)


def test_it_keeps_little_and_says_when_it_knows_too_little() -> None:
    text = text_of([0] * (ENOUGH_TOKENS - 1))
    assert not text.is_enough(None)
    text = text_of([0] * ENOUGH_TOKENS)
    assert text.is_enough(False) and not text.is_enough(True)
    text = text_of([50] * 80)
    assert text.num_tokens == KEPT_BLOCKS * BLOCK_TOKENS and text.is_enough(True)
    text.forget_old()
    assert text.num_tokens < ENOUGH_TOKENS


def test_a_choice_goes_on_where_it_stopped() -> None:
    """Asked in between, after tokens were forgotten, or once at the end: the same counts."""
    runs = [0, 3, 40, 2, 0, 25, 9, 0, 61] * 14
    asked, text = RecentText(late=True), text_of(runs, late=True)
    for number, run in enumerate(runs):
        asked.see(1, False, False)
        for place in range(run):
            asked.see(1, place >= 8, True)
        if number % 5 == 4:
            rate(asked, MTP, BOTH)
    assert asked.first > 0, "more than is kept"
    assert rate(asked, MTP, BOTH) == pytest.approx(rate(text, MTP, BOTH), rel=0.01)


def test_texts_of_several_sequences_do_not_break_each_other() -> None:
    """Their tokens land in turns; a run of one goes on behind a window of the other."""
    together = RecentText()
    for _ in range(20):
        for place in range(-1, 30):
            together.see(1, place >= 8, place >= 0)
            together.see(2, False, False)
    alone, plain = rate(text_of([30] * 20), NGRAM, NGRAM), rate(text_of([0] * 620), NGRAM, NGRAM)
    assert rate(together, NGRAM, NGRAM) == pytest.approx(2 / (1 / alone + 1 / plain), rel=0.05)


def test_what_others_bring_counts_as_it_is_known_now() -> None:
    text = text_of([0] * 320)
    assert rate(text, MTP, MTP, tokens=3.0) == pytest.approx(1.5, rel=0.02)
    assert rate(text, MTP, MTP, tokens=1.2) == pytest.approx(0.6, rel=0.02)


def test_it_tells_when_runs_begin_more_often_or_end_sooner() -> None:
    generator = random.Random(4)

    def changes(text: RecentText, enter: float, stay: float) -> int:
        count, right = 0, False
        for _ in range(600):
            right = generator.random() < (stay if right else enter)
            count += text.see(1, False, right)
        return count

    text = RecentText()
    changes(text, 0.05, 0.9)
    assert changes(text, 0.05, 0.9) == 0
    assert changes(text, 0.4, 0.98) >= 1
    assert changes(text, 0.0, 0.0) >= 1


def test_few_choices_come_into_question() -> None:
    rates = {
        OFF: 1.0,
        **{("mtp", depth): float(depth) for depth in range(1, 8)},
        NGRAM: 0.5,
        ("ngram", 3): 0.4,
        BOTH: 2,
    }
    assert in_question(rates, ("mtp", 2)) == sorted([OFF, ("mtp", 2), ("mtp", 7), NGRAM, ("ngram", 3), BOTH])


def test_behind_copies_only_the_best_drafters_come_into_question() -> None:
    names = ("eagle3", "mtp", "dspark")
    rates = {OFF: 1.0, NGRAM: 0.5, ("ngram+ngram_disk", 3): 0.6}
    rates |= {(name, depth): 2.0 - place + 0.1 * depth for place, name in enumerate(names) for depth in (1, 2)}
    rates |= {(f"ngram+{name}", depth): 0.1 for name in names for depth in (2, 5)}
    found = in_question(rates, ("ngram+dspark", 5))
    best = [(name, 2) for name in names]
    behind = [(f"ngram+{name}", depth) for name in names[:2] for depth in (2, 5)]
    assert found == sorted([OFF, NGRAM, ("ngram+ngram_disk", 3), *best, *behind, ("ngram+dspark", 5)])


def test_nothing_is_gone_through_for_what_copies_nothing() -> None:
    text = text_of([0, 3, 1] * 40)
    assert rate(text, BOTH, NGRAM) == rate(text, MTP, OFF) == pytest.approx(1.5), "no match is long"
    assert not text._tallies
    rate(text, NGRAM, NGRAM)
    assert len(text._tallies) == 1

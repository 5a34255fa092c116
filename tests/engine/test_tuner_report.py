"""The tuner's state as records: each drafter's best depth, reasons, freshness; telling changes nothing."""

from __future__ import annotations

import copy
import dataclasses

from localspec.api.codec import from_json, to_json
from localspec.api.tuning import TunerReport
from localspec.engine import tuner_store
from localspec.engine.tuner import Tuner
from localspec.engine.tuner_report import report
from tests.engine.tuner_stream import HOPELESS, LIMITS, PROSE, REASONING, Kind, Text, replay_tuned, step_ms


def taught(kind: Kind = REASONING) -> Tuner:
    """With one sequence at a time and nothing that repeats itself for long, so that there is one kind of work."""
    tuner = Tuner(dict(LIMITS), fixed_rows=True)
    replay_tuned([Text([(kind, 1500)], 3)], tuner)
    tuner.work.pop(("echo", 1), None)
    return tuner


def test_a_new_tuner_has_nothing_to_tell() -> None:
    assert report(Tuner(LIMITS)) == TunerReport("off", 0, "not started", False, ())


def test_each_drafter_is_told_once_at_its_best_depth() -> None:
    tuner = taught()
    (choice,) = report(tuner).choices
    assert (choice.phase, choice.active, choice.context_from_tokens) == ("answer", 1, 0)
    names = [candidate.drafter for candidate in choice.candidates]
    assert sorted(names) == ["mtp", "ngram", "ngram+mtp", "off"] and "mtp" in names[0] and "mtp" in choice.drafter
    assert choice.reason.startswith("measured ×") and choice.decisions == tuner.work["answer", 1].step
    for candidate in choice.candidates:
        # Of a width that never ran the cost is hoped to be that of the widest that did.
        bound = 1.0 if candidate.measured_steps else 2.0
        assert abs(candidate.step_ms - sum(step_ms([(candidate.drafter, candidate.depth)])[1:])) < bound
        assert abs(candidate.tok_per_s - candidate.tokens_per_step / candidate.step_ms * 1e3) < 0.5


def test_plain_is_said_to_be_fastest_where_drafts_fail() -> None:
    tuner = taught(dataclasses.replace(HOPELESS, mtp=(0.02, 0.02)))
    (choice,) = report(tuner).choices
    assert (choice.drafter, choice.depth) == ("off", 0)
    assert "plain is fastest" in choice.reason or choice.reason.startswith("trying")


def test_figures_age_and_those_of_an_earlier_run_have_no_age() -> None:
    tuner = taught(PROSE)
    (choice,) = report(tuner).choices
    ages = {c.drafter: c.steps_ago for c in choice.candidates}
    assert all(ages[name] is not None and 0 <= ages[name] <= tuner.learnt.steps for name in ("off", "mtp"))
    again = Tuner(dict(LIMITS), fixed_rows=True)
    tuner_store.fill(again, tuner_store.to_json(tuner))
    (restored,) = report(again).choices
    assert {c.steps_ago for c in restored.candidates} == {None}
    assert all(c.measured_steps for c in restored.candidates if c.drafter == "off")
    assert restored.decisions == 0


def test_a_choice_by_hand_is_told_with_its_greatest_depth() -> None:
    tuner = taught()
    tuner.default_drafter = "ngram"
    told = report(tuner)
    assert told.by_hand and (told.drafter, told.depth, told.reason) == ("ngram", 15, "chosen by hand")
    tuner.default_depth = 4
    assert report(tuner).depth == 4


def test_telling_changes_no_choice_and_survives_the_wire() -> None:
    tuner = taught()
    before = copy.deepcopy(tuner_store.to_json(tuner))
    told = report(tuner)
    assert tuner_store.to_json(tuner) == before
    assert from_json(TunerReport, to_json(told)) == told

"""Confidence-scheduled verification: estimates, which rows are chosen, what it gains, and that no token moves."""

from __future__ import annotations

import itertools
import math
import random
from pathlib import Path

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import GRAPH_ROWS, MAX_ROWS, MAX_SLOTS, Draft, GraphKey, SlotResult
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.confidence import Calibration, ExpectedTokens, RowBudget, added_tokens, best_budget
from localspec.engine.verify_schedule import VerifySchedule, chosen, cut, layout_rows, share, survivals
from localspec.runner.inputs import cut_to_draft, layout_numbers
from tests.engine.test_identity import repeated_prompt
from tests.engine.tuner_stream import MTP_MS, VERIFY_MS
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
CURVE = [VERIFY_MS[1], *(VERIFY_MS[GraphKey.for_shape(rows, 1).num_rows] for rows in range(1, MAX_ROWS + 1))]


def draft_of(confidence: list[list[float]], width: int) -> Draft:
    counts = torch.tensor([len(row) for row in confidence])
    padded = torch.tensor([row + [0.0] * (width - len(row)) for row in confidence])
    inside = torch.arange(width) < counts[:, None]
    ids = torch.where(inside, torch.arange(width) + 10, -1)
    return Draft(ids, torch.zeros_like(ids), counts, ("mtp",), padded)


def test_confidence_is_calibrated_from_what_was_accepted() -> None:
    """A drafter that is too sure of itself, and worse at its third token."""
    generator = random.Random(1)
    known = Calibration()
    for _ in range(4000):
        confidence = [generator.uniform(0.2, 0.98) for _ in range(3)]
        truth = [value**2 * (0.5 if k == 2 else 1.0) for k, value in enumerate(confidence)]
        accepted = next((k for k in range(3) if generator.random() >= truth[k]), 3)
        known.see(confidence, accepted)
    for value in (0.4, 0.7, 0.9):
        assert known.chance(value, 0) == pytest.approx(value**2, abs=0.1)
        assert known.chance(value, 2) == pytest.approx(value**2 / 2, abs=0.15)
    assert known.survivals([0.9, 0.9])[1] == pytest.approx(known.chance(0.9, 0) * known.chance(0.9, 1))


def test_one_step_moves_little_and_nothing_overflows() -> None:
    known = Calibration()
    known.see([1.0, 0.0], 0)
    assert 0.3 < known.chance(0.9, 0) < 0.95
    for _ in range(500):
        known.see([1.0] * 15, 15)
    assert 0.99 < known.chance(1.0, 14) <= 1.0 and math.isfinite(known.slope)


def window_of(names: tuple[str, ...], confidence: tuple[float, ...], accepted: int, verified: int = 3) -> SlotResult:
    return SlotResult(
        slot=0, sequence_id=0, token_ids=(1,), origins=("target",), num_drafted=verified, num_accepted=accepted,
        drafter="mtp", finish="", drafted_by=names[:verified], offered_by=names, confidence=confidence,
    )  # fmt: skip


def test_what_was_cut_counts_for_the_budget_and_teaches_nothing() -> None:
    one, other = VerifySchedule(), VerifySchedule()
    told = one.see(window_of(("mtp",) * 4, (0.9, 0.8, 0.7, 0.6), 1, verified=2))
    other.see(window_of(("mtp",) * 2, (0.9, 0.8), 1, verified=2))
    assert len(told) == 4 and one.calibrations == other.calibrations
    assert one.see(window_of((), (), 0, verified=0)) == []


def test_what_a_card_reads_follows_what_is_learnt_in_place() -> None:
    schedule = VerifySchedule(host_knows=False)
    before = schedule.weights(("mtp", "ngram"), torch.device("cpu"))
    kept = [part.clone() for part in before]
    for _ in range(40):
        told = schedule.see(window_of(("mtp",) * 3, (0.9, 0.6, 0.8), 0))
        schedule.see_step([told], [1.0] * 17, 0.1)
    after = schedule.weights(("mtp", "ngram"), torch.device("cpu"))
    assert [part.data_ptr() for part in after] == [part.data_ptr() for part in before]
    assert after[1][0, 0] < kept[1][0, 0] - 0.1 and torch.equal(after[1][1], kept[1][1])


def test_the_rows_of_the_next_step_are_a_captured_number_that_pays() -> None:
    budget = RowBudget(verify_ms=CURVE, draft_ms=0.5)
    assert budget.rows(4) == MAX_ROWS
    for _ in range(20):
        budget.see([[0.95, 0.9, 0.85]] * 4)
    assert budget.rows(4) == MAX_ROWS
    for _ in range(60):
        budget.see([[0.3, 0.05, 0.01]] * 4)
    assert budget.rows(4) in GRAPH_ROWS and budget.rows(4) < 12
    for _ in range(3):
        budget.see([[0.31, 0.06, 0.01]] * 4)
    assert budget.rows(4) == budget.rows(4) < 12
    assert budget.rows(2) == MAX_ROWS, "nothing is known of two"


def test_the_device_estimates_what_the_host_does() -> None:
    schedule = VerifySchedule()
    for accepted in (0, 2, 1, 3, 0):
        schedule.see(window_of(("mtp",) * 3, (0.9, 0.6, 0.8), accepted))
    draft = draft_of([[0.9, 0.5, 0.99], [], [0.3], [1.0, 0.0]], 3)
    told = survivals(draft, schedule.weights(draft.origin_names, torch.device("cpu")))
    for row, values in enumerate([[0.9, 0.5, 0.99], [], [0.3], [1.0, 0.0]]):
        expected = schedule.calibrations["mtp"].survivals(values)
        torch.testing.assert_close(told[row, : len(values)], torch.tensor(expected), rtol=1e-4, atol=1e-6)
        assert (told[row, len(values) :] == 0).all()


@pytest.mark.parametrize("budget", [0, 1, 3, 7, 15])
def test_the_likeliest_drafts_are_shared_out(budget: int) -> None:
    """Against every way of sharing, for many random windows; ties too."""
    generator = random.Random(budget)
    for _ in range(20):
        windows = []
        for _ in range(MAX_SLOTS):
            values = sorted(generator.choice([0.9, 0.5, generator.random()]) for _ in range(generator.randrange(5)))
            windows.append(values[::-1])
        width = max(1, *map(len, windows))
        chances = torch.tensor([row + [0.0] * (width - len(row)) for row in windows])
        counts = torch.tensor([len(row) for row in windows])
        found = share(chances, counts, budget).tolist()
        assert all(0 <= n <= len(row) for n, row in zip(found, windows, strict=True))
        assert sum(found) == min(budget, int(counts.sum()))
        value = sum(sum(row[:n]) for n, row in zip(found, windows, strict=True))
        best = max(
            sum(sum(row[:n]) for n, row in zip(ways, windows, strict=True))
            for ways in itertools.product(*(range(len(row) + 1) for row in windows))
            if sum(ways) <= budget
        )
        assert value == pytest.approx(best, abs=1e-5)
        assert added_tokens(windows)[budget] == pytest.approx(best, abs=1e-5)


def test_equals_are_broken_by_place_and_not_by_value() -> None:
    chances = torch.full((4, 3), 0.5)
    counts = torch.tensor([3, 3, 0, 3])
    assert share(chances, counts, 4).tolist() == [2, 1, 0, 1]
    assert share(chances * 0 + 1e-9, counts, 4).tolist() == [2, 1, 0, 1]


def test_the_budget_follows_the_staircase() -> None:
    """A step that is dear to climb is only climbed for enough."""
    stairs = [1.0] * 9 + [1.5] * 8
    assert best_budget(added_tokens([[0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]]), 1, stairs, 0.0) == 7
    assert best_budget(added_tokens([[0.99] * 15]), 1, stairs, 0.0) == 15
    assert best_budget(added_tokens([[0.01]]), 1, [1.0 + 0.1 * rows for rows in range(17)], 0.0) == 0
    assert best_budget(added_tokens([[0.9] * 9] * 4), 4, [1.0] * 17, 0.0) == 12
    assert best_budget([0.0] * MAX_ROWS, 16, [1.0] * 17, 0.0) == 0


def test_smoothed_counters_forget() -> None:
    counters = ExpectedTokens()
    counters.see([[0.5, 0.4]])
    assert counters.added[:4] == pytest.approx([0.0, 0.5, 0.9, 0.9])
    for _ in range(40):
        counters.see([[0.1]])
    assert counters.added[2] == pytest.approx(0.1, abs=0.01)


def test_rows_that_only_the_device_knows_are_laid_out_as_a_plan_lays_them_out() -> None:
    from localspec.core.records import SlotPlan, VerifyPlan

    counts = torch.tensor([2, 0, 5, 1])
    for slots in ((0, 1, 2, 3), (2,), (0, 3)):
        plan = VerifyPlan(tuple(SlotPlan(slot, slot, "mtp", 7, 9) for slot in slots))
        cut_plan = cut_to_draft(plan, counts.tolist())
        pad_to = cut_plan.graph_key.num_rows
        in_step = torch.tensor([slot in slots for slot in range(4)])
        rows = layout_rows(counts, in_step, pad_to)
        numbers = layout_numbers(cut_plan, pad_to)
        assert rows.slots.tolist() + rows.offsets.tolist() == numbers[: 2 * pad_to]
        assert rows.counts.tolist() == numbers[2 * pad_to + 4 :]
        for slot in slots:
            assert rows.starts[slot] == numbers[2 * pad_to + slot]


def test_what_is_cut_is_told() -> None:
    draft = draft_of([[0.9, 0.8, 0.7], [0.6], [], [0.99, 0.98]], 3)
    schedule = VerifySchedule(budget=RowBudget([1.0 + 0.4 * rows for rows in range(17)]))
    best = chosen(draft, [0, 1, 3], MAX_ROWS, schedule)
    assert best.num_offered is not None and best.num_offered.tolist() == [3, 1, 0, 2]
    assert best.num_drafts.tolist() == [2, 0, 0, 2]
    assert ((best.token_ids >= 0).sum(dim=1) == best.num_drafts).all()
    wide = draft_of([[0.9] * 15] * 4, 15)
    assert int(chosen(wide, [0, 1, 2, 3], MAX_ROWS, VerifySchedule()).num_drafts.sum()) == MAX_ROWS - 4
    assert int(chosen(wide, [0, 1, 3], 8, VerifySchedule(host_knows=False)).num_drafts.sum()) == 8 - 3
    assert cut(draft, torch.tensor([9, 9, 9, 9])).num_drafts.tolist() == [3, 1, 0, 2]


PUBLISHED = (0.917, 0.913, 0.774, 0.83, 0.838, 0.772, 0.77)
"""Conditional acceptance of MTP by position."""
Window = tuple[list[float], list[float]]


def synthetic_windows(num: int, seed: int, steps: int) -> list[list[Window]]:
    """Chances and draws of each draft. Some places of a text are easier than others, about the published rates."""
    generator = random.Random(seed)
    found: list[list[Window]] = []
    for _ in range(steps):
        eases = [generator.gauss(0, 1.3) for _ in range(num)]
        chances = [[1 / (1 + math.exp(-(math.log(r / (1 - r)) * 1.25 + ease))) for r in PUBLISHED] for ease in eases]
        found.append([(row, [generator.random() for _ in row]) for row in chances])
    return found


def stood(window: Window, count: int) -> int:
    return next((k for k in range(count) if window[1][k] >= window[0][k]), count)


def fixed_rate(steps: list[list[Window]], depth: int, draft_ms: float) -> float:
    num = len(steps[0])
    tokens = sum(num + sum(stood(window, depth) for window in windows) for windows in steps)
    return tokens / (len(steps) * (CURVE[num * (1 + depth)] + draft_ms))


def scheduled_rate(steps: list[list[Window]], depth: int, draft_ms: float) -> float:
    """The number of rows is fixed one step earlier from smoothed counters, as a card must, and shared by confidence:
    the chance as a drafter knows it, blurred."""
    num, generator = len(steps[0]), random.Random(1)
    counters, calibration = ExpectedTokens(), Calibration()
    tokens, total_ms, budget = 0, 0.0, num
    for windows in steps:
        told = [[min(max(c + generator.gauss(0, 0.05), 0.01), 0.99) for c in row[:depth]] for row, _ in windows]
        chances = [calibration.survivals(row) for row in told]
        counts = share(torch.tensor(chances), torch.full((num,), depth), budget).tolist()
        tokens += num + sum(stood(window, n) for window, n in zip(windows, counts, strict=True))
        total_ms += CURVE[num + budget] + draft_ms
        for row, window, n in zip(told, windows, counts, strict=True):
            calibration.see(row[:n], stood(window, n))
        counters.see(chances)
        budget = best_budget(counters.added, num, CURVE, draft_ms)
    return tokens / total_ms


@pytest.mark.parametrize(("num", "block_gain", "chain_gain"), [(2, 0.99, 0.99), (3, 1.08, 1.02), (4, 1.04, 0.99)])
def test_sharing_rows_by_confidence_beats_every_fixed_depth_of_many(
    num: int, block_gain: float, chain_gain: float
) -> None:
    """With the costs of a card: a drafter whose block costs the same at any depth, and one that pays for each draft.
    Two sequences have rows for all of seven drafts, so there is nothing to gain, and next to nothing is lost."""
    steps = synthetic_windows(num, num, 1500)
    room = (MAX_ROWS - num) // num
    for of_block, least in ((True, block_gain), (False, chain_gain)):
        best = max(fixed_rate(steps, d, 3 * MTP_MS if of_block else d * MTP_MS) for d in range(1, room + 1))
        depth = 7 if of_block else min(room + (num == 3), 7)
        gain = scheduled_rate(steps, depth, 3 * MTP_MS if of_block else depth * MTP_MS) / best
        assert gain > least, (num, of_block, gain)


def test_scheduled_steps_change_no_token(tmp_path: Path) -> None:
    """Four sequences that ask for more rows than there are, greedy and sampled, against plain decoding."""
    torch.set_num_threads(1)
    ops = reference_ops()
    model = load_model(random_checkpoint("llama", 3, tmp_path / "m"), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=512)
    drafters = {name: drafter_module(name).tiny(setup) for name in ("ngram", "mtp")}
    with token_engine(model, ops, 512, drafters) as parts:
        laws = [Sampling(), Sampling(temperature=0.9, top_k=20), Sampling(), Sampling(temperature=0.7, min_p=0.02)]
        prompts = [repeated_prompt(seed, 40 + 31 * seed) for seed in range(4)]
        for _ in range(2):
            asked = [
                [make_request(p, drafter=name, sampling=laws[i], seed=i, max_tokens=30) for i, p in enumerate(prompts)]
                for name in ("off", "auto")
            ]
            plain, scheduled = run(parts, asked[0]), run(parts, asked[1])
            assert [item.token_ids for item in scheduled] == [item.token_ids for item in plain]
        drafted = sum(drafter.drafted_tokens for drafter in parts.metrics.snapshot().drafters)
        assert drafted > 0, "nothing was drafted, so nothing was tested"
        schedule = parts.loop.stages.drafters.schedule
        assert schedule is not None and schedule.budget.verify_ms and schedule.calibrations

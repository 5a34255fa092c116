"""The processed law against a plain float64 reading of its definition, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.sampling.candidates import RowParameters
from localspec.sampling.noise import row_keys
from localspec.sampling.processors import ProcessorPlan, adjust, law
from tests.sampling.tables import draft_of, sampling_table, sequence_state, verify_rows

pytestmark = pytest.mark.torch


def kept_ids(logits: Tensor, sampling: Sampling) -> set[int]:
    """Temperature, min-p, top-k, top-p as DESIGN section 4 orders them, in float64 over a sorted list."""
    probabilities = (logits.to(torch.float64) / sampling.temperature).softmax(dim=0).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))
    order = [token for token in order if probabilities[token] >= sampling.min_p * probabilities[order[0]]]
    order = order[: sampling.top_k or None]
    total = sum(probabilities[token] for token in order)
    kept, mass = [], 0.0
    for token in order:
        if kept and sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        kept.append(token)
        mass += probabilities[token]
    return set(kept)


CASES = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8),
    Sampling(temperature=1.3, top_p=0.93),
    Sampling(temperature=0.9, min_p=0.07),
    Sampling(temperature=0.6, min_p=0.02, top_k=5, top_p=0.5),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, top_k=128),
    Sampling(temperature=2.0, top_k=5000, top_p=0.999),
    Sampling(temperature=1.0, top_p=0.0001),
    Sampling(temperature=0.0),
]


def parameters(samplings: list[Sampling]) -> RowParameters:
    return RowParameters.gather(sampling_table(samplings, 4), torch.arange(len(samplings)))


@pytest.mark.parametrize("vocab_size", [63, 1000, 3001])
def test_filters_keep_what_the_definition_keeps(vocab_size: int) -> None:
    torch.manual_seed(vocab_size)
    logits = torch.randn(len(CASES), vocab_size) * 2
    for row, sampling in enumerate(CASES):
        check_filters(logits, row, sampling)


def check_filters(logits: Tensor, row: int, sampling: Sampling) -> None:
    vocab_size = logits.shape[1]
    for samplings, at in (([sampling], 0), (CASES, row)):
        rows = logits[row : row + 1] if len(samplings) == 1 else logits
        result = law(rows, parameters(samplings), ProcessorPlan.general(vocab_size))
        assert result.ids is not None
        if sampling.temperature == 0:
            continue
        kept = result.values[at] > -torch.inf
        found = result.ids[at]
        assert set(found[kept].tolist()) == kept_ids(logits[row], sampling), sampling
        assert torch.equal(result.values[at, kept], logits[row, found[kept]] / sampling.temperature)


def test_every_plan_gives_the_same_token() -> None:
    """A slot's token must not change because another slot's parameters ask for a wider plan."""
    torch.manual_seed(1)
    for trial in range(40):
        vocab_size = 777 if trial % 2 else 2600
        logits = torch.randn(len(CASES), vocab_size).mul(4)
        if trial % 4 > 1:
            logits = logits.round().div(2)  # many equal logits
        keys = row_keys(torch.arange(len(CASES)), torch.full((len(CASES),), trial))
        general = law(logits, parameters(CASES), ProcessorPlan.general(vocab_size)).draw(keys)
        for row, sampling in enumerate(CASES):
            plan = ProcessorPlan.for_requests([sampling], vocab_size)
            alone = law(logits[row : row + 1], parameters([sampling]), plan).draw(keys[row : row + 1])
            assert alone.tolist() == [general[row].item()], sampling


def test_plans_are_the_cheapest_that_serve() -> None:
    assert ProcessorPlan.for_requests([Sampling(), Sampling(top_k=5)], 1000) == ProcessorPlan(
        sampled=False, bias=False, penalties=False, min_p=False
    )
    assert ProcessorPlan.for_requests([Sampling(), Sampling(temperature=1, top_k=50)], 1000).num_candidates == 128
    assert ProcessorPlan.for_requests([Sampling(temperature=1, top_k=50)], 63).num_candidates == 63
    mixed = [Sampling(temperature=1, top_k=50), Sampling(temperature=1)]
    assert ProcessorPlan.for_requests(mixed, 1000).num_candidates == 1000
    assert ProcessorPlan.for_requests([Sampling(temperature=1)], 1000).num_candidates == 0


def test_greedy_takes_the_lowest_id_of_equals_and_survives_nan() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [math.nan, 1.0, math.nan, 2.0], [math.nan] * 4, [math.inf, 0, 1, 2]])
    samplings = [Sampling()] * 4
    state = sequence_state([[1]] * 4, samplings, 4)
    draft = draft_of([[]] * 4, 0)
    rows = verify_rows(state, draft, [1, 1, 1, 1], 4)
    for plan in (ProcessorPlan.for_requests(samplings, 4), ProcessorPlan.general(4)):
        adjusted = adjust(logits, rows, draft, state.sampling, plan)
        drawn = law(adjusted, RowParameters.gather(state.sampling, rows.slots), plan).draw(
            row_keys(torch.zeros(4, dtype=torch.int64), rows.positions)
        )
        assert drawn.tolist() == [1, 3, 0, 0]


def test_penalties_and_bias_see_the_drafts_before_each_row() -> None:
    vocab_size = 12
    sampling = Sampling(
        repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5, logit_bias=((3, -2.0), (11, 1.0))
    )
    state = sequence_state([[1, 2, 2], [5]], [sampling, sampling], vocab_size)
    state.sampling.output_counts[0, 4] = 2
    draft = draft_of([[6, 6, -1], [2]], 3)
    rows = verify_rows(state, draft, [3, 2], 6)
    torch.manual_seed(0)
    logits = torch.randn(6, vocab_size)
    adjusted = adjust(logits, rows, draft, state.sampling, ProcessorPlan.general(vocab_size))
    outputs = [{4: 2}, {4: 2, 6: 1}, {4: 2, 6: 2}, {}, {2: 1}]
    prompts = [{1, 2}, {1, 2}, {1, 2}, {5}, {5}]
    for row in range(5):
        expected = logits[row].clone()
        expected[3] -= 2.0
        expected[11] += 1.0
        for token in prompts[row] | set(outputs[row]):
            expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
        for token, count in outputs[row].items():
            expected[token] -= 0.5 * count + 0.25
        torch.testing.assert_close(adjusted[row], expected)


def test_grammar_mask_comes_before_everything() -> None:
    state = sequence_state([[1]], [Sampling(temperature=1.0)], 8)
    draft = draft_of([[]], 0)
    rows = verify_rows(state, draft, [1], 1)
    allowed = torch.tensor([[False, True, False, True, False, False, False, False]])
    plan = ProcessorPlan.general(8)
    adjusted = adjust(torch.ones(1, 8), rows, draft, state.sampling, plan, allowed)
    drawn = {
        law(adjusted, RowParameters.gather(state.sampling, rows.slots), plan)
        .draw(row_keys(torch.tensor([seed]), rows.positions))
        .item()
        for seed in range(40)
    }
    assert drawn == {1, 3}

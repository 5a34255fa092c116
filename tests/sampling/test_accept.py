"""Coupled sampling: identity with plain decoding, the law itself, cuts, frozen slots and what is committed."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import StepResult
from localspec.core.state import SequenceState
from localspec.kernels.ops import LENGTH, RUNNING, STOPPED
from localspec.sampling.accept import accept
from localspec.sampling.processors import ProcessorPlan
from tests.sampling.tables import (
    LogitFunction,
    answer,
    draft_of,
    draw_rows_together,
    hashed_logits,
    row_logits,
    sequence_state,
    step,
    verify_rows,
)
from tests.sampling.test_processors import kept_ids

pytestmark = pytest.mark.torch

VOCAB = 40
LAWS = [
    Sampling(seed=5),
    Sampling(temperature=1.0, seed=11),
    Sampling(temperature=0.8, top_k=10, top_p=0.9, seed=-3),
    Sampling(
        temperature=1.2,
        min_p=0.02,
        presence_penalty=0.6,
        frequency_penalty=0.3,
        repetition_penalty=1.2,
        logit_bias=((3, 1.5),),
        seed=2**40,
    ),
]
PROMPTS = [[1, 2, 3], [4], [9, 9, 9, 9, 2], [30, 31]]


def plain_answers(logits: LogitFunction, samplings: Sequence[Sampling], **limits: object) -> list[list[int]]:
    """Each slot decoded alone, one row a step, with the plan of that request alone."""
    answers = []
    for prompt, sampling in zip(PROMPTS, samplings, strict=True):
        state = sequence_state([prompt], [sampling], VOCAB, **limits)  # type: ignore[arg-type]
        while not bool(state.frozen[0]):
            step(logits, state, [[]], VOCAB, plan=ProcessorPlan.for_requests([sampling], VOCAB))
        answers.append(answer(state, 0))
    return answers


def guesses(kind: str, rng: random.Random, state: SequenceState, slot: int, truth: list[int], depth: int) -> list[int]:
    done = int(state.lengths[slot] - state.prompt_lengths[slot])
    future = truth[done : done + depth]
    future += [rng.randrange(VOCAB) for _ in range(depth - len(future))]
    if kind == "random":
        return [rng.randrange(VOCAB) for _ in range(depth)]
    if kind == "partly":
        return [token if rng.random() < 0.7 else rng.randrange(VOCAB) for token in future]
    return future


@pytest.mark.parametrize("kind", ["perfect", "partly", "random"])
def test_tokens_are_those_of_plain_decoding_whatever_is_drafted(kind: str) -> None:
    """Four slots with four laws, mixed widths, zero-draft steps, slots that sit out, any padding."""
    logits = hashed_logits(VOCAB)
    expected = plain_answers(logits, LAWS, max_tokens=60)
    rng = random.Random(kind)
    state = sequence_state(PROMPTS, LAWS, VOCAB, max_tokens=60)
    accepted = drafted = 0
    while not bool(state.frozen.all()):
        depths = [rng.choice([0, 0, 1, 2, 3]) for _ in PROMPTS]
        windows = [0 if rng.random() < 0.15 else 1 + depth for depth in depths]
        drafts = [
            guesses(kind, rng, state, slot, expected[slot], depth) if windows[slot] else []
            for slot, depth in enumerate(depths)
        ]
        if not sum(windows):
            continue
        lengths = state.lengths.clone()
        result = step(logits, state, drafts, VOCAB, window_rows=windows, num_rows=sum(windows) + rng.randrange(3))
        assert torch.equal(state.lengths - lengths, result.num_emitted)
        accepted += int(result.num_accepted.sum())
        drafted += sum(len(row) for row in drafts)
    assert [answer(state, slot) for slot in range(4)] == expected
    assert drafted > 60
    if kind == "random":
        assert accepted < drafted / 4
    if kind == "partly":
        assert drafted / 4 < accepted < drafted


def test_output_counts_follow_the_answer() -> None:
    state = sequence_state(PROMPTS, LAWS, VOCAB, max_tokens=30)
    while not bool(state.frozen.all()):
        step(hashed_logits(VOCAB), state, [[1, 2], [], [9], [3]], VOCAB)
    for slot in range(4):
        counts = Counter(answer(state, slot))
        assert len(answer(state, slot)) == 30
        assert {t: n for t, n in enumerate(state.sampling.output_counts[slot].tolist()) if n} == counts


def run_window(sampling: Sampling, drafts: list[int], seeds: int, logits: LogitFunction, vocab: int) -> StepResult:
    """One step of many slots that differ in their seed only."""
    samplings = [Sampling(**{**sampling.__dict__, "seed": seed}) for seed in range(seeds)]
    state = sequence_state([[1, 2]] * seeds, samplings, vocab, capacity=16)
    draft = draft_of([drafts] * seeds, len(drafts))
    rows = verify_rows(state, draft, [1 + len(drafts)] * seeds, seeds * (1 + len(drafts)))
    per_row = row_logits(logits, verify_rows(state, draft, [1 + len(drafts)], 1 + len(drafts)), state, vocab)
    return accept(per_row.repeat(seeds, 1), rows, draft, state, logprobs=None)


def law_of(logits: LogitFunction, history: list[int], sampling: Sampling, vocab: int, prompt: int) -> list[float]:
    """The processed law in float64 from its definition."""
    values = logits(history).to(torch.float64)
    output = Counter(history[prompt:])
    for token in set(history):
        values[token] = (
            values[token] / sampling.repetition_penalty
            if values[token] > 0
            else values[token] * sampling.repetition_penalty
        )
    for token, count in output.items():
        values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    kept = sorted(kept_ids(values, sampling))
    probabilities = torch.zeros(vocab, dtype=torch.float64)
    probabilities[kept] = (values[kept] / sampling.temperature).softmax(dim=0)
    return probabilities.tolist()


JOINT_LAWS = {
    "temperature": Sampling(temperature=1.1),
    "top-k": Sampling(temperature=1.0, top_k=3),
    "top-p": Sampling(temperature=1.4, top_p=0.85),
    "min-p": Sampling(temperature=1.4, min_p=0.15),
    "penalties": Sampling(
        temperature=1.0, presence_penalty=0.5, frequency_penalty=0.7, repetition_penalty=1.3, top_p=0.97
    ),
}


@pytest.mark.parametrize("name", list(JOINT_LAWS))
def test_joint_law_of_a_window(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chi-square of the first three tokens, drafted and then finished by steps without drafts."""
    draw_rows_together(monkeypatch)
    vocab, count, sampling = 5, 10_000, JOINT_LAWS[name]
    logits = hashed_logits(vocab, scale=0.8)
    first = torch.tensor(law_of(logits, [1, 2], sampling, vocab, 2)).argmax().item()
    second = torch.tensor(law_of(logits, [1, 2, int(first)], sampling, vocab, 2)).argmax().item()
    samplings = [Sampling(**{**sampling.__dict__, "seed": seed}) for seed in range(count)]
    state = sequence_state([[1, 2]] * count, samplings, vocab, capacity=12, max_tokens=3)
    draft_ids = [int(first), int(second)]
    rows_seen: dict[tuple[int, ...], torch.Tensor] = {}
    while not bool(state.frozen.all()):
        draft = draft_of([draft_ids] * count, 2)
        rows = verify_rows(state, draft, [3] * count, 3 * count)
        seen = [tuple(history) for history in window_histories(state, draft_ids)]
        for history in set(seen) - rows_seen.keys():
            rows_seen[history] = logits(history)
        accept(torch.stack([rows_seen[history] for history in seen]), rows, draft, state, logprobs=None)
    observed = Counter(tuple(row) for row in state.history[:, 2:5].tolist())
    chi_square, cells = 0.0, 0
    for tokens in itertools.product(range(vocab), repeat=3):
        probability = 1.0
        for place in range(3):
            probability *= law_of(logits, [1, 2, *tokens[:place]], sampling, vocab, 2)[tokens[place]]
        if probability == 0:
            assert tokens not in observed
        elif probability * count >= 5:
            chi_square += (observed[tokens] - probability * count) ** 2 / (probability * count)
            cells += 1
    assert cells > 8
    assert chi_square < cells + 5 * (2 * cells) ** 0.5


def window_histories(state: SequenceState, drafts: list[int]) -> list[list[int]]:
    """What each row of windows with the same drafts sees, slot by slot."""
    texts = [row[:length] for row, length in zip(state.history.tolist(), state.lengths.tolist(), strict=True)]
    return [text + drafts[:offset] for text in texts for offset in range(len(drafts) + 1)]


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=4)])
def test_a_random_draft_is_accepted_as_often_as_its_probability(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The canary: a verifier that believes its own drafts accepts more."""
    draw_rows_together(monkeypatch)
    vocab, count = 7, 4000
    logits = hashed_logits(vocab)
    law = law_of(logits, [1, 2], sampling, vocab, 2)
    for token in range(vocab):
        result = run_window(sampling, [token], count, logits, vocab)
        rate = result.num_accepted.sum().item() / count
        assert abs(rate - law[token]) < 4.5 * (law[token] * (1 - law[token]) / count) ** 0.5 + 1e-9


def test_stop_cuts_behind_itself_and_wins_over_the_limit() -> None:
    def counting(history: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((history[-1] + 1) % 10), 10).float()

    greedy = [Sampling()] * 4
    state = sequence_state([[0], [1], [3], [5]], greedy, 10, max_tokens=3, stop_ids=[4, 6])
    result = step(counting, state, [[1, 2, 3], [2, 3, 4], [4, 5, 6], [9]], 10)
    # 0 -> 1 2 3 (limit); 1 -> 2 3 4 (stop at the limit); 3 -> 4 (stop, the accepted drafts behind are dropped); 5 -> 6.
    assert result.token_ids.tolist() == [[1, 2, 3, -1], [2, 3, 4, -1], [4, -1, -1, -1], [6, -1, -1, -1]]
    assert result.num_emitted.tolist() == [3, 3, 1, 1]
    assert result.num_accepted.tolist() == [3, 3, 3, 0]
    assert result.finish.tolist() == [LENGTH, STOPPED, STOPPED, STOPPED]
    assert result.origins.tolist() == [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0]]
    assert result.origin_names == ("target", "test")
    assert state.frozen.all() and state.pending_rows.tolist() == [3, 3, 1, 1]
    before = state.history.clone()
    again = step(counting, state, [[1], [2], [3], [4]], 10)
    assert again.num_emitted.tolist() == [0] * 4 and again.finish.tolist() == [RUNNING] * 4
    assert again.num_accepted.tolist() == [0] * 4 and (again.token_ids == -1).all()
    assert torch.equal(state.history, before) and state.lengths.tolist() == [4, 4, 2, 2]
    assert state.pending_rows.tolist() == [0] * 4


def test_slots_outside_the_step_keep_everything() -> None:
    state = sequence_state(PROMPTS, LAWS, VOCAB)
    state.pending_rows.copy_(torch.tensor([2, 3, 4, 5]))
    before = [t.clone() for t in (state.history[1], state.lengths, state.remaining, state.sampling.output_counts)]
    result = step(hashed_logits(VOCAB), state, [[1], [], [], []], VOCAB, window_rows=[2, 0, 0, 0], num_rows=4)
    assert result.num_emitted[1:].tolist() == [0, 0, 0] and result.num_emitted[0] >= 1
    assert state.pending_rows.tolist() == [int(result.num_emitted[0]), 3, 4, 5]
    assert torch.equal(state.history[1], before[0])
    assert torch.equal(state.lengths[1:], before[1][1:]) and torch.equal(state.remaining[1:], before[2][1:])
    assert torch.equal(state.sampling.output_counts[1:], before[3][1:])


def test_a_draft_without_a_row_of_its_own_is_not_accepted() -> None:
    def constant(history: Sequence[int]) -> torch.Tensor:
        return torch.tensor([0.0, 1.0, 0.0])

    state = sequence_state([[0]], [Sampling()], 3)
    result = step(constant, state, [[1, 1, 1, 1]], 3, window_rows=[3])
    assert result.num_accepted.tolist() == [2] and result.num_emitted.tolist() == [3]
    result = step(constant, state, [[1, -1, 1]], 3)
    assert result.num_accepted.tolist() == [1] and result.num_emitted.tolist() == [2]


@pytest.mark.parametrize("rows_at_once", [99, 5])
def test_logprobs_are_those_of_the_law_each_token_was_drawn_from(
    rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows together, and some at a time, the last time fewer."""
    monkeypatch.setattr("localspec.sampling.accept.MOST_VALUES", rows_at_once * VOCAB)
    logits = hashed_logits(VOCAB)
    expected = plain_answers(logits, LAWS, max_tokens=6)
    state = sequence_state(PROMPTS, LAWS, VOCAB, max_tokens=6)
    result = step(logits, state, [row[:5] for row in expected], VOCAB, logprobs=3)
    assert result.num_emitted.tolist() == [6] * 4
    assert result.logprobs is not None and result.top_ids is not None and result.top_logprobs is not None
    for slot, sampling in enumerate(LAWS):
        prompt = PROMPTS[slot]
        unfiltered = sampling if sampling.temperature else Sampling(temperature=1.0)
        for place, token in enumerate(expected[slot]):
            base = biased(logits, sampling)
            law = torch.tensor(law_of(base, prompt + expected[slot][:place], unfiltered, VOCAB, len(prompt)))
            law = law.double().log()
            assert abs(result.logprobs[slot, place] - law[token]) < 1e-4
            best = law.topk(3)
            torch.testing.assert_close(result.top_logprobs[slot, place].double(), best.values, atol=1e-4, rtol=0)
            assert result.top_ids[slot, place].tolist() == best.indices.tolist()


def biased(logits: LogitFunction, sampling: Sampling) -> LogitFunction:
    def function(history: Sequence[int]) -> torch.Tensor:
        values = logits(history)
        for token, value in sampling.logit_bias:
            values[token] += value
        return values

    return function


def test_logprobs_of_a_greedy_slot_do_not_depend_on_the_others() -> None:
    """Beside a slot with top-k only the best few tokens are ordered; the greedy slot's law is still the whole one."""
    vocab = 400
    logits = hashed_logits(vocab, scale=0.3)
    samplings = [Sampling(), Sampling(temperature=1.0, top_k=5, seed=2)]
    found = []
    for chosen in (samplings, samplings[:1]):
        state = sequence_state([[1, 2], [3]][: len(chosen)], chosen, vocab, max_tokens=4)
        plan = ProcessorPlan.for_requests(chosen, vocab)
        result = step(logits, state, [[]] * len(chosen), vocab, plan=plan, logprobs=2)
        assert result.logprobs is not None and result.top_logprobs is not None
        found.append((result.logprobs[0, 0].item(), result.top_logprobs[0, 0].tolist()))
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    assert found[1][0] == pytest.approx(logits([1, 2]).log_softmax(0).max().item(), abs=1e-5)

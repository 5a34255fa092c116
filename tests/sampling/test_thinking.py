"""The thinking budget against a plain reading of the rule, for every offset of a window and every draft."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import ThinkingRule
from localspec.core.state import SequenceState
from localspec.sampling.accept import accept
from localspec.sampling.thinking import FORCED_ORIGIN, ThinkingState, with_forced_drafts
from tests.sampling.tables import (
    LogitFunction,
    answer,
    draft_of,
    hashed_logits,
    row_logits,
    sequence_state,
    verify_rows,
)

pytestmark = pytest.mark.torch

VOCAB = 9
START, TOOL = (7,), (8, 8)


def ends_with(text: Sequence[int], marker: Sequence[int]) -> bool:
    return bool(marker) and list(text[-len(marker) :]) == list(marker)


def dictated(answer_ids: Sequence[int], rule: ThinkingRule, prompt: Sequence[int], close_ids: Sequence[int]) -> int:
    """Token that must follow `answer_ids`, -1 if free: reads the whole answer from its first token."""
    inside, thought, count = rule.open_at_start, [], 0
    text = list(prompt)
    for token in answer_ids:
        text.append(token)
        if not inside:
            if ends_with(text, rule.start_ids):
                inside, thought = True, []
            continue
        thought.append(token)
        count += 1
        if ends_with(thought, rule.end_ids):
            inside, count = False, count - len(rule.end_ids)
        elif ends_with(text, close_ids):
            inside = False
    if not inside or rule.budget_tokens is None or count < rule.budget_tokens:
        return -1
    said = max(size for size in range(len(rule.end_ids)) if size == 0 or ends_with(thought, rule.end_ids[:size]))
    return rule.end_ids[said]


def run(
    logits: LogitFunction,
    rules: Sequence[ThinkingRule | None],
    prompts: list[list[int]],
    seed: int,
    forced_drafts: bool,
) -> tuple[SequenceState, int]:
    """Answers of 40 tokens in windows of random widths with half-right drafts. Returns also the number of steps."""
    rng = random.Random(seed)
    samplings = [Sampling(temperature=1.0, seed=slot) for slot in range(len(rules))]
    state = sequence_state(prompts, samplings, VOCAB, max_tokens=40)
    thinking = ThinkingState.make(len(rules), 4, torch.device("cpu"))
    for slot, rule in enumerate(rules):
        thinking.fill(slot, replace(rule, close_ids=tuple(TOOL)) if rule is not None else None)
    steps = 0
    while not bool(state.frozen.all()):
        depths = [rng.choice([0, 1, 2, 4]) if seed else 0 for _ in rules]
        draft = draft_of([[rng.randrange(VOCAB) for _ in range(rng.randint(0, depth))] for depth in depths], 4)
        if forced_drafts:
            draft = with_forced_drafts(thinking, draft, torch.tensor(depths), state)
            assert draft.origin_names == ("test", FORCED_ORIGIN)
        windows = [1 + count for count in draft.num_drafts.tolist()]
        rows = verify_rows(state, draft, windows, sum(windows))
        accept(row_logits(logits, rows, state, VOCAB), rows, draft, state, logprobs=None, thinking=thinking)
        steps += 1
    return state, steps


RULES = {
    "one token": ThinkingRule(5, START, (6,), True),
    "three tokens": ThinkingRule(7, START, (6, 5, 6), True),
    "nothing allowed": ThinkingRule(0, START, (6, 5), True),
    "the model opens": ThinkingRule(3, START, (6,), False),
    "repeating marker": ThinkingRule(4, START, (6, 6, 5), True),
    "no budget": ThinkingRule(None, START, (6,), True),
}


@pytest.mark.parametrize("name", list(RULES))
def test_every_token_is_dictated_or_the_laws_own(name: str) -> None:
    rules = [RULES[name]] * 3 + [None]
    prompts = [[1, 2], [6, 5], [6], [3]]
    logits = hashed_logits(VOCAB, scale=1.0)
    plain, _ = run(logits, rules, prompts, 0, False)
    for seed, forced_drafts in ((1, False), (2, True), (3, True), (4, False)):
        state, _ = run(logits, rules, prompts, seed, forced_drafts)
        assert [answer(state, slot) for slot in range(4)] == [answer(plain, slot) for slot in range(4)]
    forced = 0
    for slot in range(3):
        said = answer(plain, slot)
        assert len(said) == 40
        for place, token in enumerate(said):
            due = dictated(said[:place], RULES[name], prompts[slot], TOOL)
            if due >= 0:
                assert token == due, (slot, place)
                forced += 1
    assert forced > 0 or name == "no budget"


def test_free_tokens_are_those_without_a_rule() -> None:
    """Up to the budget's end nothing changes."""
    logits = hashed_logits(VOCAB, scale=1.0)
    free, _ = run(logits, [None] * 2, [[1, 2], [3]], 0, False)
    bound, _ = run(logits, [ThinkingRule(12, (), (6, 5, 6), True)] * 2, [[1, 2], [3]], 5, True)
    for slot in range(2):
        assert answer(bound, slot)[:12] == answer(free, slot)[:12]
        assert answer(bound, slot)[12:] != answer(free, slot)[12:]


def test_the_end_is_drafted_and_costs_no_step() -> None:
    """With a marker of three tokens and no other drafts, the forced run takes one step instead of three."""
    rule = ThinkingRule(2, (), (6, 5, 4), True)
    state = sequence_state([[1]], [Sampling()], VOCAB, max_tokens=9)
    thinking = ThinkingState.make(1, 3, torch.device("cpu"))
    thinking.fill(0, rule)

    def ones(history: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor(1), VOCAB).float()

    emitted = []
    while not bool(state.frozen[0]):
        draft = with_forced_drafts(thinking, draft_of([[]], 4), torch.tensor([4]), state)
        rows = verify_rows(state, draft, [1 + int(draft.num_drafts[0])], 5)
        result = accept(row_logits(ones, rows, state, VOCAB), rows, draft, state, logprobs=None, thinking=thinking)
        emitted.append(int(result.num_emitted[0]))
        if emitted[-1] == 4:
            assert result.origins[0].tolist() == [2, 2, 2, 0, 0]
            assert result.origin_names[2] == FORCED_ORIGIN
    assert answer(state, 0) == [1, 1, 6, 5, 4, 1, 1, 1, 1]
    assert emitted == [1, 1, 4, 1, 1, 1]


def test_markers_are_checked() -> None:
    thinking = ThinkingState.make(2, 2, torch.device("cpu"))
    with pytest.raises(ValueError, match="longer than 2"):
        thinking.fill(0, ThinkingRule(3, (), (1, 2, 3), True))
    with pytest.raises(ValueError, match="end a thought"):
        thinking.fill(0, ThinkingRule(3, (), (), True))
    thinking.fill(1, ThinkingRule(3, (1,), (2,), True))
    thinking.fill(1, None)
    assert thinking.budgets.tolist() == [-1, -1] and not thinking.is_open.any()

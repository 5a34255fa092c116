"""What every drafter must keep, found by file name: shapes, silence, no trace of rejected rows, identical tokens."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS, Draft
from localspec.drafters import drafter_module, drafter_names
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.ops import Paging
from localspec.models import Model
from tests.drafters.session import Session, fixed_draft, random_target, tiny_drafter

pytestmark = pytest.mark.torch

NAMES = drafter_names()
TARGETS = ("llama", "qwen3_5")
LAWS = (
    Sampling(),
    Sampling(temperature=0.9, seed=4),
    Sampling(temperature=1.0, top_k=8, top_p=0.9, seed=9),
    Sampling(),
)
LIVELY = Sampling(temperature=2.5, seed=4)


@pytest.fixture(scope="module", params=TARGETS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return random_target(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=NAMES)
def session(request: pytest.FixtureRequest, model: Model) -> Session:
    return Session(model, tiny_drafter(request.param, model))


@pytest.fixture(scope="module")
def plain_answers(model: Model) -> list[list[int]]:
    """Of each slot, 24 tokens without drafts."""
    plain = Session(model, tiny_drafter("off", model))
    start_all(plain)
    for _ in range(24):
        plain.step([0, 0, 0, 0])
    return [plain.answer(slot) for slot in range(4)]


@pytest.fixture(scope="module")
def long_answer(model: Model) -> list[int]:
    """90 tokens of a lively law without drafts, in slot 1."""
    plain = Session(model, tiny_drafter("off", model))
    plain.start(1, prompts()[0], LIVELY)
    for _ in range(90):
        plain.step([0, 0])
    return plain.answer(1)


def prompts(seed: int = 0) -> list[list[int]]:
    """Texts that repeat themselves, so that n-gram matching has something to say."""
    rng = random.Random(seed)
    texts = []
    for length in (70, 5, 33, 2):
        phrase = [rng.randrange(120) for _ in range(7)]
        texts.append((phrase * 12)[:length])
    return texts


def start_all(session: Session, seed: int = 0) -> None:
    for slot, prompt in enumerate(prompts(seed)):
        session.start(slot, prompt, LAWS[slot])


def check_shape(session: Session, draft: Draft, by_slot: list[int], max_depth: int) -> None:
    assert draft.token_ids.shape == draft.origins.shape == (MAX_SLOTS, max_depth)
    assert draft.token_ids.dtype == draft.origins.dtype == draft.num_drafts.dtype == torch.int64
    assert draft.origin_names == session.drafter.origins
    assert all(0 <= origin < max(1, len(draft.origin_names)) for origin in draft.origins.flatten().tolist())
    for slot, (tokens, count) in enumerate(zip(draft.token_ids.tolist(), draft.num_drafts.tolist(), strict=True)):
        assert count <= min(by_slot[slot], session.drafter.max_depth)
        assert all(0 <= token < session.model.vocab_size for token in tokens[:count])
        assert all(token == -1 for token in tokens[count:])
    if draft.confidence is not None:
        assert draft.confidence.shape == draft.token_ids.shape and draft.confidence.dtype == torch.float32
        assert ((draft.confidence >= 0) & (draft.confidence <= 1.0001)).all()


def test_a_module_offers_what_a_drafter_needs() -> None:
    assert {"off", "ngram", "mtp"} <= set(NAMES)
    for name in NAMES:
        assert isinstance(drafter_module(name).needs_weights, bool)
    with pytest.raises(ValueError, match="ngram"):
        drafter_module("nothing")


def test_bounds_beyond_the_tables_are_the_tables_own(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are rounded up for graphs: at the end of a context, with drafts behind, they pass what tables hold."""
    start_all(session)
    seen: list[int] = []
    attention = ReferenceOps.attention

    def checked(ops: ReferenceOps, q: Tensor, k: Tensor, v: Tensor, paging: Paging, *rest: Any) -> Tensor:
        seen.append(paging.max_key_bound)
        assert paging.max_key_bound <= paging.block_tables.shape[1] * PAGE_TOKENS
        return attention(ops, q, k, v, paging, *rest)

    monkeypatch.setattr(ReferenceOps, "attention", checked)
    last = session.state.block_tables.shape[1] * PAGE_TOKENS - 1
    depths = dataclasses.replace(session.depths([5, 5, 5, 5]), length_bounds=(last,) * len(session.active))
    session.verify(session.drafter.propose(depths, session.state, session.cache))
    assert seen


def test_drafts_have_the_asked_for_shape(session: Session) -> None:
    start_all(session)
    assert session.drafter.name in NAMES and session.drafter.cache_spec.owner == session.drafter.name
    for by_slot, max_depth in (
        ([3, 0, 5, 1], 5),
        ([0, 0, 0, 0], 0),
        ([0, 0, 0, 0], 2),
        ([1, 1, 1, 1], 4),
        ([15] * 4, 15),
    ):
        draft = session.propose(by_slot, max_depth)
        check_shape(session, draft, by_slot, max_depth)
        session.verify(draft)


def test_propose_leaves_the_sequences_alone_and_repeats_itself(session: Session) -> None:
    start_all(session)
    session.step([2, 2, 2, 2])
    state = session.state
    tensors = {f.name: getattr(state, f.name) for f in dataclasses.fields(state) if f.name != "sampling"}
    tensors |= {f.name: getattr(state.sampling, f.name) for f in dataclasses.fields(state.sampling)}
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    first, second = session.propose([4, 4, 4, 4]), session.propose([4, 4, 4, 4])
    assert torch.equal(first.token_ids, second.token_ids)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, before[name]), name


def test_tokens_are_those_without_drafts(session: Session, plain_answers: list[list[int]]) -> None:
    """Mixed depths, steps without drafts, padding rows, a law for each slot."""
    start_all(session)
    rng = random.Random(1)
    for _ in range(24):
        depths = [rng.choice([0, 1, 2, 3]) for _ in range(4)]
        session.verify(session.propose(depths), padding=rng.randrange(3))
        session.verify(session.propose([0, 0, 0, 0])) if rng.random() < 0.2 else None
    for slot in range(4):
        assert len(session.answer(slot)) >= len(plain_answers[slot]) == 24
        assert session.answer(slot)[:24] == plain_answers[slot]


def test_rejected_rows_leave_no_trace(session: Session) -> None:
    """Wrong drafts at every step against no drafts at all: the next proposals are equal."""
    clean = Session(session.model, tiny_drafter(session.drafter.name, session.model))
    start_all(session)
    start_all(clean)
    rng = random.Random(2)
    for _ in range(6):
        clean.verify(fixed_draft([[]] * 4, 0))
        future = clean.state.history[torch.arange(4), clean.state.lengths - 1].tolist()
        wrong = [[(token + 1 + rng.randrange(100)) % 120 for _ in range(rng.choice([1, 2, 3]))] for token in future]
        result = session.verify(fixed_draft(wrong, 3))
        assert result.num_accepted.tolist() == [0] * 4
        assert torch.equal(session.state.lengths, clean.state.lengths)
        ours, theirs = session.propose([3, 3, 3, 3]), clean.propose([3, 3, 3, 3])
        assert torch.equal(ours.num_drafts, theirs.num_drafts)
        assert torch.equal(ours.token_ids, theirs.token_ids)
        if ours.confidence is not None and theirs.confidence is not None:
            torch.testing.assert_close(ours.confidence, theirs.confidence, rtol=1e-3, atol=1e-5)


def test_a_slot_given_to_another_sequence_forgets(session: Session) -> None:
    start_all(session)
    for _ in range(3):
        session.step([3, 3, 3, 3])
    fresh = Session(session.model, tiny_drafter(session.drafter.name, session.model))
    for each in (session, fresh):
        for slot in (2, 0):
            each.start(slot, prompts(5)[slot], LAWS[slot])
        each.active = [0, 2]
        each.verify(fixed_draft([[]] * 4, 0))
    ours, theirs = session.propose([4, 0, 4, 0]), fresh.propose([4, 0, 4, 0])
    assert torch.equal(ours.token_ids, theirs.token_ids)
    session.drafter.forget(0)
    session.start(0, [3], LAWS[0])
    draft = session.propose([4, 0, 4, 0])
    check_shape(session, draft, [4, 0, 4, 0], 4)
    assert torch.equal(draft.token_ids[2], theirs.token_ids[2])


def test_the_size_of_prompt_chunks_does_not_matter(session: Session) -> None:
    other = Session(session.model, tiny_drafter(session.drafter.name, session.model))
    for each, chunk in ((session, 64), (other, 13)):
        for slot, prompt in enumerate(prompts()):
            each.start(slot, prompt, LAWS[slot], chunk=chunk)
        each.step([0, 0, 0, 0])
    ours, theirs = session.propose([3] * 4), other.propose([3] * 4)
    assert torch.equal(ours.token_ids, theirs.token_ids)


def test_greedy_slots_get_the_same_whether_the_host_says_so_or_not(session: Session) -> None:
    for slot, prompt in enumerate(prompts()):
        session.start(slot, prompt)
    session.step([2, 2, 2, 2])
    depths = session.depths([3, 2, 3, 1])
    told = session.drafter.propose(dataclasses.replace(depths, sampled=False), session.state, session.cache)
    asked = session.drafter.propose(depths, session.state, session.cache)
    assert torch.equal(told.token_ids, asked.token_ids)
    if told.confidence is not None and asked.confidence is not None:
        torch.testing.assert_close(told.confidence, asked.confidence, rtol=1e-4, atol=1e-6)


def test_in_front_of_another_drafter_it_says_no_more(session: Session) -> None:
    start_all(session)
    session.step([1, 1, 1, 1])
    depths = session.depths([3, 3, 3, 3])
    alone = session.drafter.propose(depths, session.state, session.cache)
    first = session.drafter.propose(dataclasses.replace(depths, only_sure=True), session.state, session.cache)
    assert (first.num_drafts <= alone.num_drafts).all()
    inside = torch.arange(3) < first.num_drafts[:, None]
    assert torch.equal(first.token_ids[inside], alone.token_ids[inside])


def test_a_refusal_at_every_place_of_the_widest_window(session: Session, long_answer: list[int]) -> None:
    """Fifteen drafts that are right up to some place; between such steps the drafter is asked as well."""
    session.start(1, prompts()[0], LIVELY)
    for right in (0, 1, 2, 5, 9, 14, 15):
        done = len(session.answer(1))
        drafts = long_answer[done : done + 15]
        if right < 15:
            drafts[right] = (drafts[right] + 1) % 120
        result = session.verify(fixed_draft([[], drafts], 15))
        assert result.num_accepted[1] == right and result.num_emitted[1] == right + 1
        session.step([0, 2])
    length = len(session.answer(1))
    assert length > 50 and session.answer(1) == long_answer[:length]

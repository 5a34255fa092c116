"""A small model as drafter: itself is accepted always, foreign vocabularies meet where tokens spell the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localspec.api.types import Sampling
from localspec.drafters import draft_model
from localspec.drafters._vocabulary import VocabularyMap, compare, read_spellings
from localspec.formats.checkpoint import open_checkpoint
from localspec.models import Model
from tests.drafters.session import Session, random_target, setup_for

pytestmark = pytest.mark.torch
LAWS = [
    Sampling(),
    Sampling(temperature=4.0, seed=3),
    Sampling(temperature=3.0, top_k=9, top_p=0.9, seed=5),
    Sampling(temperature=3.0, min_p=0.05, seed=-1),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return random_target("llama", tmp_path_factory.mktemp("target"))


def test_a_model_as_its_own_draft_is_always_accepted(model: Model) -> None:
    session = Session(model, draft_model.make(model, None, setup_for(model)))
    for slot, law in enumerate(LAWS):
        session.start(slot, list(range(2, 9 + 20 * slot)), law)
    for depths in ([3, 3, 3, 3], [0, 1, 2, 3], [1, 0, 0, 0], [3, 3, 3, 3], [2, 3, 3, 2]):
        result = session.step(depths)
        assert result.num_accepted.tolist() == depths
        assert result.num_emitted.tolist() == [depth + 1 for depth in depths]


def test_a_greedy_draft_of_the_same_model_misses_sampled_tokens(model: Model) -> None:
    accepted = {}
    for greedy in (False, True):
        session = Session(model, draft_model.make(model, None, setup_for(model), greedy))
        for slot in range(4):
            session.start(slot, [7 + slot, 3], Sampling(temperature=4.0, seed=slot))
        accepted[greedy] = sum(int(session.step([3] * 4).num_accepted.sum()) for _ in range(5))
    assert accepted[False] == 60 and accepted[True] < 40


def test_a_permuted_vocabulary_is_accepted_where_it_has_the_token(model: Model) -> None:
    """The same model behind a renaming of its ids that leaves out one of each five."""
    order = torch.randperm(model.vocab_size, generator=torch.Generator().manual_seed(2))
    to_target = torch.where(order % 5 == 0, -1, order)

    class Renamed:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            return model.logits(hidden)[:, order]

        def forward(self, rows, cache, needs):  # type: ignore[no-untyped-def]
            return model.forward(replace(rows, token_ids=order[rows.token_ids]), cache, needs)

    vocabulary = VocabularyMap(to_target, order.argsort(), int((to_target >= 0).sum()))
    session = Session(model, draft_model.make(Renamed(), vocabulary, setup_for(model)))  # type: ignore[arg-type]
    for slot, law in enumerate(LAWS):
        session.start(slot, list(range(2, 30)), replace(law, top_p=1.0, top_k=0, min_p=0.0))
    missed = 0
    for _ in range(12):
        before = session.state.lengths.clone()
        result = session.step([3, 3, 3, 3])
        for slot in range(4):
            emitted = session.state.history[slot, int(before[slot]) : int(session.state.lengths[slot])]
            # The run ends at the first token that the draft cannot say, and nowhere else.
            assert all(token % 5 for token in emitted[:-1].tolist())
            if result.num_accepted[slot] < 3:
                missed += 1
                assert emitted[-1] % 5 == 0
    assert missed > 3


def tokenizer(folder: Path, vocabulary: dict[str, int], byte_level: bool, special: dict[str, int]) -> Path:
    folder.mkdir(exist_ok=True)
    decoder = {"type": "ByteLevel"} if byte_level else {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}
    added = [{"content": text, "id": number, "special": True} for text, number in special.items()]
    found = {"model": {"vocab": vocabulary}, "decoder": decoder, "added_tokens": added}
    (folder / "tokenizer.json").write_text(json.dumps(found), encoding="utf-8")
    return folder


def test_vocabularies_meet_where_tokens_spell_the_same(tmp_path: Path) -> None:
    ours = tokenizer(tmp_path / "a", {"a": 0, "Ġthe": 1, "Ċ": 2, "Ã": 3, "ing": 4, "thing": 5}, True, {"<|end|>": 6})
    theirs = tokenizer(
        tmp_path / "b", {"▁the": 0, "<0x0A>": 1, "<0xC3>": 2, "b": 3, "ing": 4, "a": 7}, False, {"<|end|>": 5}
    )
    target, draft = read_spellings(ours), read_spellings(theirs)
    assert target == {0: b"a", 1: b" the", 2: b"\n", 3: b"\xc3", 4: b"ing", 5: b"thing", 6: b"\0<|end|>"}
    found = compare(draft, target, (8, 7))
    assert found is not None and found.shared_tokens == 6
    assert found.draft_to_target.tolist() == [1, 2, 3, -1, 4, 6, -1, 0]
    assert found.target_to_draft.tolist() == [7, 0, 1, 2, 4, 4, 5]  # "thing" is read as its end "ing"
    assert compare(target, target, (7, 7)) is None
    assert compare(target, target, (7, 9)) is None
    with pytest.raises(ValueError, match="in common"):
        compare({0: b"x"}, {0: b"y"}, (1, 1))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"model": 3}', '{"model": {"vocab": {"a": -1}}}', '{"model": {"vocab": {"a": "b"}}}']
)
def test_tokenizers_are_not_trusted(tmp_path: Path, text: str) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        read_spellings(tmp_path)


def test_faults_are_named(model: Model, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing"):
        read_spellings(tmp_path)
    hybrid = random_target("qwen3_5", tmp_path / "hybrid")
    with pytest.raises(ValueError, match="recurrent"):
        draft_model.make(hybrid, VocabularyMap(torch.zeros(152).long(), torch.zeros(131).long(), 1), setup_for(model))
    with pytest.raises(ValueError, match="tokenizers"):
        draft_model.make(model, None, replace(setup_for(model), model=_Smaller()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="folder"):
        draft_model.build(setup_for(model))


class _Smaller:
    vocab_size = 5


def test_built_from_folders(tmp_path: Path) -> None:
    target = random_target("llama", tmp_path / "target")
    random_target("llama", tmp_path / "draft", seed=1)
    vocabulary = {chr(0x61 + index % 26) * (1 + index // 26): index for index in range(131)}
    tokenizer(tmp_path / "target", vocabulary, True, {})
    tokenizer(tmp_path / "draft", {text: 130 - index for text, index in vocabulary.items()}, True, {})
    setup = replace(
        setup_for(target, tmp_path / "draft"),
        checkpoint=open_checkpoint(tmp_path / "draft"),
        target_folder=tmp_path / "target",
    )
    session = Session(target, draft_model.build(setup))
    session.start(0, [1, 2, 3])
    assert session.propose([4]).num_drafts.tolist() == [4, 0, 0, 0]


@pytest.mark.parametrize("pause", [3, 40])
def test_after_a_pause_it_catches_up(model: Model, pause: int) -> None:
    """It reads nothing meanwhile, then sixteen tokens a step, and is right again."""
    read: list[int] = []

    class Counted:
        def __getattr__(self, name: str) -> object:
            return getattr(model, name)

        def forward(self, rows, cache, needs):  # type: ignore[no-untyped-def]
            read.append(int((rows.slots >= 0).sum()))
            return model.forward(rows, cache, needs)

    session = Session(model, draft_model.make(Counted(), None, setup_for(model)))  # type: ignore[arg-type]
    for slot in range(2):
        session.start(slot, list(range(2, 30)), Sampling(temperature=3.0, seed=slot))
    assert session.step([3, 3]).num_accepted.tolist()[:2] == [3, 3]
    del read[:]
    for _ in range(pause):
        session.step([0, 0])
    assert not read, "a drafter that is not asked costs nothing"
    for _ in range(-(-2 * (pause + 4) // 16) + 2):
        result = session.step([0, 3])
    assert result.num_accepted[1] == 3 and max(read) <= 16
    assert session.step([3, 3]).num_accepted.tolist()[1] == 3

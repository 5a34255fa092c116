"""Training in small: it learns, it resumes bit for bit, and it refuses what does not belong together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localspec.formats.checkpoint import read_config
from localspec.training.answers import Answer, AnswerStore, BatchPlan, epoch_batches
from localspec.training.drafting import DraftVocabulary, soft_loss
from localspec.training.loading import load_drafter
from localspec.training.recipe import Recipe, train
from localspec.training.trainer import Trainer, TrainPlan
from tests.training.common import CPU, KINDS, TinyTarget, drafter, tiny_target, written

pytestmark = pytest.mark.torch

PLAN = TrainPlan(steps=8, batches=BatchPlan(600, 64, 5), measure_every=4, save_every=3, learning_rate=3e-3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return tiny_target(tmp_path_factory.mktemp("target"), "qwen2", seed=2)


@pytest.fixture(scope="module")
def store(target: TinyTarget, tmp_path_factory: pytest.TempPathFactory) -> AnswerStore:
    return written(target, tmp_path_factory.mktemp("store"), count=80, tokens=16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tiny_drafter_learns(kind: str, target: TinyTarget, store: AnswerStore, tmp_path: Path) -> None:
    recipe = Recipe(
        kind, steps=20, seed=1, draft_vocab_size=130, tokens_per_batch=600, learning_rate=1e-2, block_size=5,
        mask_token_id=130, measure_every=10, save_every=20,
    )  # fmt: skip
    told: list[str] = []
    found = train(recipe, target.dense, read_config(target.folder), store, tmp_path, told.append)
    first, last = found.report["curve"][0], found.report["curve"][-1]
    assert last["loss"] < first["loss"]
    assert found.report["length"] > found.report["untrained_length"] + 0.05
    assert len(told) == 2 and "acceptance length" in told[-1]
    assert {each.name for each in tmp_path.iterdir()} >= {"config.json", "model.safetensors", "training.safetensors"}


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_a_killed_run_ends_with_the_same_weights(
    kind: str, target: TinyTarget, store: AnswerStore, tmp_path: Path
) -> None:
    def trainer(folder: Path) -> Trainer:
        return Trainer(drafter(kind, target, range(0, 130, 2)), target.dense, store, PLAN, folder)

    whole = trainer(tmp_path / "whole")
    whole.run(lambda line: None)
    killed = trainer(tmp_path / "killed")

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        killed.run(stop)
    again = trainer(tmp_path / "killed")
    curve = again.run(lambda line: None)
    assert again.step == 8 and 0 < killed.step < 12
    for (name, expected), (_, found) in zip(
        whole.drafter.module.named_parameters(), again.drafter.module.named_parameters(), strict=True
    ):
        assert torch.equal(expected, found), name
    assert curve[-1].length == whole.curve[-1].length


def test_a_run_by_the_clock_goes_on_to_the_end_that_was_told(
    target: TinyTarget, store: AnswerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a machine that is slower or faster than when it began; a checkpoint comes by time as well."""
    recipe = Recipe("mtp", seconds=1.0, tokens_per_batch=600, measure_every=5, save_every=1 << 30)
    speeds = iter((1 / 20, 1 / 90))
    monkeypatch.setattr(Trainer, "seconds_a_step", lambda self: next(speeds))
    monkeypatch.setattr("localspec.training.trainer.SAVE_S", 0.0)
    config = read_config(target.folder)

    def stop(line: str) -> None:
        if line.startswith("step"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(recipe, target.dense, config, store, tmp_path, stop)
    told: list[str] = []
    found = train(recipe, target.dense, config, store, tmp_path, told.append)
    assert told[0] == "going on with 20 steps" and found.report["curve"][-1]["step"] == 20
    assert found.report["curve"][0]["step"] == 5
    with pytest.raises(ValueError, match="another training"):
        train(replace(recipe, seed=3), target.dense, config, store, tmp_path, told.append)


def test_a_checkpoint_of_another_plan_is_refused(target: TinyTarget, store: AnswerStore, tmp_path: Path) -> None:
    made = drafter("eagle3", target, range(0, 130, 2))
    Trainer(made, target.dense, store, replace(PLAN, steps=1), tmp_path).run(lambda line: None)
    with pytest.raises(ValueError, match="another training"):
        Trainer(made, target.dense, store, PLAN, tmp_path).run(lambda line: None)


def test_batches_cover_an_epoch_once_and_stay_small(store: AnswerStore) -> None:
    entries = store.select(held_out=False)
    plan = BatchPlan(300, 64, 2)
    batches = epoch_batches(store, entries, plan, 1)
    assert sorted(entry for batch in batches for entry in batch) == entries.tolist()
    assert batches == epoch_batches(store, entries, plan, 1) != epoch_batches(store, entries, plan, 2)
    for batch in batches:
        assert len(batch) == 1 or store.batch(batch, 64, CPU).tokens.numel() <= 300
    assert not set(entries) & set(store.select(held_out=True))


def test_the_vocabulary_holds_the_most_used_tokens(store: AnswerStore) -> None:
    counts = store.counts(149)
    found = DraftVocabulary.most_used(store, 149, 20, always=(7,))
    assert found.ids is not None and 7 in found.ids.tolist() and found.size == 20
    least = min(counts[each] for each in found.ids.tolist() if each != 7)
    assert least >= max(counts[each] for each in range(149) if each not in found.ids.tolist())
    assert torch.equal(found.ids, torch.arange(20) + found.offsets)
    assert int(found.is_said.sum()) == 20


def test_a_damaged_store_is_refused(store: AnswerStore, tmp_path: Path) -> None:
    copy = AnswerStore(tmp_path)
    assert len(copy) == 0
    copy.append([Answer((5, 6, 7), 1)])
    for entry in ((0, 99, 1, 0), (0, 3, 4, 0), (0, 3, -1, 0), (1 << 62, 1 << 62, 0, 0), (-4, 3, 1, 0)):
        (tmp_path / "index.bin").write_bytes(b"".join(each.to_bytes(8, "little", signed=True) for each in entry))
        with pytest.raises(ValueError, match="damaged"):
            AnswerStore(tmp_path)


def test_what_a_kill_left_torn_shifts_nothing(tmp_path: Path) -> None:
    AnswerStore(tmp_path).append([Answer((5, 6, 7), 1)])
    for name, torn in (("tokens.bin", b"abc"), ("index.bin", bytes(12))):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    again = AnswerStore(tmp_path)
    again.append([Answer((8, 9), 1, held_out=True)])
    found = AnswerStore(tmp_path)
    assert [found.tokens(entry).tolist() for entry in range(len(found))] == [[5, 6, 7], [8, 9]]


def test_a_training_goes_on_from_a_finished_drafter(target: TinyTarget, store: AnswerStore, tmp_path: Path) -> None:
    first = Recipe("dspark", steps=6, draft_vocab_size=80, tokens_per_batch=600, learning_rate=1e-2, block_size=5)
    config = read_config(target.folder)
    made = train(first, target.dense, config, store, tmp_path / "first", lambda line: None)
    further = replace(first, steps=1, learning_rate=1e-6, start_from=str(tmp_path / "first"), draft_vocab_size=40)
    found = train(further, target.dense, config, store, tmp_path / "further", lambda line: None)
    assert found.drafter.vocabulary.size == 80
    # BF16 and one tiny step apart.
    assert abs(found.report["untrained_length"] - made.report["length"]) < 0.02
    assert abs(found.report["length"] - made.report["length"]) < 0.02


def test_dspark_goes_on_from_a_dflash_backbone(target: TinyTarget, store: AnswerStore, tmp_path: Path) -> None:
    base = Recipe(
        "dflash", steps=6, draft_vocab_size=80, tokens_per_batch=600, learning_rate=1e-2, block_size=5, floor_share=1.0
    )
    config = read_config(target.folder)
    made = train(base, target.dense, config, store, tmp_path / "base", lambda line: None)
    further = replace(base, kind="dspark", steps=8, markov_rank=16, start_from=str(tmp_path / "base"))
    found = train(further, target.dense, config, store, tmp_path / "further", lambda line: None)
    assert found.drafter.config["markov_rank"] == 16 and found.drafter.config["sample_from_anchor"] is False
    # Heads without weight change no draft; BF16 is between the two.
    assert abs(found.report["untrained_length"] - made.report["length"]) < 0.02
    assert found.report["length"] > made.report["length"]
    loaded, _ = load_drafter("dspark", tmp_path / "further", target.dense)
    assert loaded.config == found.drafter.config


def test_answers_of_another_store_can_be_measured(target: TinyTarget, store: AnswerStore, tmp_path: Path) -> None:
    """Entries are numbers within a store: the store that is named is the one that is read."""
    other = AnswerStore(tmp_path / "other")
    entries = store.select(held_out=True)[-3:]
    other.append([Answer(store.tokens(entry).tolist(), int(store.index[entry, 2]), held_out=True) for entry in entries])
    trainer = Trainer(drafter("dspark", target, range(149)), target.dense, store, PLAN, tmp_path)
    found = trainer.measure([0, 1, 2], other)
    same = trainer.measure(entries)
    assert (found.steps, found.accepted, found.reached) == (same.steps, same.accepted, same.reached)
    assert found.steps != trainer.measure([0, 1, 2]).steps


def test_the_loss_has_the_gradient_of_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(7, 13, generator=generator, dtype=torch.float64, requires_grad=True)
    law = torch.randn(7, 13, generator=generator, dtype=torch.float64).softmax(dim=1)
    weights = torch.tensor([1.0, 0.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    expected = -(law * logits.log_softmax(dim=1)).sum(dim=1) @ weights.double() / 7
    (gradient,) = torch.autograd.grad(expected, logits)
    found = soft_loss(logits, law, weights)
    torch.testing.assert_close(found, expected, check_dtype=False)
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], gradient, rtol=1e-5, atol=1e-6)

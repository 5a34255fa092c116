"""Fine-tuning: it starts from what the file holds, it helps on new text, and a drafter that got worse is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from localspec.training.adapting import Adapted, AdaptSettings, adapt_drafter
from localspec.training.answers import Answer, AnswerStore
from localspec.training.export import drafter_tensors, export
from localspec.training.loading import load_drafter
from tests.training.common import KINDS, TinyTarget, drafter, tiny_target, written

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return tiny_target(tmp_path_factory.mktemp("target"), "qwen2", seed=2)


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_drafter_is_the_stored_one(kind: str, form: str, target: TinyTarget, tmp_path: Path) -> None:
    made = drafter(kind, target, range(0, 140, 2))
    export(made, tmp_path, "nvfp4" if form == "nvfp4" else "bf16")
    loaded, found = load_drafter(kind, tmp_path, target.dense)
    assert found == form and loaded.config == made.config
    tokens = torch.randint(0, 149, (2, 20), generator=torch.Generator().manual_seed(3))
    loaded.fit_inputs(target.dense.hiddens(tokens, loaded.layer_outputs))
    again = drafter_tensors(loaded, found)
    for name, tensor in drafter_tensors(made, found).items():
        # The input matrix is stored rounded and read in other units: one rounding more.
        close = {"rtol": 1e-2, "atol": 1e-6} if name == "fc.weight" else {"rtol": 0.0, "atol": 0.0}
        torch.testing.assert_close(again[name].float(), tensor.float(), **close)


def test_what_does_not_fit_is_refused(target: TinyTarget, tmp_path: Path) -> None:
    export(drafter("dflash", target, range(0, 140, 2)), tmp_path)
    with pytest.raises(ValueError, match="holds a dflash drafter"):
        load_drafter("dspark", tmp_path, target.dense)
    with pytest.raises(ValueError, match="can be trained further"):
        load_drafter("ngram", tmp_path, target.dense)
    narrow = tiny_target(tmp_path / "llama", "llama").dense
    with pytest.raises(ValueError, match="target"):
        load_drafter("dflash", tmp_path, narrow)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dspark"])
def test_sizes_of_another_target_are_refused(kind: str, target: TinyTarget, tmp_path: Path) -> None:
    made = drafter(kind, target, range(0, 140, 2))
    layer = made.config.get("transformer_layer_config", made.config)
    layer["hidden_size"] += 8
    export(made, tmp_path)
    with pytest.raises(ValueError, match=r"fit|target"):
        load_drafter(kind, tmp_path, target.dense)


def test_text_of_the_user_is_learnt(target: TinyTarget, tmp_path: Path) -> None:
    export(drafter("dspark", target, range(149)), tmp_path / "drafter", "nvfp4")
    store = AnswerStore(tmp_path / "answers")
    # A user who asks the same few things again and again.
    asked = written(target, tmp_path / "asked", count=7, tokens=24)
    texts = [(asked.tokens(entry).tolist(), int(asked.index[entry, 2])) for entry in range(7)] * 4
    store.append([Answer(ids, start, held_out=index % 5 == 0) for index, (ids, start) in enumerate(texts)])
    settings = AdaptSettings(steps=30, learning_rate=5e-3, tokens_per_batch=300)
    told: list[str] = []
    found = adapt_drafter("dspark", tmp_path / "drafter", target.dense, store, settings, told.append)
    assert found.after > found.before + 0.05 and found.better and found.steps == 30
    assert "before" in told[0]
    assert not Adapted(found.drafter, found.form, 2.0, 2.0, 1).better
    worse = replace(found, before=found.after, after=found.before)
    assert not worse.better

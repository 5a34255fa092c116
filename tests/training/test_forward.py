"""What is trained is what drafts: the trainable forms against the target, the drafters and their files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.core.records import MAX_SLOTS, HiddenNeeds
from localspec.drafters import DrafterSetup, drafter_module
from localspec.formats.checkpoint import open_checkpoint
from localspec.training.export import export
from localspec.training.parts import initialise, set_rounding
from tests.drafters.session import CONTEXT_TOKENS, Session, layer_outputs_of
from tests.helpers.models import reference_ops
from tests.training.common import CPU, KINDS, drafter, prompts, tiny_target, written

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_target_has_the_hiddens_of_the_model(model_type: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path, model_type)
    tokens = [5, 9, 3, 77, 20, 20, 4]
    layers = (0, target.model.num_layers - 1)
    expected = layer_outputs_of(target.model, tokens, layers)
    found = target.dense.hiddens(torch.tensor([tokens, tokens[::-1]]), layers)
    torch.testing.assert_close(found.taps[0], torch.cat([expected[each] for each in layers], 1), rtol=1e-4, atol=1e-4)
    logits = target.model.logits(found.final[0])
    assert torch.equal(logits.argmax(1), (found.final[0] @ target.dense.head_rows(None).T).argmax(1))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_written_answers_are_the_greedy_ones(model_type: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "model", model_type)
    store = written(target, tmp_path / "store", count=7, tokens=20)
    asked = {prompt.token_ids for prompt in prompts(7)}
    for entry in range(len(store)):
        start = int(store.index[entry, 2])
        tokens = torch.from_numpy(store.tokens(entry).astype("int64"))
        assert tuple(tokens[:start].tolist()) in asked
        final = target.dense.hiddens(tokens[None], ()).final[0]
        expected = (final @ target.dense.head_rows(None).T).argmax(1)
        assert tokens[start:].tolist() == expected[start - 1 : -1].tolist()
        assert len(tokens) == start + 20 or int(tokens[-1]) == 1


@pytest.mark.parametrize("form", ["bf16", "nvfp4"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_drafter_of_the_file_drafts_what_training_measures(kind: str, form: str, tmp_path: Path) -> None:
    """Every draft of a session is right exactly where `matches` says so."""
    target = tiny_target(tmp_path / "model")
    store = written(target, tmp_path / "store", count=6)
    ids = sorted({*range(0, 131, 2), *store.tokens(0).tolist()})
    trained = drafter(kind, target, ids)
    initialise(trained.module, 11)
    for parameter in trained.module.parameters():
        with torch.no_grad():
            generator = torch.Generator().manual_seed(parameter.numel())
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            if form == "bf16":
                parameter.copy_(parameter.to(torch.bfloat16))
    trained.fit_inputs(target.dense.hiddens(store.batch([1, 2], 64, CPU).tokens, trained.layer_outputs))
    set_rounding(trained.module, form == "nvfp4")
    export(trained, tmp_path / kind, "nvfp4" if form == "nvfp4" else "bf16")
    checkpoint = open_checkpoint(tmp_path / kind)
    setup = DrafterSetup(reference_ops(), target.model, MAX_SLOTS, CONTEXT_TOKENS, checkpoint, tmp_path / kind)
    module = drafter_module(kind)
    built = module.build(setup)
    assert built.needs == HiddenNeeds(layer_outputs=trained.layer_outputs)
    compared = 0
    for entry in range(3):
        tokens = store.tokens(entry).astype("int64").tolist()
        start = int(store.index[entry, 2])
        batch = store.batch([entry], 64, CPU)
        hiddens = target.dense.hiddens(batch.tokens, trained.layer_outputs)
        matches = trained.matches(batch, hiddens, 4)
        for newest in range(start + entry, len(tokens) - 5, 7):
            session = Session(target.model, built)
            session.start(0, tokens[: newest + 1])
            drafts = session.propose([4]).token_ids[0].tolist()
            for place, draft in enumerate(drafts):
                if draft == -1:
                    break
                right = draft == tokens[newest + 1 + place]
                assert right == bool(matches[0, newest, place])
                compared += 1
                if not right:
                    break
            built.forget(0)
    assert compared >= 8

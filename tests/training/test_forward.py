"""What is trained is what drafts: the trainable forms against the target, the drafters and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from localspec.core.records import MAX_SLOTS, HiddenNeeds
from localspec.drafters import DrafterSetup, drafter_module
from localspec.formats.checkpoint import open_checkpoint
from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.storage.safetensors import SafetensorsFile
from localspec.training.answers import BatchPlan
from localspec.training.export import export
from localspec.training.kept import KeptHiddens
from localspec.training.parts import Matrix, initialise, nearest_nvfp4, set_rounding
from tests.drafters.session import CONTEXT_TOKENS, Session, layer_outputs_of
from tests.helpers.models import reference_ops
from tests.training.common import CPU, KINDS, OWN_PLACE, drafter, prompts, tiny_target, written

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
@pytest.mark.parametrize("kind", (*KINDS, OWN_PLACE))
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
    module = drafter_module(trained.kind)
    built = module.build(setup)
    needs = HiddenNeeds(final_norm=True) if kind == "mtp" else HiddenNeeds(layer_outputs=trained.layer_outputs)
    assert built.needs == needs
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


def test_layouts_say_what_other_engines_ask_for(tmp_path: Path) -> None:
    """Whose drafter it is, how many tokens it drafts, and how far its positions go; a missing one is 2,048 for some."""
    target = tiny_target(tmp_path / "model")
    configs = {}
    for kind in KINDS:
        export(drafter(kind, target, range(0, 130, 2)), tmp_path / kind)
        configs[kind] = json.loads((tmp_path / kind / "config.json").read_text())
    method = configs["eagle3"]["speculators_config"]
    assert method["verifier"]["name_or_path"] == "tiny" and method["proposal_methods"][0]["speculative_tokens"] == 4
    inner = LlamaConfig(**configs["eagle3"]["transformer_layer_config"])
    assert inner.max_position_embeddings == 4096 and inner.vocab_size == target.dense.vocab_size
    for kind in ("dflash", "dspark"):
        found = Qwen3Config(**configs[kind])
        assert found.max_position_embeddings == 4096 and found.num_target_layers == target.dense.num_layers
        with SafetensorsFile.open(tmp_path / kind / "model.safetensors") as file:
            assert file.entry("d2t").shape == (found.draft_vocab_size,) == (65,)
            assert file.entry("t2d").shape == (found.vocab_size,)


def test_rounding_in_training_is_the_stored_form() -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(37, 64, generator=generator) * 10 ** torch.randn(37, 1, generator=generator)
    weight[3, :16] = 0
    weight[5, 16:32] *= 1e-6
    for each in (weight, (4 * weight).round() / 4, torch.zeros(4, 32)):
        assert torch.equal(nearest_nvfp4(each), quantise_nvfp4(each, "max").dequantise())


def test_kept_hiddens_are_those_of_the_target(tmp_path: Path) -> None:
    target = tiny_target(tmp_path / "model")
    store = written(target, tmp_path / "store", count=9)
    last = target.dense.num_layers - 1
    kept = KeptHiddens(target.dense, store, (0, last), BatchPlan(64, 24, 0))
    for entries, outputs in (([3, 8, 1], (0, last)), ([5], (last,)), ([7, 2], ())):
        batch, hiddens = kept.batch(entries, outputs)
        expected = store.batch(entries, 24, CPU)
        for name in ("tokens", "answer_from", "ends", "label_rows"):
            assert torch.equal(getattr(batch, name), getattr(expected, name)), name
        read = target.dense.hiddens(expected.tokens, outputs)
        inside = (torch.arange(batch.tokens.shape[1]) < batch.ends[:, None])[..., None]
        torch.testing.assert_close(hiddens.taps, read.taps * inside)
        torch.testing.assert_close(hiddens.final, read.final * inside)
    with pytest.raises(ValueError, match="not kept"):
        kept.batch([0], (1,))


def test_a_rounded_matrix_follows_an_optimiser_that_tells_nobody() -> None:
    part = Matrix(8, 16)
    part.weight.data.copy_(torch.randn(8, 16, generator=torch.Generator().manual_seed(2)))
    set_rounding(part, True)
    before = part.value()
    assert part.value() is before
    # Written as fused optimisers do, without a new version of the weight.
    part.weight.data.add_(1.0)
    set_rounding(part, True)
    assert torch.equal(part.value(), nearest_nvfp4(part.weight.detach()))

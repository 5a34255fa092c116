"""The trainable hybrid and its MTP block compute what the engine's model and drafter compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, mtp
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.models import architecture
from localspec.training.answers import Answer, AnswerStore
from localspec.training.export import export
from localspec.training.hybrid import HybridTarget, gated_delta, load_hybrid, new_hybrid, save_hybrid
from localspec.training.mtp import TrainableMtp
from tests.drafters.session import CONTEXT_TOKENS, Session, layer_outputs_of
from tests.helpers.models import load_model, random_checkpoint, reference_ops
from tests.training.common import CPU

pytestmark = pytest.mark.torch


def test_chunks_are_the_recurrence() -> None:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.nn.functional.normalize(torch.randn(2, 128, 3, 6, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(2, 128, 3, 5, generator=generator)
    beta = torch.rand(2, 128, 3, generator=generator)
    decay = -2 * torch.rand(2, 128, 3, generator=generator)
    state = torch.zeros(2, 3, 6, 5)
    expected = []
    for row in range(128):
        state = state * decay[:, row].exp()[..., None, None]
        read = (state * k[:, row][..., None]).sum(2)
        state = state + k[:, row][..., None] * (beta[:, row][..., None] * (v[:, row] - read))[:, :, None]
        expected.append((state * q[:, row][..., None]).sum(2))
    torch.testing.assert_close(gated_delta(q, k, v, beta, decay), torch.stack(expected, 1), rtol=1e-4, atol=1e-5)


def test_hiddens_are_those_of_the_model(tmp_path: Path) -> None:
    folder = random_checkpoint("qwen3_5", 2, tmp_path)
    model = load_model(folder)
    target = HybridTarget(load_hybrid(read_config(folder), open_checkpoint(folder)), CPU, torch.float32)
    tokens = torch.randint(0, 149, (1, 75), generator=torch.Generator().manual_seed(1))
    found = target.hiddens(tokens, (0, 3, 4))
    expected = layer_outputs_of(model, tokens[0].tolist(), (0, 3, 4))
    wanted = torch.cat([expected[each] for each in (0, 3, 4)], 1)
    torch.testing.assert_close(found.taps[0], wanted, rtol=2e-3, atol=2e-3)


def test_the_block_of_the_file_drafts_what_training_measures(tmp_path: Path) -> None:
    config = architecture("qwen3_5").tiny_config()
    config["text_config"] |= {"mtp_num_hidden_layers": 1, "num_hidden_layers": 4}
    target = HybridTarget(new_hybrid(config, 4), CPU, torch.float32)
    trained = TrainableMtp(config, target, 9)
    for module in (target.module, trained.net):
        for parameter in module.parameters():
            with torch.no_grad():
                generator = torch.Generator().manual_seed(parameter.numel())
                parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
                parameter.copy_(parameter.to(torch.bfloat16))
    save_hybrid(target.module, config, tmp_path / "model", {})
    export(trained, tmp_path / "block")
    model = load_model(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "block")
    drafter = mtp.build(DrafterSetup(reference_ops(), model, MAX_SLOTS, CONTEXT_TOKENS, checkpoint, tmp_path / "block"))
    tokens = target.go_on(torch.tensor([[5, 9, 3, 77]]), 30)[0].tolist()
    store = AnswerStore(tmp_path / "store")
    store.append([Answer(tokens, 4)])
    batch = store.batch([0], 64, CPU)
    matches = trained.matches(batch, target.hiddens(batch.tokens, ()), 4)
    compared = 0
    for newest in range(4, 28, 3):
        session = Session(model, drafter)
        session.start(0, tokens[: newest + 1])
        for place, draft in enumerate(session.propose([4]).token_ids[0].tolist()):
            right = draft == tokens[newest + 1 + place]
            assert right == bool(matches[0, newest, place])
            compared += 1
            if not right:
                break
        drafter.forget(0)
    assert compared >= 8

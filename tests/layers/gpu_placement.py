"""A real checkpoint folder loaded onto a card: every tensor is on it, the embedding pinned, and the model answers."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.kernels.table import choose
from localspec.layers import host_table
from localspec.models import architecture
from tests.helpers.models import random_checkpoint
from tests.layers.test_placement import _quantised, _tensors

pytestmark = [pytest.mark.torch, pytest.mark.gpu]


@pytest.mark.parametrize("pinned", [True, False])
def test_a_folder_on_a_card(tmp_path: Path, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pinned:
        monkeypatch.setattr(host_table, "pinned_memory", lambda num_bytes: None)
    config = architecture("qwen3_5").tiny_config()
    config["text_config"] |= {"intermediate_size": 96}
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = random_checkpoint("qwen3_5", 3, tmp_path, config)
    _quantised(folder)
    ops, _ = choose("cuda")
    with torch.inference_mode():
        model: Any = architecture("qwen3_5").load(read_config(folder), open_checkpoint(folder), ops)
        table = model.vocabulary.table
        elsewhere = [tensor for tensor in _tensors(model, {id(ops)}) if tensor.device.type != "cuda"]
        assert [id(tensor) for tensor in elsewhere] == ([id(table)] if pinned else [])
        assert table.is_pinned() == pinned
        ids = torch.tensor([0, 5, 148, 7], device="cuda")
        expected = open_checkpoint(folder).weight("model.language_model.embed_tokens.weight").dequantise()
        assert torch.equal(model.embed(ids).float().cpu(), expected[ids.cpu()])
        torch.cuda.synchronize()


def test_pinned_memory_of_odd_size_is_given_back() -> None:
    for _ in range(3):
        memory = host_table.pinned_memory((1 << 20) + 4097)
        assert memory is not None and memory.is_pinned()
        address = memory.data_ptr()
        del memory
        gc.collect()
    again = host_table.pinned_memory(1 << 20)
    assert again is not None and address
    torch.zeros(4, device="cuda")
    torch.cuda.synchronize()

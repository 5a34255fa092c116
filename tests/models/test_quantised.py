"""Models from quantised checkpoints equal the same models from the values that the codes mean, every tensor used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.formats.checkpoint import open_checkpoint
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.models import architecture
from tests.helpers.models import Driver, load_model, random_checkpoint

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["qwen2", "qwen3_5"])
def test_a_mixed_checkpoint_means_its_values(name: str, tmp_path: Path) -> None:
    config = architecture(name).tiny_config()
    text = config.get("text_config", config)
    # NVFP4 needs whole blocks of 16 columns.
    text.update(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    text.update(head_dim=32) if name != "qwen2" else None
    if name == "qwen3_5":
        text.update(linear_num_value_heads=4, linear_value_head_dim=16)
    plain = random_checkpoint(name, 3, tmp_path / "plain", config)
    stored: dict[str, torch.Tensor] = {}
    for tensor_name, tensor in load_file(plain / "model.safetensors").items():
        if tensor.ndim != 2 or "embed" in tensor_name or "in_proj_a" in tensor_name or "in_proj_b" in tensor_name:
            stored[tensor_name] = tensor
        elif "k_proj" in tensor_name or "in_proj_z" in tensor_name or "lm_head" in tensor_name:
            fp8 = quantise_fp8(tensor)
            stored |= {tensor_name: fp8.codes, f"{tensor_name}_scale": fp8.row_scale.view(-1, 1)}
        else:
            nvfp4 = quantise_nvfp4(tensor, "max")
            stored |= {f"{tensor_name}": nvfp4.codes, f"{tensor_name}_scale": nvfp4.block_scale}
            stored[f"{tensor_name}_scale_2"] = nvfp4.row_scale[0].clone()
            stored[f"{tensor_name.removesuffix('.weight')}.input_scale"] = torch.tensor(1.0)
    quantised = tmp_path / "quantised"
    quantised.mkdir()
    settings = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    save_file(stored, quantised / "model.safetensors")
    checkpoint = open_checkpoint(quantised)
    names = list(load_file(plain / "model.safetensors"))
    values = {each: checkpoint.weight(each).dequantise() if stored[each].ndim == 2 else stored[each] for each in names}
    save_file(values, plain / "model.safetensors")
    ids = list(range(50))
    assert torch.equal(Driver(load_model(quantised)).prefill(0, ids), Driver(load_model(plain)).prefill(0, ids))

"""Checkpoints that compressed-tensors and ModelOpt themselves wrote mean what these libraries read back from them.

The samples are made by scripts/make_format_samples.py; nothing of the libraries is needed here.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint
from localspec.kernels.fp8_pack import Fp8Weight
from localspec.kernels.nvfp4_pack import Nvfp4Weight
from localspec.kernels.weights import DenseWeight

pytestmark = pytest.mark.torch
SAMPLES = Path(__file__).parent / "samples"
EXPECTED = "expected."
FORMS: dict[str, dict[str, type]] = {
    "compressed_tensors": {
        "mlp.up_proj": Nvfp4Weight,
        "mlp.down_proj": Nvfp4Weight,
        "mlp.gate_proj": Nvfp4Weight,
        "self_attn.q_proj": Fp8Weight,
        "self_attn.k_proj": Fp8Weight,
    },
    "modelopt": {
        "mlp.up_proj": Nvfp4Weight,
        "mlp.down_proj": DenseWeight,
        "self_attn.q_proj": Fp8Weight,
        "self_attn.k_proj": Fp8Weight,
    },
}


def _opened(sample: str, folder: Path) -> tuple[FolderCheckpoint, dict[str, torch.Tensor]]:
    """The sample as a checkpoint without the library's values, and those values by weight."""
    shutil.copytree(SAMPLES / sample, folder, dirs_exist_ok=True)
    stored = load_file(folder / "model.safetensors")
    expected = {name.removeprefix(EXPECTED): stored.pop(name) for name in list(stored) if name.startswith(EXPECTED)}
    save_file(stored, folder / "model.safetensors")
    return open_checkpoint(folder), expected


@pytest.mark.parametrize(("sample", "flat"), [("compressed_tensors", False), ("modelopt", False), ("modelopt", True)])
def test_a_library_and_we_read_the_same(sample: str, flat: bool, tmp_path: Path) -> None:
    if flat:
        shutil.copytree(SAMPLES / sample, tmp_path, dirs_exist_ok=True)
        (tmp_path / "hf_quant_config.json").unlink()
        config = json.loads((tmp_path / "flat_config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "modelopt"
    checkpoint, expected = _opened(sample, tmp_path)
    if flat:
        (tmp_path / "hf_quant_config.json").unlink()
        (tmp_path / "config.json").write_text((tmp_path / "flat_config.json").read_text())
        checkpoint = open_checkpoint(tmp_path)
    forms = {f"model.layers.0.{module}.weight": kind for module, kind in FORMS[sample].items()}
    assert expected.keys() == forms.keys()
    for name, values in expected.items():
        weight = checkpoint.weight(name)
        assert type(weight) is forms[name] and weight.shape == tuple(values.shape), name
        found = weight.dequantise()
        # float32 products in another order; the codes and scales are the same.
        assert float((found - values).abs().max()) <= 2e-6 * float(values.abs().max()), name
        assert values.std() > 0.1, "nothing was compared"
    checkpoint.finish()


def test_every_part_is_accounted_for(tmp_path: Path) -> None:
    """A scale that a library wrote and nobody asked for would be noticed."""
    checkpoint, expected = _opened("compressed_tensors", tmp_path)
    for name in list(expected)[1:]:
        checkpoint.weight(name)
    with pytest.raises(ValueError, match="the model uses 3 stored tensors nowhere"):
        checkpoint.finish()

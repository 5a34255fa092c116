"""Weights kept packed: a load from them gives the tensors of a load from the source, and outdated files are refused.

The Triton back end packs on a CPU just as well; only running needs a card.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine import packed_weights
from localspec.engine.packed_weights import OutdatedFile, open_packed, prepared, write_packed
from localspec.formats import _packed_file
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.hub.layout import PACKED_NAME
from localspec.models import architecture, architectures
from localspec.runner.synthetic import tensor_shapes
from localspec.storage.errors import DamagedFile
from tests.helpers.models import random_checkpoint
from tests.layers.test_placement import _quantised, _tensors

pytestmark = pytest.mark.torch
pytest.importorskip("triton")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    from localspec.kernels.backends import triton_sm80

    workspace = SimpleNamespace(tickets=torch.empty(9999), normed=torch.empty(1, 9999))
    monkeypatch.setattr(triton_sm80.StreamWorkspace, "create", lambda *_: workspace)


def _with_mtp(folder: Path, config: dict[str, Any]) -> None:
    """Add the MTP block that the config announces."""
    generator = torch.Generator().manual_seed(9)
    stored = load_file(folder / "model.safetensors")
    for name, shape in tensor_shapes(config).items():
        if name.startswith("mtp."):
            stored[name] = torch.randn(shape, generator=generator)
    save_file(stored, folder / "model.safetensors")


def _folder(name: str, path: Path, quantised: bool) -> Path:
    config = architecture(name).tiny_config()
    if name == "qwen3_5":
        config["text_config"] |= {"intermediate_size": 96, "mtp_num_hidden_layers": 1}
    if quantised:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = random_checkpoint(name, 3, path / name, config)
    if name == "qwen3_5":
        _with_mtp(folder, config)
    if quantised:
        _quantised(folder)
    return folder


def _load(folder: Path, packed: Any = None) -> list[torch.Tensor]:
    """Every tensor of the model and of its own drafting block, in the order in which they are found."""
    from localspec.kernels.backends.triton_sm80 import TritonOps

    ops = TritonOps(CPU)
    ops.store = packed
    config = read_config(folder)
    checkpoint = packed or open_checkpoint(folder)
    model = architecture(config["model_type"]).load(config, checkpoint, ops)
    roots: list[Any] = [model]
    if any(each.startswith("mtp.") for each in checkpoint.names()):
        setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=64)
        drafter = drafter_module("mtp").build(dataclasses.replace(setup, checkpoint=checkpoint, folder=folder))
        roots.append(drafter._network)  # type: ignore[attr-defined]
    ops.store = None
    assert checkpoint.fingerprint == open_checkpoint(folder).fingerprint
    return list(_tensors(roots, set()))


def _equal(got: torch.Tensor, expected: torch.Tensor) -> bool:
    if got.dtype != expected.dtype or got.shape != expected.shape or got.is_meta:
        return False
    return got.contiguous().view(-1).view(torch.uint8).equal(expected.contiguous().view(-1).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "quantised"), [*((name, False) for name in architectures()), ("qwen3_5", True), ("qwen2", True)]
)
def test_the_second_load_has_the_tensors_of_the_first(name: str, quantised: bool, tmp_path: Path) -> None:
    folder = _folder(name, tmp_path, quantised)
    size = write_packed(folder)
    assert (folder / PACKED_NAME).stat().st_size == size and not list(folder.glob(".tmp*"))
    expected = _load(folder)
    (folder / "model.safetensors").chmod(0)  # nothing of the source is read but its name, size and time
    packed = open_packed(folder, CPU)
    (folder / "model.safetensors").chmod(0o600)
    found = _load(folder, packed)
    packed.close()
    assert len(found) == len(expected) > 15
    assert all(_equal(got, want) for got, want in zip(found, expected, strict=True))


@pytest.mark.parametrize("ending", ["up_proj.weight", "embed_tokens.weight"])
def test_block_formats_are_kept_too(ending: str, tmp_path: Path) -> None:
    """A quantised embedding, which is also the head of a tied model, is kept as the rows that are gathered."""
    config = {**architecture("qwen2").tiny_config(), "hidden_size": 64, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
    folder = random_checkpoint("qwen2", 3, tmp_path, config)
    config = read_config(folder)
    stored = load_file(folder / "model.safetensors")
    name = next(each for each in stored if each.endswith(ending) and stored[each].shape[1] % 32 == 0)
    rows, columns = stored.pop(name).shape
    codes = torch.randint(-99, 99, (rows, columns), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    stored |= {f"{name}.q": codes, f"{name}.scale": torch.full((rows, columns // 32), 0.01, dtype=torch.float16)}
    config["quantization_config"] = {"quant_method": "localspec-blocks", "tensors": {name: "q8_0"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    write_packed(folder)
    packed = open_packed(folder, CPU)
    assert all(_equal(*pair) for pair in zip(_load(folder, packed), _load(folder), strict=True))
    packed.close()


def test_outdated_files_are_refused_and_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder("qwen3", tmp_path, False)
    path = folder / PACKED_NAME
    with pytest.raises(OSError, match=PACKED_NAME):
        open_packed(folder, CPU)
    write_packed(folder)
    first = path.read_bytes()
    os.utime(folder / "model.safetensors", (1, 1))
    with pytest.raises(OutdatedFile, match="another source"):
        open_packed(folder, CPU)
    write_packed(folder)
    with monkeypatch.context() as patched:
        patched.setattr(packed_weights, "LAYOUT_VERSION", 2)
        with pytest.raises(OutdatedFile, match="another layout"):
            open_packed(folder, CPU)
    with monkeypatch.context() as patched:
        patched.setattr("localspec.kernels.packed_forms.layout_probe", lambda: "bytes lie elsewhere")
        with pytest.raises(OutdatedFile, match="another probe"):
            open_packed(folder, CPU)
    path.write_bytes(first[:-1])
    said: list[str] = []
    again = prepared(folder, CPU, said.append)
    assert again is not None and said[0] == "packing weights for this card, once"
    assert len(_load(folder, again)) > 15
    again.close()


def test_another_order_of_loading_is_refused(tmp_path: Path) -> None:
    from localspec.kernels.backends.triton_sm80 import TritonOps

    folder = _folder("qwen3", tmp_path, False)
    write_packed(folder)
    packed = open_packed(folder, CPU)
    ops = TritonOps(CPU)
    ops.store = packed
    at = "model.layers.0.self_attn."
    with pytest.raises(OutdatedFile, match="packed otherwise"):
        ops.pack([packed.weight(f"{at}q_proj.weight"), packed.weight(f"{at}v_proj.weight")])
    with pytest.raises(OutdatedFile, match="packed otherwise"):
        ops.pack([packed.weight(f"{at}o_proj.weight")])
    assert len({id(packed.weight(f"{at}q_proj.weight")) for _ in range(2)}) >= 1
    packed.close()


def test_a_damaged_weight_is_found(tmp_path: Path) -> None:
    folder = _folder("qwen3", tmp_path, False)
    write_packed(folder)
    header = _packed_file.read_header(folder / PACKED_NAME)
    place = header.tensors[header.facts["packs"][3]["tensors"]["matrix"]].offset_bytes + 5
    data = bytearray((folder / PACKED_NAME).read_bytes())
    data[place] ^= 4
    (folder / PACKED_NAME).write_bytes(data)
    packed = open_packed(folder, CPU)
    with pytest.raises(DamagedFile, match="not what was written"):
        _load(folder, packed)
    packed.close()


def test_a_full_disk_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _folder("qwen3", tmp_path, False)
    monkeypatch.setattr(packed_weights, "FREE_SHARE", 0.0)
    said: list[str] = []
    assert prepared(folder, CPU, said.append) is None
    assert not (folder / PACKED_NAME).exists() and not list(folder.glob(".tmp*"))

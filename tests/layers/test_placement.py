"""Loading for a card: every tensor ends on it, the embedding in pinned host memory, and no mapped file stays in use."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.fp8_pack import quantise_fp8
from localspec.kernels.nvfp4_pack import Nvfp4Weight
from localspec.kernels.ops import Ops
from localspec.layers import host_table
from localspec.models import Model, architecture, architectures
from tests.helpers.models import random_checkpoint

pytestmark = pytest.mark.torch


def _tensors(root: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached through attributes, fields and containers."""
    if id(root) in seen:
        return
    seen.add(id(root))
    if isinstance(root, Tensor):
        yield root
    elif isinstance(root, dict):
        for value in root.values():
            yield from _tensors(value, seen)
    elif isinstance(root, list | tuple):
        for value in root:
            yield from _tensors(value, seen)
    elif dataclasses.is_dataclass(root):
        for field in dataclasses.fields(root):
            yield from _tensors(getattr(root, field.name), seen)
    elif hasattr(root, "__dict__") and type(root).__module__.startswith("localspec"):
        yield from _tensors(vars(root), seen)


def _load(folder: Path, ops: Ops) -> Model:
    config = read_config(folder)
    return architecture(config["model_type"]).load(config, open_checkpoint(folder), ops)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", architectures())
def test_everything_lies_on_the_device(
    name: str, pinned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Tensor] = []

    def memory(num_bytes: int) -> Tensor | None:
        given.append(torch.empty(num_bytes, dtype=torch.uint8))
        return given[-1] if pinned else None

    monkeypatch.setattr(host_table, "pinned_memory", memory)
    monkeypatch.setattr(host_table, "SLAB_VALUES", 1)  # several slabs, the last one short
    folder = random_checkpoint(name, 3, tmp_path)
    model: Any = _load(folder, ReferenceOps(torch.device("meta")))
    table = model.vocabulary.table
    elsewhere = [tensor for tensor in _tensors(model, set()) if tensor.device.type != "meta"]
    assert len(given) == 1
    if not pinned:
        assert not elsewhere and table.device.type == "meta"
        return
    assert [id(tensor) for tensor in elsewhere] == [id(table)]
    assert table.data_ptr() == given[0].data_ptr() and table.nbytes == given[0].nbytes
    stored = load_file(folder / "model.safetensors")
    expected = next(tensor for each, tensor in stored.items() if each.endswith("embed_tokens.weight"))
    assert torch.equal(table, expected)


def _quantised(folder: Path) -> None:
    """Store the checkpoint as real ones are: bf16, NVFP4 and FP8 side by side."""
    stored: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = tensor.bfloat16()
        if tensor.ndim == 2 and ("v_proj" in name or "out_proj" in name):
            fp8 = quantise_fp8(tensor)
            stored |= {name: fp8.codes, f"{name}_scale": fp8.row_scale.view(-1, 1)}
        elif tensor.ndim == 2 and "mlp" in name and tensor.shape[1] % 16 == 0:
            rows, columns = tensor.shape
            scales = torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)
            codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator)
            stored |= {name: codes, f"{name}_scale": scales, f"{name}_scale_2": torch.tensor(0.01)}
    save_file(stored, folder / "model.safetensors")


def test_the_packed_weights_of_the_card_are_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton_sm80 = pytest.importorskip("localspec.kernels.backends.triton_sm80", reason="Triton is not installed")
    workspace = SimpleNamespace(tickets=torch.empty(9999), normed=torch.empty(1, 9999))
    monkeypatch.setattr(triton_sm80.StreamWorkspace, "create", lambda *_: workspace)
    config = architecture("qwen3_5").tiny_config()
    config["text_config"] |= {"intermediate_size": 96}
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}
    folder = random_checkpoint("qwen3_5", 3, tmp_path, config)
    _quantised(folder)
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint.weight("model.language_model.layers.0.mlp.up_proj.weight"), Nvfp4Weight)
    mapped = [checkpoint._tensors[name] for name in checkpoint.names()]
    begin = min(tensor.data_ptr() for tensor in mapped)
    end = max(tensor.data_ptr() + tensor.nbytes for tensor in mapped)
    ops = triton_sm80.TritonOps(torch.device("cpu"))
    model: Any = architecture("qwen3_5").load(read_config(folder), checkpoint, ops)
    # Where the table goes is the other test's matter.
    found = [tensor for tensor in _tensors(model, set()) if tensor is not model.vocabulary.table]
    assert len(found) > 60
    assert not [tensor.shape for tensor in found if begin <= tensor.data_ptr() < end]


class _Driver:
    """Stands in for the CUDA runtime's registration of host memory."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert address % 4096 == 0 and flags == 3
        if self.answer == 0:
            self.registered[address] = num_bytes
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_pinned_memory_is_exact_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    memory = host_table.pinned_memory(5_000_001)
    assert memory is not None and memory.dtype == torch.uint8 and memory.shape == (5_000_001,)
    assert driver.registered == {memory.data_ptr(): 5_000_001}
    memory.fill_(7)
    view = memory[4096:]
    del memory
    assert driver.registered, "a view still uses the memory"
    del view
    assert not driver.registered


def test_no_pinned_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(2))

    def refuse(*_: Any, **options: Any) -> Tensor:
        raise RuntimeError("no page-locked memory")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch, "zeros", refuse)
    assert host_table.pinned_memory(4096) is None

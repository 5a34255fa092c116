"""A checkpoint folder as hostile input: everything is accounted for, and what is wrong is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.formats.checkpoint import open_checkpoint, read_config

pytestmark = pytest.mark.torch


def _folder(path: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config or {}))
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_plain_weights_and_vectors(tmp_path: Path, dtype: torch.dtype) -> None:
    weight, vector = torch.randn(5, 7).to(dtype), torch.randn(3, 1, 2).to(dtype)
    checkpoint = open_checkpoint(_folder(tmp_path, {"a.weight": weight, "b": vector, "empty": torch.empty(0, 3)}))
    assert (
        checkpoint.has("a.weight") and not checkpoint.has("c") and set(checkpoint.names()) == {"a.weight", "b", "empty"}
    )
    assert checkpoint.weight("a.weight").shape == (5, 7)
    assert torch.equal(checkpoint.weight("a.weight").dequantise(), weight.float())
    assert torch.equal(checkpoint.vector("b"), vector) and checkpoint.vector("empty").shape == (0, 3)
    checkpoint.finish()
    kept = checkpoint.vector("b")
    checkpoint.close()
    assert torch.equal(kept, vector)


def test_what_nobody_asked_for_is_named_unless_ignored(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        _folder(tmp_path, {"a.weight": torch.ones(2, 2), "mtp.x": torch.ones(1), "odd": torch.ones(1)})
    )
    checkpoint.weight("a.weight")
    with pytest.raises(ValueError, match=r"2 stored tensors nowhere: mtp.x, odd"):
        checkpoint.finish()
    with pytest.raises(ValueError, match="odd"):
        checkpoint.finish(("mtp.",))
    checkpoint.finish(("mtp.", "odd"))


def test_missing_and_misshapen_are_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(_folder(tmp_path, {"a": torch.ones(2), "ids": torch.ones(2, 2, dtype=torch.int64)}))
    with pytest.raises(ValueError, match="no weight nothing"):
        checkpoint.weight("nothing")
    with pytest.raises(ValueError, match="no tensor nothing"):
        checkpoint.vector("nothing")
    for name in ("a", "ids"):
        with pytest.raises(ValueError, match=name):
            checkpoint.weight(name)


def test_folders_that_are_no_models(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config.json is missing"):
        open_checkpoint(tmp_path)
    for text in ("[1]", "{", "\xff", "[" * 100000):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=r"config.json is no"):
            read_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="0 safetensors files"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x01\x02")
    with pytest.raises(ValueError, match="shorter than"):
        open_checkpoint(tmp_path)


def test_two_files_with_one_name_and_an_unknown_method(tmp_path: Path) -> None:
    folder = _folder(tmp_path, {"a": torch.ones(1)})
    save_file({"a": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(ValueError, match="tensor a is in"):
        open_checkpoint(folder)
    (folder / "other.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "magic"}}))
    with pytest.raises(ValueError, match=r"'magic' is not supported; supported are .*localspec-blocks"):
        open_checkpoint(folder)


def test_the_fingerprint_follows_the_bytes(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(9000.0)}
    first = open_checkpoint(_folder(tmp_path / "1", tensors)).fingerprint
    assert open_checkpoint(_folder(tmp_path / "2", tensors)).fingerprint == first
    tensors["a"][8999] = 1.0
    assert open_checkpoint(_folder(tmp_path / "3", tensors)).fingerprint != first
    assert open_checkpoint(_folder(tmp_path / "4", tensors, {"x": 1}), "given").fingerprint == "given"


def _blocks(method: str, rows: int = 3, columns: int = 64) -> dict[str, torch.Tensor]:
    scale = torch.rand(rows, columns // 32).half()
    if method == "q8_0":
        return {"w.q": torch.randint(-128, 128, (rows, columns), dtype=torch.int8), "w.scale": scale}
    parts = {"w.q": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8), "w.scale": scale}
    return {**parts, "w.min": torch.rand_like(scale)} if method == "q4_1" else parts


def _quantised(method: str) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "localspec-blocks", "block_size": 32, "tensors": {"w": method}}}


@pytest.mark.parametrize("method", ["q4_0", "q4_1", "q8_0"])
def test_blocks_are_read_whole_and_accounted_for(tmp_path: Path, method: str) -> None:
    torch.manual_seed(0)
    parts = _blocks(method)
    checkpoint = open_checkpoint(_folder(tmp_path, {**parts, "plain": torch.ones(2, 3)}, _quantised(method)))
    assert checkpoint.has("w") and checkpoint.weight("w").shape == (3, 64)
    codes = parts["w.q"]
    if method != "q8_0":
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).int() - (8 if method == "q4_0" else 0)
    expected = codes.float() * parts["w.scale"].float().repeat_interleave(32, 1)
    if method == "q4_1":
        expected = expected + parts["w.min"].float().repeat_interleave(32, 1)
    assert torch.equal(checkpoint.weight("w").dequantise(), expected)
    assert torch.equal(checkpoint.weight("plain").dequantise(), torch.ones(2, 3))
    checkpoint.finish()


def test_incomplete_and_contradicting_blocks_are_named(tmp_path: Path) -> None:
    parts = _blocks("q4_1")
    del parts["w.min"]
    with pytest.raises(ValueError, match=r"w is incomplete: .*w.min"):
        open_checkpoint(_folder(tmp_path / "1", parts, _quantised("q4_1"))).weight("w")
    with pytest.raises(ValueError, match=r"w.q"):
        open_checkpoint(_folder(tmp_path / "2", _blocks("q8_0"), _quantised("q4_0"))).weight("w")
    with pytest.raises(ValueError, match="does not name its method"):
        other = _quantised("q4_0")
        other["quantization_config"]["tensors"] = {}
        open_checkpoint(_folder(tmp_path / "3", _blocks("q4_0"), other)).weight("w")
    short = _blocks("q4_0")
    short["w.scale"] = short["w.scale"][:, :1].contiguous()
    with pytest.raises(ValueError, match="do not fit"):
        open_checkpoint(_folder(tmp_path / "4", short, _quantised("q4_0"))).weight("w")

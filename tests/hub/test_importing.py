"""Importing what lies on this disk: GGUF files and checkpoint folders, copied and checked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hub_gguf_samples import SampleModel, write_model
from safetensors.numpy import save_file

from localspec.hub import layout
from localspec.hub.importing import import_path
from localspec.hub.local import list_installed, verify
from localspec.hub.records import HubError


def write_checkpoint(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("not taken")
    save_file({"w": np.ones(4, np.float32)}, folder / "model.safetensors")
    return folder


def test_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "My Model_Q4.gguf"
    write_model(path, SampleModel())
    result = import_path(path, tmp_path / "data")
    assert result.model_id == "my-model_q4" and verify(tmp_path / "data", "my-model_q4") == ()
    assert path.exists()
    with pytest.raises(HubError, match="my-model_q4 is already installed"):
        import_path(path, tmp_path / "data")
    assert import_path(path, tmp_path / "data", model_id="second").model_id == "second"


def test_checkpoint_folder_is_copied(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Tiny-1B")
    real = tmp_path / "blob"
    (folder / "tokenizer.json").rename(real)
    (folder / "tokenizer.json").symlink_to(real)
    result = import_path(folder, tmp_path / "data")
    directory = Path(result.directory)
    assert {p.name for p in directory.iterdir()} == {
        "config.json",
        "tokenizer.json",
        "model.safetensors",
        "localspec.json",
    }
    assert all(p.stat().st_mode & 0o077 == 0 and not p.is_symlink() for p in directory.iterdir())
    (folder / "model.safetensors").write_bytes(b"changed")
    real.write_text("changed")
    assert verify(tmp_path / "data", result.model_id) == ()


def test_a_download_that_was_cut_short_is_not_copied(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "cut")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00003.safetensors")
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    index = {"weight_map": {"w": names[0], "model.layers.9.w": names[1], "model.visual.w": names[2]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(HubError, match=r"lacks model-00002-of-00003\.safetensors, which its index names"):
        import_path(folder, tmp_path / "data")
    assert list_installed(tmp_path / "data") == ()
    # What holds vision only is not needed, and an index of other files means nothing.
    save_file({"model.layers.9.w": np.ones(4, np.float32)}, folder / names[1])
    import_path(folder, tmp_path / "data", model_id="whole")
    for name in names[:2]:
        (folder / name).unlink()
    save_file({"w": np.ones(4, np.float32)}, folder / "model.safetensors")
    import_path(folder, tmp_path / "data", model_id="other")


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data"
    with pytest.raises(HubError, match=r"does not exist; give a \.gguf file"):
        import_path(tmp_path / "absent", data)
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(HubError, match=r"is not a \.gguf file"):
        import_path(tmp_path / "x.bin", data)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HubError, match=r"has no config\.json"):
        import_path(tmp_path / "empty", data)
    with pytest.raises(HubError, match="architecture 'bert' is not supported"):
        import_path(write_checkpoint(tmp_path / "bert", model_type="bert"), data)
    with pytest.raises(HubError, match="format 'awq' is not supported"):
        import_path(write_checkpoint(tmp_path / "awq", quantization_config={"quant_method": "awq"}), data)
    damaged = write_checkpoint(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(HubError, match=r"model\.safetensors is damaged"):
        import_path(damaged, data)
    with pytest.raises(HubError, match="is not a model id"):
        import_path(damaged, data, model_id="../x")
    monkeypatch.setattr(layout, "free_bytes", lambda directory: 1000)
    with pytest.raises(HubError, match="GB are free") as caught:
        import_path(write_checkpoint(tmp_path / "good"), data)
    assert caught.value.exit_code == 3
    assert list_installed(data) == ()
    assert [p for p in (data / "models").iterdir() if p.name.startswith(".tmp-")] == []


def test_folder_whose_path_is_no_utf8(tmp_path: Path) -> None:
    above = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    above.mkdir()
    folder = write_checkpoint(above / os.fsdecode(b"Tiny-\xff1B"))
    result = import_path(folder, tmp_path / "data")
    assert result.model_id == "tiny--1b" and verify(tmp_path / "data", "tiny--1b") == ()
    assert layout.read_manifest(Path(result.directory)).source.endswith("/caf\ufffd/Tiny-\ufffd1B")

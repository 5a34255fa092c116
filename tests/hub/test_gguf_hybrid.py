"""Qwen3.5 hybrids as GGUF: a checkpoint written as llama.cpp's converter writes it comes back as it was, and runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hub_fake_server import FakeHub, running
from hub_gguf_samples import Q, SampleModel, write_model
from hub_hybrid_samples import HIDDEN, INNER, LAYERS, write

from localspec.hub.catalogue import Catalogue
from localspec.hub.convert import convert_gguf
from localspec.hub.get import Wish, get
from localspec.hub.gguf_architectures import peek_architecture
from localspec.hub.gguf_hybrid import value_head_order
from localspec.hub.records import HubError, HubSettings


def convert(tmp_path: Path, kind: Q, tied: bool = False) -> tuple[Path, dict[str, np.ndarray], dict[str, Any]]:
    values = write(tmp_path / "m.gguf", kind, tied)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out, {})
    return out, values, json.loads((out / "config.json").read_text())


def test_value_heads_are_grouped_again() -> None:
    assert value_head_order(2, 6).tolist() == [0, 2, 4, 1, 3, 5]
    assert value_head_order(3, 3).tolist() == [0, 1, 2]


@pytest.mark.torch
@pytest.mark.parametrize("kind", [Q.F32, Q.BF16, Q.Q8_0, Q.Q4_1, Q.Q5_0], ids=lambda q: q.name)
def test_every_tensor_comes_back_as_the_hub_has_it(tmp_path: Path, kind: Q) -> None:
    """Whole heads move, so that quantising and moving commute: each result is the quantised original."""
    import torch
    from safetensors.torch import load_file

    from localspec.formats.blocks import dequantise, methods_by_name

    out, values, config = convert(tmp_path, kind)
    tensors = load_file(out / "model.safetensors")
    methods = methods_by_name(config["quantization_config"])
    assert {name.removesuffix(suffix) for name in tensors for suffix in (".q", ".scale", ".min")} >= set(values)
    for name, expected in values.items():
        ours = dequantise(tensors, name) if name in methods else tensors[name].float()
        assert tuple(ours.shape) == expected.shape
        if expected.ndim == 2:
            data = gguf.quants.quantize(expected, kind)
            np.testing.assert_array_equal(ours.numpy(), gguf.quants.dequantize(data, kind), err_msg=name)
        else:
            torch.testing.assert_close(ours, torch.from_numpy(expected), rtol=0, atol=3e-7)
    if kind not in (Q.F32, Q.BF16):
        assert "model.language_model.layers.0.linear_attn.out_proj.weight" in methods


@pytest.mark.torch
@pytest.mark.parametrize("tied", [False, True])
def test_the_engine_takes_model_and_block(tmp_path: Path, tied: bool) -> None:
    """Every tensor is used by the model or its drafter, and their shapes agree with the config."""
    from localspec.drafters.mtp import shape_of
    from localspec.formats.checkpoint import open_checkpoint
    from localspec.kernels.table import choose
    from localspec.models import architecture

    out, _, config = convert(tmp_path, Q.Q8_0, tied)
    ops, _ = choose("cpu")
    model = architecture(config["model_type"]).load(config, open_checkpoint(out), ops)
    assert model.num_layers == LAYERS and model.hidden_size == HIDDEN
    assert shape_of(config).intermediate_size == INNER
    assert config["text_config"]["mtp_num_hidden_layers"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm.time_step_rank": 5}, "5 value heads over 2 key heads"),
        ({"ssm.group_count": 0}, "ssm.group_count is 0"),
        ({"ssm.inner_size": 1 << 30}, "ssm.inner_size"),
        ({"block_count": 1}, "with 1 of them for prediction"),
        ({"nextn_predict_layers": 9}, "nextn_predict_layers is 9"),
        ({"full_attention_interval": 2}, "unknown tensor"),
        ({"rope.dimension_count": 64}, "rope.dimension_count is 64"),
    ],
    ids=str,
)
def test_sizes_that_cannot_be(tmp_path: Path, changes: dict[str, int], message: str) -> None:
    write(tmp_path / "m.gguf", **changes)
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", {})
    assert list((tmp_path / "out").iterdir()) == []


def test_the_first_bytes_tell_the_architecture(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf")
    raw = (tmp_path / "m.gguf").read_bytes()
    assert peek_architecture(raw[:4096]) == "qwen35"
    for cut in range(0, 120, 7):
        assert peek_architecture(raw[:cut]) in (None, "qwen35")
    for damage in (b"", b"GGUF", b"XXXX" + raw[4:], raw[:24] + b"\xff" * 40, raw[:40] + b"\xff" * 40):
        assert peek_architecture(damage) is None


def test_an_unsupported_file_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", SampleModel(architecture="falcon"))
    data = (tmp_path / "m.gguf").read_bytes() + b"\0" * 500_000
    with running(FakeHub(repo="acme/falcon", files={"m.gguf": data})) as hub:
        settings = HubSettings(endpoint=hub.hub_url)
        with pytest.raises(HubError, match=r"m\.gguf has the architecture 'falcon'.*it was not fetched"):
            get(Catalogue(()), Wish("acme/falcon:m.gguf"), tmp_path / "data", settings)
        assert 0 < hub.body_bytes_of("m.gguf") <= 64 << 10

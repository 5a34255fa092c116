"""The memory budget against figures computed apart (27B of the hybrid family) and against small written models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from localspec.hub.catalogue import load_catalogue
from localspec.hub.fit import CacheShape, WeightBytes, cache_shape, fit, fit_installed, keeps_fp8, proposal, weights_of
from localspec.hub.layout import write_json
from localspec.hub.records import HubError

GIB = 2**30
HYBRID_27B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "text_config": {
        "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4,
        "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "max_position_embeddings": 262_144, "mtp_num_hidden_layers": 1,
    },
}  # fmt: skip


def test_hybrid_27b_keeps_64_kib_a_token_and_150_mib_a_sequence() -> None:
    shape = cache_shape(HYBRID_27B)
    assert shape.n_attention_layers == 16
    assert shape.bytes_per_token("bf16", with_mtp=False) == 64 * 1024
    assert shape.bytes_per_token("fp8", with_mtp=True) == 34 * 1024
    assert 0.155 < shape.state_bytes / GIB < 0.160
    assert 0.022 < shape.ring_bytes / GIB < 0.025


@pytest.mark.parametrize(
    ("usable_gib", "kv_dtype", "least", "most"),
    [(23.5, "bf16", 23_000, 27_000), (23.5, "fp8", 45_000, 53_000), (31.4, "bf16", 140_000, 150_000)],
)
def test_context_on_real_cards(usable_gib: float, kv_dtype: str, least: int, most: int) -> None:
    """19.56 GiB of weights with MTP on 24 and 32 GB cards, states of four sequences and all scratch beside them."""
    weights = WeightBytes(body=int(18.77 * GIB), embedding=0, mtp=int(0.79 * GIB), vision=0)
    result = fit(weights, cache_shape(HYBRID_27B), int(usable_gib * GIB), kv_dtype, with_mtp=True)
    assert least <= result.context_tokens <= most and result.context_tokens % 256 == 0


def test_limits_are_kept() -> None:
    shape = CacheShape(2, 100, 0, context_limit_tokens=1000, n_mtp_layers=0)
    weights = WeightBytes(body=GIB, embedding=5, mtp=0, vision=7)
    assert fit(weights, shape, 80 * GIB, "fp8", with_mtp=False).context_tokens == 1000
    nothing = fit(weights, shape, GIB, "fp8", with_mtp=False)
    assert (nothing.context_tokens, nothing.host_bytes) == (0, 5)
    with pytest.raises(HubError, match="'int3' is not known; known are bf16, fp8"):
        fit(weights, shape, GIB, "int3", with_mtp=False)


def test_plain_attention_and_listed_layers() -> None:
    plain = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 99}
    shape = cache_shape(plain)
    assert (
        replace(shape, workspace_bytes=0, row_scratch_bytes=0) == CacheShape(3, 2 * 4 * 16, 0, 99, 0)
        and shape.workspace_bytes > 0
    )
    listed = HYBRID_27B["text_config"] | {"layer_types": ["full_attention"] * 63 + ["linear_attention"]}
    assert cache_shape(listed).n_attention_layers == 63


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"])
@pytest.mark.parametrize("value", [None, 0, -1, "64", True, 1.5, 1 << 60])
def test_absurd_config_is_refused_by_key(key: str, value: object) -> None:
    plain = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 99}
    with pytest.raises(HubError, match=f"config.json: {key} is"):
        cache_shape({**plain, key: value})


def write(directory: Path, tied: bool) -> None:
    tensors = {
        "model.language_model.embed_tokens.weight": np.zeros((10, 4), np.float32),
        "model.language_model.layers.0.w": np.zeros(7, np.float32),
        "mtp.fc.weight": np.zeros(3, np.float32),
        "model.visual.w": np.zeros(100, np.float32),
    }
    if not tied:
        tensors["lm_head.weight"] = np.zeros((10, 4), np.float32)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    write_json(directory / "config.json", HYBRID_27B)


def test_stored_weights_are_counted_by_place(tmp_path: Path) -> None:
    write(tmp_path / "untied", tied=False)
    assert weights_of(tmp_path / "untied") == WeightBytes(body=28 + 80, embedding=80, mtp=12, vision=400)
    write(tmp_path / "tied", tied=True)
    assert weights_of(tmp_path / "tied") == WeightBytes(body=28 + 80, embedding=0, mtp=12, vision=400)
    result = fit_installed(tmp_path / "untied", 24 * GIB)
    assert result.weights_bytes == 28 + 80 + 12 and result.kv_bytes_per_token == 34 * 1024


def test_block_formats_lie_on_a_card_in_bf16(tmp_path: Path) -> None:
    tensors = {
        "lm_head.weight.q": np.zeros((4, 16), np.uint8),
        "lm_head.weight.scale": np.zeros((4, 1), np.float16),
        "model.a.q": np.zeros((4, 32), np.int8),
        "model.a.scale": np.zeros((4, 2), np.float32),
        "model.a.min": np.zeros((4, 2), np.float32),
        "model.b": np.zeros((3, 8), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    assert weights_of(tmp_path).body == 2 * (4 * 32) + 2 * (4 * 32) + 48


@pytest.mark.parametrize(("name", "keeps"), [("a.self_attn.k_norm.weight", True), ("a.k_norm.bias", False)])
def test_a_model_with_normed_keys_keeps_fp8(tmp_path: Path, name: str, keeps: bool) -> None:
    assert not keeps_fp8(tmp_path)
    save_file({"z": np.zeros(1, np.float32)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({name: np.zeros(3, np.float32)}, tmp_path / "model-00002-of-00002.safetensors")
    assert keeps_fp8(tmp_path) == keeps
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(b"damaged")
    assert not keeps_fp8(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(HubError, match=r"model\.safetensors cannot be read"):
        weights_of(tmp_path)


@pytest.mark.parametrize(
    ("gpu_gib", "model_id"),
    [
        (None, "smollm2-135m"),
        (4.0, "smollm2-135m"),
        (7.6, "qwen3.5-4b"),
        (11.6, "qwen3.5-9b"),
        (15.5, "qwen3.5-9b"),
        (23.5, "qwen3.8-27b"),
        (140.0, "qwen3.8-27b"),
    ],
)
def test_what_is_proposed_for_a_card(gpu_gib: float | None, model_id: str) -> None:
    gpu_bytes = None if gpu_gib is None else int(gpu_gib * GIB)
    assert proposal(load_catalogue(), gpu_bytes).id == model_id

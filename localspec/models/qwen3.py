"""Qwen3 dense models: as Llama, with an RMS norm on each query and key head before the rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.layers.attention import AttentionShape
from localspec.layers.config import ConfigReader
from localspec.layers.decoder import Decoder
from localspec.layers.dense import build_dense, read_dense_shape


def load(config: Mapping[str, Any], checkpoint: Checkpoint, ops: Ops) -> Decoder:
    """Build the model from its config.json. Raises ValueError for settings or tensors that do not fit."""
    reader = ConfigReader(config)
    reader.expect("model_type", "qwen3")
    reader.expect("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    heads = reader.integer("num_attention_heads")
    reader.expect("layer_types", ["full_attention"] * reader.integer("num_hidden_layers"))
    bias = reader.flag("attention_bias", False)
    attention = AttentionShape(
        hidden_size=reader.integer("hidden_size"),
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", 128),
        bias=bias,
        output_bias=bias,
        head_norms=True,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
    )
    return build_dense(read_dense_shape(reader, attention), checkpoint, ops)


def tiny_config() -> dict[str, Any]:
    """A small config for tests: heads wider than hidden / heads, linear scaling, tied head."""
    return {
        "model_type": "qwen3",
        "hidden_size": 60,
        "intermediate_size": 99,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 20,
        "vocab_size": 141,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000000.0},
    }

"""Llama and what shares its form (SmolLM2, Llama 3.x): plain norms, rotary attention, gated MLP."""

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
    reader.expect("model_type", "llama")
    reader.expect("mlp_bias", False)
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    bias = reader.flag("attention_bias", False)
    attention = AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", max(1, hidden // heads)),
        bias=bias,
        output_bias=bias,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
    )
    return build_dense(read_dense_shape(reader, attention), checkpoint, ops)


def tiny_config() -> dict[str, Any]:
    """A small config for tests: odd sizes, grouped heads, tied head, biases, scaled frequencies."""
    return {
        "model_type": "llama",
        "hidden_size": 72,
        "intermediate_size": 100,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "vocab_size": 131,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    }

"""Qwen2 and Qwen2.5 dense models: as Llama, with biases on the query, key and value projections only."""

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
    reader.expect("model_type", "qwen2")
    reader.expect("use_sliding_window", False)
    reader.ignore("sliding_window", "max_window_layers")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    reader.expect("layer_types", ["full_attention"] * reader.integer("num_hidden_layers"))
    attention = AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", max(1, hidden // heads)),
        bias=True,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
    )
    return build_dense(read_dense_shape(reader, attention), checkpoint, ops)


def tiny_config() -> dict[str, Any]:
    """A small config for tests: odd sizes, grouped heads, a head of its own."""
    return {
        "model_type": "qwen2",
        "hidden_size": 56,
        "intermediate_size": 90,
        "num_hidden_layers": 2,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "vocab_size": 150,
        "num_token_ids": 147,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    }

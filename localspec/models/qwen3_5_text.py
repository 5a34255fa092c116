"""Qwen3.5, 3.6 and 3.8 dense hybrids as text-only exports: the settings stand at the top of the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.layers.config import ConfigReader
from localspec.layers.decoder import Decoder
from localspec.layers.hybrid import build_hybrid, read_hybrid_shape


def load(config: Mapping[str, Any], checkpoint: Checkpoint, ops: Ops) -> Decoder:
    """Build the model from its config.json. Raises ValueError for settings or tensors that do not fit."""
    reader = ConfigReader(config)
    reader.expect("model_type", "qwen3_5_text")
    return build_hybrid(read_hybrid_shape(reader, reader.flag("tie_word_embeddings", False)), checkpoint, ops)


def tiny_config() -> dict[str, Any]:
    """A small config for tests: layers named one by one, one value head a key head, flat rope settings, tied head."""
    return {
        "model_type": "qwen3_5_text",
        "hidden_size": 40,
        "intermediate_size": 66,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "linear_num_key_heads": 3,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 10,
        "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3,
        "full_attention_interval": 2,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "vocab_size": 140,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mlp_only_layers": [],
    }

"""Qwen3.5, 3.6 and 3.8 dense hybrids in multimodal form: the text part of the config and of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.layers.config import ConfigReader
from localspec.layers.decoder import Decoder
from localspec.layers.hybrid import HybridShape, build_hybrid, read_hybrid_shape


def load(config: Mapping[str, Any], checkpoint: Checkpoint, ops: Ops) -> Decoder:
    """Build the model from its config.json. Raises ValueError for settings or tensors that do not fit."""
    return build_hybrid(read_shape(config), checkpoint, ops)


def read_shape(config: Mapping[str, Any]) -> HybridShape:
    """Checks every setting of the text part, whether it is nested or flat. Raises ValueError by name."""
    outer = ConfigReader(config)
    outer.expect("model_type", "qwen3_5")
    nested = outer.section("text_config")
    reader = nested or outer
    # Older exports repeat the flag of the tied head outside the text part; the outer one is the whole model's.
    tied = outer.flag("tie_word_embeddings", reader.flag("tie_word_embeddings", False))
    if nested is not None:
        outer.ignore("vision_config", "image_token_id", "video_token_id", "vision_start_token_id")
        outer.ignore("vision_end_token_id", "language_model_only")
        outer.finish()
    return read_hybrid_shape(reader, tied)


def tiny_config() -> dict[str, Any]:
    """A small multimodal config for tests: grouped heads in both kinds of layer, padded vocabulary."""
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": 64,
            "intermediate_size": 90,
            "num_hidden_layers": 5,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "vocab_size": 152,
            "num_token_ids": 149,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "attention_bias": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [1, 1, 1],
            },
        },
    }

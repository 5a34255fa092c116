"""The `qwen35` architecture of GGUF files: Qwen3.5, 3.6 and 3.8 dense hybrids, with their MTP block. Torch-free.

What the converter that writes these files changes, and this module undoes: value heads of Gated DeltaNet lie tiled over
the key heads instead of grouped by them; every norm but the one inside Gated DeltaNet is stored as 1 + w; A_log is
stored as -exp(A_log); the convolution lacks its middle axis; the MTP block is one layer more. Read in
github.com/ggml-org/llama.cpp: conversion/qwen.py, src/models/qwen35.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.hub.gguf import GgufFile
from localspec.hub.gguf_models import LIMITS, Change, HeadOrder, MappedTensor, Metadata, Shape, read_shape, top_tensors
from localspec.hub.records import HubError

NAME = "qwen35"
PREFIX = "model.language_model."


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a hybrid. `dense.n_layers` counts the trunk only; `n_mtp_layers` lie after it in the file."""

    dense: Shape
    n_mtp_layers: int
    key_heads: int
    value_heads: int
    key_head_size: int
    value_head_size: int
    taps: int
    attention_interval: int
    rotated_size: int

    @property
    def vocabulary(self) -> int:
        return self.dense.vocabulary

    @property
    def context_tokens(self) -> int:
        return self.dense.context_tokens


def read_hybrid(file: GgufFile) -> HybridShape:
    """Reads and bounds the sizes. Raises HubError naming the metadata key that is missing or absurd."""
    metadata, dense = Metadata(file, NAME), read_shape(file, NAME)
    heads, width = LIMITS["heads"], LIMITS["width"]
    n_mtp_layers = metadata.size("nextn_predict_layers", 1, 0, least=0)
    value_heads = metadata.size("ssm.time_step_rank", heads)
    inner_size = metadata.size("ssm.inner_size", width)
    shape = HybridShape(
        dense=_trunk(dense, n_mtp_layers),
        n_mtp_layers=n_mtp_layers,
        key_heads=metadata.size("ssm.group_count", heads),
        value_heads=value_heads,
        key_head_size=metadata.size("ssm.state_size", width),
        value_head_size=inner_size // value_heads,
        taps=metadata.size("ssm.conv_kernel", 64),
        attention_interval=metadata.size("full_attention_interval", LIMITS["layers"], 4),
        rotated_size=metadata.size("rope.dimension_count", dense.head_size),
    )
    if shape.value_heads % shape.key_heads or inner_size % value_heads or shape.key_heads * shape.key_head_size > width:
        raise HubError(
            f"{file.path.name}: {value_heads} value heads over {shape.key_heads} key heads in a width of {inner_size} "
            "are not possible"
        )
    return shape


def _trunk(dense: Shape, n_mtp_layers: int) -> Shape:
    if dense.n_layers <= n_mtp_layers:
        raise HubError(f"{NAME}.block_count is {dense.n_layers}, with {n_mtp_layers} of them for prediction")
    return Shape(**{**vars(dense), "n_layers": dense.n_layers - n_mtp_layers})


def hybrid_config(shape: HybridShape) -> dict[str, Any]:
    """config.json in the form of the multimodal originals, with the text part alone."""
    dense = shape.dense
    text = {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attn_output_gate": True,
        "full_attention_interval": shape.attention_interval,
        "head_dim": dense.head_size,
        "hidden_act": "silu",
        "hidden_size": dense.hidden,
        "intermediate_size": dense.intermediate,
        "linear_conv_kernel_dim": shape.taps,
        "linear_key_head_dim": shape.key_head_size,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "linear_value_head_dim": shape.value_head_size,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": dense.context_tokens,
        "mtp_num_hidden_layers": shape.n_mtp_layers,
        "num_attention_heads": dense.n_heads,
        "num_hidden_layers": dense.n_layers,
        "num_key_value_heads": dense.n_kv_heads,
        "rms_norm_eps": dense.norm_epsilon,
        "rope_parameters": {
            "partial_rotary_factor": shape.rotated_size / dense.head_size,
            "rope_theta": dense.rope_theta,
            "rope_type": "default",
        },
        "tie_word_embeddings": dense.tied,
        "vocab_size": dense.vocabulary,
    }
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "text_config": text,
        "tie_word_embeddings": dense.tied,
    }


def hybrid_tensors(shape: HybridShape) -> list[MappedTensor]:
    """Every tensor that a hybrid of this shape has."""
    tensors, orders = top_tensors(shape.dense, PREFIX, "minus_one"), _orders_of(shape)
    for layer in range(shape.dense.n_layers):
        gguf, hub = f"blk.{layer}.", f"{PREFIX}layers.{layer}."
        is_full = (layer + 1) % shape.attention_interval == 0
        tensors += _attention(shape, gguf, hub) if is_full else _delta_net(shape, orders, gguf, hub)
        tensors += _around(shape, gguf, hub)
    if shape.n_mtp_layers:
        tensors += _mtp(shape, f"blk.{shape.dense.n_layers}.")
    return tensors


def _around(shape: HybridShape, gguf: str, hub: str) -> list[MappedTensor]:
    """Norms and MLP, which all layers have."""
    hidden, inner = shape.dense.hidden, shape.dense.intermediate
    return [
        _norm(f"{gguf}attn_norm", f"{hub}input_layernorm", hidden),
        _norm(f"{gguf}post_attention_norm", f"{hub}post_attention_layernorm", hidden),
        MappedTensor(f"{gguf}ffn_gate.weight", f"{hub}mlp.gate_proj.weight", (inner, hidden)),
        MappedTensor(f"{gguf}ffn_up.weight", f"{hub}mlp.up_proj.weight", (inner, hidden)),
        MappedTensor(f"{gguf}ffn_down.weight", f"{hub}mlp.down_proj.weight", (hidden, inner)),
    ]


def _attention(shape: HybridShape, gguf: str, hub: str) -> list[MappedTensor]:
    dense, at = shape.dense, f"{hub}self_attn."
    query, key = dense.n_heads * dense.head_size, dense.n_kv_heads * dense.head_size
    return [
        # Each head's query is followed by its gate, in both layouts.
        MappedTensor(f"{gguf}attn_q.weight", f"{at}q_proj.weight", (2 * query, dense.hidden)),
        MappedTensor(f"{gguf}attn_k.weight", f"{at}k_proj.weight", (key, dense.hidden)),
        MappedTensor(f"{gguf}attn_v.weight", f"{at}v_proj.weight", (key, dense.hidden)),
        MappedTensor(f"{gguf}attn_output.weight", f"{at}o_proj.weight", (dense.hidden, query)),
        _norm(f"{gguf}attn_q_norm", f"{at}q_norm", dense.head_size),
        _norm(f"{gguf}attn_k_norm", f"{at}k_norm", dense.head_size),
    ]


@dataclass(frozen=True)
class _Orders:
    """Orders that all Gated DeltaNet layers share. heads: [value heads]; rows: of z; joined: of q, k and v."""

    heads: npt.NDArray[np.int64]
    rows: npt.NDArray[np.int64]
    joined: npt.NDArray[np.int64]


def _orders_of(shape: HybridShape) -> _Orders:
    heads = value_head_order(shape.key_heads, shape.value_heads)
    key_rows = 2 * shape.key_heads * shape.key_head_size
    rows = (heads[:, None] * shape.value_head_size + np.arange(shape.value_head_size, dtype=np.int64)).reshape(-1)
    return _Orders(heads, rows, np.concatenate([np.arange(key_rows, dtype=np.int64), key_rows + rows]))


def _delta_net(shape: HybridShape, orders: _Orders, gguf: str, hub: str) -> list[MappedTensor]:
    hidden, at = shape.dense.hidden, f"{hub}linear_attn."
    heads, value_width = shape.value_heads, shape.value_heads * shape.value_head_size
    order, joined_rows = orders.heads, orders.joined
    columns = HeadOrder(order, shape.value_head_size)
    change: Change = "middle_axis"
    return [
        MappedTensor(f"{gguf}attn_qkv.weight", f"{at}in_proj_qkv.weight", (len(joined_rows), hidden), joined_rows),
        MappedTensor(f"{gguf}attn_gate.weight", f"{at}in_proj_z.weight", (value_width, hidden), orders.rows),
        MappedTensor(f"{gguf}ssm_alpha.weight", f"{at}in_proj_a.weight", (heads, hidden), order),
        MappedTensor(f"{gguf}ssm_beta.weight", f"{at}in_proj_b.weight", (heads, hidden), order),
        MappedTensor(f"{gguf}ssm_a", f"{at}A_log", (heads,), order, change="log_of_negative"),
        MappedTensor(f"{gguf}ssm_dt.bias", f"{at}dt_bias", (heads,), order),
        MappedTensor(
            f"{gguf}ssm_conv1d.weight", f"{at}conv1d.weight", (len(joined_rows), shape.taps), joined_rows, change=change
        ),
        MappedTensor(f"{gguf}ssm_norm.weight", f"{at}norm.weight", (shape.value_head_size,)),
        MappedTensor(f"{gguf}ssm_out.weight", f"{at}out_proj.weight", (hidden, value_width), columns=columns),
    ]


def _mtp(shape: HybridShape, gguf: str) -> list[MappedTensor]:
    hidden, at = shape.dense.hidden, "mtp.layers.0."
    return [
        MappedTensor(f"{gguf}nextn.eh_proj.weight", "mtp.fc.weight", (hidden, 2 * hidden)),
        _norm(f"{gguf}nextn.enorm", "mtp.pre_fc_norm_embedding", hidden),
        _norm(f"{gguf}nextn.hnorm", "mtp.pre_fc_norm_hidden", hidden),
        _norm(f"{gguf}nextn.shared_head_norm", "mtp.norm", hidden),
        *_attention(shape, gguf, at),
        *_around(shape, gguf, at),
    ]


def _norm(gguf: str, hub: str, size: int) -> MappedTensor:
    return MappedTensor(f"{gguf}.weight", f"{hub}.weight", (size,), change="minus_one")


def value_head_order(key_heads: int, value_heads: int) -> npt.NDArray[np.int64]:
    """Heads that undo the tiling: result head h is stored head order[h].  # [value_heads] i64

    The file goes through all key heads for the first value head of each, then the second; the hub's order keeps the
    value heads of one key head together.
    """
    stored = np.arange(value_heads, dtype=np.int64).reshape(value_heads // key_heads, key_heads)
    return stored.swapaxes(0, 1).reshape(-1)

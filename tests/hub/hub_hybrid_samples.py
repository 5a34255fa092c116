"""A small Qwen3.5 hybrid with random weights, written as GGUF in the way of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from hub_gguf_samples import MERGES, Q, SampleModel, vocabulary

HIDDEN, INNER, HEADS, KV_HEADS, HEAD = 64, 96, 4, 2, 32
KEY_HEADS, VALUE_HEADS, KEY, VALUE, TAPS, LAYERS = 2, 6, 32, 64, 4, 4
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return (RNG.normal(size=shape) * 0.1).astype(np.float32)


def attention(at: str) -> dict[str, np.ndarray]:
    return {
        f"{at}q_proj.weight": normal(2 * HEADS * HEAD, HIDDEN), f"{at}k_proj.weight": normal(KV_HEADS * HEAD, HIDDEN),
        f"{at}v_proj.weight": normal(KV_HEADS * HEAD, HIDDEN), f"{at}o_proj.weight": normal(HIDDEN, HEADS * HEAD),
        f"{at}q_norm.weight": normal(HEAD), f"{at}k_norm.weight": normal(HEAD),
    }  # fmt: skip


def around(at: str) -> dict[str, np.ndarray]:
    return {
        f"{at}input_layernorm.weight": normal(HIDDEN), f"{at}post_attention_layernorm.weight": normal(HIDDEN),
        f"{at}mlp.gate_proj.weight": normal(INNER, HIDDEN), f"{at}mlp.up_proj.weight": normal(INNER, HIDDEN),
        f"{at}mlp.down_proj.weight": normal(HIDDEN, INNER),
    }  # fmt: skip


def original(n_tokens: int, tied: bool) -> dict[str, np.ndarray]:
    """A checkpoint as the hub has it."""
    conv, values = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE, VALUE_HEADS * VALUE
    found = {"embed_tokens.weight": normal(n_tokens, HIDDEN), "norm.weight": normal(HIDDEN)}
    for layer in range(LAYERS):
        at = f"layers.{layer}."
        if layer % 4 == 3:
            found |= attention(f"{at}self_attn.")
        else:
            found |= {
                f"{at}linear_attn.in_proj_qkv.weight": normal(conv, HIDDEN),
                f"{at}linear_attn.in_proj_z.weight": normal(values, HIDDEN),
                f"{at}linear_attn.in_proj_a.weight": normal(VALUE_HEADS, HIDDEN),
                f"{at}linear_attn.in_proj_b.weight": normal(VALUE_HEADS, HIDDEN),
                f"{at}linear_attn.A_log": normal(VALUE_HEADS), f"{at}linear_attn.dt_bias": normal(VALUE_HEADS),
                f"{at}linear_attn.conv1d.weight": normal(conv, 1, TAPS),
                f"{at}linear_attn.norm.weight": normal(VALUE),
                f"{at}linear_attn.out_proj.weight": normal(HIDDEN, values),
            }  # fmt: skip
        found |= around(at)
    found = {f"model.language_model.{name}": tensor for name, tensor in found.items()}
    at = "mtp.layers.0."
    found |= attention(f"{at}self_attn.") | around(at) | {"mtp.fc.weight": normal(HIDDEN, 2 * HIDDEN)}
    found |= {f"mtp.{name}.weight": normal(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return found if tied else found | {"lm_head.weight": normal(n_tokens, HIDDEN)}


def tiled(tensor: np.ndarray, axis: int, head: int) -> np.ndarray:
    """Value heads from grouped by key head to one round of all key heads after the other, along an axis."""
    groups = np.split(tensor, VALUE_HEADS, axis)
    assert groups[0].shape[axis] == head
    per_key = VALUE_HEADS // KEY_HEADS
    return np.concatenate([groups[k * per_key + v] for v in range(per_key) for k in range(KEY_HEADS)], axis)


GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "input_layernorm": "attn_norm", "lm_head": "output",
    "post_attention_layernorm": "post_attention_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha", "linear_attn.in_proj_b": "ssm_beta", "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm", "linear_attn.out_proj": "ssm_out", "fc": "nextn.eh_proj",
    "pre_fc_norm_embedding": "nextn.enorm", "pre_fc_norm_hidden": "nextn.hnorm",
}  # fmt: skip


def as_gguf(name: str, tensor: np.ndarray) -> tuple[str, np.ndarray]:
    """Name and values as the converter writes them."""
    is_mtp, name = name.startswith("mtp."), name.removeprefix("model.language_model.").removeprefix("mtp.")
    layer = ""
    if name.startswith("layers."):
        _, number, name = name.split(".", 2)
        layer = f"blk.{LAYERS if is_mtp else number}."
    elif is_mtp:
        layer = f"blk.{LAYERS}."
    if name == "linear_attn.A_log":
        return f"{layer}ssm_a", tiled(-np.exp(tensor), 0, 1)
    if name == "linear_attn.dt_bias":
        return f"{layer}ssm_dt.bias", tiled(tensor, 0, 1)
    name = name.removesuffix(".weight")
    keys = 2 * KEY_HEADS * KEY
    if name.endswith(("in_proj_qkv", "conv1d")):
        tensor = tensor.reshape(len(tensor), -1)
        tensor = np.concatenate([tensor[:keys], tiled(tensor[keys:], 0, VALUE)])
    elif name.endswith("in_proj_z"):
        tensor = tiled(tensor, 0, VALUE)
    elif name.endswith(("in_proj_a", "in_proj_b")):
        tensor = tiled(tensor, 0, 1)
    elif name.endswith("out_proj"):
        tensor = tiled(tensor, 1, VALUE)
    elif "norm" in name and name != "linear_attn.norm":
        tensor = tensor + 1
    gguf_name = "nextn.shared_head_norm" if is_mtp and name == "norm" else GGUF_NAMES[name]
    return f"{layer}{gguf_name}.weight", tensor


def write(path: Path, kind: Q = Q.F32, tied: bool = False, **changes: int) -> dict[str, np.ndarray]:
    """Writes the file; returns the hub's tensors with the values that are stored."""
    sample = SampleModel()
    tokens, kinds = vocabulary(sample)
    writer = gguf.GGUFWriter(path, "qwen35")
    sizes = {
        "block_count": LAYERS + 1, "context_length": 512, "embedding_length": HIDDEN, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD,
        "attention.value_length": HEAD, "rope.dimension_count": HEAD // 4, "ssm.conv_kernel": TAPS,
        "ssm.state_size": KEY, "ssm.group_count": KEY_HEADS, "ssm.time_step_rank": VALUE_HEADS,
        "ssm.inner_size": VALUE_HEADS * VALUE, "full_attention_interval": 4, "nextn_predict_layers": 1, **changes,
    }  # fmt: skip
    for key, value in sizes.items():
        writer.add_uint32(f"qwen35.{key}", value)
    writer.add_float32("qwen35.rope.freq_base", 10_000_000.0)
    writer.add_float32("qwen35.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_array("qwen35.rope.dimension_sections", [11, 11, 10, 0])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen35")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(2)
    values = original(len(tokens), tied)
    for name, tensor in values.items():
        gguf_name, stored = as_gguf(name, tensor)
        use = kind if stored.ndim == 2 and "conv1d" not in gguf_name else Q.F32
        data = gguf.quants.quantize(np.ascontiguousarray(stored), use)
        writer.add_tensor(gguf_name, data, raw_dtype=use)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values

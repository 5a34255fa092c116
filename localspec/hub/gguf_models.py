"""Architectures that GGUF files of ours may have: config.json keys, tensor names, row order. Torch-free, data first.

Knows `llama` and `qwen2`. Each has a config builder that gives the keys transformers writes, and one name map. Metadata
or tensors that the map does not know are refused by name, because dropping them would give a silently different model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.hub.gguf import GgufFile, Value
from localspec.hub.records import HubError

Json = dict[str, Any]

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_MODULES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LIMITS = {"layers": 1_000, "width": 1 << 20, "heads": 4_096, "context": 1 << 26, "vocabulary": 4 << 20}


@dataclass(frozen=True)
class Shape:
    """Sizes both architectures share, read from the metadata and checked against the tensors."""

    n_layers: int
    hidden: int
    intermediate: int
    n_heads: int
    n_kv_heads: int
    head_size: int
    context_tokens: int
    vocabulary: int
    rope_theta: float
    norm_epsilon: float
    tied: bool


def read_shape(file: GgufFile, architecture: str) -> Shape:
    """Reads and bounds the sizes. Raises HubError naming the metadata key that is missing or absurd."""
    metadata = file.metadata

    def size(key: str, limit: int, default: int | None = None) -> int:
        value = metadata.get(f"{architecture}.{key}", default)
        if type(value) is not int or not 1 <= value <= limit:
            raise HubError(f"{file.path.name}: {architecture}.{key} is {value!r}, a number from 1 to {limit} is needed")
        return value

    def real(key: str, default: float | None = None) -> float:
        value = metadata.get(f"{architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise HubError(f"{file.path.name}: {architecture}.{key} is {value!r}, a positive number is needed")
        return float(np.format_float_positional(np.float32(value), unique=True))

    _refuse_scaled_rope(metadata, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise HubError(f"{file.path.name} has no token embedding; it is not a whole model")
    hidden, n_heads = size("embedding_length", LIMITS["width"]), size("attention.head_count", LIMITS["heads"])
    n_kv_heads = size("attention.head_count_kv", LIMITS["heads"], n_heads)
    head_size = size("attention.key_length", LIMITS["width"], hidden // n_heads)
    # Halves of a head rotate against each other; the product is bounded before row orders are built from it.
    if head_size % 2 or n_heads % n_kv_heads or n_heads * head_size > LIMITS["width"]:
        raise HubError(f"{file.path.name}: {n_heads} heads of {head_size} over {n_kv_heads} KV heads are not possible")
    return Shape(
        n_layers=size("block_count", LIMITS["layers"]),
        hidden=hidden,
        intermediate=size("feed_forward_length", LIMITS["width"]),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_size=head_size,
        context_tokens=size("context_length", LIMITS["context"]),
        vocabulary=embedding.shape[0],
        rope_theta=real("rope.freq_base", 10_000.0),
        norm_epsilon=real("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
    )


def _refuse_scaled_rope(metadata: Mapping[str, Value], architecture: str) -> None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    if kind != "none" or factor != 1.0:
        raise HubError(f"rope scaling {kind!r} with factor {factor!r} is not supported in GGUF import; 'none' is")


def _config(shape: Shape, class_name: str, model_type: str) -> Json:
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate,
        "max_position_embeddings": shape.context_tokens,
        "num_attention_heads": shape.n_heads,
        "num_hidden_layers": shape.n_layers,
        "num_key_value_heads": shape.n_kv_heads,
        "rms_norm_eps": shape.norm_epsilon,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def _llama_config(shape: Shape) -> Json:
    own = {"attention_bias": False, "head_dim": shape.head_size, "mlp_bias": False, "pretraining_tp": 1}
    return _config(shape, "LlamaForCausalLM", "llama") | own


def _qwen2_config(shape: Shape) -> Json:
    if shape.head_size * shape.n_heads != shape.hidden:
        raise HubError(f"qwen2 with heads of {shape.head_size} does not fit its width of {shape.hidden}")
    own = {
        "layer_types": ["full_attention"] * shape.n_layers,
        "max_window_layers": shape.n_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _config(shape, "Qwen2ForCausalLM", "qwen2") | own


@dataclass(frozen=True)
class Architecture:
    """One GGUF architecture: how its config is written and in which way its tensors differ from the hub's."""

    config: Callable[[Shape], Json]
    interleaved_rope_rows: bool
    """Whether the converter that wrote the file interleaved the two halves of each head's q and k rows."""
    biased_modules: frozenset[str]


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": Architecture(_llama_config, interleaved_rope_rows=True, biased_modules=frozenset()),
        "qwen2": Architecture(
            _qwen2_config, interleaved_rope_rows=False, biased_modules=frozenset({"attn_q", "attn_k", "attn_v"})
        ),
    }
)


@dataclass(frozen=True)
class MappedTensor:
    """A GGUF tensor under its hub name, with the row order to apply (None: as stored) and the shape it must have."""

    gguf_name: str
    name: str
    shape: tuple[int, ...]
    rows: npt.NDArray[np.int64] | None


def architecture_of(file: GgufFile) -> tuple[str, Architecture]:
    """The file's architecture. Raises HubError listing the supported ones."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise HubError(f"{file.path.name} has the architecture {name!r}; GGUF import supports {known}")
    return name, ARCHITECTURES[name]


def map_tensors(file: GgufFile, shape: Shape, architecture: Architecture) -> list[MappedTensor]:
    """Hub name, shape and row order of every tensor. Raises HubError for unknown, missing or misshapen tensors."""
    expected = _expected_tensors(shape, architecture)
    unknown = sorted(set(file.tensors) - set(expected))
    missing = sorted(set(expected) - set(file.tensors))
    if unknown or missing:
        what = f"the unknown tensor {unknown[0]!r}" if unknown else f"no tensor {missing[0]!r}"
        raise HubError(f"{file.path.name} has {what}; this build of the model is not supported")
    for gguf_name, mapped in expected.items():
        stored = file.tensors[gguf_name].shape
        if stored != mapped.shape:
            raise HubError(f"{file.path.name}: {gguf_name} has shape {stored}, its metadata needs {mapped.shape}")
    return [expected[name] for name in sorted(expected, key=lambda n: expected[n].name)]


def _expected_tensors(shape: Shape, architecture: Architecture) -> dict[str, MappedTensor]:
    q_rows, kv_rows = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    rows_of = {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows, "attn_output": shape.hidden}
    rows_of |= {"ffn_gate": shape.intermediate, "ffn_up": shape.intermediate, "ffn_down": shape.hidden}
    columns_of = {"attn_output": q_rows, "ffn_down": shape.intermediate}
    order = {}
    if architecture.interleaved_rope_rows:
        order = {"attn_q": rope_row_order(q_rows, shape.n_heads), "attn_k": rope_row_order(kv_rows, shape.n_kv_heads)}
    tensors = [
        MappedTensor("token_embd.weight", _TOP_NAMES["token_embd.weight"], (shape.vocabulary, shape.hidden), None),
        MappedTensor("output_norm.weight", _TOP_NAMES["output_norm.weight"], (shape.hidden,), None),
    ]
    if not shape.tied:
        tensors.append(
            MappedTensor("output.weight", _TOP_NAMES["output.weight"], (shape.vocabulary, shape.hidden), None)
        )
    for layer in range(shape.n_layers):
        for module, hub_module in _LAYER_MODULES.items():
            gguf_name, name = f"blk.{layer}.{module}", f"model.layers.{layer}.{hub_module}"
            if module not in rows_of:
                tensors.append(MappedTensor(f"{gguf_name}.weight", f"{name}.weight", (shape.hidden,), None))
                continue
            size = (rows_of[module], columns_of.get(module, shape.hidden))
            tensors.append(MappedTensor(f"{gguf_name}.weight", f"{name}.weight", size, order.get(module)))
            if module in architecture.biased_modules:
                tensors.append(MappedTensor(f"{gguf_name}.bias", f"{name}.bias", size[:1], order.get(module)))
    return {tensor.gguf_name: tensor for tensor in tensors}


def rope_row_order(n_rows: int, n_heads: int) -> npt.NDArray[np.int64]:
    """Row indices that undo the interleaving of q and k rows: result row r is stored row order[r].  # [n_rows] i64

    Within each head the file holds rows (0, half, 1, half + 1, ...); the hub's order is 0, 1, ..., half, half + 1, ....
    """
    head_rows = n_rows // n_heads
    stored = np.arange(n_rows, dtype=np.int64).reshape(n_heads, head_rows // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)

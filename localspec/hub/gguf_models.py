"""Dense architectures of GGUF files: config.json keys, tensor names, row order. Torch-free, data first.

Knows `llama`, `qwen2` and `qwen3` (`hub.gguf_architectures` lists all). Each has a config builder that gives the keys
transformers writes, and one name map. Metadata or tensors that the map does not know are refused by name, because
dropping them would give a silently different model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from localspec.hub.gguf import GgufFile
from localspec.hub.records import HubError

Json = dict[str, Any]

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
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies: how the files of Llama 3 say what its config calls rope type llama3."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
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
    rope_factor: float = 1.0
    """Of rope type llama3; 1 for plain frequencies."""


class Metadata:
    """Numbers of one architecture's metadata, bounded. Every refusal names the file and the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file, self._architecture = file, architecture

    def size(self, key: str, limit: int, default: int | None = None, least: int = 1) -> int:
        """A whole number up to `limit`. Raises HubError otherwise, or if missing without a default."""
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if type(value) is not int or not least <= value <= limit:
            raise self._error(key, value, f"a number from {least} to {limit}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        """A positive number in the fewest digits that give the same float32. Raises HubError otherwise."""
        value = self._file.metadata.get(f"{self._architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
            raise self._error(key, value, "a positive number")
        return float(np.format_float_positional(np.float32(value), unique=True))

    def refuse_scaled_rope(self) -> None:
        """Raises HubError for scaling that the metadata states; Llama 3 states its own by a tensor."""
        kind = self._file.metadata.get(f"{self._architecture}.rope.scaling.type", "none")
        factor = self._file.metadata.get(f"{self._architecture}.rope.scaling.factor", 1.0)
        if kind != "none" or factor != 1.0:
            raise HubError(f"rope scaling {kind!r} with factor {factor!r} is not supported in GGUF import; 'none' is")

    def _error(self, key: str, value: object, needed: str) -> HubError:
        return HubError(f"{self._file.path.name}: {self._architecture}.{key} is {value!r}, {needed} is needed")


def read_shape(file: GgufFile, architecture: str) -> Shape:
    """Reads and bounds the sizes. Raises HubError naming the metadata key that is missing or absurd."""
    metadata = Metadata(file, architecture)
    size, real = metadata.size, metadata.real
    metadata.refuse_scaled_rope()
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
        rope_factor=_rope_factor(file, head_size, real("rope.freq_base", 10_000.0)),
    )


def _rope_factor(file: GgufFile, head_size: int, theta: float) -> float:
    """The factor of rope type llama3 whose formula gives the stored divisors. Raises HubError for any others."""
    tensor = file.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return 1.0
    if tensor.shape != (head_size // 2,) or tensor.type.name != "F32":
        raise HubError(
            f"{file.path.name}: {ROPE_FACTORS} has shape {tensor.shape}, one number a rotated pair is needed"
        )
    stored = file.dequantise(tensor)
    factor = float(stored.max())
    if not 1.0 < factor < 1e4 or not np.allclose(stored, _llama3_divisors(head_size, theta, factor), rtol=1e-3):
        raise HubError(f"{file.path.name}: {ROPE_FACTORS} is not the scaling of Llama 3; others are not supported")
    return float(np.format_float_positional(np.float32(factor), unique=True))


def _llama3_divisors(head_size: int, theta: float, factor: float) -> npt.NDArray[np.float64]:
    """What each frequency is divided by: 1 for short wavelengths, `factor` for long ones, blended between."""
    low, high = _LLAMA3_ROPE["low_freq_factor"], _LLAMA3_ROPE["high_freq_factor"]
    original = _LLAMA3_ROPE["original_max_position_embeddings"]
    wavelength = 2 * np.pi * theta ** (np.arange(0, head_size, 2) / head_size)
    smooth = np.clip((original / wavelength - low) / (high - low), 0.0, 1.0)
    divisors: npt.NDArray[np.float64] = 1.0 / ((1.0 - smooth) / factor + smooth)
    return divisors


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
        "rope_parameters": _rope_parameters(shape),
        "tie_word_embeddings": shape.tied,
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def _rope_parameters(shape: Shape) -> Json:
    if shape.rope_factor == 1.0:
        return {"rope_theta": shape.rope_theta, "rope_type": "default"}
    return {"rope_theta": shape.rope_theta, "rope_type": "llama3", "factor": shape.rope_factor, **_LLAMA3_ROPE}


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


def _qwen3_config(shape: Shape) -> Json:
    own = {
        "attention_bias": False,
        "head_dim": shape.head_size,
        "layer_types": ["full_attention"] * shape.n_layers,
        "max_window_layers": shape.n_layers,
        "sliding_window": None,
        "use_sliding_window": False,
    }
    return _config(shape, "Qwen3ForCausalLM", "qwen3") | own


@dataclass(frozen=True)
class DenseKind:
    """How a dense architecture's config is written and in which way its tensors differ from the hub's."""

    config: Callable[[Shape], Json]
    interleaved_rope_rows: bool = False
    """Whether the converter that wrote the file interleaved the two halves of each head's q and k rows."""
    biased_modules: frozenset[str] = frozenset()
    head_norms: bool = False


DENSE_KINDS: Mapping[str, DenseKind] = MappingProxyType(
    {
        "llama": DenseKind(_llama_config, interleaved_rope_rows=True),
        "qwen2": DenseKind(_qwen2_config, biased_modules=frozenset({"attn_q", "attn_k", "attn_v"})),
        "qwen3": DenseKind(_qwen3_config, head_norms=True),
    }
)


@dataclass(frozen=True)
class HeadOrder:
    """An order of heads along the columns of a matrix: result head h is stored head `heads[h]`.  # [n_heads] i64"""

    heads: npt.NDArray[np.int64]
    head_columns: int


Change = Literal["none", "minus_one", "log_of_negative", "middle_axis"]
"""What a tensor's values need: norms stored as 1 + w, decays stored as -exp(a), convolutions stored without an axis."""


@dataclass(frozen=True)
class MappedTensor:
    """A GGUF tensor under its hub name, with the orders to apply (None: as stored) and the shape it must have."""

    gguf_name: str
    name: str
    shape: tuple[int, ...]
    rows: npt.NDArray[np.int64] | None = None
    columns: HeadOrder | None = None
    change: Change = "none"


def dense_tensors(shape: Shape, kind: DenseKind) -> list[MappedTensor]:
    """Every tensor that a dense model of this shape has."""
    q_rows, kv_rows = shape.n_heads * shape.head_size, shape.n_kv_heads * shape.head_size
    rows_of = {"attn_q": q_rows, "attn_k": kv_rows, "attn_v": kv_rows, "attn_output": shape.hidden}
    rows_of |= {"ffn_gate": shape.intermediate, "ffn_up": shape.intermediate, "ffn_down": shape.hidden}
    columns_of = {"attn_output": q_rows, "ffn_down": shape.intermediate}
    order = {}
    if kind.interleaved_rope_rows:
        order = {"attn_q": rope_row_order(q_rows, shape.n_heads), "attn_k": rope_row_order(kv_rows, shape.n_kv_heads)}
    tensors = top_tensors(shape, "model.")
    for layer in range(shape.n_layers):
        for module, hub_module in _LAYER_MODULES.items():
            gguf_name, name = f"blk.{layer}.{module}", f"model.layers.{layer}.{hub_module}"
            if module not in rows_of:
                tensors.append(MappedTensor(f"{gguf_name}.weight", f"{name}.weight", (shape.hidden,)))
                continue
            size = (rows_of[module], columns_of.get(module, shape.hidden))
            tensors.append(MappedTensor(f"{gguf_name}.weight", f"{name}.weight", size, order.get(module)))
            if module in kind.biased_modules:
                tensors.append(MappedTensor(f"{gguf_name}.bias", f"{name}.bias", size[:1], order.get(module)))
        for module, hub_module in _HEAD_NORMS.items() if kind.head_norms else ():
            names = f"blk.{layer}.{module}.weight", f"model.layers.{layer}.{hub_module}.weight"
            tensors.append(MappedTensor(*names, (shape.head_size,)))
    return tensors


def top_tensors(shape: Shape, prefix: str, norm_change: Change = "none") -> list[MappedTensor]:
    """Embedding, final norm and, unless it is the embedding, the head. `prefix` stands before the hub's names."""
    matrix = (shape.vocabulary, shape.hidden)
    tensors = [
        MappedTensor("token_embd.weight", f"{prefix}embed_tokens.weight", matrix),
        MappedTensor("output_norm.weight", f"{prefix}norm.weight", (shape.hidden,), change=norm_change),
    ]
    return tensors if shape.tied else [*tensors, MappedTensor("output.weight", "lm_head.weight", matrix)]


def rope_row_order(n_rows: int, n_heads: int) -> npt.NDArray[np.int64]:
    """Row indices that undo the interleaving of q and k rows: result row r is stored row order[r].  # [n_rows] i64

    Within each head the file holds rows (0, half, 1, half + 1, ...); the hub's order is 0, 1, ..., half, half + 1, ....
    """
    head_rows = n_rows // n_heads
    stored = np.arange(n_rows, dtype=np.int64).reshape(n_heads, head_rows // 2, 2)
    return stored.swapaxes(1, 2).reshape(-1)

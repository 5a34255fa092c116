"""What fits on a GPU: weights, cache per token, state per sequence, and the context that is left. Torch-free.

Told from config.json and the sizes of the stored tensors, before anything is loaded; the engine measures what really is
free. The byte model is that of decoder layers with grouped attention, with gated-delta layers between them for the
hybrid family. Knows no GPU: whoever calls says how much memory there is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.hub import layout
from localspec.hub.catalogue import Catalogue, ModelEntry
from localspec.hub.parts import EMBEDDING_PREFIXES, MTP_PREFIXES, VISION_PREFIXES
from localspec.hub.records import HubError
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import SafetensorsFile

RUNTIME_BYTES = int(1.3 * 2**30)
"""CUDA context, compiled modules, captured graphs, prefill workspace."""
STATE_COPIES = 2
"""One running sequence and one snapshot."""
CONTEXT_STEP_TOKENS = 256
SOLD_SIZE_SHARE = 0.93
KV_DTYPE_BYTES: Mapping[str, float] = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class WeightBytes:
    """Stored bytes of a model by where they go. A tied embedding is the head too and stays on the GPU."""

    body: int
    embedding: int
    mtp: int
    vision: int
    """Not loaded for text."""


@dataclass(frozen=True)
class CacheShape:
    """Values kept for each token and each sequence."""

    n_attention_layers: int
    values_per_token_and_layer: int
    state_bytes: int
    context_limit_tokens: int
    n_mtp_layers: int

    def bytes_per_token(self, kv_dtype: str, with_mtp: bool) -> float:
        """K and V of all layers for one token."""
        n_layers = self.n_attention_layers + (self.n_mtp_layers if with_mtp else 0)
        return n_layers * self.values_per_token_and_layer * KV_DTYPE_BYTES[kv_dtype]


@dataclass(frozen=True)
class Fit:
    """The budget of one model on one amount of memory. `context_tokens` 0 means that it does not fit."""

    available_bytes: int
    weights_bytes: int
    runtime_bytes: int
    state_bytes: int
    kv_bytes_per_token: float
    kv_dtype: str
    context_tokens: int
    context_limit_tokens: int
    host_bytes: int
    """Pinned host memory for an embedding that is only gathered from."""


def fit(weights: WeightBytes, cache: CacheShape, available_bytes: int, kv_dtype: str, with_mtp: bool) -> Fit:
    """The context that fits beside weights, runtime and states, in steps of 256 tokens, capped at the model's limit.

    `available_bytes` is what is free on the card now. Raises HubError for an unknown `kv_dtype`.
    """
    if kv_dtype not in KV_DTYPE_BYTES:
        raise HubError(f"the cache type {kv_dtype!r} is not known; known are {', '.join(KV_DTYPE_BYTES)}")
    weights_bytes = weights.body + (weights.mtp if with_mtp else 0)
    states_bytes = STATE_COPIES * cache.state_bytes
    left_bytes = available_bytes - weights_bytes - RUNTIME_BYTES - states_bytes
    per_token = cache.bytes_per_token(kv_dtype, with_mtp)
    tokens = int(max(0, left_bytes) // per_token) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
    return Fit(
        available_bytes=available_bytes,
        weights_bytes=weights_bytes,
        runtime_bytes=RUNTIME_BYTES,
        state_bytes=states_bytes,
        kv_bytes_per_token=per_token,
        kv_dtype=kv_dtype,
        context_tokens=min(tokens, cache.context_limit_tokens),
        context_limit_tokens=cache.context_limit_tokens,
        host_bytes=weights.embedding,
    )


def weights_of(directory: Path) -> WeightBytes:
    """Stored bytes of an installed model, from the headers of its weight files. Raises HubError for damaged ones."""
    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with SafetensorsFile.open(path) as file:
                sizes |= {name: entry.length_bytes for name, entry in file.entries.items()}
        except (DamagedFile, OSError) as error:
            raise HubError(f"{path.name} cannot be read ({error}); pull the model again") from error
    tied = not any(name.startswith("lm_head.") for name in sizes)
    parts = {"body": 0, "embedding": 0, "mtp": 0, "vision": 0}
    for name, size_bytes in sizes.items():
        parts[_part_of(name, tied)] += size_bytes
    return WeightBytes(**parts)


def _part_of(name: str, tied: bool) -> str:
    if name.startswith(VISION_PREFIXES):
        return "vision"
    if name.startswith(MTP_PREFIXES):
        return "mtp"
    return "embedding" if name.startswith(EMBEDDING_PREFIXES) and not tied else "body"


def cache_shape(config: Mapping[str, Any]) -> CacheShape:
    """Cache sizes from config.json, of either the flat or the nested (`text_config`) form. Raises HubError by key."""
    nested = config.get("text_config")
    text: Mapping[str, Any] = nested if isinstance(nested, dict) else config
    n_layers, n_heads = _size(text, "num_hidden_layers"), _size(text, "num_attention_heads")
    head_size = _size(text, "head_dim", _size(text, "hidden_size") // n_heads)
    n_attention_layers = _count_attention_layers(text, n_layers)
    n_linear_layers = n_layers - n_attention_layers
    return CacheShape(
        n_attention_layers=n_attention_layers,
        values_per_token_and_layer=2 * _size(text, "num_key_value_heads", n_heads) * head_size,
        state_bytes=n_linear_layers * _linear_state_bytes(text) if n_linear_layers else 0,
        context_limit_tokens=_size(text, "max_position_embeddings"),
        n_mtp_layers=_size(text, "mtp_num_hidden_layers", 0, least=0),
    )


def _count_attention_layers(text: Mapping[str, Any], n_layers: int) -> int:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == n_layers:
        return sum(kind != "linear_attention" for kind in kinds)
    if "linear_num_value_heads" in text:
        return n_layers // _size(text, "full_attention_interval", 4)
    return n_layers


def _linear_state_bytes(text: Mapping[str, Any]) -> int:
    """Recurrent state [heads, Dk, Dv] and the convolution's last inputs, both float32, of one layer."""
    n_key, n_value = _size(text, "linear_num_key_heads"), _size(text, "linear_num_value_heads")
    key, value = _size(text, "linear_key_head_dim"), _size(text, "linear_value_head_dim")
    channels = 2 * n_key * key + n_value * value
    return 4 * (n_value * key * value + channels * (_size(text, "linear_conv_kernel_dim") - 1))


def _size(text: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = text.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= 1 << 32:
        raise HubError(f"config.json: {key} is {value!r}, a whole number is needed")
    return value


def proposal(catalogue: Catalogue, gpu_bytes: int | None) -> ModelEntry:
    """What suits this machine: the first model of the largest class that the card can hold, or the demo without one.

    `gpu_bytes` is the card's total memory, which drivers report a little below the size it is sold with.
    """
    gib = 0.0 if gpu_bytes is None else gpu_bytes / 2**30
    fitting = [m for m in catalogue.models if 0 < m.smallest_gpu_gib * SOLD_SIZE_SHARE <= gib]
    return max(fitting, key=lambda model: model.smallest_gpu_gib, default=catalogue.demo())


def fit_installed(directory: Path, available_bytes: int, kv_dtype: str = "fp8") -> Fit:
    """The budget of an installed model. Drafting with its own MTP block is counted when the block is there."""
    weights = weights_of(directory)
    shape = cache_shape(layout.read_json(directory / "config.json"))
    return fit(weights, shape, available_bytes, kv_dtype, with_mtp=weights.mtp > 0)

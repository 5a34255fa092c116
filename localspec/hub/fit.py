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

from localspec.core.memory_budget import Demand, plan_memory, row_scratch_bytes, workspace_bytes
from localspec.core.records import MAX_ROWS, MAX_SLOTS
from localspec.hub import layout
from localspec.hub.catalogue import Catalogue, ModelEntry
from localspec.hub.parts import EMBEDDING_PREFIXES, MTP_PREFIXES, VISION_PREFIXES
from localspec.hub.records import HubError
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import SafetensorsFile, TensorEntry

RUNTIME_BYTES = int(1.5 * 2**30)
"""CUDA context, compiled modules, captured graphs, workspace of a large model; a model's own stands in its Fit."""
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
    ring_bytes: int = 0
    """Records of the last window, beside the state of a running sequence."""
    workspace_bytes: int = 0
    row_scratch_bytes: int = 0

    @property
    def all_states_bytes(self) -> int:
        """States of all running sequences, and one saved one."""
        return MAX_SLOTS * (self.state_bytes + self.ring_bytes) + self.state_bytes

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


def demand_of(weights: WeightBytes, cache: CacheShape, kv_dtype: str, with_mtp: bool) -> Demand:
    """What a model asks for on a card. Raises HubError for an unknown `kv_dtype`."""
    if kv_dtype not in KV_DTYPE_BYTES:
        raise HubError(f"the cache type {kv_dtype!r} is not known; known are {', '.join(KV_DTYPE_BYTES)}")
    return Demand(
        weights=weights.body + (weights.mtp if with_mtp else 0),
        kv_per_token=cache.bytes_per_token(kv_dtype, with_mtp),
        context_limit_tokens=cache.context_limit_tokens,
        state=cache.state_bytes + cache.ring_bytes,
        snapshot=cache.state_bytes,
        workspace=cache.workspace_bytes,
        row_scratch=cache.row_scratch_bytes,
        host=weights.embedding,
    )


def fit(
    weights: WeightBytes,
    cache: CacheShape,
    available_bytes: int,
    kv_dtype: str,
    with_mtp: bool,
    runtime_bytes: int | None = None,
) -> Fit:
    """The context that fits beside weights, runtime and states, in steps of 256 tokens, capped at the model's limit.

    `available_bytes` is what is free on the card now. `runtime_bytes` replaces what a card's runtime and workspace
    take, on a CPU. Raises HubError for an unknown `kv_dtype`.
    """
    demand = demand_of(weights, cache, kv_dtype, with_mtp)
    own_runtime = demand.fixed - demand.weights - cache.all_states_bytes
    runtime = own_runtime if runtime_bytes is None else runtime_bytes
    budget = plan_memory(demand, available_bytes + own_runtime - runtime)
    return Fit(
        available_bytes=available_bytes,
        weights_bytes=demand.weights,
        runtime_bytes=runtime,
        state_bytes=cache.all_states_bytes,
        kv_bytes_per_token=demand.kv_per_token,
        kv_dtype=kv_dtype,
        context_tokens=budget.context_tokens,
        context_limit_tokens=cache.context_limit_tokens,
        host_bytes=weights.embedding,
    )


def weights_of(directory: Path) -> WeightBytes:
    """Bytes of an installed model on a card, from the headers of its weight files. Raises HubError for damaged ones."""
    entries: dict[str, TensorEntry] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with SafetensorsFile.open(path) as file:
                entries |= file.entries
        except (DamagedFile, OSError) as error:
            raise HubError(f"{path.name} cannot be read ({error}); pull the model again") from error
    tied = not any(name.startswith("lm_head.") for name in entries)
    parts = {"body": 0, "embedding": 0, "mtp": 0, "vision": 0}
    for name, entry in entries.items():
        parts[_part_of(name, tied)] += _loaded_bytes(entry, entries)
    return WeightBytes(**parts)


def keeps_fp8(directory: Path) -> bool:
    """Whether keys are normed per head, as in Qwen3 and 3.5: an FP8 cache holds those well, and `auto` takes it.

    Measured on models without such norms (SmolLM2 135M, Qwen2.5 0.5B): 4 and 7 of 100 first choices change with FP8,
    below 1 with BF16.
    """
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with SafetensorsFile.open(path) as file:
                if any(name.endswith("self_attn.k_norm.weight") for name in file.entries):
                    return True
        except (DamagedFile, OSError):
            return False
    return False


def _loaded_bytes(entry: TensorEntry, entries: Mapping[str, TensorEntry]) -> int:
    """A card's kernels know NVFP4 and FP8; other matrices lie there in bf16, block formats (`.q`, `.scale`) too."""
    base, _, part = entry.name.rpartition(".")
    if f"{base}.q" in entries and part in ("q", "scale", "min"):
        return 0 if part != "q" else entry.length_bytes * (4 if entry.dtype == "U8" else 2)
    if len(entry.shape) == 2 and entry.dtype == "F32":
        return entry.length_bytes // 2
    return entry.length_bytes


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
    states = _linear_state_bytes(text) if n_linear_layers else (0, 0)
    hidden, vocab = _size(text, "hidden_size"), _size(text, "vocab_size", 1)
    inner = _size(text, "intermediate_size", 4 * hidden)
    return CacheShape(
        n_attention_layers=n_attention_layers,
        values_per_token_and_layer=2 * _size(text, "num_key_value_heads", n_heads) * head_size,
        state_bytes=n_linear_layers * states[0],
        context_limit_tokens=_size(text, "max_position_embeddings"),
        n_mtp_layers=_size(text, "mtp_num_hidden_layers", 0, least=0),
        ring_bytes=n_linear_layers * states[1],
        workspace_bytes=workspace_bytes(hidden, inner, 2 * inner * hidden, vocab),
        row_scratch_bytes=row_scratch_bytes(hidden, inner),
    )


def _count_attention_layers(text: Mapping[str, Any], n_layers: int) -> int:
    kinds = text.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == n_layers:
        return sum(kind != "linear_attention" for kind in kinds)
    if "linear_num_value_heads" in text:
        return n_layers // _size(text, "full_attention_interval", 4)
    return n_layers


def _linear_state_bytes(text: Mapping[str, Any]) -> tuple[int, int]:
    """Of one layer: the state that is saved (recurrent [heads, Dk, Dv] in float32 and the convolution's columns in
    bf16), and the records of a window (float32 keys, updates and decays)."""
    n_key, n_value = _size(text, "linear_num_key_heads"), _size(text, "linear_num_value_heads")
    key, value = _size(text, "linear_key_head_dim"), _size(text, "linear_value_head_dim")
    channels = 2 * n_key * key + n_value * value
    columns = _size(text, "linear_conv_kernel_dim") - 1 + MAX_ROWS
    saved = 4 * n_value * key * value + 2 * channels * columns
    return saved, 4 * MAX_ROWS * (n_key * key + n_value * value + n_value)


def _size(text: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = text.get(key)
    value = default if value is None else value
    if type(value) is not int or not least <= value <= 1 << 32:
        raise HubError(f"config.json: {key} is {value!r}, a whole number is needed")
    return value


def proposal(catalogue: Catalogue, gpu_bytes: int | None) -> ModelEntry:
    """What suits this machine: the first model of the catalogue that the card can hold, or the demo without one.

    `gpu_bytes` is the card's total memory, which drivers report a little below the size it is sold with.
    """
    gib = 0.0 if gpu_bytes is None else gpu_bytes / 2**30
    fitting = (m for m in catalogue.models if 0 < m.smallest_gpu_gib * SOLD_SIZE_SHARE <= gib)
    return next(fitting, catalogue.demo())


def fit_installed(directory: Path, available_bytes: int, kv_dtype: str = "fp8") -> Fit:
    """The budget of an installed model. Drafting with its own MTP block is counted when the block is there."""
    weights = weights_of(directory)
    shape = cache_shape(layout.read_json(directory / "config.json"))
    return fit(weights, shape, available_bytes, kv_dtype, with_mtp=weights.mtp > 0)

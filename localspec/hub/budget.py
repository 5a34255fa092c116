"""The memory budget of a model on a card, use by use, for people: what `localspec show MODEL --fit` prints. Torch-free.

The arithmetic is `hub.fit`'s. Knows cards by name and size only; for a model that is not installed the catalogue's
estimates stand in, and are called so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.hub.catalogue import ModelEntry
from localspec.hub.fit import (
    KV_DTYPE_BYTES,
    SOLD_SIZE_SHARE,
    CacheShape,
    WeightBytes,
    fit,
    weights_of,
)
from localspec.hub.gpus import Gpu
from localspec.hub.records import HubError

SOLD_SIZES_GIB = (8, 12, 16, 24, 32, 48, 96)
USABLE_SHARE = 0.975
"""Of the size that a card is sold with, what a driver reports and an idle desktop leaves."""


@dataclass(frozen=True)
class Card:
    """A card that may be in this machine. `free_bytes` is what programs can have now."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class UsePart:
    """One use of memory."""

    name: str
    bytes: int


@dataclass(frozen=True)
class ContextUse:
    """The context that is left with one type of cache; 0 tokens: the model does not fit."""

    kv_dtype: str
    bytes_per_token: float | None
    tokens: int


@dataclass(frozen=True)
class Use:
    """The budget on one card."""

    card: str
    available_bytes: int
    parts: tuple[UsePart, ...]
    contexts: tuple[ContextUse, ...]
    note: str = ""


def sold_card(size_gib: float) -> Card:
    """A card as it is sold, with nothing else running on it."""
    usable_bytes = int(size_gib * USABLE_SHARE * 2**30)
    return Card(f"a {size_gib:g} GB card", usable_bytes, usable_bytes)


def card_of(gpu: Gpu) -> Card:
    """A card of this machine with what other programs leave of it."""
    return Card(f"GPU {gpu.index} ({gpu.name})", gpu.total_bytes, gpu.free_bytes)


def drafter_bytes(drafters_dir: Path, model_id: str) -> Mapping[str, int]:
    """Weights of each installed drafter of a model, by kind. A damaged one counts nothing: it is not loaded either."""
    sizes = {}
    for folder in sorted(drafters_dir.glob(f"{model_id}.*")):
        kind = folder.name.removeprefix(f"{model_id}.")
        if "." in kind or not (folder / "localspec.json").is_file():
            continue
        try:
            found = weights_of(folder)
        except HubError:
            continue
        sizes[kind] = found.body + found.embedding + found.mtp
    return sizes


def use_of(card: Card, weights: WeightBytes, shape: CacheShape, drafters: Mapping[str, int]) -> Use:
    """The budget of an installed model with its drafters. The MTP block's cache counts where the block is there."""
    with_mtp = weights.mtp > 0 or "mtp" in drafters
    loaded = replace(weights, body=weights.body + sum(drafters.values()))
    parts = [UsePart("weights on the card", weights.body)]
    parts += [UsePart("mtp block", weights.mtp)] if weights.mtp else []
    parts += [UsePart(f"drafter {kind}", size) for kind, size in drafters.items()]
    parts += [UsePart("state of four conversations", shape.all_states_bytes)] if shape.state_bytes else []
    contexts = []
    for kv_dtype in sorted(KV_DTYPE_BYTES, key=lambda name: KV_DTYPE_BYTES[name]):
        found = fit(loaded, shape, card.free_bytes, kv_dtype, with_mtp)
        contexts.append(ContextUse(kv_dtype, found.kv_bytes_per_token, found.context_tokens))
    parts.append(UsePart("CUDA, graphs and workspace", found.runtime_bytes))
    notes = []
    if card.free_bytes < card.total_bytes * 0.95:
        notes.append(f"other programs hold {(card.total_bytes - card.free_bytes) / 2**30:.1f} GiB of this card")
    if weights.embedding:
        notes.append(f"the embedding ({weights.embedding / 2**30:.1f} GiB) lies in pinned host memory")
    return Use(card.name, card.free_bytes, tuple(parts), tuple(contexts), "; ".join(notes))


def estimated_use(card: Card, entry: ModelEntry) -> Use:
    """What the catalogue estimates for a model that is not installed.

    Raises HubError when it holds no estimate.
    """
    if not entry.context_tokens:
        if entry.smallest_gpu_gib:
            raise HubError(f"{entry.id} is not installed, and no estimate is known for it; pull it first")
        return Use(card.name, card.free_bytes, (), (), f"{entry.id} is small enough for any card, and for a CPU")
    sizes = [gib for gib in entry.context_tokens if gib * SOLD_SIZE_SHARE * 2**30 <= card.total_bytes]
    tokens = entry.context_tokens[max(sizes)] if sizes else 0
    note = "an estimate of the catalogue; exact once the model is installed"
    if not sizes:
        note += f"; {entry.id} needs a card of {min(entry.context_tokens)} GB"
    return Use(card.name, card.free_bytes, (), (ContextUse("fp8", None, tokens),), note)

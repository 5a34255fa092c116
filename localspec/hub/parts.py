"""Which part of a model a stored tensor belongs to, told by its name. Plain data, no input or output."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

VISION_PREFIXES = ("visual.", "model.visual.", "vision_tower.", "model.vision_tower.")
"""Towers of multimodal checkpoints: not loaded for text."""
MTP_PREFIXES = ("mtp.", "model.mtp.")
EMBEDDING_PREFIXES = ("model.embed_tokens.", "model.language_model.embed_tokens.", "embed_tokens.")


def files_of_text(weight_map: Mapping[str, str]) -> frozenset[str]:
    """Weight files that hold more than a vision tower, from the tensor-to-file map of a checkpoint's index."""
    return frozenset(file for name, file in weight_map.items() if not name.startswith(VISION_PREFIXES))


def files_with(weight_map: Mapping[str, str], prefix: str) -> tuple[str, ...]:
    """Weight files that hold tensors of this prefix, by name."""
    return tuple(sorted({file for name, file in weight_map.items() if name.startswith(prefix)}))


def holds_mtp(names: Iterable[str]) -> bool:
    """Whether a checkpoint kept its multi-token-prediction block."""
    return any(name.startswith(MTP_PREFIXES) for name in names)

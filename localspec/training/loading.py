"""A drafter's folder as something that can be trained further."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from localspec.drafters.mtp import PREFIX
from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint, read_config
from localspec.training.block import TrainableBlock, head_config
from localspec.training.drafting import DraftVocabulary, TrainableDrafter
from localspec.training.eagle3 import TrainableEagle3
from localspec.training.export import Form
from localspec.training.mtp import TrainableMtp
from localspec.training.parts import Matrix, ScaledMatrix
from localspec.training.target import Target

LOADED_KINDS = ("eagle3", "dflash", "dspark", "mtp")


def load_drafter(kind: str, folder: Path, target: Target) -> tuple[TrainableDrafter, Form]:
    """The drafter, and the form that its matrices are stored in.

    Raises ValueError for a kind that cannot be trained further, options that training does not cover, or tensors that
    are missing or do not fit.
    """
    if kind not in LOADED_KINDS:
        raise ValueError(f"drafters of the kinds {', '.join(LOADED_KINDS)} can be trained further, not {kind!r}")
    config = read_config(folder)
    form: Form = "nvfp4" if config.pop("quantization_config", None) else "bf16"
    checkpoint = open_checkpoint(folder)
    try:
        made = _make(kind, config, checkpoint, target)
        _fill(made, checkpoint)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # Sizes of another target.
        first = str(error).partition("\n")[0]
        raise ValueError(f"the drafter in {folder} does not fit the target ({first})") from error
    finally:
        checkpoint.close()
    return made, form


def load_backbone(folder: Path, target: Target, markov_rank: int) -> TrainableBlock:
    """A DSpark drafter on the backbone of a DFlash folder; its heads are new and change no draft yet.

    Raises ValueError as `load_drafter` does.
    """
    config = read_config(folder)
    config.pop("quantization_config", None)
    heads = {"architectures": ["Qwen3DSparkModel"], **head_config(markov_rank, sample_from_anchor=False)}
    checkpoint = open_checkpoint(folder)
    try:
        made = _make("dspark", {**config, **heads}, checkpoint, target)
        _fill(made, checkpoint, new=("markov_head.", "confidence_head."))
    finally:
        checkpoint.close()
    assert isinstance(made, TrainableBlock)
    return made


def _make(kind: str, config: Mapping[str, Any], checkpoint: FolderCheckpoint, target: Target) -> TrainableDrafter:
    ids = None
    if kind == "mtp" and checkpoint.has(f"{PREFIX}draft_ids"):
        ids = checkpoint.vector(f"{PREFIX}draft_ids").to(torch.int64)
    elif checkpoint.has("d2t"):
        offsets = checkpoint.vector("d2t").to(torch.int64)
        ids = offsets + torch.arange(offsets.shape[0])
    if ids is not None and not (ids.numel() and bool(((ids >= 0) & (ids < target.vocab_size)).all())):
        raise ValueError(f"the draft's ids are none or lead beyond the target's vocabulary of {target.vocab_size}")
    vocabulary = DraftVocabulary(ids, target.vocab_size)
    if kind == "eagle3":
        return TrainableEagle3(config, target, vocabulary, 0)
    if kind == "mtp":
        return TrainableMtp(config, target, 0, vocabulary)
    made = TrainableBlock(config, target, vocabulary, 0)
    if made.kind != kind:
        raise ValueError(f"the folder holds a {made.kind} drafter, not {kind}")
    return made


def _fill(drafter: TrainableDrafter, checkpoint: FolderCheckpoint, new: tuple[str, ...] = ()) -> None:
    """new: beginnings of the names that the checkpoint does not hold."""
    parts = {f"{name}.weight": part for name, part in drafter.module.named_modules() if isinstance(part, Matrix)}
    with torch.no_grad():
        for name, parameter in drafter.module.named_parameters():
            if name.startswith(new):
                continue
            stored = f"{drafter.prefix}{name}"
            found = checkpoint.weight(stored).dequantise() if name in parts else checkpoint.vector(stored)
            if found.shape != parameter.shape:
                raise ValueError(f"{name} has shape {tuple(found.shape)}, the config asks for {tuple(parameter.shape)}")
            parameter.copy_(found)
            part = parts.get(name)
            if isinstance(part, ScaledMatrix):
                part.filled = True

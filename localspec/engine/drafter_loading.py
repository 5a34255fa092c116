"""Which drafters a loaded model gets: those without weights, its own MTP block, and installed ones for it.

A drafter that does not fit is left out with a word: it could only have cost speed, and the model answers without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from localspec.core.records import MAX_SLOTS
from localspec.drafters import Drafter, DrafterSetup, NgramTableHandle, drafter_module, drafter_names
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import open_checkpoint
from localspec.kernels.ops import Ops
from localspec.models import Model

log = logging.getLogger(__name__)
OWN_BLOCK = "mtp"
NGRAM_DISK = "ngram_disk"


@dataclass(frozen=True)
class DrafterPlaces:
    """Where weights of drafters may lie. `installed_dir` holds `<model id>.<kind>` folders; None: there is none."""

    model_id: str
    model_folder: Path
    model_checkpoint: Checkpoint
    installed_dir: Path | None


def load_drafters(
    model: Model,
    ops: Ops,
    limit: int,
    tables: tuple[NgramTableHandle, ...],
    places: DrafterPlaces,
    report: Callable[[str], None],
) -> dict[str, Drafter]:
    """All drafters of a model by name, `off` (the absence of one) left out.

    Without tables there is nothing that `ngram_disk` could speak from, so it is left out.
    """
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=limit, ngram_tables=tables)
    absent = {"off"} if tables else {"off", NGRAM_DISK}
    drafters: dict[str, Drafter] = {}
    for name in drafter_names():
        module = drafter_module(name)
        if name in absent:
            continue
        if not module.needs_weights:
            drafters[name] = module.build(setup)
            continue
        try:
            weighted = _with_weights(name, setup, places)
            if weighted is not None:
                report(f"reading the drafter {name}")
                with torch.inference_mode():
                    drafters[name] = module.build(weighted)
        except (ValueError, OSError) as error:
            log.warning("drafter %s is left out: %s", name, error)
            report(f"drafter {name} is left out: {error}")
    return drafters


def _with_weights(name: str, setup: DrafterSetup, places: DrafterPlaces) -> DrafterSetup | None:
    """The setup with the checkpoint of this drafter, or None where the machine has none."""
    if name == OWN_BLOCK and any(tensor.startswith("mtp.") for tensor in places.model_checkpoint.names()):
        return replace(setup, checkpoint=places.model_checkpoint, folder=places.model_folder)
    if places.installed_dir is None:
        return None
    folder = places.installed_dir / f"{places.model_id}.{name}"
    if not folder.is_dir():
        return None
    return replace(setup, checkpoint=open_checkpoint(folder), folder=folder, target_folder=places.model_folder)

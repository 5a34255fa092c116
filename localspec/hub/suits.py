"""Whether this machine suits a model: card, its memory and its age. Torch-free; no model is loaded for it.

A model that is meant for a card never runs on the CPU unless that was asked for: what takes seconds there would take an
hour, and look like a fault of the model.
"""

from __future__ import annotations

from pathlib import Path

from localspec.hub.catalogue import Catalogue, ModelEntry
from localspec.hub.fit import RUNTIME_BYTES, SOLD_SIZE_SHARE, weights_of
from localspec.hub.gpus import LEAST_CAPABILITY, Gpu, GpuReading
from localspec.hub.records import HubError

CPU_WEIGHTS_BYTES = 4 << 30
"""More weights than this are read too slowly from a desktop's memory: such a model is meant for a card."""


def why_no_card(reading: GpuReading, index: int = 0) -> str | None:
    """One clause that says why there is no card to run on, or None. `index` as in `cuda:N`."""
    if reading.problem is not None or not reading.gpus:
        return reading.problem or "the driver reports no card"
    if index >= len(reading.gpus):
        return f"there is no card {index}; this machine has {len(reading.gpus)}"
    gpu = reading.gpus[index]
    if gpu.compute_capability < LEAST_CAPABILITY:
        major, minor = gpu.compute_capability
        return f"{gpu.name} has compute capability {major}.{minor}, and 8.0 (Ampere) or later is needed"
    return None


def why_unsuited(entry: ModelEntry, reading: GpuReading) -> str | None:
    """One sentence that says why a model of the catalogue should not be fetched for this machine, or None."""
    if not entry.smallest_gpu_gib:
        return None
    reason = why_no_card(reading)
    if reason is None:
        gpu = max(reading.gpus, key=lambda each: each.total_bytes)
        if gpu.total_bytes >= entry.smallest_gpu_gib * SOLD_SIZE_SHARE * 2**30:
            return None
        reason = f"{gpu.name} has {gpu.total_bytes / 2**30:.0f} GiB"
    return f"{entry.id} is meant for a card of {entry.smallest_gpu_gib} GB or more, and {reason}"


def meant_for_card(catalogue: Catalogue, model_id: str, folder: Path) -> bool:
    """Whether an installed model should run on a card only, by the catalogue or else by its weights."""
    for entry in catalogue.models:
        if entry.id == model_id:
            return entry.smallest_gpu_gib > 0
    try:
        return weights_of(folder).body > CPU_WEIGHTS_BYTES
    except HubError:
        return False


def why_too_large(folder: Path, gpu: Gpu) -> str | None:
    """One clause with the budget when a model's weights alone cannot lie on a card now, or None.

    Only what is certain is refused: the context shrinks to what is left, and the engine measures that.
    """
    try:
        weights_bytes = weights_of(folder).body
    except HubError:
        return None
    if weights_bytes <= gpu.free_bytes:
        return None
    holders = ", ".join(f"{process.name} (pid {process.pid})" for process in gpu.processes)
    return (
        f"its weights take {weights_bytes / 2**30:.1f} GiB and the engine {RUNTIME_BYTES / 2**30:.1f} GiB more, "
        f"{gpu.free_bytes / 2**30:.1f} of {gpu.total_bytes / 2**30:.1f} GiB are free on {gpu.name}"
        + (f"; {holders} hold the rest" if holders else "")
    )

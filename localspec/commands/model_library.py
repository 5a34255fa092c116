"""The library of models for the terminal app: catalogue, installed models, this machine's memory, pulls.

Meets `api.library.ModelLibrary` over the hub. Everything that touches the disk runs in threads, a pull in a process of
its own, so that the interface never waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from localspec.api.library import Budget, LibraryError, LibraryModel, PullStep
from localspec.commands.common import catalogue, installed_ids

if TYPE_CHECKING:
    from localspec.config import Settings
    from localspec.hub.catalogue import ModelEntry
    from localspec.hub.fit import Fit

WORKER = (sys.executable, "-m", "localspec.commands.pull_worker")
CPU_RUNTIME_BYTES = 1 << 29
"""The interpreter with torch, measured at some 0.4 GiB."""
ENDING_S = 5.0


@dataclass(frozen=True)
class _Device:
    """Memory that a model could use. `gib` is the card's size for the catalogue's estimates; 0 on a CPU."""

    name: str
    free_bytes: int
    total_gib: float
    is_gpu: bool


class HubLibrary:
    """`device` (auto, cpu, cuda or cuda:N) and `kv_cache` (auto, fp8 or bf16) are what the engine was asked to use."""

    def __init__(
        self, config: Settings, device: str = "auto", kv_cache: str = "auto", worker: tuple[str, ...] = WORKER
    ) -> None:
        self._config = config
        self._device = device
        self._kv_cache = kv_cache
        self._worker = worker

    async def models(self) -> tuple[LibraryModel, ...]:
        """Installed models first, the newest before the others; then those of the catalogue."""
        return await asyncio.to_thread(self._models)

    async def budget(self, model_id: str, held_bytes: int = 0) -> Budget | None:
        """From the stored weights of an installed model, else the catalogue's estimate for a card of this size."""
        return await asyncio.to_thread(self._budget, model_id, held_bytes)

    async def pull(self, name: str) -> AsyncGenerator[PullStep, None]:
        """Run the worker; see ModelLibrary.pull."""
        process = await asyncio.create_subprocess_exec(
            *self._worker,
            name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert process.stdout is not None
        try:
            is_done = False
            while line := await process.stdout.readline():
                step = _step(line)
                is_done = is_done or step.stage == "done"
                yield step
            if await process.wait() != 0 and not is_done:
                raise LibraryError(f"Fetching {name} ended before it was done; pull it again to go on.")
        finally:
            if process.returncode is None:
                process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), ENDING_S)

    async def remove(self, model_id: str) -> int:
        """Delete it; see ModelLibrary.remove."""
        return await asyncio.to_thread(self._remove, model_id)

    def _models(self) -> tuple[LibraryModel, ...]:
        from localspec.hub.budget import drafter_bytes
        from localspec.hub.local import list_installed
        from localspec.hub.records import HubError

        try:
            known = {entry.id: entry for entry in catalogue(self._config).models}
            here = {model.model_id: model for model in list_installed(self._config.paths.data_dir)}
        except (HubError, OSError) as error:
            raise LibraryError(str(error)) from error
        newest = [name for name in installed_ids(self._config) if name in here]
        found = []
        for name in (*newest, *(n for n in here if n not in newest), *(n for n in known if n not in here)):
            entry, model = known.get(name), here.get(name)
            found.append(
                LibraryModel(
                    id=name,
                    title=entry.title if entry else name,
                    installed=model is not None,
                    size_bytes=model.size_bytes if model else _download_bytes(entry),
                    weight_format=entry.format if entry else "",
                    licence=(model.manifest.licence if model and model.manifest else "")
                    or (entry.licence if entry else ""),
                    demo=entry.demo if entry else model is not None and model.is_demo,
                    advice=entry.advice if entry else "",
                    problem=(model.problem or "") if model else "",
                    verified=entry.verified if entry else True,
                    drafters=tuple(drafter.kind for drafter in entry.drafters) if entry else (),
                    drafters_here=tuple(drafter_bytes(self._config.paths.drafters_dir, name)),
                    presets=_presets(entry.sampling) if entry else {},
                )
            )
        return tuple(found)

    def _budget(self, model_id: str, held_bytes: int) -> Budget | None:
        from localspec.hub.records import HubError

        device = self._memory(held_bytes)
        try:
            if (self._config.paths.models_dir / model_id / "localspec.json").is_file():
                return self._measured(model_id, device)
            return _estimated(next((e for e in catalogue(self._config).models if e.id == model_id), None), device)
        except (HubError, OSError):
            # What is wrong with the model is said in its row.
            return None

    def _measured(self, model_id: str, device: _Device) -> Budget:
        """From the sizes of the stored tensors. Raises HubError and OSError."""
        from localspec.hub.budget import drafter_bytes
        from localspec.hub.fit import cache_shape, fit, keeps_fp8, weights_of
        from localspec.hub.layout import read_json

        folder = self._config.paths.models_dir / model_id
        weights, shape = weights_of(folder), cache_shape(read_json(folder / "config.json"))
        drafters = drafter_bytes(self._config.paths.drafters_dir, model_id)
        has_mtp = weights.mtp > 0 or "mtp" in drafters
        weights = replace(weights, body=weights.body + sum(drafters.values()))
        kv_dtype = self._kv_cache
        if kv_dtype == "auto":
            kv_dtype = "fp8" if device.is_gpu and keeps_fp8(folder) else "bf16"
            if not device.is_gpu:
                # A CPU keeps float32, twice what bf16 takes.
                shape = replace(shape, values_per_token_and_layer=2 * shape.values_per_token_and_layer)
        runtime_bytes = None if device.is_gpu else CPU_RUNTIME_BYTES
        found = fit(weights, shape, device.free_bytes, kv_dtype, has_mtp, runtime_bytes)
        return _exact(device, found, found.runtime_bytes)

    def _memory(self, held_bytes: int) -> _Device:
        from localspec.hub.gpus import read_gpus

        gpus = () if self._device == "cpu" else read_gpus().gpus
        index = int(self._device[5:]) if self._device.startswith("cuda:") and self._device[5:].isdecimal() else 0
        if index < len(gpus):
            gpu = gpus[index]
            free_bytes = min(gpu.free_bytes + held_bytes, gpu.total_bytes)
            return _Device(gpu.name, free_bytes, gpu.total_bytes / 2**30, is_gpu=True)
        import psutil

        memory = psutil.virtual_memory()
        return _Device("memory of this computer", memory.available, memory.total / 2**30, is_gpu=False)

    def _remove(self, model_id: str) -> int:
        from localspec.hub.local import remove
        from localspec.hub.records import HubError

        try:
            return remove(self._config.paths.data_dir, model_id)
        except (HubError, OSError) as error:
            raise LibraryError(f"{model_id} cannot be removed: {error}") from error


def _estimated(entry: ModelEntry | None, device: _Device) -> Budget | None:
    """What the catalogue says of a card of this size; None where it says nothing."""
    from localspec.hub.fit import SOLD_SIZE_SHARE

    if entry is None or not entry.smallest_gpu_gib:
        return None
    card_gib = device.total_gib if device.is_gpu else 0.0
    sizes = [gib for gib in entry.context_tokens if gib * SOLD_SIZE_SHARE <= card_gib]
    if not sizes and entry.smallest_gpu_gib * SOLD_SIZE_SHARE <= card_gib:
        return None
    tokens = entry.context_tokens[max(sizes)] if sizes else 0
    limit = max(entry.context_tokens.values(), default=0)
    return Budget(device.name, device.free_bytes, tokens, limit, estimated=True)


def _exact(device: _Device, found: Fit, runtime_bytes: int) -> Budget:
    return Budget(
        device=device.name,
        available_bytes=device.free_bytes,
        context_tokens=found.context_tokens,
        context_limit_tokens=found.context_limit_tokens,
        weights_bytes=found.weights_bytes,
        runtime_bytes=runtime_bytes,
        state_bytes=found.state_bytes,
        cache_bytes=int(found.context_tokens * found.kv_bytes_per_token),
        cache_format=found.kv_dtype,
    )


def _download_bytes(entry: ModelEntry | None) -> int | None:
    """Of the first source whose files are pinned; others say their sizes when they are asked."""
    for source in entry.sources if entry else ():
        size_bytes = sum(file.size_bytes for file in getattr(source, "files", ())) or getattr(
            source, "wheel_size_bytes", 0
        )
        if size_bytes:
            return int(size_bytes)
    return None


def _presets(sampling: Mapping[str, Mapping[str, float | int]]) -> dict[str, dict[str, float]]:
    return {name: dict(preset) for name, preset in sampling.items()}


def _step(line: bytes) -> PullStep:
    """Raises LibraryError for a line that says that the pull failed, or that is no line of the worker's."""
    try:
        data: dict[str, Any] = json.loads(line)
        if "error" in data:
            raise LibraryError(str(data["error"]))
        return PullStep(
            stage=str(data["stage"]),
            message=str(data["message"]),
            done_bytes=int(data["done_bytes"]),
            total_bytes=None if data["total_bytes"] is None else int(data["total_bytes"]),
            rate_bytes_per_s=float(data["rate_bytes_per_s"]),
            eta_s=None if data["eta_s"] is None else float(data["eta_s"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise LibraryError(f"The worker that fetches models said something unexpected: {line[:80]!r}") from error

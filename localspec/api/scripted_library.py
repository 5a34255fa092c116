"""A library without a disk or a network, repeatable: models, budgets, pulls that take given steps or fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace

from localspec.api.library import Budget, LibraryError, LibraryModel, PullStep

GIB = 1 << 30


class ScriptedLibrary:
    """Meets ModelLibrary. A model of `n` GiB has a budget on a card of `card_gib`; pulls move in `n_steps` steps."""

    def __init__(
        self, models: tuple[LibraryModel, ...], card_gib: float = 24.0, n_steps: int = 4, step_s: float = 0.0
    ) -> None:
        self._models = {model.id: model for model in models}
        self._card_bytes = int(card_gib * GIB)
        self._n_steps = n_steps
        self._step_s = step_s
        self.failing: set[str] = set()
        """Names whose pull breaks off half way."""

    async def models(self) -> tuple[LibraryModel, ...]:
        """Installed ones first, otherwise in the given order."""
        return tuple(sorted(self._models.values(), key=lambda model: not model.installed))

    async def budget(self, model_id: str, held_bytes: int = 0) -> Budget | None:
        """Weights of the model's size, one GiB beside them, and 64 KiB a token."""
        model = self._known(model_id)
        if model.size_bytes is None:
            return None
        left_bytes = max(0, self._card_bytes + held_bytes - model.size_bytes - GIB)
        tokens = min(65536, left_bytes // 65536)
        return Budget(
            device="scripted card",
            available_bytes=self._card_bytes + held_bytes,
            context_tokens=tokens,
            context_limit_tokens=65536,
            weights_bytes=model.size_bytes,
            runtime_bytes=GIB,
            cache_bytes=tokens * 65536,
            cache_format="fp8",
            estimated=not model.installed,
        )

    async def pull(self, name: str) -> AsyncGenerator[PullStep, None]:
        """Even steps up to the model's size; the model is installed with the last one."""
        base, _, kind = name.rpartition(".")
        is_drafter = base in self._models and kind in self._models[base].drafters
        model = self._known(base if is_drafter else name)
        total = model.size_bytes or GIB
        yield PullStep("locate", f"looking for {name}")
        for number in range(1, self._n_steps + 1):
            await asyncio.sleep(self._step_s)
            if name in self.failing and 2 * number > self._n_steps:
                raise LibraryError(f"{name}: the source went away; pull it again to go on.")
            done = total * number // self._n_steps
            rate = total / self._n_steps / (self._step_s or 1.0)
            yield PullStep("download", f"fetching {name}", done, total, rate, (total - done) / rate)
        if is_drafter:
            self._models[base] = replace(model, drafters_here=(*model.drafters_here, kind))
        else:
            self._models[name] = replace(model, installed=True, size_bytes=total)
        yield PullStep("done", f"{name} is ready", total, total)

    async def remove(self, model_id: str) -> int:
        """Not installed any more."""
        model = self._known(model_id)
        if not model.installed:
            raise LibraryError(f"{model_id} is not installed.")
        self._models[model_id] = replace(model, installed=False)
        return model.size_bytes or 0

    def _known(self, name: str) -> LibraryModel:
        if name not in self._models:
            raise LibraryError(f"There is no model {name!r}; known are {', '.join(self._models)}.")
        return self._models[name]

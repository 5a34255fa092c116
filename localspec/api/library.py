"""The models on this machine as interfaces see them: what there is, what fits, fetching and removing.

Records are frozen and hold plain values. Knows nothing of catalogues, hubs or folders.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol


class LibraryError(Exception):
    """One sentence for the user: what is wrong and what would work."""


@dataclass(frozen=True)
class LibraryModel:
    """A model that is installed or could be. `problem` says why an installed one cannot be used.

    `size_bytes` is what it takes on this disk, or what would be fetched; None where the source was not asked yet.
    `presets` are sampling settings by name. `verified`: somebody checked the entry against its source.
    """

    id: str
    title: str
    installed: bool = False
    size_bytes: int | None = None
    weight_format: str = ""
    licence: str = ""
    demo: bool = False
    advice: str = ""
    problem: str = ""
    verified: bool = True
    drafters: tuple[str, ...] = ()
    drafters_here: tuple[str, ...] = ()
    """Those of `drafters` that lie on this disk; the others can be pulled as `MODEL.KIND`."""
    presets: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """How a model would divide the memory of a device. `context_tokens` 0: it does not fit.

    Told before anything is loaded, so the engine may measure a little less. `estimated`: the weights are not here, and
    the figure is the catalogue's, so that the bytes by use are not known.
    """

    device: str
    available_bytes: int
    context_tokens: int
    context_limit_tokens: int = 0
    weights_bytes: int = 0
    runtime_bytes: int = 0
    state_bytes: int = 0
    cache_bytes: int = 0
    cache_format: str = ""
    estimated: bool = False


@dataclass(frozen=True)
class PullStep:
    """A moment of fetching a model. `total_bytes` is None until sizes are known."""

    stage: str
    message: str
    done_bytes: int = 0
    total_bytes: int | None = None
    rate_bytes_per_s: float = 0.0
    eta_s: float | None = None


class ModelLibrary(Protocol):
    """What an interface may ask about models. Every call raises LibraryError with a sentence for the user."""

    async def models(self) -> tuple[LibraryModel, ...]:
        """Installed models first, the newest before the others; then those of the catalogue."""
        ...

    async def budget(self, model_id: str, held_bytes: int = 0) -> Budget | None:
        """What of the context fits; None where nothing is known.

        `held_bytes` of the device are taken by the engine that would give them back when it loads another model.
        """
        ...

    def pull(self, name: str) -> AsyncIterator[PullStep]:
        """Fetch a model of the catalogue, a drafter `MODEL.KIND`, or a hub address `owner/name`.

        Closing the iterator stops it; what was fetched so far is kept, and the next pull goes on from there. Consume it
        under `aclosing`.
        """
        ...

    async def remove(self, model_id: str) -> int:
        """Delete an installed model; returns the bytes that it took."""
        ...

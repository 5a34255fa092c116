"""Which back end runs: chosen once among the files of `backends/`, with the reason for each refusal.

A back end module offers `PRIORITY` (higher is tried first), `supports(device) -> reason or None` and
`create(device) -> Ops`. Knows nothing of what the back ends do.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Protocol, cast

from localspec.kernels import backends
from localspec.kernels.ops import Ops


class Backend(Protocol):
    """What a module of `backends/` offers."""

    PRIORITY: int

    def supports(self, device: str) -> str | None: ...

    def create(self, device: str) -> Ops: ...


@dataclass(frozen=True)
class Refusal:
    """A back end that was not taken, and why, in one sentence for the user."""

    backend: str
    reason: str


def backend_names() -> tuple[str, ...]:
    """Names of all back ends, from the files of `backends/`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(backends.__path__)))


def choose(device: str, name: str | None = None) -> tuple[Ops, tuple[Refusal, ...]]:
    """The back end for `device` ("cpu", "cuda", "cuda:1"): the first by priority that supports it, or `name` itself.

    Returns it and what was refused before it. Raises ValueError for an unknown name, or when none supports the device.
    """
    if name is not None and name not in backend_names():
        raise ValueError(f"back end {name!r} is unknown; known are {', '.join(backend_names())}")
    refusals: list[Refusal] = []
    found: list[tuple[int, str, Backend]] = []
    for candidate in (name,) if name else backend_names():
        try:
            module = importlib.import_module(f"{backends.__name__}.{candidate}")
        except ImportError as error:
            refusals.append(Refusal(candidate, f"it cannot be imported: {error}"))
        else:
            found.append((module.PRIORITY, candidate, cast(Backend, module)))
    for _, candidate, backend in sorted(found, key=lambda entry: (-entry[0], entry[1])):
        reason = backend.supports(device)
        if reason is None:
            return backend.create(device), tuple(refusals)
        refusals.append(Refusal(candidate, reason))
    reasons = "; ".join(f"{refusal.backend}: {refusal.reason}" for refusal in refusals)
    raise ValueError(f"no back end runs on {device!r} ({reasons})")

"""What routes share: the engine, the settings, room for one more request, and notes for the log.

Knows who is being served; knows nothing of protocols.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from localspec.api.closing import closing
from localspec.api.engine import Engine
from localspec.api.types import EngineError, ModelInfo
from localspec.server.errors import ApiError
from localspec.server.fields import Fields
from localspec.server.request import Caller
from localspec.server.settings import ServerSettings
from localspec.server.trim import HeapTrimmer

log = logging.getLogger(__name__)

MAX_CLIENT_NAMES = 32
MAX_NOTES = 256
IGNORED_FIELDS = frozenset(
    ("cache_prompt", "id_slot", "timings_per_token", "user", "store", "metadata", "service_tier")
)
"""Fields that clients send by habit and that need no word in the log."""


@dataclass(frozen=True)
class ControlHooks:
    """What control calls need beyond the engine; the composition root gives what it has."""

    shutdown: Callable[[], None] | None = None
    pull: Callable[[str], AsyncIterator[Mapping[str, Any]]] | None = None
    explain_tuner: Callable[[], Awaitable[list[str]]] | None = None
    reset_tuner: Callable[[], Awaitable[None]] | None = None


@dataclass
class Port:
    """State of one port. Made by `create_app`, found by routes under `request.app.state.port`."""

    engine: Engine
    settings: ServerSettings
    hooks: ControlHooks = ControlHooks()
    started_s: float = field(default_factory=time.time)
    n_requests: int = 0
    n_holders: int = 0
    heap: HeapTrimmer = field(default_factory=HeapTrimmer)
    _clients: set[str] = field(default_factory=set)
    _noted: set[str] = field(default_factory=set)

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Hold one place while the block runs. Raises ApiError 429 when all are taken."""
        if self.n_requests >= self.settings.max_requests:
            raise ApiError(
                429,
                f"{self.n_requests} requests run or wait already; try again in a moment.",
                code="overloaded",
                retry_after_s=2,
            )
        self.n_requests += 1
        try:
            yield
        finally:
            self.n_requests -= 1

    async def admit(self, frames: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The frames, with a place held from the first to the last."""
        with self.admitted():
            async with closing(frames) as items:
                async for item in items:
                    yield item

    def caller(self, request: Request, model_name: str | None) -> Caller:
        """Model and client of a request. Raises EngineError while loading, ApiError 404 for a strict name."""
        model = self.engine.model()
        if model is None:
            metrics = self.engine.metrics()
            what = f"failed to load: {metrics.stage}" if metrics.state == "failed" else f"is loading ({metrics.stage})"
            raise EngineError("not_ready", f"The model {what}; ask again when /health answers 200.")
        if model_name and model_name != model.id:
            if self.settings.strict_model:
                raise ApiError(
                    404,
                    f"No model {model_name[:100]!r} here; loaded is {model.id!r}.",
                    code="model_not_found",
                    param="model",
                )
            self.note(f"requests for model {model_name[:100]!r} are answered by {model.id!r}")
        return Caller(self.engine, model, self._client_name(request))

    def loaded(self) -> ModelInfo:
        """The loaded model. Raises EngineError while it loads."""
        model = self.engine.model()
        if model is None:
            raise EngineError("not_ready", "The model is not loaded yet; ask again when /health answers 200.")
        return model

    def note(self, text: str) -> None:
        """Say something in the log once."""
        if text not in self._noted and len(self._noted) < MAX_NOTES:
            self._noted.add(text)
            log.info("%s", text)

    def note_unknown(self, fields: Fields) -> None:
        """Say once which fields of requests mean nothing here."""
        for name in fields.unread():
            if name not in IGNORED_FIELDS:
                self.note(f"the request field {name[:60]!r} is ignored")

    def _client_name(self, request: Request) -> str:
        """A short name for counters; strangers beyond a limit share one, so that they cannot grow without end."""
        given = request.headers.get("x-localspec-client") or request.headers.get("user-agent", "").partition(" ")[0]
        name = "".join(c for c in given if c.isalnum() or c in "._/-")[:40] or "unknown"
        if name in self._clients or len(self._clients) < MAX_CLIENT_NAMES:
            self._clients.add(name)
            return name
        return "others"


def port_of(request: Request) -> Port:
    """The port that serves a request."""
    port: Port = request.app.state.port
    return port

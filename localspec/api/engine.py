"""The engine as interfaces see it: a few calls, all asynchronous, none of them about tensors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from localspec.api.tuning import TunerReport
from localspec.api.types import Event, GenerateRequest, MetricsSnapshot, ModelInfo


@dataclass(frozen=True)
class DrafterChoice:
    """Method and depth for requests that name none. `auto` lets the tuner choose, `off` drafts nothing."""

    drafter: str = "auto"
    depth: int | None = None


class Engine(Protocol):
    """Everything an interface may ask of an engine.

    Fakes that ship (`echo`, `scripted`, `replay`), the local engine and the client of a remote port all meet it.
    """

    def model(self) -> ModelInfo | None:
        """The loaded model, or None while it loads."""
        ...

    def metrics(self) -> MetricsSnapshot:
        """A snapshot; never blocks."""
        ...

    async def wait_ready(self) -> ModelInfo:
        """Return when the model is loaded. Raises EngineError (`not_ready`) if loading failed."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        """Run one request. Closing the iterator cancels it within one step.

        Raises EngineError before the first event for a request that cannot run, later only for `internal`.
        Consume it under `contextlib.aclosing`.
        """
        ...

    async def count_tokens(self, request: GenerateRequest) -> int:
        """Length in tokens of the prompt that `generate` would read."""
        ...

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Token ids of plain text (no template, no special tokens added)."""
        ...

    async def detokenize(self, token_ids: tuple[int, ...]) -> str:
        """Text of token ids. Raises EngineError (`bad_request`) for an id outside the vocabulary."""
        ...

    async def warm(self, request: GenerateRequest) -> int:
        """Bring the cache of a conversation near (restore or nothing); returns cached tokens."""
        ...

    async def forget(self, chat_id: str) -> None:
        """Drop every cache of a conversation."""
        ...

    async def load(self, model_id: str) -> ModelInfo:
        """Switch to another installed model. Running requests end first. Raises EngineError (`model_not_found`)."""
        ...

    async def choose_drafter(self, choice: DrafterChoice) -> None:
        """Method and depth from now on. Raises EngineError (`unsupported`) for a drafter the model lacks."""
        ...

    async def explain(self) -> TunerReport:
        """Which drafter is used and why. Raises EngineError (`unsupported`) where the engine does not tell."""
        ...

    async def aclose(self) -> None:
        """Stop: running requests end with `cancelled`."""
        ...

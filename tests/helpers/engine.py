"""A running engine in tokens around a tiny random model or the demo's weights, for tests of identity and reuse."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.drafters import Drafter
from localspec.engine.build import Assembled, EngineOptions, assemble
from localspec.engine.loop import EndNews, News, PrefillNews, StepNews, Ticket
from localspec.kernels.ops import Ops
from localspec.models import Model

GREEDY = Sampling()


@dataclass
class Collected:
    """Everything that one request produced."""

    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    end: EndNews | None = None
    done: threading.Event = field(default_factory=threading.Event)
    ticket: Ticket | None = None

    def see(self, news: News) -> None:
        if isinstance(news, StepNews):
            self.token_ids.extend(news.result.token_ids)
            self.origins.extend(news.result.origins)
            self.logprobs.extend(news.result.logprobs)
        elif isinstance(news, PrefillNews):
            self.cached_tokens = news.cached_tokens
        elif isinstance(news, EndNews):
            self.end = news
            self.done.set()


def make_request(
    prompt_ids: Sequence[int],
    *,
    drafter: str = "off",
    depth: int | None = None,
    max_tokens: int = 24,
    sampling: Sampling = GREEDY,
    seed: int = 7,
    stop_ids: tuple[int, ...] = (),
    **more: object,
) -> Request:
    return Request(
        request_id="",
        prompt_ids=tuple(prompt_ids),
        sampling=sampling,
        seed=seed,
        max_tokens=max_tokens,
        stop_ids=stop_ids,
        drafter=drafter,
        depth=depth,
        **more,  # type: ignore[arg-type]
    )


@contextmanager
def token_engine(model: Model, ops: Ops, limit: int, drafters: dict[str, Drafter]) -> Iterator[Assembled]:
    parts = assemble(model, ops, limit, drafters, EngineOptions(device="cpu"))
    parts.loop.start()
    try:
        yield parts
    finally:
        parts.loop.stop()


def run(parts: Assembled, requests: Sequence[Request], timeout_s: float = 240.0) -> list[Collected]:
    """Submit all at once and wait for all."""
    collected = [Collected() for _ in requests]
    for item, request in zip(collected, requests, strict=True):
        item.ticket = parts.loop.submit(request, item.see)
    for item in collected:
        assert item.done.wait(timeout_s), "a request did not end"
        assert item.end is not None and item.end.error is None, item.end
    return collected

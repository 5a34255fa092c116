"""Counters of the engines without weights, in the form of a MetricsSnapshot.

Knows how to add; knows nothing of requests beyond their counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque

from localspec.api.types import ClientMetrics, DrafterMetrics, EngineState, MetricsSnapshot

RATE_WINDOW_S = 2.0


class Counters:
    """Totals since the start and the rate of the last two seconds."""

    def __init__(self) -> None:
        self.queued = 0
        self._active = 0
        self._client = "-"
        self._requests = 0
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._steps = 0
        self._drafters: dict[str, DrafterMetrics] = {}
        self._clients: dict[str, ClientMetrics] = {}
        self._recent: deque[tuple[float, int]] = deque()

    def begin(self, client: str, prompt_tokens: int) -> None:
        """A request starts to run."""
        self._active += 1
        self._requests += 1
        self._prompt_tokens += prompt_tokens
        self._client = client
        seen = self._clients.get(client, ClientMetrics(client))
        self._clients[client] = dataclasses.replace(seen, requests=seen.requests + 1)

    def end(self) -> None:
        """A request left, however it ended."""
        self._active -= 1

    def emit(self, n_tokens: int) -> None:
        """Tokens went out."""
        now_s = time.monotonic()
        self._completion_tokens += n_tokens
        self._recent.append((now_s, n_tokens))
        while self._recent and self._recent[0][0] < now_s - RATE_WINDOW_S:
            self._recent.popleft()

    def step(self, drafter: str, n_drafted: int, n_accepted: int) -> None:
        """One verify step."""
        self._steps += 1
        if not n_drafted:
            return
        seen = self._drafters.get(drafter, DrafterMetrics(drafter))
        self._drafters[drafter] = dataclasses.replace(
            seen,
            drafts=seen.drafts + 1,
            drafted_tokens=seen.drafted_tokens + n_drafted,
            accepted_tokens=seen.accepted_tokens + n_accepted,
            drafted_per_position=_count_positions(seen.drafted_per_position, n_drafted),
            accepted_per_position=_count_positions(seen.accepted_per_position, n_accepted),
        )

    def snapshot(self, base: MetricsSnapshot, state: EngineState, stage: str) -> MetricsSnapshot:
        """`base` with the counters in it."""
        horizon_s = time.monotonic() - RATE_WINDOW_S
        recent_tokens = sum(n_tokens for at_s, n_tokens in self._recent if at_s >= horizon_s)
        accepted = sum(drafter.accepted_tokens for drafter in self._drafters.values())
        return dataclasses.replace(
            base,
            state=state,
            stage=stage,
            active_requests=self._active,
            queued_requests=self.queued,
            requests_total=self._requests,
            prompt_tokens_total=self._prompt_tokens,
            completion_tokens_total=self._completion_tokens,
            tok_per_s=recent_tokens / RATE_WINDOW_S,
            mean_accepted_run=1 + accepted / self._steps if self._steps else 0.0,
            verify_steps=self._steps,
            drafters=tuple(self._drafters.values()),
            clients=tuple(self._clients.values()),
        )


def _count_positions(counts: tuple[int, ...], n: int) -> tuple[int, ...]:
    """Add one to the first n positions."""
    padded = counts + (0,) * (n - len(counts))
    return tuple(count + (position < n) for position, count in enumerate(padded))

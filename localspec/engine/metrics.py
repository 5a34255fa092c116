"""Counters of the engine: fed by the decode thread, read as one frozen snapshot from anywhere."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

from localspec.api.types import ClientMetrics, DrafterMetrics, MetricsSnapshot, Timings, WorkMetrics
from localspec.core.records import SlotResult

RATE_WINDOW_S = 3.0
MAX_CLIENTS = 32
OTHER_CLIENTS = "others"
"""Clients name themselves; beyond a number they are counted together."""


@dataclass
class DraftCounts:
    """Drafts of one request, drafter or client."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)

    def see(self, drafted: int, accepted: int) -> None:
        if not drafted:
            return
        self.drafts += 1
        self.drafted += drafted
        self.accepted += accepted
        for counts, reached in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (reached - len(counts)))
            for position in range(reached):
                counts[position] += 1


@dataclass(frozen=True)
class StepCount:
    """One sequence's part of a step: what came, in which phase it was planned, whose it was, and what it would have
    cost without drafts."""

    result: SlotResult
    phase: str
    client: str
    plain_ms: float


@dataclass
class WorkCounts:
    """Counters of one (drafter, phase, client)."""

    steps: int = 0
    tokens: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0

    def see(self, result: SlotResult, draft_ms: float, verify_ms: float, plain_ms: float) -> None:
        """A step's result for one sequence, and its share of the time."""
        self.steps += 1
        self.tokens += len(result.token_ids)
        self.drafts.see(result.num_drafted, result.num_accepted)
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms
        self.plain_ms += plain_ms

    def told(self, drafter: str, phase: str, client: str) -> WorkMetrics:
        """As interfaces read it."""
        return WorkMetrics(
            drafter,
            phase,
            client,
            steps=self.steps,
            tokens=self.tokens,
            drafts=self.drafts.drafts,
            drafted_tokens=self.drafts.drafted,
            accepted_tokens=self.drafts.accepted,
            drafted_per_position=tuple(self.drafts.drafted_at),
            accepted_per_position=tuple(self.drafts.accepted_at),
            draft_ms=round(self.draft_ms, 3),
            verify_ms=round(self.verify_ms, 3),
            plain_ms=round(self.plain_ms, 3),
        )


@dataclass
class RequestClock:
    """Times and counts of one request, kept by the decode thread."""

    prefill_ms: float = 0.0
    first_step_s: float | None = None
    last_step_s: float = 0.0
    steps: int = 0
    tokens: int = 0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    plain_ms: float = 0.0
    drafts: DraftCounts = field(default_factory=DraftCounts)
    work: defaultdict[tuple[str, str], WorkCounts] = field(default_factory=lambda: defaultdict(WorkCounts))
    """By drafter and phase."""

    def timings(self, cached_tokens: int, miss_reason: str = "") -> Timings:
        """`speedup_vs_plain` compares with the plain milliseconds of as many tokens, measured by this engine."""
        decode_ms = (self.last_step_s - self.first_step_s) * 1e3 if self.first_step_s is not None else 0.0
        busy_ms = self.draft_ms + self.verify_ms
        return Timings(
            prefill_ms=round(self.prefill_ms, 3),
            decode_ms=round(decode_ms, 3),
            tok_per_s=round(self.tokens / decode_ms * 1e3, 3) if decode_ms else 0.0,
            verify_steps=self.steps,
            draft_n=self.drafts.drafted,
            draft_n_accepted=self.drafts.accepted,
            accepted_per_position=tuple(self.drafts.accepted_at),
            draft_ms=round(self.draft_ms, 3),
            verify_ms=round(self.verify_ms, 3),
            speedup_vs_plain=round(self.plain_ms / busy_ms, 3) if self.plain_ms and busy_ms else None,
            cached_tokens=cached_tokens,
            cache_miss_reason=miss_reason,
            draft_steps=self.drafts.drafts,
            drafted_per_position=tuple(self.drafts.drafted_at),
            work=tuple(counts.told(*key, client="") for key, counts in self.work.items()),
        )


@dataclass
class _Totals:
    """Counters by their names in the snapshot."""

    requests_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    completion_tokens_total: int = 0
    verify_steps: int = 0
    verify_ms: float = 0.0
    draft_ms: float = 0.0


class MetricsRecorder:
    """Thread-safe. `clock` is monotonic seconds. Counts in place: a step of a small model takes a millisecond, and a
    snapshot of fifty fields a fiftieth of that."""

    def __init__(self, base: MetricsSnapshot, clock: Callable[[], float] = time.monotonic) -> None:
        self._lock = Lock()
        self._clock = clock
        self._base = base
        self._changes: dict[str, object] = {}
        self._totals = _Totals()
        self._recent: deque[tuple[float, int]] = deque()
        self._by_drafter: defaultdict[str, DraftCounts] = defaultdict(DraftCounts)
        self._by_client: dict[str, ClientMetrics] = {}
        self._by_work: defaultdict[tuple[str, str, str], WorkCounts] = defaultdict(WorkCounts)

    def update(self, **changes: object) -> None:
        """Set fields of the snapshot by name."""
        with self._lock:
            self._changes |= changes

    def count_request(self, client: str, prompt_tokens: int, cached_tokens: int) -> None:
        """A request was admitted."""
        with self._lock:
            self._totals.requests_total += 1
            self._totals.prompt_tokens_total += prompt_tokens
            self._totals.cached_tokens_total += cached_tokens
            name = self._shown_client(client)
            known = self._by_client.get(name, ClientMetrics(name))
            self._by_client[name] = replace(known, requests=known.requests + 1)

    def count_step(self, counts: Sequence[StepCount], draft_ms: float, verify_ms: float) -> None:
        """A verify step landed. Its sequences share its milliseconds alike."""
        now = self._clock()
        tokens = sum(len(count.result.token_ids) for count in counts)
        with self._lock:
            self._recent.append((now, tokens))
            self._forget_old(now)
            for count in counts:
                result = count.result
                self._by_drafter[result.drafter].see(result.num_drafted, result.num_accepted)
                name = self._shown_client(count.client)
                known = self._by_client.get(name) or ClientMetrics(name)
                self._by_client[name] = replace(
                    known,
                    completion_tokens=known.completion_tokens + len(result.token_ids),
                    drafted_tokens=known.drafted_tokens + result.num_drafted,
                    accepted_tokens=known.accepted_tokens + result.num_accepted,
                )
                work = self._by_work[result.drafter, count.phase, name]
                work.see(result, draft_ms / len(counts), verify_ms / len(counts), count.plain_ms / len(counts))
            self._totals.completion_tokens_total += tokens
            self._totals.verify_steps += 1
            self._totals.verify_ms += verify_ms
            self._totals.draft_ms += draft_ms

    def snapshot(self) -> MetricsSnapshot:
        """The counters now; tokens per second over the last seconds."""
        now = self._clock()
        with self._lock:
            self._forget_old(now)
            rate = 0.0
            if len(self._recent) > 1:
                span = max(now - self._recent[0][0], 1e-6)
                rate = sum(tokens for _, tokens in self._recent) / span
            drafters = tuple(
                DrafterMetrics(
                    name=name,
                    drafts=counts.drafts,
                    drafted_tokens=counts.drafted,
                    accepted_tokens=counts.accepted,
                    drafted_per_position=tuple(counts.drafted_at),
                    accepted_per_position=tuple(counts.accepted_at),
                    draft_ms=round(sum(w.draft_ms for key, w in self._by_work.items() if key[0] == name), 3),
                )
                for name, counts in self._by_drafter.items()
                if counts.drafts
            )
            drafts = sum(counts.drafts for counts in self._by_drafter.values())
            accepted = sum(counts.accepted for counts in self._by_drafter.values())
            known = replace(self._base, **self._changes, **vars(self._totals))  # type: ignore[arg-type]
            return replace(
                known,
                tok_per_s=round(rate, 2),
                mean_accepted_run=round(1 + accepted / drafts, 3) if drafts else 0.0,
                drafters=drafters,
                clients=tuple(self._by_client.values()),
                work=tuple(counts.told(*key) for key, counts in self._by_work.items()),
            )

    def _forget_old(self, now: float) -> None:
        while self._recent and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()

    def _shown_client(self, client: str) -> str:
        return client if client in self._by_client or len(self._by_client) < MAX_CLIENTS else OTHER_CLIENTS

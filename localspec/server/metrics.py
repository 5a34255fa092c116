"""/metrics: the engine's counters as Prometheus text.

Knows the text format and the names; the figures are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from localspec.api.types import DrafterMetrics, MetricsSnapshot, WorkMetrics
from localspec.server.context import port_of

Sample = tuple[dict[str, str], float]


async def metrics(request: Request) -> Response:
    """GET /metrics."""
    text = prometheus_text(port_of(request).engine.metrics())
    return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def prometheus_text(snapshot: MetricsSnapshot) -> str:
    """The snapshot in the text format, each name with its type."""
    lines: list[str] = []
    for name, kind, samples in _families(snapshot):
        rows = [(labels, value) for labels, value in samples]
        if rows:
            lines.append(f"# TYPE localspec_{name} {kind}")
            lines += [f"localspec_{name}{_labels(labels)} {_number(value)}" for labels, value in rows]
    return "\n".join(lines) + "\n"


def _families(snapshot: MetricsSnapshot) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    none: dict[str, str] = {}
    yield "info", "gauge", [({"model": snapshot.model_id, "device": snapshot.device, "drafter": snapshot.drafter}, 1)]
    yield "ready", "gauge", [(none, float(snapshot.state == "ready"))]
    counters = {
        "requests_total": snapshot.requests_total,
        "prompt_tokens_total": snapshot.prompt_tokens_total,
        "cached_prompt_tokens_total": snapshot.cached_tokens_total,
        "generation_tokens_total": snapshot.completion_tokens_total,
        "verify_steps_total": snapshot.verify_steps,
        "verify_seconds_total": snapshot.verify_ms / 1e3,
        "draft_seconds_total": snapshot.draft_ms / 1e3,
    }
    for name, value in counters.items():
        yield name, "counter", [(none, value)]
    gauges = {
        "requests_running": snapshot.active_requests,
        "requests_waiting": snapshot.queued_requests,
        "tokens_per_second": snapshot.tok_per_s,
        "plain_tokens_per_second": snapshot.plain_tok_per_s,
        "speedup_vs_plain": snapshot.speedup_vs_plain,
        "mean_accepted_run_tokens": snapshot.mean_accepted_run,
        "draft_depth": snapshot.depth,
        "context_limit_tokens": snapshot.context_limit_tokens,
        "context_used_tokens": snapshot.context_used_tokens,
    }
    for name, gauge in gauges.items():
        yield name, "gauge", [] if gauge is None else [(none, gauge)]
    yield "memory_bytes", "gauge", [({"use": use}, size) for use, size in snapshot.memory_bytes.items()]
    yield "tier", "gauge", [({"figure": name}, value) for name, value in snapshot.tiers.items()]
    yield "storage", "gauge", [({"figure": name}, value) for name, value in snapshot.storage.items()]
    yield from _drafters(snapshot.drafters)
    yield from _work(snapshot.work)
    clients = snapshot.clients
    yield "client_requests_total", "counter", [({"client": c.name}, c.requests) for c in clients]
    yield "client_generation_tokens_total", "counter", [({"client": c.name}, c.completion_tokens) for c in clients]
    yield "client_draft_tokens_total", "counter", [({"client": c.name}, c.drafted_tokens) for c in clients]
    yield "client_accepted_tokens_total", "counter", [({"client": c.name}, c.accepted_tokens) for c in clients]


def _drafters(drafters: tuple[DrafterMetrics, ...]) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    """The four counters that other servers have too, for each drafter."""
    totals: dict[str, list[Sample]] = {
        "spec_decode_num_drafts_total": [({"drafter": d.name}, d.drafts) for d in drafters],
        "spec_decode_num_draft_tokens_total": [({"drafter": d.name}, d.drafted_tokens) for d in drafters],
        "spec_decode_num_accepted_tokens_total": [({"drafter": d.name}, d.accepted_tokens) for d in drafters],
    }
    for name, samples in totals.items():
        yield name, "counter", samples
    for name, counts in (
        ("spec_decode_num_accepted_tokens_per_pos_total", [(d.name, d.accepted_per_position) for d in drafters]),
        ("spec_decode_num_draft_tokens_per_pos_total", [(d.name, d.drafted_per_position) for d in drafters]),
    ):
        yield (
            name,
            "counter",
            [
                ({"drafter": drafter, "position": str(position)}, count)
                for drafter, row in counts
                for position, count in enumerate(row)
            ],
        )
    yield "spec_decode_draft_seconds_total", "counter", [({"drafter": d.name}, d.draft_ms / 1e3) for d in drafters]


def _work(work: tuple[WorkMetrics, ...]) -> Iterator[tuple[str, str, Iterable[Sample]]]:
    """Drafting by drafter, phase and client: counters, and the rates that they come to."""
    keys = [{"drafter": w.drafter, "phase": w.phase, "client": w.client} for w in work]
    counters: dict[str, list[float]] = {
        "work_steps_total": [w.steps for w in work],
        "work_generation_tokens_total": [w.tokens for w in work],
        "work_drafts_total": [w.drafts for w in work],
        "work_draft_tokens_total": [w.drafted_tokens for w in work],
        "work_accepted_tokens_total": [w.accepted_tokens for w in work],
        "work_draft_seconds_total": [w.draft_ms / 1e3 for w in work],
        "work_verify_seconds_total": [w.verify_ms / 1e3 for w in work],
    }
    for name, values in counters.items():
        yield name, "counter", list(zip(keys, values, strict=True))
    yield "work_tokens_per_second", "gauge", [(key, w.tok_per_s) for key, w in zip(keys, work, strict=True)]
    yield "work_speedup_vs_plain", "gauge", [(key, w.speedup) for key, w in zip(keys, work, strict=True) if w.speedup]
    by_position: dict[str, tuple[str, list[tuple[float, ...]]]] = {
        "work_draft_tokens_per_pos_total": ("counter", [w.drafted_per_position for w in work]),
        "work_accepted_tokens_per_pos_total": ("counter", [w.accepted_per_position for w in work]),
        "work_acceptance_marginal": ("gauge", [w.marginal_rates for w in work]),
        "work_acceptance_conditional": ("gauge", [w.conditional_rates for w in work]),
    }
    for name, (kind, rows) in by_position.items():
        samples = [
            ({**key, "position": str(at)}, value)
            for key, row in zip(keys, rows, strict=True)
            for at, value in enumerate(row)
        ]
        yield name, kind, samples


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    inner = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{inner}}}"


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))

"""Figures of a server from the text of its /metrics page: vLLM, SGLang, llama.cpp, or our own port read from afar.

Knows the names that those servers give their figures; does no network calls. The text is hostile until checked: lines
that are none, figures that are not finite or negative, and positions beyond any drafter are passed over.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from localspec.api.types import DrafterMetrics, MetricsSnapshot

MAX_METRICS_BYTES = 8 << 20
MAX_POSITIONS = 64
MAX_DRAFTERS = 32
NO_PAGE = "this server publishes no /metrics (SGLang: --enable-metrics, llama.cpp: --metrics)"
UNKNOWN = "unknown"
"""Drafter of a server that does not say whether it drafts."""

_LINE = re.compile(r'^([a-zA-Z_:][\w:]*)(?:\{((?:[^"}]|"(?:\\.|[^"\\])*")*)\})?[ \t]+(\S+)')
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:\\.|[^"\\])*)"')
_MAKERS = ("vllm_", "sglang_", "llamacpp_", "localspec_")
# Copies of one figure by the ranks of a split model; data-parallel ranks (dp_rank, engine) count apart.
_COPIES = frozenset(("tp_rank", "pp_rank", "moe_ep_rank", "pid"))
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"
_RUNNING = ("requests_running", "num_requests_running", "num_running_reqs", "requests_processing")
_WAITING = ("requests_waiting", "num_requests_waiting", "num_queue_reqs", "requests_deferred")
_GENERATED = ("generation_tokens", "tokens_predicted")
_RATES = ("tokens_per_second", "gen_throughput", "predicted_tokens_seconds")
_DRAFTED_PER_POSITION = "spec_decode_num_draft_tokens_per_pos"


@dataclass(frozen=True)
class _Sample:
    labels: dict[str, str]
    value: float


class _Page:
    """Samples by figure, without the maker's prefix and without `_total`."""

    def __init__(self, text: str, model_id: str) -> None:
        self._samples: dict[str, list[_Sample]] = {}
        for name, sample in _samples(text):
            self._samples.setdefault(name, []).append(sample)
        rows = [row for rows in self._samples.values() for row in rows]
        # A gateway may speak for several models; a server that names its model otherwise speaks for itself.
        self._model_id = model_id if any(row.labels.get("model_name") == model_id for row in rows) else None

    def rows(self, name: str) -> list[_Sample]:
        """Samples of a figure, one for each set of labels that tells engines apart."""
        found = [row for row in self._samples.get(name, ()) if self._is_ours(row)]
        # SGLang gives a total and, beside it, a part for each priority.
        found = [row for row in found if not row.labels.get("priority")] or found
        kept: dict[tuple[tuple[str, str], ...], _Sample] = {}
        for row in found:
            key = tuple(sorted(item for item in row.labels.items() if item[0] not in _COPIES))
            if key not in kept or kept[key].value < row.value:
                kept[key] = row
        return list(kept.values())

    def total(self, *names: str) -> float:
        """Sum of the first of these figures that is there; 0 if none is."""
        rows = next((rows for name in names if (rows := self.rows(name))), [])
        return sum(row.value for row in rows)

    def mean(self, *names: str) -> float:
        """Mean over the engines that did anything; 0 if none did."""
        values = [row.value for name in names for row in self.rows(name) if row.value > 0]
        return sum(values) / len(values) if values else 0.0

    def has(self, name: str) -> bool:
        return name in self._samples

    def _is_ours(self, row: _Sample) -> bool:
        return self._model_id is None or row.labels.get("model_name", self._model_id) == self._model_id


def read_metrics(text: str, base: MetricsSnapshot) -> MetricsSnapshot:
    """`base` with the figures of a /metrics page. Never raises: a page of nonsense leaves `base` as it is."""
    return _read(_Page(text[:MAX_METRICS_BYTES], base.model_id), base)


class MetricsReader:
    """Reads one page after another; where a server counts tokens and gives no rate, the rate is between pages."""

    def __init__(self, window_s: float = 1.0) -> None:
        self._window_s = window_s
        self._readings: deque[tuple[float, int]] = deque()

    def read(self, text: str, base: MetricsSnapshot, now_s: float) -> MetricsSnapshot:
        """The figures of a page that came at `now_s`."""
        page = _Page(text[:MAX_METRICS_BYTES], base.model_id)
        snapshot, rate = _read(page, base), self._rate(now_s, int(page.total(*_GENERATED)))
        return snapshot if any(page.has(name) for name in _RATES) else replace(snapshot, tok_per_s=rate)

    def _rate(self, now_s: float, n_tokens: int) -> float:
        # 0 before the second reading, and when the counter fell because the server began anew.
        readings = self._readings
        if readings and n_tokens < readings[-1][1]:
            readings.clear()
        readings.append((now_s, n_tokens))
        while len(readings) > 2 and readings[1][0] <= now_s - self._window_s:
            readings.popleft()
        first_s, n_first = readings[0]
        return (n_tokens - n_first) / (now_s - first_s) if now_s > first_s else 0.0


def _read(page: _Page, base: MetricsSnapshot) -> MetricsSnapshot:
    drafters = _drafters(page)
    drafts, accepted = page.total("spec_decode_num_drafts"), page.total("spec_decode_num_accepted_tokens")
    mean_run = 1 + accepted / drafts if drafts else page.mean("spec_accept_length")
    # SGLang keeps the last rate when it falls idle.
    is_idle = any(page.has(name) for name in _RUNNING) and not page.total(*_RUNNING)
    snapshot = replace(
        base,
        drafter="server" if drafters else "off",
        active_requests=int(page.total(*_RUNNING)),
        queued_requests=int(page.total(*_WAITING)),
        prompt_tokens_total=int(page.total("prompt_tokens")),
        cached_tokens_total=int(page.total("cached_prompt_tokens", "prompt_tokens_cached", "cached_tokens")),
        completion_tokens_total=int(page.total(*_GENERATED)),
        tok_per_s=0.0 if is_idle else page.total(*_RATES),
        mean_accepted_run=page.mean("mean_accepted_run_tokens") or mean_run,
        drafters=drafters,
        tiers=_cache_figures(page),
    )
    return _with_own_figures(page, snapshot) if page.has("mean_accepted_run_tokens") else snapshot


def _samples(text: str) -> Iterator[tuple[str, _Sample]]:
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[3])
        except ValueError:
            continue
        if not math.isfinite(value) or not 0 <= value < 1e18:
            continue
        name = match[1].replace(":", "_")
        for maker in _MAKERS:
            name = name.removeprefix(maker)
        yield name.removesuffix("_total"), _Sample(dict(_LABEL.findall(match[2] or "")), value)


def _drafters(page: _Page) -> tuple[DrafterMetrics, ...]:
    names = {row.labels.get("drafter", "server") for row in page.rows("spec_decode_num_draft_tokens")}
    found = tuple(_drafter(page, name) for name in sorted(names)[:MAX_DRAFTERS])
    rate = min(1.0, page.mean("spec_accept_rate"))
    if not any(drafter.drafted_tokens for drafter in found) and rate:
        # SGLang gives a rate and no counters: shown as what it is of every thousand drafted tokens.
        return (DrafterMetrics("server (of 1,000)", 0, 1000, round(1000 * rate)),)
    return found


def _drafter(page: _Page, name: str) -> DrafterMetrics:
    def own(figure: str) -> list[_Sample]:
        return [row for row in page.rows(figure) if row.labels.get("drafter", "server") == name]

    def count(figure: str) -> int:
        return int(sum(row.value for row in own(figure)))

    drafts, drafted = count("spec_decode_num_drafts"), count("spec_decode_num_draft_tokens")
    accepted_at = _by_position(own(_PER_POSITION))
    return DrafterMetrics(
        name,
        drafts,
        drafted,
        min(drafted, count("spec_decode_num_accepted_tokens")),
        # vLLM counts no drafted tokens by position; its own rate of a position is over all drafts.
        _by_position(own(_DRAFTED_PER_POSITION)) or (drafts,) * len(accepted_at),
        accepted_at,
        1e3 * sum(row.value for row in own("spec_decode_draft_seconds")),
    )


def _by_position(rows: list[_Sample]) -> tuple[int, ...]:
    counts: dict[int, int] = {}
    for row in rows:
        text = row.labels.get("position", "")
        if text.isascii() and text.isdecimal() and len(text) < 4 and int(text) < MAX_POSITIONS:
            counts[int(text)] = counts.get(int(text), 0) + int(row.value)
    return tuple(counts.get(position, 0) for position in range(max(counts, default=-1) + 1))


def _cache_figures(page: _Page) -> dict[str, float]:
    figures = {"kv cache used %": 100 * page.mean("kv_cache_usage_perc", "token_usage")}
    queries, hits = page.total("prefix_cache_queries"), page.total("prefix_cache_hits")
    figures["prefix found %"] = 100 * (hits / queries if queries else page.mean("cache_hit_rate"))
    return {name: min(100.0, round(value, 1)) for name, value in figures.items() if value}


def _with_own_figures(page: _Page, snapshot: MetricsSnapshot) -> MetricsSnapshot:
    # What only our own port says.
    chosen = next((row.labels.get("drafter", "") for row in page.rows("info")), "")
    return replace(
        snapshot,
        drafter=chosen or "off",
        depth=int(page.total("draft_depth")),
        context_limit_tokens=int(page.total("context_limit_tokens")),
        context_used_tokens=int(page.total("context_used_tokens")),
        plain_tok_per_s=page.total("plain_tokens_per_second") or None,
        speedup_vs_plain=page.total("speedup_vs_plain") or None,
        verify_steps=int(page.total("verify_steps")),
        verify_ms=1e3 * page.total("verify_seconds"),
        draft_ms=1e3 * page.total("draft_seconds"),
    )

"""/metrics by drafter, phase and client: counters, marginal and conditional rates, tokens per second, speed-up."""

from __future__ import annotations

import pytest

from localspec.api.types import MetricsSnapshot, WorkMetrics
from localspec.server.metrics import prometheus_text

WORK = WorkMetrics(
    "ngram+mtp",
    "thinking",
    'a"b',
    steps=12,
    tokens=30,
    drafts=10,
    drafted_tokens=25,
    accepted_tokens=14,
    drafted_per_position=(10, 10, 5),
    accepted_per_position=(8, 4, 2),
    draft_ms=50.0,
    verify_ms=100.0,
    plain_ms=300.0,
)
KEY = 'drafter="ngram+mtp",phase="thinking",client="a\\"b"'


def test_rates_follow_from_counts() -> None:
    assert WORK.tok_per_s == pytest.approx(200.0) and WORK.speedup == pytest.approx(2.0)
    assert WORK.marginal_rates == pytest.approx((0.8, 0.4, 0.2))
    assert WORK.conditional_rates == pytest.approx((0.8, 0.5, 0.5))
    assert WorkMetrics("off", "answer", "").speedup == 0.0
    shorter = WorkMetrics("mtp", "answer", "", drafts=9, drafted_per_position=(9, 3), accepted_per_position=(6, 3))
    assert shorter.conditional_rates == pytest.approx((6 / 9, 1.0)), "of six that stood, three were followed by a draft"


def test_every_figure_is_on_the_page() -> None:
    text = prometheus_text(MetricsSnapshot(work=(WORK,)))
    for line in (
        f"localspec_work_steps_total{{{KEY}}} 12",
        f"localspec_work_generation_tokens_total{{{KEY}}} 30",
        f"localspec_work_drafts_total{{{KEY}}} 10",
        f"localspec_work_draft_tokens_total{{{KEY}}} 25",
        f"localspec_work_accepted_tokens_total{{{KEY}}} 14",
        f"localspec_work_draft_seconds_total{{{KEY}}} 0.05",
        f"localspec_work_verify_seconds_total{{{KEY}}} 0.1",
        f"localspec_work_tokens_per_second{{{KEY}}} 200",
        f"localspec_work_speedup_vs_plain{{{KEY}}} 2",
        f'localspec_work_accepted_tokens_per_pos_total{{{KEY},position="1"}} 4',
        f'localspec_work_acceptance_marginal{{{KEY},position="2"}} 0.2',
        f'localspec_work_acceptance_conditional{{{KEY},position="1"}} 0.5',
        "# TYPE localspec_work_acceptance_conditional gauge",
    ):
        assert line in text.splitlines()
    assert "work_" not in prometheus_text(MetricsSnapshot())

"""Figures of the panel: sums over drafters, times over the recent past, and words where a figure is missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localspec.api.types import DrafterMetrics, MetricsSnapshot, ModelInfo
from localspec.tui.panel_text import (
    HISTORY_LENGTH,
    PanelState,
    acceptance,
    full_lines,
    per_position,
    speedup_text,
    step_times_ms,
    strip_lines,
)
from localspec.tui.text import bar, bytes_text, clean, seconds_text, short_count, sparkline

TWO = (
    DrafterMetrics("ngram", 10, 20, 5, (10, 10), (4, 1)),
    DrafterMetrics("mtp", 10, 30, 25, (10, 10, 10), (10, 8, 7)),
)


def test_acceptance_is_of_all_drafts_together() -> None:
    assert acceptance(()) is None
    assert acceptance(TWO) == 30 / 50
    assert per_position(TWO) == (14 / 20, 9 / 20, 7 / 10)
    assert per_position((DrafterMetrics("n", 1, 1, 0, (0,), (0,)),)) == (0.0,)


def test_step_times_are_of_the_recent_past() -> None:
    start = MetricsSnapshot(state="ready", verify_steps=100, verify_ms=1000.0, draft_ms=100.0)
    state = PanelState().advanced(None, start).advanced(None, start)
    assert step_times_ms(state) == (1.0, 10.0)
    later = replace(start, verify_steps=110, verify_ms=1500.0, draft_ms=130.0)
    times = step_times_ms(state.advanced(None, later))
    assert times == pytest.approx((3.0, 50.0))
    # An engine that restarted counts from nothing again.
    again = replace(start, verify_steps=2, verify_ms=60.0, draft_ms=4.0)
    assert step_times_ms(state.advanced(None, later).advanced(None, again)) == pytest.approx((2.0, 30.0))
    assert step_times_ms(PanelState()) is None


def test_missing_speedup_is_said() -> None:
    assert speedup_text(MetricsSnapshot()) == "against plain: not measured yet"
    assert speedup_text(MetricsSnapshot(state="ready", drafter="off")) == "drafting is off"
    assert speedup_text(MetricsSnapshot(state="ready", drafter="ngram")) == "against plain: measuring"
    assert speedup_text(MetricsSnapshot(drafter="ngram", speedup_vs_plain=0.934)) == "×0.93 against plain"


def test_a_loading_engine_is_not_said_to_draft_nothing() -> None:
    state = PanelState().advanced(None, MetricsSnapshot(stage="connecting"))
    text = "\n".join(line.plain for line in full_lines(state, 40))
    assert "chosen when the model is loaded" in text and "off" not in text


def test_a_narrow_header_cuts_names_but_never_a_figure() -> None:
    model = ModelInfo("smollm2-135m", "t", 8192, 10, demo=True)
    now = MetricsSnapshot(
        state="ready",
        drafter="auto: ngram_disk+ngram+mtp",
        depth=15,
        drafters=TWO,
        mean_accepted_run=10.25,
        tok_per_s=1121.7,
        speedup_vs_plain=0.76,
        context_used_tokens=815,
        context_limit_tokens=8192,
        active_requests=1,
        prefill_done_tokens=1,
        prefill_total_tokens=2,
    )
    first, second = strip_lines(PanelState().advanced(model, now), 78)
    assert first.plain.endswith("…  accepted 60%  run 10.25") and first.plain.startswith("smollm2-135m (demo)  auto:")
    assert second.plain == "1121.7 tok/s  ×0.76 against plain  reading 50%  context 815/8.2k"
    gone = replace(now, active_requests=0)
    for lines in (strip_lines, full_lines):
        assert not any("reading" in line.plain for line in lines(PanelState().advanced(model, gone), 78))
    _, second = strip_lines(PanelState().advanced(model, now), 60)
    assert second.plain == "1121.7 tok/s  ×0.76 against plain  reading 50%"


def test_history_is_bounded() -> None:
    state = PanelState()
    for number in range(3 * HISTORY_LENGTH):
        state = state.advanced(None, MetricsSnapshot(tok_per_s=float(number)))
    assert len(state.history) == HISTORY_LENGTH and state.history[-1] == 3 * HISTORY_LENGTH - 1


@pytest.mark.parametrize("width", [1, 7, 20, 34, 80])
def test_lines_fit_and_names_of_others_cannot_control_the_terminal(width: int) -> None:
    model = ModelInfo("evil\x1b[2J", "t", 100, 10, demo=True, note="note " * 30)
    now = MetricsSnapshot(
        state="ready",
        drafter="x\x1b]0;t\x07",
        depth=3,
        drafters=TWO,
        context_limit_tokens=100,
        context_used_tokens=900,
        prefill_done_tokens=1,
        prefill_total_tokens=9,
        memory_bytes={"kv\n": 5},
        verify_steps=1,
        verify_ms=2.0,
        tok_per_s=3.0,
    )
    state = PanelState().advanced(model, now)
    for line in [*full_lines(state, width), *strip_lines(state, width)]:
        assert line.cell_len <= width
        assert "\x1b" not in line.plain and "\n" not in line.plain


def test_demo_models_are_called_so_in_both_forms() -> None:
    model = ModelInfo("small", "Small", 100, 10, demo=True, note="Pull a real one.")
    state = PanelState().advanced(model, MetricsSnapshot(state="ready"))
    assert "small (demo)" in full_lines(state, 34)[1].plain
    assert any("Pull a real one." in line.plain for line in full_lines(state, 34))
    assert strip_lines(state, 80)[0].plain.startswith("small (demo)")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (1234, "1.2k"), (32768, "33k"), (999_700, "1M"), (2.5e9, "2.5G")],
)
def test_short_counts(number: float, text: str) -> None:
    assert short_count(number) == text


def test_other_figures() -> None:
    assert [bytes_text(n) for n in (12, 1536, 23 * 2**30)] == ["12 B", "1.5 KiB", "23 GiB"]
    assert [seconds_text(s) for s in (0.44, 12.4, 200)] == ["0.4 s", "12 s", "3 min 20 s"]
    assert bar(0.5, 4) == "██  " and bar(2.0, 2) == "██" and bar(-1.0, 2) == "  " and bar(1 / 16, 2) == "▏ "
    assert sparkline((0.0, 5.0, 10.0), 2) == "▅█" and sparkline((0.0, 0.0), 5) == "▁▁"
    assert clean("a\tb\r\nc\x1b[0m\x85\u2028") == "a\tb\nc\ufffd[0m\ufffd\ufffd"

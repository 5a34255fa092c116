"""Progress for people: what a line says, when nothing is said, and how a time reads."""

from __future__ import annotations

import pytest

from localspec.commands.progress import ProgressLines, in_words
from localspec.hub.meter import ProgressMeter
from localspec.hub.records import PullProgress


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (91, "2 min"), (3600, "60 min"), (5400, "1 h 30 min"), (90_000, "25 h 00 min")],
)
def test_times(seconds: float, text: str) -> None:
    assert in_words(seconds) == text


def test_lines_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    lines = ProgressLines()
    lines(PullProgress("download", "fetching x", "x", 0, 1 << 30))
    lines(PullProgress("download", "fetching x", "x", 1 << 20, 1 << 30, 5e6, 200.0))  # too soon after the first
    lines(PullProgress("note", "a word"))
    lines(PullProgress("verify", "checking", "", 1 << 29, 1 << 30, 2 << 20, 120.0))
    assert capsys.readouterr().err.splitlines() == [
        "fetching x · 0% of 1.0 GiB", "a word", "checking · 50% of 1.0 GiB · 2.0 MiB/s · 2 min left",
    ]  # fmt: skip


def test_no_speed_and_no_end_before_enough_was_seen() -> None:
    now_s = 0.0
    seen: list[PullProgress] = []
    meter = ProgressMeter(seen.append, lambda: now_s)
    meter.start("download", "x", total_bytes=1000)
    for now_s, n_bytes in ((0.2, 1), (1.0, 99), (3.0, 200)):  # noqa: B007
        meter.add(n_bytes)
    assert [(round(each.rate_bytes_per_s), each.eta_s) for each in seen] == [
        (0, None), (0, None), (100, None), (100, 7.0),
    ]  # fmt: skip

"""The script that measures the tiers on a card goes the same way with a tiny model on a CPU."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[2] / "scripts" / "device_tiers.py"


@pytest.fixture(autouse=True)
def _scripts_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))


def test_every_section_runs_and_every_tier_is_equal(tmp_path: Path) -> None:
    main = runpy.run_path(str(SCRIPT))["main"]
    words = [
        "--tiny",
        "--tokens",
        "1000",
        "--host-gib",
        "0.1",
        "--kv",
        str(tmp_path / "kv"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(words) == 0
    report = json.loads((tmp_path / "out").read_text())
    assert report["failed"] == []
    for tier in ("host", "disk"):
        assert report[tier]["equal"] and report[tier]["cached_tokens"] >= 900
        assert report[tier]["restore_mb_per_s"] > 0
    assert report["fast_disk"]["equal"] and report["fast_disk"]["cached_tokens"] >= 900
    assert report["overflow"]["equal"] and report["overflow"]["device_tokens"] < 1000
    assert report["beside_a_stream"]["stream_tokens_meanwhile"] > 1


def test_a_stage_that_hangs_is_left_behind_and_the_others_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    names = runpy.run_path(str(SCRIPT))
    ended = threading.Event()

    class Bench:
        def __init__(self) -> None:
            self.report: dict[str, Any] = {"failed": [], "seconds": {}}

        def stages(self) -> list[tuple[str, float, Callable[[], object]]]:
            return [("hangs", 0.1, ended.wait), ("fails", 1.0, lambda: 1 / 0), ("works", 1.0, lambda: None)]

    bench, told = Bench(), []
    try:
        names["run_stages"](bench, 60.0, lambda: told.append(len(bench.report["failed"])))
    finally:
        ended.set()
    assert told == [1, 2, 2] and bench.report["failed"][0] == "hangs: did not end in 0 s"
    assert bench.report["failed"][1].startswith("fails: ZeroDivisionError")
    assert list(bench.report["seconds"]) == ["hangs", "fails", "works"]
    assert "test_device_tiers_script" in capfd.readouterr().err

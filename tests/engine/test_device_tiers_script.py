"""The script that measures the tiers on a card goes the same way with a tiny model on a CPU."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
SCRIPT = Path(__file__).parents[2] / "scripts" / "device_tiers.py"


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
        assert report["restore"][tier]["equal"] and report["restore"][tier]["cached_tokens"] >= 900
        assert report["restore"][tier]["restore_mb_per_s"] > 0
    assert report["overflow"]["equal"] and report["overflow"]["device_tokens"] < 1000
    assert report["beside_a_stream"]["stream_tokens_meanwhile"] > 1

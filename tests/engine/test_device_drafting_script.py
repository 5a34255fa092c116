"""The script that measures drafting on a card, on a tiny model: every figure is there and means what it says."""

from __future__ import annotations

import json

import pytest
import torch

from scripts import device_drafting
from scripts.device_drafting import Plan, measure
from tests.engine.test_step_bench import small_hybrid

pytestmark = pytest.mark.torch


def test_a_proposal_is_cut_out_of_a_trace() -> None:
    def kernel(name: str, start_us: float, us: float) -> dict[str, object]:
        return {"cat": "kernel", "name": name, "ts": start_us, "dur": us}

    step = (
        ("window_rows_kernel", 2.0),
        ("gdn", 5.0),
        ("take_rows_kernel", 3.0),
        ("stream", 20.0),
        ("best_tokens", 4.0),
    )
    events = [{"cat": "cpu_op", "name": "take_rows", "ts": 0.0, "dur": 1.0}]
    for number in range(5):
        start_us = 1000.0 * number
        for name, us in step[: 4 if number == 2 else 5]:
            events.append(kernel(name, start_us, us + number))
            start_us += us + 1
    rows = device_drafting.timeline(list(reversed(events)))
    assert [row["kernel"] for row in rows] == ["take_rows_kernel", "stream", "best_tokens"]
    assert [row["start_us"] for row in rows] == [0.0, 4.0, 25.0] and rows[0]["us"] == 4.0
    assert device_drafting.timeline(events[:3]) == []


def test_all_figures_on_a_tiny_model() -> None:
    torch.set_num_threads(1)
    plan = Plan(
        small_hybrid(),
        device="cpu",
        depths=(1, 3),
        prompt_tokens=40,
        max_tokens=80,
        draft_head_rows=96,
        read_bytes=1 << 20,
        repeats=1,
        long_prompt_tokens=200,
        identity_tokens=8,
    )
    document = measure(plan)
    assert json.loads(json.dumps(document)) == document
    assert document["weights"] == "random" and document["acceptance"] == "synthetic"
    assert set(document["mtp"]) == {"1", "3"} and set(device_drafting.BARS) < set(document["figures"])
    assert document["plain"]["tokens_per_step"] == document["plain_without_drafters"]["tokens_per_step"] == 1.0
    assert document["mtp"]["1"]["tokens_per_step"] == pytest.approx(1.917, abs=0.1)
    assert document["mtp"]["3"]["tokens_per_step"] == pytest.approx(3.40, abs=0.45)
    assert document["mtp_at_length_3_2"]["tokens_per_step"] == pytest.approx(3.2, abs=0.45)
    # Five matrices and the trimmed head of 96 rows, each read once a draft.
    assert 0 < document["draft_gb_per_token"] < document["target_gb_per_token"]
    assert document["figures"]["draft_over_floor"] > 0
    assert set(document["four_sequences"]) == {"plain", "own rows", "shared rows"}
    assert document["four_sequences"]["own rows"]["tokens_per_window"] == pytest.approx(3.40, abs=0.5)
    for name, compared in (("identity_shared_rows", 64), ("identity_long", 96)):
        assert document[name] == {"compared_tokens": compared, "differing_tokens": 0}

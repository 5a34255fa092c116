"""Benchmark machinery on a tiny model: synthetic acceptance meets its rates, steps are timed against their floor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import EngineOptions, assemble
from localspec.engine.step_bench import StepBench, matmul_rate_flop_per_s, step_table
from localspec.models import architecture
from localspec.runner.synthetic import SyntheticCheckpoint, tensor_shapes
from localspec.sampling.synthetic import SyntheticAcceptance
from tests.helpers.engine import make_request, run
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
RATES = (0.9, 0.7, 0.5, 0.4)


def assembled(tmp_path: Path, rates: tuple[float, ...]):
    ops = reference_ops()
    model = load_model(random_checkpoint("qwen3_5", 5, tmp_path / "m"), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=1024)
    drafters = {"mtp": drafter_module("mtp").tiny(setup)}
    return assemble(model, ops, 1024, drafters, EngineOptions(device="cpu", synthetic_acceptance=rates))


def test_synthetic_acceptance_meets_its_rates(tmp_path: Path) -> None:
    parts = assembled(tmp_path, RATES)
    parts.loop.start()
    try:
        prompts = [[(7 * i + s) % 11 for i in range(60)] for s in range(3)]
        run(parts, [make_request(p, drafter="mtp", depth=4, max_tokens=500, seed=i) for i, p in enumerate(prompts)])
    finally:
        parts.loop.stop()
    [counts] = parts.metrics.snapshot().drafters
    assert counts.drafted_per_position[3] > 300
    for position, rate in enumerate(RATES):
        measured = counts.accepted_per_position[position] / counts.drafted_per_position[position]
        assert measured == pytest.approx(rate, abs=0.07)


@pytest.mark.parametrize("rates", [(), (0.5, 0.6), (0.0,), (1.2,)])
def test_impossible_rates_are_refused(rates: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="never rise"):
        SyntheticAcceptance(rates, torch.device("cpu"))


def test_steps_and_prefill_are_timed(tmp_path: Path) -> None:
    parts = assembled(tmp_path, ())
    bench = StepBench(parts, read_rate_bytes_per_s=1e9)
    times = [bench.verify(1, 1, 100, repeats=3), bench.verify(4, 4, 200, repeats=3)]
    assert [t.rows for t in times] == [1, 16] and all(t.step_ms > 0 for t in times)
    assert times[1].floor_ms > times[0].floor_ms
    assert "ratio" in step_table(times)
    assert bench.prefill_tok_per_s(300, 128) > 0
    assert matmul_rate_flop_per_s(torch.device("cpu"), 64, 2) > 0


def small_hybrid() -> dict[str, Any]:
    """A config whose matrices have whole NVFP4 blocks, with an MTP block."""
    config = architecture("qwen3_5").tiny_config()
    config["text_config"]["hidden_size"] = 96
    config["text_config"]["intermediate_size"] = 160
    config["text_config"]["num_attention_heads"] = 6
    config["text_config"]["head_dim"] = 16
    config["text_config"]["linear_value_head_dim"] = 16
    config["text_config"]["mtp_num_hidden_layers"] = 1
    return config


def test_synthetic_mtp_drafts_and_changes_no_token(tmp_path: Path) -> None:
    config, ops, device = small_hybrid(), reference_ops(), torch.device("cpu")
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = architecture("qwen3_5").load(config, SyntheticCheckpoint(config, device), ops)
    setup = DrafterSetup(
        ops=ops,
        model=model,
        num_slots=MAX_SLOTS,
        context_limit_tokens=1024,
        checkpoint=SyntheticCheckpoint(config, device, seed=1, draft_head_rows=64),
        folder=tmp_path,
    )
    parts = assemble(model, ops, 1024, {"mtp": drafter_module("mtp").build(setup)}, EngineOptions(device="cpu"))
    parts.loop.start()
    try:
        prompt = [(7 * i) % 11 for i in range(90)]
        [plain] = run(parts, [make_request(prompt, max_tokens=40)])
        [drafted] = run(parts, [make_request(prompt, max_tokens=40, drafter="mtp", depth=5)])
    finally:
        parts.loop.stop()
    assert drafted.token_ids == plain.token_ids
    assert parts.metrics.snapshot().drafters[0].drafted_tokens > 40


def test_synthetic_weights_have_the_shapes_of_the_architecture() -> None:
    config = small_hybrid()
    checkpoint = SyntheticCheckpoint(config, torch.device("cpu"))
    model = architecture("qwen3_5").load(config, checkpoint, reference_ops())
    assert model.vocab_size == config["text_config"]["vocab_size"]
    assert set(checkpoint.names()) == set(tensor_shapes(config))

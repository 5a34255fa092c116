"""The script that measures a table on the SSD beside a card, on a tiny model: every figure is there and adds up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.device_ngram import BARS, ROOT, Bench, Plan
from tests.engine.test_step_bench import small_hybrid

pytestmark = pytest.mark.torch
TOKENIZER = ROOT / "tests/data/small_hybrid/tokenizer.json"


def test_all_figures_on_a_tiny_model(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    trees = tmp_path / "trees"
    trees.mkdir()
    # Much the same text in every file, as in code, and never wholly.
    for number in range(60):
        lines = [f"def step_{at % 40}(value: int) -> int:\n    return value + {at + number % 3}\n" for at in range(60)]
        (trees / f"part_{number}.py").write_text("".join(lines) + f"# end of {number}\n")
    config = small_hybrid()
    config["text_config"]["vocab_size"] = 4096
    layers = config["text_config"]["num_hidden_layers"]
    plan = Plan(config, TOKENIZER, (trees,), (layers,), "cpu", texts=1, prompt_tokens=40, max_tokens=60)
    plan = replace(plan, ram_cap_bytes=1 << 20)
    kept: list[str] = []
    bench = Bench(plan, tmp_path, lambda document: kept.append(json.dumps(document)))
    document = bench.run()
    assert json.loads(json.dumps(document)) == document == json.loads(kept[-1])
    assert set(document["figures"]) == set(BARS) and document["weights"] == "random"
    disk, memory = (document[f"layers_{layers}"][place] for place in ("disk", "memory"))
    assert document["plain"]["tokens_per_step"] == 1.0 < memory["tokens_per_step"] <= plan.depth + 1
    for found in (disk, memory):
        assert found["tokens"] == plan.max_tokens and 0 < found["hits"] <= found["lookups"]
        assert 0 < found["accepted_per_draft"] <= plan.depth and found["decode_thread_share"] > 0
    assert memory["reads"] == 0 and memory["cached_share"] == 1.0 and memory["late"] == 0
    assert disk["reads"] > 0 and disk["table_memory_bytes"] < plan.ram_cap_bytes

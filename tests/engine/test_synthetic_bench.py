"""The benchmark with random weights on a tiny model: every section has figures, failures and limits are named."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from localspec.api.types import EngineError
from localspec.engine import synthetic_decode
from localspec.engine.step_profile import GAPS, REST, KernelSpan, added_times, group_of, group_table, verdict
from localspec.engine.synthetic_bench import SyntheticBench, SyntheticPlan, plan_for, prefill_flop_per_token
from localspec.hub.catalogue import load_catalogue
from localspec.models import architecture
from localspec.runner.synthetic import CONFIGS, QWEN3_5_27B, SyntheticCheckpoint, known_config, tensor_shapes
from tests.engine.test_step_bench import small_hybrid
from tests.helpers.models import reference_ops

pytestmark = pytest.mark.torch
PLAN = SyntheticPlan(
    model="tiny",
    config=small_hybrid(),
    device="cpu",
    contexts=(128, 256),
    prefills=(130,),
    chunk_tokens=64,
    repeats=2,
    depths=(2,),
    decode_tokens=24,
    decode_prompt_tokens=40,
    self_test_s=0.0,
    read_bytes=1 << 20,
    matmul_size=64,
)


def test_every_section_has_figures() -> None:
    said: list[str] = []
    document = SyntheticBench(PLAN, said.append).run()
    assert json.loads(json.dumps(document)) == document
    assert document["failed"] == document["skipped"] == [] and document["weights"] == "random"
    assert document["kv_cache"] == "float32" and document["rates"]["read_gb_per_s"] > 0
    assert "no time was left" in document["self_test"]["summary"]
    steps = document["steps_128"]
    assert [(each["slots"], each["rows"]) for each in steps[:2]] == [(1, 1), (1, 2)]
    assert {each["rows"] for each in steps} >= {1, 2, 3, 8, 16} and (4, 16) in {(e["slots"], e["rows"]) for e in steps}
    assert len(document["steps_256"]) == 6 and steps[0]["over_one_row"] == 1.0
    assert all(each["over_floor"] == pytest.approx(each["ms"] / each["floor_ms"]) for each in steps)
    groups = document["groups"]["groups"]
    assert {"weights", "attention", "gdn", "norms", REST} == set(groups)
    total = sum(each["ms"] for each in groups.values())
    assert 0.2 * total < steps[0]["ms"] < 5 * total, "the groups are not those of a step"
    assert "beyond it" in document["groups"]["verdict"] and any("floor ms" in text for text in said)
    assert document["prefill_130"]["tok_per_s"] > 0
    decoded = document["decode_mtp_2_synthetic_acceptance"]
    assert 1.5 < decoded["tokens_per_step"] <= 3 and document["decode_off"]["tokens_per_step"] == 1.0
    assert 0 <= document["decode_off"]["idle"] < 1 and document["decode_off"]["tok_per_s"] > 0


def test_drafted_answers_are_compared_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = SyntheticBench(replace(PLAN, identity=True, contexts=(128,), prefills=(), depths=()))
    few = partial(synthetic_decode.identity, max_tokens=10, prompt_tokens=(40, 7, 60))
    monkeypatch.setattr("localspec.engine.synthetic_bench.identity", few)
    assert bench.run()["identity"] == {"compared_tokens": 2 * 3 * 3 * 10, "differing_tokens": 0}


def test_a_section_that_fails_is_named_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> float:
        raise RuntimeError("no luck")

    monkeypatch.setattr("localspec.engine.step_bench.StepBench.prefill_tok_per_s", broken)
    document = SyntheticBench(replace(PLAN, contexts=(128,), depths=())).run()
    assert document["failed"] == ["prefill_130"] and "decode_off" in document


def test_a_cpu_measures_less_and_no_model_that_it_cannot_hold() -> None:
    plan = plan_for("tiny", small_hybrid(), "cpu")
    assert plan.contexts == (512, 2048) and plan.read_bytes == 1 << 30 and plan.device == "cpu"
    huge = {**QWEN3_5_27B, "text_config": QWEN3_5_27B["text_config"] | {"num_hidden_layers": 4000}}
    with pytest.raises(EngineError, match=r"takes \d{4} GB of this computer's memory") as caught:
        plan_for("huge", huge, "cpu")
    assert caught.value.code == "machine_cannot"


def test_what_no_time_is_left_for_is_named() -> None:
    bench = SyntheticBench(replace(PLAN, time_limit_s=0.0))
    bench._rates = {"read": 1e9, "matmul": 1e9}
    document = bench.run()
    assert document["skipped"] == [
        "self_test", "rates", "steps_128", "groups", "prefill_130", "steps_256", "decode_off",
        "decode_mtp_2_synthetic_acceptance",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="own rates"):
        SyntheticBench(replace(PLAN, time_limit_s=0.0)).run()


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("weight_stream_kernel", "weights"),
        ("dense_finish_kernel", "weights"),
        ("nvjet_tst_128x64_NNT", "weights"),
        ("attention_split_kernel", "attention"),
        ("norm_rope_store_kernel", "attention"),
        ("gdn_window_kernel", "gdn"),
        ("rms_norm_kernel", "norms"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", REST),
    ],
)
def test_kernels_have_groups(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_the_verdict_names_what_is_beyond_the_floor() -> None:
    groups, sentence = verdict({"weights": 5.0, "gdn": 1.0, GAPS: 0.5, REST: 0.01}, {"weights": 3.5, "gdn": 0.1})
    assert [each.group for each in groups] == ["weights", "gdn", GAPS, REST]
    assert sentence == (
        "a step takes 6.51 ms, its floor is 3.60 ms; beyond it: weights 1.50 ms, gdn 0.90 ms, gaps 0.50 ms"
    )
    assert len(group_table(groups).splitlines()) == 5


def test_kernels_that_overlap_count_what_they_add() -> None:
    """Two steps: b waits inside a, c lies wholly in b, d comes after a gap; between the steps the profiler pauses."""
    step = [("a", 0.0, 10.0), ("b", 2.0, 16.0), ("c", 5.0, 15.0), ("d", 17.0, 20.0)]
    spans = [KernelSpan(name, start + at, end + at) for at in (0.0, 500.0) for name, start, end in step]
    assert added_times(reversed(spans), 2) == {"a": 20.0, "b": 12.0, "c": 0.0, "d": 6.0, GAPS: 2.0}
    assert added_times(spans[:4], 1) == {"a": 10.0, "b": 6.0, "c": 0.0, "d": 3.0, GAPS: 1.0}
    assert added_times([], 3) == {GAPS: 0.0}


def test_every_catalogue_model_has_a_size() -> None:
    from localspec.hub.fit import cache_shape

    missing = [entry.id for entry in load_catalogue().models if known_config(entry.id) is None]
    assert known_config("qwen3.8-27b-unsloth") is QWEN3_5_27B and known_config("nothing") is None
    assert not missing
    values = {name: sum(_count(shape) for shape in tensor_shapes(config).values()) for name, config in CONFIGS.items()}
    # Published sizes: text part and MTP block of the hybrids; the others in all.
    assert values["qwen3.8-27b"] == 26_895_998_464 + 424_699_392
    assert values["smollm2-135m"] == 134_515_008 and 493e6 < values["qwen2.5-coder-0.5b"] < 495e6
    assert 8.9e9 < values["qwen3.5-9b"] < 9.3e9 and 4.2e9 < values["qwen3.5-4b"] < 4.4e9
    assert 1.85e9 < values["qwen3.5-2b"] < 2.0e9 and 0.74e9 < values["qwen3.5-0.8b"] < 0.80e9
    for config in CONFIGS.values():
        assert cache_shape(config).context_limit_tokens >= 8192
    assert prefill_flop_per_token(QWEN3_5_27B) == pytest.approx(2 * 24.33e9, rel=0.001)


@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b", "smollm2-135m", "qwen3.5-0.8b"])
def test_configs_of_the_catalogue_load(name: str) -> None:
    """With two layers and a small vocabulary, since only names and settings can be wrong."""
    config = json.loads(json.dumps(CONFIGS[name]))
    text = config.get("text_config", config)
    text |= {"num_hidden_layers": 2, "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    if "linear_num_key_heads" in text:
        text |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "full_attention_interval": 2}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = architecture(config["model_type"]).load(
        config, SyntheticCheckpoint(config, torch.device("cpu")), reference_ops()
    )
    assert model.num_layers == 2


def _count(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product

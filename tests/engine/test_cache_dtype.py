"""Keys and values in FP8 or BF16: a row's bits and the first promise hold as with an unrounded cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from localspec.api.types import EngineError, Sampling
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import Assembled, cache_dtype
from localspec.kernels.backends.reference import ReferenceOps
from tests.engine import tier_machine
from tests.engine.test_identity import repeated_prompt
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import Driver, load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
LIMIT = 512
NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.bfloat16: "bfloat16"}


def _ops(dtype: torch.dtype) -> ReferenceOps:
    ops = reference_ops()
    ops.cache_dtype = dtype
    return ops


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", NAMES)
def test_rows_keep_their_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = random_checkpoint(name, 11, tmp_path)
    plain, model = load_model(folder), load_model(folder, _ops(dtype))
    assert {plane.dtype for plane in model.cache_spec.planes} == {NAMES[dtype]}
    assert plain.cache_spec.bytes_per_token == 4 // dtype.itemsize * model.cache_spec.bytes_per_token
    ids = torch.randint(0, 128, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = Driver(model).prefill(0, ids)
    unrounded = Driver(plain).prefill(0, ids)
    assert not torch.equal(whole, unrounded), "the cache was not rounded at all"
    shown = whole.isfinite()
    error = ((whole - unrounded)[shown].square().mean() / unrounded[shown].square().mean()).sqrt()
    assert error < (0.06 if dtype == torch.float8_e4m3fn else 0.01)
    for width in (1, 2, 5, 16):
        driver = Driver(model, scattered=True)
        driver.prefill(2, ids[:270], chunk=100)
        assert torch.equal(driver.verify({2: ids[270 : 270 + width]})[2], whole[270 : 270 + width]), width


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembled]:
    ops = _ops(torch.float8_e4m3fn)
    model = load_model(random_checkpoint("qwen3_5", 3, tmp_path_factory.mktemp("fp8")), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
    drafters = {name: drafter_module(name).tiny(setup) for name in ("ngram", "mtp", "eagle3", "dflash")}
    for drafter in drafters.values():
        assert {plane.dtype for plane in drafter.cache_spec.planes} <= {"float8_e4m3fn"}
    with token_engine(model, ops, LIMIT, drafters) as engine:
        yield engine


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_k=20)])
def test_drafts_change_no_token(parts: Assembled, sampling: Sampling) -> None:
    prompts = [repeated_prompt(seed, 40 + 61 * seed) for seed in range(4)]
    plain = run(parts, [make_request(p, sampling=sampling, seed=i) for i, p in enumerate(prompts)])
    for depth in (2, 7):
        names = ("ngram", "mtp", "eagle3", "dflash")
        drafted = [
            make_request(p, drafter=name, depth=depth, sampling=sampling, seed=i)
            for i, (p, name) in enumerate(zip(prompts, names, strict=True))
        ]
        together = run(parts, drafted)
        assert [item.token_ids for item in together] == [item.token_ids for item in plain]
    assert sum(counts.drafted_tokens for counts in parts.metrics.snapshot().drafters) > 0


def test_a_cached_prefix_in_fp8_changes_no_token(parts: Assembled) -> None:
    first = repeated_prompt(11, 150)
    [fresh] = run(parts, [make_request(first, max_tokens=30)])
    second = [*first, *fresh.token_ids, *repeated_prompt(12, 23)]
    [cached] = run(parts, [make_request(second, logprobs=0, max_tokens=20)])
    [salted] = run(parts, [make_request(second, logprobs=0, max_tokens=20, cache_salt="fresh")])
    assert cached.cached_tokens > 0 and salted.cached_tokens == 0
    assert (salted.token_ids, salted.logprobs) == (cached.token_ids, cached.logprobs)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3_5"])
@pytest.mark.parametrize("spelling", ["k_proj.k_scale v_proj.v_scale", "k_scale v_scale"])
def test_scales_of_the_checkpoint_change_what_is_cached_and_nothing_else(
    name: str, spelling: str, tmp_path: Path
) -> None:
    folder = random_checkpoint(name, 5, tmp_path)
    ids = list(range(3, 90))
    unrounded = Driver(load_model(folder))
    expected = unrounded.prefill(0, ids)
    stored = load_file(folder / "model.safetensors")
    layers = sorted({each.rsplit("q_proj", 1)[0] for each in stored if "q_proj.weight" in each})
    config = (folder / "config.json").read_text()
    settings = '{"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}, '
    (folder / "config.json").write_text(settings + config.lstrip()[1:])
    for k_scale, v_scale in ((0.25, 2.0), (1.7, 0.6)):
        values = dict(zip(spelling.split(), (k_scale, v_scale), strict=True))
        scales = {f"{layer}{part}": torch.tensor(value) for layer in layers for part, value in values.items()}
        save_file({**stored, **scales}, folder / "model.safetensors")
        driver = Driver(load_model(folder, _ops(torch.float8_e4m3fn)))
        found = driver.prefill(0, ids)
        shown = expected.isfinite()
        error = ((found - expected)[shown].square().mean() / expected[shown].square().mean()).sqrt()
        assert error < 0.06, (k_scale, v_scale, float(error))
        # The first attention layer sees almost the same input, so that its pages tell what was cached.
        for plane, scale in zip(driver.model.cache_spec.planes[:2], (k_scale, v_scale), strict=True):
            cached, original = driver.cache.planes[plane.name].float() * scale, unrounded.cache.planes[plane.name]
            assert (cached - original).abs().max() < 0.15 * original.abs().max(), plane.name
        # A cache that does not round has no use for them.
        assert torch.equal(Driver(load_model(folder)).prefill(0, ids), expected)


@pytest.mark.parametrize("bad", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(2)])
def test_an_impossible_scale_is_named(bad: torch.Tensor, tmp_path: Path) -> None:
    folder = random_checkpoint("qwen3", 5, tmp_path)
    stored = load_file(folder / "model.safetensors")
    save_file({**stored, "model.layers.0.self_attn.k_scale": bad}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"self_attn\.k_scale must be one positive number"):
        load_model(folder, _ops(torch.float8_e4m3fn))


def test_options_name_dtypes() -> None:
    ops: Any = reference_ops()
    assert cache_dtype(ops, "auto") == torch.float32 and cache_dtype(ops, "fp8") == torch.float8_e4m3fn
    ops.device = torch.device("cuda")
    ops.activation_dtype = torch.bfloat16
    assert cache_dtype(ops, "auto", holds_fp8=False) == torch.bfloat16
    assert cache_dtype(ops, "fp8", holds_fp8=False) == torch.float8_e4m3fn
    assert cache_dtype(ops, "auto") == torch.float8_e4m3fn and cache_dtype(ops, "bf16") == torch.bfloat16
    with pytest.raises(EngineError, match="known are fp8, bf16"):
        cache_dtype(ops, "int4")


def test_a_turn_that_was_on_disk_in_fp8_equals_the_unbroken_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_machine, "reference_ops", lambda: _ops(torch.float8_e4m3fn))
    machine = tier_machine.Machine("qwen3_5", tmp_path)
    assert {plane.dtype for plane in machine.model.cache_spec.planes} == {"float8_e4m3fn"}
    first = tier_machine.prompt_ids(4, 300)
    with machine.engine(tmp_path / "kv") as parts:
        [one] = run(parts, [make_request(first, max_tokens=20)])
        second = [*first, *one.token_ids, 5, 6, 7]
        [unbroken] = run(parts, [make_request(second, max_tokens=12, logprobs=0)])
    with machine.engine(tmp_path / "kv") as parts:
        tier_machine.eager(parts)
        [restored] = run(parts, [make_request(second, max_tokens=12, logprobs=0)])
    assert restored.cached_tokens >= unbroken.cached_tokens > 300
    assert (restored.token_ids, restored.logprobs) == (unbroken.token_ids, unbroken.logprobs)
    # The same conversation in an unrounded cache is another one on disk.
    monkeypatch.setattr(tier_machine, "reference_ops", reference_ops)
    with tier_machine.Machine("qwen3_5", tmp_path).engine(tmp_path / "kv") as parts:
        tier_machine.eager(parts)
        [other] = run(parts, [make_request(second, max_tokens=12)])
    assert other.cached_tokens == 0

"""The app's library over a real folder: what is listed, budgets, pulls by a worker process, removal."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from contextlib import aclosing
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import save_file

from localspec.api.library import LibraryError, PullStep
from localspec.commands.common import catalogue
from localspec.commands.model_library import CPU_RUNTIME_BYTES, HubLibrary
from localspec.commands.pull_worker import main
from localspec.config import Settings, load_settings
from localspec.hub import layout
from localspec.hub.gpus import Gpu, GpuReading
from localspec.hub.records import PullProgress

GIB = 1 << 30


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    return load_settings({"LOCALSPEC_HOME": str(tmp_path)})


def install(config: Settings, model_id: str) -> None:
    with layout.building(config.paths.data_dir, model_id) as directory:
        values = {
            "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 4096,
        }  # fmt: skip
        layout.write_json(directory / "config.json", values)
        tensors = {
            "model.layers.0.w": np.zeros((100, 10), np.float32),
            "model.layers.0.self_attn.k_norm.weight": np.zeros(16, np.float32),
            "lm_head.weight": np.zeros((10, 10), np.float32),
        }
        save_file(tensors, directory / "model.safetensors")
        files = layout.describe_files(directory, {})
        manifest = layout.Manifest(model_id, "a test", "mit", files, layout.fingerprint_of(files))
        layout.publish(directory, manifest, config.paths.data_dir)


def card(monkeypatch: pytest.MonkeyPatch, total_gib: float, free_gib: float) -> None:
    gpu = Gpu(0, "Test card", (9, 0), int(total_gib * GIB), int(free_gib * GIB), None, None, None, None, ())
    monkeypatch.setattr("localspec.hub.gpus.read_gpus", lambda: GpuReading((gpu,)))


async def test_installed_models_come_first_with_what_the_catalogue_knows(config: Settings) -> None:
    install(config, "my-own")
    install(config, "smollm2-135m")
    models = await HubLibrary(config).models()
    assert {model.id for model in models[:2]} == {"my-own", "smollm2-135m"}
    assert not any(model.installed for model in models[2:]) and len(models) > 5
    demo = next(model for model in models if model.id == "smollm2-135m")
    assert demo.demo and demo.title == "SmolLM2 135M Instruct" and demo.presets["default"]["temperature"] == 0.2
    assert demo.size_bytes and demo.size_bytes < 100_000
    big = next(model for model in models if model.id == "qwen3.8-27b")
    assert big.size_bytes is None and not big.verified and "coding" in big.presets
    (config.paths.models_dir / "my-own" / "model.safetensors").unlink()
    damaged = next(model for model in await HubLibrary(config).models() if model.id == "my-own")
    assert "model.safetensors is missing" in damaged.problem


async def test_budget_of_an_installed_model(config: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    install(config, "m")
    card(monkeypatch, 24, 10)
    library = HubLibrary(config)
    budget = await library.budget("m")
    assert budget is not None and not budget.estimated
    assert (budget.device, budget.available_bytes, budget.cache_format) == ("Test card", 10 * GIB, "fp8")
    # 2 layers of 2 heads of 16 values, K and V, one byte each.
    assert (budget.context_tokens, budget.cache_bytes) == (4096, 4096 * 128)
    held = await library.budget("m", held_bytes=20 * GIB)
    assert held is not None and held.available_bytes == 24 * GIB, "no more than the card has"
    card(monkeypatch, 24, 0.5)
    full = await library.budget("m")
    assert full is not None and full.context_tokens == 0
    on_cpu = await HubLibrary(config, "cpu").budget("m")
    assert on_cpu is not None and on_cpu.runtime_bytes == CPU_RUNTIME_BYTES
    assert on_cpu.cache_bytes == 4096 * 512, "float32"
    (config.paths.models_dir / "m" / "model.safetensors").write_bytes(b"x" * 100)
    assert await library.budget("m") is None


@pytest.mark.parametrize(("total_gib", "sold_gib"), [(23.6, 24), (31.8, 32), (11.9, 0)])
async def test_budget_of_the_catalogue(
    config: Settings, monkeypatch: pytest.MonkeyPatch, total_gib: float, sold_gib: int
) -> None:
    card(monkeypatch, total_gib, total_gib)
    budget = await HubLibrary(config).budget("qwen3.8-27b")
    tokens = catalogue(config).find("qwen3.8-27b").context_tokens.get(sold_gib, 0)
    assert (tokens > 0) == (sold_gib > 0)
    assert budget is not None and budget.estimated and budget.context_tokens == tokens
    assert await HubLibrary(config).budget("qwen2.5-coder-0.5b") is None
    assert await HubLibrary(config).budget("nosuch") is None
    on_cpu = await HubLibrary(config, "cpu").budget("qwen3.8-27b")
    assert on_cpu is not None and on_cpu.context_tokens == 0


def worker(code: str) -> tuple[str, ...]:
    """A process that gets the name of the model as its argument, as the real one does."""
    return (sys.executable, "-c", code)


def line(stage: str, done: int = 0, total: int | None = None) -> str:
    return json.dumps(dataclasses.asdict(PullProgress(stage, "m", "", done, total, 5.0, 2.0)))


async def steps_of(config: Settings, code: str) -> list[PullStep]:
    async with aclosing(HubLibrary(config, worker=worker(code)).pull("m")) as steps:
        return [step async for step in steps]


async def test_steps_of_a_pull(config: Settings) -> None:
    lines = [line("locate"), line("download", 3, 9), line("done", 9, 9)]
    found = await steps_of(config, f"import sys\nassert sys.argv[1] == 'm'\nfor l in {lines!r}: print(l, flush=True)")
    assert [step.stage for step in found] == ["locate", "download", "done"]
    assert found[1] == PullStep("download", "m", 3, 9, 5.0, 2.0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('print(\'{"error": "No such model."}\')', "No such model"),
        ("raise SystemExit(1)", "ended before it was done"),
        ("print('[]')", "unexpected"),
        ("print('{')", "unexpected"),
    ],
)
async def test_a_pull_that_fails_says_why(config: Settings, code: str, words: str) -> None:
    with pytest.raises(LibraryError, match=words):
        await steps_of(config, code)


async def test_closing_ends_the_worker(config: Settings, tmp_path: Path) -> None:
    code = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n"
    code += f"print({line('locate')!r}, flush=True)\ntime.sleep(60)"
    async with aclosing(HubLibrary(config, worker=worker(code)).pull("m")) as steps:
        async for _ in steps:
            break
    pid = int((tmp_path / "pid").read_text())
    async with asyncio.timeout(30):
        while psutil.pid_exists(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_removal(config: Settings) -> None:
    install(config, "m")
    library = HubLibrary(config)
    assert await library.remove("m") > 0
    with pytest.raises(LibraryError, match="m is not installed"):
        await library.remove("m")
    with pytest.raises(LibraryError, match="cannot be removed"):
        await library.remove("../m")


def test_the_worker_says_one_sentence_for_an_unknown_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["pull_worker", "no such model"])
    # Under pytest the standard input has ended already.
    monkeypatch.setattr("localspec.commands.pull_worker._end_with_starter", lambda: None)
    assert main() == 1
    assert "there is no model 'no such model'" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]

"""The first start: what is proposed to whom, what is fetched, and that no model for a card lands on the CPU unasked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save_file

from localspec.api.types import EngineError
from localspec.cli import group
from localspec.commands import first_start
from localspec.commands.common import make_locator
from localspec.config import NetworkSettings, Paths, Settings
from localspec.hub import layout
from localspec.hub.catalogue import load_catalogue
from localspec.hub.gpus import Gpu, GpuProcess, GpuReading
from localspec.hub.suits import why_no_card, why_unsuited

GIB = 2**30
CARD = Gpu(0, "RTX 4090", (8, 9), 24 * GIB, 23 * GIB, 4, 16, 4, 16, ())
NO_CARD = GpuReading(problem="no NVIDIA driver is installed")
SetReading = Callable[[GpuReading], None]


@pytest.fixture
def config(tmp_path: Path) -> Settings:
    return Settings(Paths(tmp_path, tmp_path / "cache"), NetworkSettings(hub_endpoint="http://127.0.0.1:9"))


@pytest.fixture
def set_reading(monkeypatch: pytest.MonkeyPatch) -> SetReading:
    return lambda reading: monkeypatch.setattr("localspec.hub.gpus.read_gpus", lambda: reading)


def install(config: Settings, model_id: str, n_values: int = 4) -> Path:
    with layout.building(config.paths.data_dir, model_id) as folder:
        layout.write_json(folder / "config.json", {"model_type": "llama"})
        save_file({"lm_head.weight": np.zeros(n_values, np.float32)}, folder / "model.safetensors")
        files = layout.describe_files(folder, {})
        manifest = layout.Manifest(model_id, "a test", "mit", files, layout.fingerprint_of(files))
        return layout.publish(folder, manifest, config.paths.data_dir)


@pytest.mark.parametrize(
    ("reading", "first", "words"),
    [
        (GpuReading((CARD,)), "qwen3.8-27b", "RTX 4090 with 24.0 GiB (23.0 GiB free)"),
        (GpuReading((replace(CARD, total_bytes=12 * GIB),)), "qwen3.5-9b", "12.0 GiB"),
        (GpuReading((replace(CARD, compute_capability=(7, 5)),)), "smollm2-135m", "capability 7.5"),
        (NO_CARD, "smollm2-135m", "no NVIDIA driver is installed"),
    ],
)
def test_what_is_proposed(
    config: Settings, set_reading: SetReading, reading: GpuReading, first: str, words: str
) -> None:
    set_reading(reading)
    offered = first_start.propose(config)
    assert offered.choices[0].id == first and words in offered.machine and "free on the disk" in offered.machine
    assert len({each.id for each in offered.choices}) == len(offered.choices) >= 2
    assert any(each.demo for each in offered.choices)


def test_a_person_chooses_and_it_is_fetched(
    config: Settings, set_reading: SetReading, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_reading(GpuReading((CARD,)))
    asked: list[str] = []
    monkeypatch.setattr("localspec.hub.get.get", lambda known, wish, *rest: asked.append(wish.name))
    monkeypatch.setattr("click.prompt", lambda *arguments, **options: 2)
    assert first_start.offer_model(config, offline=False, asks=True) == "qwen3.5-9b" == asked[0]
    shown = capsys.readouterr().out
    assert "RTX 4090" in shown and "1  qwen3.8-27b" in shown and "(a demo, 94 MiB" in shown
    install(config, "own")
    assert first_start.offer_model(config, offline=False, asks=True) is None and len(asked) == 1


def test_nobody_to_ask_means_the_demo_and_a_hint(
    config: Settings, set_reading: SetReading, capsys: pytest.CaptureFixture[str]
) -> None:
    set_reading(GpuReading((CARD,)))
    assert first_start.offer_model(config, offline=False, asks=False) is None
    assert "localspec pull qwen3.8-27b" in capsys.readouterr().err
    set_reading(NO_CARD)
    assert first_start.offer_model(config, offline=False, asks=False) is None
    assert capsys.readouterr().err == ""


def test_offline_says_what_is_missing(config: Settings, set_reading: SetReading) -> None:
    set_reading(NO_CARD)
    with pytest.raises(Exception, match=r"no model is installed under .*models.*localspec import"):
        first_start.offer_model(config, offline=True, asks=True)
    with pytest.raises(EngineError, match=r"SmolLM2-135M-Instruct\.Q4_1\.gguf \(94 MiB\) of QuantFactory") as caught:
        make_locator(config, offline=True)("smollm2-135m", lambda stage: None)
    assert "offline" in caught.value.message


def locate(config: Settings, model_id: str, device: str) -> Any:
    return make_locator(config, offline=True, device=device)(model_id, lambda stage: None)


@pytest.mark.torch
def test_a_model_for_a_card_never_lands_on_the_cpu_unasked(config: Settings, set_reading: SetReading) -> None:
    install(config, "qwen3.5-9b", n_values=1000)
    set_reading(NO_CARD)
    for device in ("auto", "cuda", "cuda:1"):
        with pytest.raises(EngineError, match="meant for an NVIDIA card, and no NVIDIA driver") as caught:
            locate(config, "qwen3.5-9b", device)
        assert caught.value.code == "machine_cannot" and "--device cpu" in caught.value.message
    assert locate(config, "qwen3.5-9b", "cpu").id == "qwen3.5-9b"
    holder = GpuProcess(41, "python", 23 * GIB)
    set_reading(GpuReading((replace(CARD, free_bytes=1000, processes=(holder,)),)))
    with pytest.raises(EngineError, match=r"python \(pid 41\) hold the rest"):
        locate(config, "qwen3.5-9b", "auto")
    with pytest.raises(EngineError, match="there is no card 1"):
        locate(config, "qwen3.5-9b", "cuda:1")
    set_reading(GpuReading((CARD,)))
    with pytest.raises(EngineError, match="torch"):
        locate(config, "qwen3.5-9b", "auto")  # the driver sees a card, this build of torch does not


@pytest.mark.torch
def test_small_and_own_models_run_where_they_are_put(
    config: Settings, set_reading: SetReading, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_reading(NO_CARD)
    install(config, "own", n_values=1000)
    place = locate(config, "own", "auto")
    assert (place.id, place.title) == ("own", "own")
    monkeypatch.setattr("localspec.hub.suits.CPU_WEIGHTS_BYTES", 3999)
    with pytest.raises(EngineError, match="own is meant for an NVIDIA card"):
        locate(config, "own", "auto")
    install(config, "qwen2.5-coder-0.5b", n_values=10_000)
    assert locate(config, "qwen2.5-coder", "auto").id == "qwen2.5-coder-0.5b"
    with pytest.raises(EngineError, match=r"get it with: localspec pull qwen3.8-27b"):
        locate(config, "qwen3.8-27b", "auto")
    with pytest.raises(EngineError, match="there is no model 'nosuch'"):
        locate(config, "nosuch", "auto")


def test_reasons() -> None:
    known = load_catalogue()
    assert why_no_card(GpuReading((CARD,))) is None
    assert why_unsuited(known.find("qwen3.8-27b"), GpuReading((CARD,))) is None
    small = replace(CARD, total_bytes=8 * GIB)
    assert "24 GB or more, and RTX 4090 has 8 GiB" in str(why_unsuited(known.find("qwen3.8-27b"), GpuReading((small,))))
    assert why_unsuited(known.demo(), NO_CARD) is None


def test_bare_localspec_in_a_pipe_is_help() -> None:
    result = CliRunner().invoke(group, [])
    assert result.exit_code == 0 and "Usage:" in result.output and "doctor" in result.output

"""An engine that is loaded again starts with what it measured before, and can be asked and told to forget."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from localspec.api.types import GenerateRequest
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.engine.tuner_store import read_document
from tests.helpers.tiny_text import tiny_text_model

pytestmark = pytest.mark.torch


async def loaded(folder: Path, tuner_dir: Path, **more: object) -> LocalEngine:
    place = ModelPlace("tiny", folder, "tiny")
    options = EngineOptions(device="cpu", context_tokens=256, tuner_dir=tuner_dir, **more)  # type: ignore[arg-type]
    engine = LocalEngine(lambda model_id, report: place, options)
    engine.start("tiny")
    await engine.wait_ready()
    return engine


async def write_something(engine: LocalEngine) -> None:
    request = GenerateRequest(prompt="abababababab", max_tokens=60, ignore_eos=True)
    async with aclosing(engine.generate(request)) as events:
        async for _ in events:
            pass


def test_state_is_kept_explained_and_forgotten(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder, tuner_dir = tiny_text_model("llama", 4, tmp_path / "model"), tmp_path / "tuner"

    async def run() -> None:
        first = await loaded(folder, tuner_dir)
        assert len(await first.explain_tuner()) == 1, "nothing is known yet"
        await write_something(first)
        told = await first.explain_tuner()
        assert any("answer, 1 active" in line and "off 0" in line for line in told)
        choice = next(choice for choice in (await first.explain()).choices if choice.phase == "answer")
        assert "off" in [candidate.drafter for candidate in choice.candidates] and choice.decisions > 0
        await first.aclose()
        [file] = tuner_dir.glob("*.json")
        assert read_document(file) is not None
        second = await loaded(folder, tuner_dir)
        assert (await second.explain_tuner())[1:] == told[1:]
        await second.reset_tuner()
        assert len(await second.explain_tuner()) == 1
        await second.aclose()
        assert not file.exists(), "nothing was learnt after the reset"

    asyncio.run(run())


def test_made_up_acceptance_is_never_kept(tmp_path: Path) -> None:
    async def run() -> None:
        engine = await loaded(
            tiny_text_model("llama", 4, tmp_path / "model"), tmp_path / "tuner", synthetic_acceptance=(0.9, 0.5)
        )
        await write_something(engine)
        await engine.aclose()

    asyncio.run(run())
    assert not (tmp_path / "tuner").exists()

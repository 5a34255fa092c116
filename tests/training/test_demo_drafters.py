"""The trained drafters that come with the program, on the demo's real weights: same answers, fewer steps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.hub.bundled import BUNDLED_DIR

pytestmark = [pytest.mark.torch, pytest.mark.demo]

KINDS = ("eagle3", "dspark", "dflash", "mtp")
QUESTION = 'def add(a, b):\n    """Return the sum of a and b."""\n'
TOKENS = 16


@pytest_asyncio.fixture
async def engine(demo_folder: Path) -> AsyncIterator[LocalEngine]:
    place = ModelPlace("smollm2-135m", demo_folder, "demo")
    made = LocalEngine(lambda name, report: place, EngineOptions("cpu", 512, drafters_dir=BUNDLED_DIR))
    made.start("smollm2-135m")
    await made.wait_ready()
    yield made
    await made.aclose()


async def answer(engine: LocalEngine, drafter: str, temperature: float = 0.0) -> tuple[list[int], float]:
    """Token ids and mean tokens a step."""
    request = GenerateRequest(
        messages=(Message("user", QUESTION),),
        sampling=Sampling(temperature=temperature, seed=5),
        max_tokens=TOKENS,
        drafter=drafter,
        depth=4 if drafter != "off" else None,
        private=True,
    )
    ids: list[int] = []
    async for event in engine.generate(request):
        if isinstance(event, Delta):
            ids += event.token_ids
        if isinstance(event, Done):
            return ids, 1 + event.timings.draft_n_accepted / max(1, event.timings.verify_steps)
    raise AssertionError("no end")


async def test_trained_drafters_change_no_token_and_save_steps(engine: LocalEngine) -> None:
    info = engine.model()
    assert info is not None and set(KINDS) <= set(info.drafters)
    plain, _ = await answer(engine, "off")
    sampled, _ = await answer(engine, "off", 0.8)
    for kind in KINDS:
        ids, length = await answer(engine, kind)
        assert ids == plain, kind
        assert length > 1.3, kind
    assert (await answer(engine, "eagle3", 0.8))[0] == sampled

"""The small hybrid with weights that mean something: its MTP block drafts well, and changes no token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from localspec.api.types import Delta, Done, GenerateRequest, Sampling
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine

pytestmark = pytest.mark.torch

FOLDER = Path(__file__).parents[1] / "data" / "small_hybrid"
PROMPT = "    def __init__(self, name, value):\n        self.name = name\n"


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    place = ModelPlace("small-hybrid", FOLDER, "small hybrid")
    made = LocalEngine(lambda name, report: place, EngineOptions("cpu", 512))
    made.start("small-hybrid")
    await made.wait_ready()
    yield made
    await made.aclose()


async def answer(engine: LocalEngine, drafter: str, temperature: float) -> tuple[list[int], str, float]:
    sampling = Sampling(temperature=temperature, seed=3)
    request = GenerateRequest(prompt=PROMPT, sampling=sampling, max_tokens=40, drafter=drafter, depth=4, private=True)
    ids: list[int] = []
    text = ""
    async for event in engine.generate(request):
        if isinstance(event, Delta):
            ids += event.token_ids
            text += event.text
        if isinstance(event, Done):
            return ids, text, 1 + event.timings.draft_n_accepted / max(1, event.timings.verify_steps)
    raise AssertionError("no end")


async def test_the_block_drafts_and_changes_no_token(engine: LocalEngine) -> None:
    plain, text, _ = await answer(engine, "off", 0.0)
    drafted, _, length = await answer(engine, "mtp", 0.0)
    assert drafted == plain
    assert length > 1.5
    # It goes on in Python, as it was taught.
    assert "self." in text and "value" in text
    sampled, _, _ = await answer(engine, "off", 0.9)
    assert (await answer(engine, "mtp", 0.9))[0] == sampled != plain

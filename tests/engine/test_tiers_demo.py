"""The demo model over a restart, through the calls that the terminal UI makes: warm a chat, go on, forget it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest

from localspec.api.types import Delta, Done, GenerateRequest, Message
from localspec.cache.spill import SpillLimits
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine

pytestmark = [pytest.mark.demo, pytest.mark.torch]
QUESTION = "Tell me what a river is, where it begins, how it runs, and where it ends. " * 12


@asynccontextmanager
async def started(folder: Path, kv_dir: Path) -> AsyncIterator[LocalEngine]:
    place = ModelPlace("demo", folder, "demo", demo=True)
    options = EngineOptions(device="cpu", context_tokens=1024, kv_dir=kv_dir, kv_limits=SpillLimits(1 << 30, 0))
    engine = LocalEngine(lambda model_id, report: place, options)
    engine.start("demo")
    await engine.wait_ready()
    try:
        yield engine
    finally:
        await engine.aclose()


async def answer(engine: LocalEngine, messages: tuple[Message, ...], chat_id: str) -> tuple[str, Done]:
    text, done = "", None
    async with aclosing(engine.generate(GenerateRequest(messages=messages, max_tokens=12, chat_id=chat_id))) as events:
        async for event in events:
            if isinstance(event, Delta):
                text += event.text
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return text, done


def test_a_chat_goes_on_after_a_restart(demo_folder: Path, tmp_path: Path) -> None:
    async def session() -> None:
        first = (Message("user", QUESTION),)
        async with started(demo_folder, tmp_path / "kv") as engine:
            text, done = await answer(engine, first, "river")
        read_tokens = done.usage.prompt_tokens
        second = (*first, Message("assistant", text), Message("user", "And a lake?"))
        async with started(demo_folder, tmp_path / "kv") as engine:
            near = await engine.warm(GenerateRequest(messages=second, chat_id="river"))
            assert near > read_tokens, "the question and the answer are there before anything is asked"
            _, done = await answer(engine, second, "river")
            assert done.usage.cached_tokens >= near
            assert done.timings.prefill_ms < 5_000
            tiers = engine.metrics().tiers
            assert tiers["ssd_bytes"] > 0 and tiers["ssd_hit_rate"] > 0 and tiers["ssd_restore_mb_per_s"] > 0
            await engine.forget("river")
        assert not list((tmp_path / "kv").rglob("*.blk"))

    asyncio.run(session())

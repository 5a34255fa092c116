"""Thinking budgets through the whole engine: exact at every depth, and no drafter changes a token."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import httpx
import pytest
import torch

from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.sampling.thinking import FORCED_ORIGIN
from tests.helpers.tiny_text import byte_tokenizer, tiny_text_model

pytestmark = pytest.mark.torch
TOKENIZER = byte_tokenizer()
THINK, END_THINK, TOOL = (TOKENIZER.token_to_id(text) for text in ("<think>", "</think>", "<tool_call>"))
LAWS = (Sampling(), Sampling(temperature=1.0, seed=5), Sampling(temperature=0.8, top_k=30, seed=6))


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalEngine]:
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    folder: Path = tiny_text_model(request.param, 4, tmp_path_factory.mktemp(request.param))
    place = ModelPlace("tiny", folder, "tiny")
    local = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=512))
    local.start("tiny")
    asyncio.run(local.wait_ready())
    yield local
    asyncio.run(local.aclose())


async def answer(engine: LocalEngine, **fields: object) -> tuple[list[int], set[str], Done]:
    ids: list[int] = []
    origins: set[str] = set()
    done: Done | None = None
    request = GenerateRequest(messages=(Message("user", "abab abab ab"),), max_tokens=24, **fields)  # type: ignore[arg-type]
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
                origins |= {span.origin for span in event.spans}
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return ids, origins, done


def thought(ids: list[int]) -> int:
    """Tokens of the thought that the prompt opened, without its end."""
    return next((index for index, token in enumerate(ids) if token in (END_THINK, TOOL)), len(ids))


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled", "top_k"])
@pytest.mark.parametrize("budget", [0, 1, 13])
def test_budget_is_exact_and_no_drafter_changes_a_token(engine: LocalEngine, budget: int, law: Sampling) -> None:
    """No random thought of these ends by itself, so the end must come exactly behind the budget."""

    async def compare() -> None:
        common = {"sampling": law, "thinking_budget_tokens": budget, "ignore_eos": True}
        plain, _, done = await answer(engine, drafter="off", **common)
        free, _, _ = await answer(engine, drafter="off", sampling=law, ignore_eos=True)
        assert thought(free) > budget, "this thought ends by itself; the budget is not tested"
        assert plain[:budget] == free[:budget]
        assert plain[budget] == END_THINK
        assert done.usage.reasoning_tokens == budget + 1
        depths = (1, 2, 3, 7, 15)
        alone = [await answer(engine, drafter="ngram", depth=depths[-1], **common)]
        mixed = await asyncio.gather(*(answer(engine, drafter="ngram", depth=depth, **common) for depth in depths[:-1]))
        for depth, (drafted, _, end) in zip(depths, [*mixed, *alone], strict=True):
            assert drafted == plain, depth
            assert end.timings.draft_n > 0

    asyncio.run(compare())


def test_requests_without_a_budget_are_left_alone(engine: LocalEngine) -> None:
    """Beside one with a budget, and after it in the same slot."""

    async def compare() -> None:
        free, _, _ = await answer(engine, drafter="off", ignore_eos=True)
        bounded, _, _ = await answer(engine, drafter="off", ignore_eos=True, thinking_budget_tokens=5)
        assert bounded != free
        together = await asyncio.gather(
            answer(engine, drafter="ngram", depth=3, ignore_eos=True),
            answer(engine, drafter="ngram", depth=5, ignore_eos=True, thinking_budget_tokens=5),
            answer(engine, drafter="off", ignore_eos=True),
        )
        assert [ids for ids, _, _ in together] == [free, bounded, free]
        assert (await answer(engine, drafter="off", ignore_eos=True))[0] == free

    asyncio.run(compare())


def test_the_forced_end_is_drafted(engine: LocalEngine) -> None:
    """The end marker shows as a draft of the budget, not as a token of its own step."""

    async def origins() -> set[str]:
        found: set[str] = set()
        for budget in range(2, 6):
            found |= (await answer(engine, drafter="ngram", depth=4, ignore_eos=True, thinking_budget_tokens=budget))[1]
        return found

    assert FORCED_ORIGIN in asyncio.run(origins())


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_budget_tokens", "reasoning_budget"])
def test_the_port_bounds_a_thought(engine: LocalEngine, name: str) -> None:
    from localspec.server.app import create_app
    from localspec.server.settings import ServerSettings

    body = {"model": "tiny", "messages": [{"role": "user", "content": "abab abab ab"}], "max_tokens": 16, name: 6}

    async def ask() -> dict[str, object]:
        transport = httpx.ASGITransport(app=create_app(engine, ServerSettings()))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8012") as client:
            reply = await client.post("/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found: dict[str, object] = reply.json()
        return found

    usage = asyncio.run(ask())["usage"]
    assert isinstance(usage, dict)
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 7

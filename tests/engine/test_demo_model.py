"""The demo model end to end: against transformers on the same dequantised weights, and identity on real prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling
from localspec.core.records import HiddenNeeds
from localspec.engine.build import EngineOptions, ModelPlace, load_model
from localspec.engine.engine import LocalEngine
from localspec.engine.tokenizer import Tokenizer
from localspec.formats.checkpoint import open_checkpoint
from localspec.matrix.workloads import WORKLOADS
from localspec.models import Model
from tests.helpers.models import make_cache, make_rows

pytestmark = [pytest.mark.demo, pytest.mark.torch]
PROMPTS = tuple(prompt for prompts in WORKLOADS.values() for prompt in prompts)
MORE = (
    "List the planets.", "Translate to French: good morning.", "def add(a, b):", "1, 2, 3, 4,", "Once upon a time",
    "The capital of Italy is", "SELECT name FROM", "Why is the sky blue?", "import os\nfor", "Dear Sir or Madam,",
    "日本",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> Model:
    return load_model(demo_folder, "cpu")[0]


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> torch.nn.Module:
    """transformers' own Llama with the weights that the folder's blocks mean."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.from_pretrained(demo_folder)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with no_init_weights():
        other = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint = open_checkpoint(demo_folder)
    weights = {}
    for name, parameter in other.state_dict().items():
        source = name if checkpoint.has(name) else "model.embed_tokens.weight"
        value = checkpoint.weight(source).dequantise() if parameter.dim() == 2 else checkpoint.vector(source).float()
        weights[name] = value
    other.load_state_dict(weights)
    return other.eval()


def test_logits_equal_transformers(model: Model, reference: torch.nn.Module, demo_folder: Path) -> None:
    """Bar: 1e-3 relative in float32 on 20 prompts."""
    tokenizer = Tokenizer(demo_folder)
    worst = 0.0
    prompts = (*PROMPTS, *MORE)[:20]
    assert len(prompts) == 20
    for prompt in prompts:
        ids = torch.tensor(tokenizer.encode(prompt))
        num_pages = -(-len(ids) // 64) + 1
        cache = make_cache(model.cache_spec, num_pages, 1)
        tables = torch.arange(1, num_pages, dtype=torch.int32)[None]
        with torch.inference_mode():
            rows = make_rows("prefill", {0: (0, ids.tolist())}, tables)
            ours = model.logits(model.forward(rows, cache, HiddenNeeds()).hidden)[: len(ids)]
            theirs = reference(ids[None]).logits[0]
        worst = max(worst, float((ours - theirs).norm() / theirs.norm()))
        assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    print(f"worst relative difference of logits over {len(prompts)} prompts: {worst:.2e}")
    assert worst < 1e-3


@pytest.fixture(scope="module")
def engine(demo_folder: Path) -> Iterator[LocalEngine]:
    place = ModelPlace("demo", demo_folder, "demo", demo=True)
    local = LocalEngine(lambda model_id, report: place, EngineOptions(device="cpu", context_tokens=1024))
    local.start("demo")
    asyncio.run(local.wait_ready())
    yield local
    asyncio.run(local.aclose())


async def generate(engine: LocalEngine, **fields: object) -> tuple[list[int], Done]:
    ids: list[int] = []
    done: Done | None = None
    async with aclosing(engine.generate(GenerateRequest(**fields))) as events:  # type: ignore[arg-type]
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return ids, done


def test_greedy_continuations_equal_transformers(
    engine: LocalEngine, reference: torch.nn.Module, demo_folder: Path
) -> None:
    tokenizer = Tokenizer(demo_folder)
    for prompt in (*PROMPTS[:3], *MORE[:3]):
        ids = tokenizer.encode(prompt)
        ours, _ = asyncio.run(generate(engine, prompt_token_ids=ids, max_tokens=10, ignore_eos=True))
        # The likeliest token behind every one of ours is our next one: its own greedy continuation, read at once.
        with torch.inference_mode():
            likeliest = reference(torch.tensor([[*ids, *ours]])).logits[0].argmax(-1)
        assert len(ours) == 10 and ours == likeliest[len(ids) - 1 : -1].tolist()


@pytest.mark.parametrize("law", [Sampling(), Sampling(temperature=0.8, top_p=0.9, seed=5)], ids=["greedy", "sampled"])
def test_drafting_changes_no_token(engine: LocalEngine, law: Sampling) -> None:
    """The short form of scripts/identity.py."""

    async def compare() -> int:
        asked = [{"messages": (Message("user", prompt),), "sampling": law, "max_tokens": 32} for prompt in PROMPTS[-3:]]
        plain = [(await generate(engine, drafter="off", **fields))[0] for fields in asked]
        # Wide and narrow windows beside each other, and under the other law the other way round.
        depths = (15, 4, 15) if law.temperature else (4, 15, 4)
        results = await asyncio.gather(
            *(
                generate(engine, drafter="ngram", depth=depth, **fields)
                for fields, depth in zip(asked, depths, strict=True)
            )
        )
        assert [ids for ids, _ in results] == plain
        return sum(done.timings.draft_n for _, done in results)

    assert asyncio.run(compare()) > 0


def test_a_second_turn_reads_only_what_is_new(engine: LocalEngine) -> None:
    async def turns() -> tuple[int, int, int]:
        first = (Message("user", "Name three colours of the rainbow and say a word on each."),)
        text, ids = "", []
        async with aclosing(engine.generate(GenerateRequest(messages=first, max_tokens=60))) as events:
            async for event in events:
                if isinstance(event, Delta):
                    text += event.text
                    ids += event.token_ids
        second = (*first, Message("assistant", text), Message("user", "And another?"))
        _, done = await generate(engine, messages=second, max_tokens=4)
        return len(ids), done.usage.prompt_tokens, done.usage.cached_tokens

    answer_tokens, prompt_tokens, cached_tokens = asyncio.run(turns())
    assert cached_tokens > answer_tokens
    assert prompt_tokens - cached_tokens < 24, "only the new message and the template around it"


def test_cancelling_stops_within_a_step(engine: LocalEngine) -> None:
    async def cancel() -> None:
        seen = 0
        async with aclosing(
            engine.generate(GenerateRequest(prompt="a b c", max_tokens=400, ignore_eos=True))
        ) as events:
            async for event in events:
                seen += isinstance(event, Delta)
                if seen == 3:
                    break
        for _ in range(100):
            await asyncio.sleep(0.05)
            if engine.metrics().active_requests == 0:
                break
        assert engine.metrics().active_requests == 0
        before = engine.metrics().completion_tokens_total
        await asyncio.sleep(0.3)
        assert engine.metrics().completion_tokens_total == before

    asyncio.run(cancel())

"""The first promise on tiny random models: no drafter, depth, mix of widths or cached prefix changes a token."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module, drafter_names
from localspec.engine.build import Assembled
from localspec.models import architectures
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

pytestmark = pytest.mark.torch
LIMIT = 512
SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=0.9, top_k=20, top_p=0.95),
    "penalised": Sampling(temperature=0.7, min_p=0.02, presence_penalty=0.5, repetition_penalty=1.1),
}


@pytest.fixture(scope="module", params=architectures())
def model_type(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def parts(model_type: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Assembled]:
    """An engine with a tiny instance of every drafter that can be built for this architecture."""
    folder: Path = random_checkpoint(model_type, 3, tmp_path_factory.mktemp(model_type))
    ops = reference_ops()
    model = load_model(folder, ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=LIMIT)
    drafters = {name: drafter_module(name).tiny(setup) for name in drafter_names() if name != "off"}
    with token_engine(model, ops, LIMIT, drafters) as engine:
        yield engine


def repeated_prompt(seed: int, length: int, vocab: int = 90) -> list[int]:
    """A prompt that repeats itself, so that copying from history has something to copy."""
    generator = random.Random(seed)
    phrase = [generator.randrange(vocab) for _ in range(11)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if generator.random() < 0.6 else [generator.randrange(vocab) for _ in range(3)]
    return ids[:length]


PROMPTS = [repeated_prompt(seed, 40 + 37 * seed) for seed in range(4)]


@pytest.fixture(scope="module")
def plain(parts: Assembled) -> Callable[[str], list[list[int]]]:
    """Tokens of the prompts under a law without drafts, made once for all drafters."""

    @functools.cache
    def made(law: str) -> list[list[int]]:
        requests = [make_request(p, sampling=SAMPLINGS[law], seed=i, drafter="off") for i, p in enumerate(PROMPTS)]
        return [item.token_ids for item in run(parts, requests)]

    return made


def laws_for(architecture: str, number: int) -> list[str]:
    """Every law on a plain transformer and on a hybrid; on the others one for each drafter, in turn.

    A law sees nothing of a model but its logits; scripts/identity_depths.py makes the rest of the table.
    """
    laws = list(SAMPLINGS)
    if architecture in ("llama", "qwen3_5"):
        return laws
    return [laws[(architectures().index(architecture) + number) % len(laws)]]


# Depths of four neighbours: 0 drafts nothing and leaves steps without drafts in between.
MIXES = ((0, 14, 2, 12), (9, 4, 15, 0))


@pytest.mark.parametrize("name", [n for n in drafter_names() if n != "off"])
def test_drafter_changes_no_token(
    parts: Assembled, plain: Callable[[str], list[list[int]]], model_type: str, name: str
) -> None:
    for law in laws_for(model_type, drafter_names().index(name)):
        expected = plain(law)
        alone = run(parts, [make_request(PROMPTS[1], drafter=name, depth=15, sampling=SAMPLINGS[law], seed=1)])
        assert alone[0].token_ids == expected[1]
        for depths in MIXES:
            mixed = [
                make_request(p, drafter=name if depth else "off", depth=depth, sampling=SAMPLINGS[law], seed=i)
                for i, (p, depth) in enumerate(zip(PROMPTS, depths, strict=True))
            ]
            together = run(parts, mixed)
            assert [item.token_ids for item in together] == expected
    counts = {drafter.name: drafter for drafter in parts.metrics.snapshot().drafters}
    assert counts[name].drafted_tokens > 0, "the drafter never spoke, so nothing was tested"


def test_cached_prefix_gives_the_same_tokens_and_logprobs(parts: Assembled) -> None:
    first = repeated_prompt(11, 150)
    [fresh] = run(parts, [make_request(first, logprobs=0, max_tokens=30)])
    second = [*first, *fresh.token_ids, *repeated_prompt(12, 23)]
    [cached] = run(parts, [make_request(second, logprobs=0, max_tokens=20, sampling=SAMPLINGS["sampled"])])
    assert cached.cached_tokens == len(first) + len(fresh.token_ids) - 1
    [salted] = run(
        parts, [make_request(second, logprobs=0, max_tokens=20, sampling=SAMPLINGS["sampled"], cache_salt="fresh")]
    )
    assert salted.cached_tokens == 0
    assert salted.token_ids == cached.token_ids
    assert salted.logprobs == cached.logprobs


def test_stop_and_length_end_where_they_should(parts: Assembled) -> None:
    prompt = repeated_prompt(5, 60)
    [free] = run(parts, [make_request(prompt, max_tokens=30)])
    stop = free.token_ids[9]
    cut = free.token_ids.index(stop) + 1
    for drafter in ("off", "ngram"):
        [stopped] = run(parts, [make_request(prompt, max_tokens=30, stop_ids=(stop,), drafter=drafter, depth=15)])
        assert stopped.token_ids == free.token_ids[:cut]
        assert stopped.end is not None and stopped.end.finish == "stop"
        [short] = run(parts, [make_request(prompt, max_tokens=5, drafter=drafter, depth=15)])
        assert short.token_ids == free.token_ids[:5]
        assert short.end is not None and short.end.finish == "length"

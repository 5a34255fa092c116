#!/usr/bin/env python3
"""Counts tokens that drafting changes: the first promise, on the demo model and real prompts. The bar is 0.

    python scripts/identity.py --data ../shared/data --prompts 100 --max-tokens 24

Prompts are taken in turn from HumanEval (code), GSM8K (maths) and Spec-Bench (chat, summary, question answering,
translation, retrieval). Each is answered greedily and sampled with a seed, by `off` and by n-gram drafts at several
depths, alone and four at once; every answer is compared with `off` alone. Writes scripts/results/identity_cpu.json.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import sys
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path

from localspec.config import DEMO_MODEL_ID, load_settings, prepare_process

prepare_process()

from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling  # noqa: E402
from localspec.commands.common import make_locator  # noqa: E402
from localspec.engine.build import EngineOptions  # noqa: E402
from localspec.engine.engine import LocalEngine  # noqa: E402

LAWS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, top_k=40, seed=11)}
RUNS = (("off", None, 4), ("ngram", 1, 4), ("ngram", 4, 4), ("ngram", 15, 1), ("ngram", 15, 4))


def read_prompts(folder: Path, count: int) -> list[tuple[str, str]]:
    """(kind, prompt) in turn from each kind, so that any count mixes all."""
    kinds: dict[str, list[str]] = {}
    with gzip.open(folder / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        kinds["code"] = [f"Complete this function:\n\n{json.loads(line)['prompt']}" for line in file]
    with (folder / "gsm8k_test_400.jsonl").open(encoding="utf-8") as file:
        kinds["maths"] = [json.loads(line)["question"] for line in file]
    with (folder / "spec_bench_320.jsonl").open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            if len(row["turns"][0]) < 3000:
                kinds.setdefault(row["category"], []).append(row["turns"][0])
    prompts: list[tuple[str, str]] = []
    index = 0
    while len(prompts) < count:
        prompts += [(kind, texts[index % len(texts)]) for kind, texts in kinds.items()]
        index += 1
    return prompts[:count]


async def answer(engine: LocalEngine, prompt: str, law: Sampling, drafter: str, depth: int | None, tokens: int):
    request = GenerateRequest(
        messages=(Message("user", prompt),), sampling=law, max_tokens=tokens, drafter=drafter, depth=depth
    )
    ids: list[int] = []
    done: Done | None = None
    async with aclosing(engine.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
            elif isinstance(event, Done):
                done = event
    assert done is not None
    return ids, done.timings


async def compare(engine: LocalEngine, prompts: list[tuple[str, str]], tokens: int) -> dict[str, object]:
    counts: Counter[str] = Counter()
    for law_name, law in LAWS.items():
        plain = [(await answer(engine, prompt, law, "off", None, tokens))[0] for _, prompt in prompts]
        counts["tokens"] += sum(map(len, plain))
        print(f"{law_name}: off done", file=sys.stderr, flush=True)
        for drafter, depth, active in RUNS:
            gate = asyncio.Semaphore(active)

            async def one(prompt: str, law=law, drafter=drafter, depth=depth, gate=gate):
                async with gate:
                    return await answer(engine, prompt, law, drafter, depth, tokens)

            results = await asyncio.gather(*(one(prompt) for _, prompt in prompts))
            for expected, (ids, timings) in zip(plain, results, strict=True):
                counts["compared_answers"] += 1
                counts["drafted_tokens"] += timings.draft_n
                counts["accepted_tokens"] += timings.draft_n_accepted
                counts["differing_answers"] += ids != expected
                counts["differing_tokens"] += sum(a != b for a, b in zip(ids, expected, strict=False))
            print(f"{law_name} {drafter} depth {depth} active {active}: {dict(counts)}", file=sys.stderr, flush=True)
    return {**counts, "kinds": dict(Counter(kind for kind, _ in prompts))}


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=24)
    arguments = parser.parse_args()
    engine = LocalEngine(make_locator(load_settings(), offline=False), EngineOptions(device="cpu"))
    engine.start(DEMO_MODEL_ID)
    await engine.wait_ready()
    started = time.time()
    result = await compare(engine, read_prompts(arguments.data, arguments.prompts), arguments.max_tokens)
    await engine.aclose()
    document = {
        "what": "tokens that n-gram drafting changes against off, demo model, CPU back end",
        "bar": 0,
        "prompts": arguments.prompts,
        "max_tokens": arguments.max_tokens,
        "seconds": round(time.time() - started),
        **result,
    }
    path = Path(__file__).parent / "results" / "identity_cpu.json"
    path.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))
    return 1 if result["differing_answers"] else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

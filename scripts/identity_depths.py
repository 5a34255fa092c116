#!/usr/bin/env python3
"""Tokens that differ from plain decoding on tiny random models: every drafter, depths 1 to 15, 1 to 4 sequences.

Steps without drafts lie in between (the neighbours draft to other depths, down to none), answers go on behind cached
prefixes, and one text is longer than 32k tokens. Greedy and sampled. The promise is 0. Writes a JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module, drafter_names
from localspec.engine.build import Assembled
from localspec.models import architecture
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import load_model, random_checkpoint, reference_ops

LAWS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.9, top_k=20, top_p=0.95)}
NAMES = [name for name in drafter_names() if name != "off"]


def prompt_of(seed: int, length: int, vocab: int = 90) -> list[int]:
    """A text that repeats itself."""
    generator = random.Random(seed)
    phrase = [generator.randrange(vocab) for _ in range(11)]
    ids: list[int] = []
    while len(ids) < length:
        ids += phrase if generator.random() < 0.6 else [generator.randrange(vocab) for _ in range(3)]
    return ids[:length]


def differing(ours: list[int], plain: list[int]) -> int:
    return abs(len(ours) - len(plain)) + sum(a != b for a, b in zip(ours, plain, strict=False))


def depths(parts: Assembled, max_tokens: int) -> dict[str, int]:
    """Every drafter at every depth; the number of sequences and their mix follow from the depth."""
    compared = wrong = drafted = 0
    for law_name, law in LAWS.items():
        prompts = [prompt_of(seed, 40 + 37 * seed) for seed in range(4)]
        asked = [make_request(p, sampling=law, seed=i, max_tokens=max_tokens) for i, p in enumerate(prompts)]
        plain = run(parts, asked)
        for name in NAMES:
            for depth in range(1, 16):
                count = 1 + depth % 4
                # The second time round the prompt's prefix is in the cache, with and without the answer.
                salt = "" if depth % 2 else f"{law_name} {name} {depth}"
                # Neighbours draft to other depths, one of them not at all.
                mixed = [max(0, depth - 5 * i) for i in range(count)]
                requests = [replace(asked[i], drafter=name, depth=d, cache_salt=salt) for i, d in enumerate(mixed)]
                for ours, theirs in zip(run(parts, requests), plain, strict=False):
                    compared += len(theirs.token_ids)
                    wrong += differing(ours.token_ids, theirs.token_ids)
    counts = {drafter.name: drafter.drafted_tokens for drafter in parts.metrics.snapshot().drafters}
    drafted = sum(counts.values())
    return {"compared_tokens": compared, "differing_tokens": wrong, "drafted_tokens": drafted}


def long_context(parts: Assembled, length: int) -> dict[str, int]:
    """One text longer than `length` tokens, then the same with each drafter behind its cached prefix."""
    prompt = prompt_of(7, length)
    [plain] = run(parts, [make_request(prompt, max_tokens=24)], timeout_s=3600)
    compared = wrong = 0
    for name in NAMES:
        [ours] = run(parts, [make_request(prompt, drafter=name, depth=7, max_tokens=24)], timeout_s=3600)
        compared += len(plain.token_ids)
        wrong += differing(ours.token_ids, plain.token_ids)
    return {"context_tokens": length, "compared_tokens": compared, "differing_tokens": wrong}


def engine_of(model_type: str, limit: int, folder: Path) -> Any:
    ops = reference_ops()
    config = json.loads(json.dumps(architecture(model_type).tiny_config()))
    config.get("text_config", config)["max_position_embeddings"] = limit + 64
    model = load_model(random_checkpoint(model_type, 3, folder, config), ops)
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=limit)
    return token_engine(model, ops, limit, {name: drafter_module(name).tiny(setup) for name in NAMES})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/identity_depths.json"))
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--long", type=int, default=33000)
    parser.add_argument("--models", default="llama,qwen3_5")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    document: dict[str, Any] = {"models": "tiny, random weights, CPU", "drafters": NAMES, "runs": {}}
    for model_type in arguments.models.split(","):
        started = time.perf_counter()
        found: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as name:
            with engine_of(model_type, 1024, Path(name) / "short") as parts:
                found["depths_1_to_15"] = depths(parts, arguments.max_tokens)
            print(model_type, json.dumps(found), flush=True)
            if arguments.long:
                with engine_of(model_type, arguments.long + 256, Path(name) / "long") as parts:
                    found["long_context"] = long_context(parts, arguments.long)
        found["seconds"] = round(time.perf_counter() - started, 1)
        document["runs"][model_type] = found
        print(model_type, json.dumps(found), flush=True)
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

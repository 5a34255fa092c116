#!/usr/bin/env python3
"""Tokens of the demo's answers that differ when its trained drafters draft. The promise is 0. Writes a JSON.

Every drafter that comes with the program, at several depths, greedy and sampled, on prompts of each kind of work.

    python scripts/identity_trained.py --model DIR --data ../shared/data --prompts 1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path

from measure_matrix import TRAINED, prompt_sets

from localspec.api.types import Delta, Done, GenerateRequest, Message, Sampling
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.engine import LocalEngine
from localspec.hub.bundled import BUNDLED_DIR

ROOT = Path(__file__).resolve().parents[1]
MODEL_ID = "smollm2-135m"
LAWS = {"greedy": Sampling(temperature=0.0), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=11)}
DEPTHS = (1, 4, 7)


async def answer(
    engine: LocalEngine, messages: Sequence[Message], law: str, drafter: tuple[str, int], max_tokens: int
) -> tuple[list[int], int]:
    """Token ids, and how many of them had been drafted."""
    name, depth = drafter
    request = GenerateRequest(
        messages=tuple(messages), sampling=LAWS[law], max_tokens=max_tokens, private=True,
        drafter=name, depth=None if name == "off" else depth,
    )  # fmt: skip
    ids: list[int] = []
    accepted = 0
    async for event in engine.generate(request):
        if isinstance(event, Delta):
            ids += event.token_ids
        if isinstance(event, Done):
            accepted = event.timings.draft_n_accepted
    return ids, accepted


async def measure(chosen: argparse.Namespace) -> dict[str, dict[str, int]]:
    place = ModelPlace(MODEL_ID, chosen.model, "demo")
    engine = LocalEngine(lambda name, report: place, EngineOptions(chosen.device, 2048, drafters_dir=BUNDLED_DIR))
    engine.start(MODEL_ID)
    await engine.wait_ready()
    found = {name: {"compared": 0, "differ": 0, "drafted": 0} for name in TRAINED}
    asked = [prompt for each in prompt_sets(chosen.data, chosen.prompts).values() for prompt in each]
    for prompt in asked:
        for law in LAWS:
            plain, _ = await answer(engine, prompt.messages, law, ("off", 0), chosen.max_tokens)
            for name in TRAINED:
                for depth in DEPTHS:
                    ids, accepted = await answer(engine, prompt.messages, law, (name, depth), chosen.max_tokens)
                    row = found[name]
                    row["compared"] += len(plain)
                    row["drafted"] += accepted
                    row["differ"] += abs(len(ids) - len(plain))
                    row["differ"] += sum(a != b for a, b in zip(ids, plain, strict=False))
        print(json.dumps(found), flush=True)
    await engine.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared/data")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=int, default=1, help="Of each kind of work.")
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    begun = time.monotonic()
    found = asyncio.run(measure(chosen))
    document = {
        "device": chosen.device, "prompts_a_kind": chosen.prompts, "max_tokens": chosen.max_tokens,
        "depths": DEPTHS, "laws": list(LAWS), "by_drafter": found, "seconds": round(time.monotonic() - begun),
    }  # fmt: skip
    out = chosen.out or ROOT / f"scripts/results/identity_trained_{chosen.device}.json"
    out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

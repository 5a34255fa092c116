#!/usr/bin/env python3
"""The tuner on many replayed texts with the costs measured on an H200: each part against the best fixed choice for it.

Parts of code, prose, reasoning, editing and hopeless text follow one another in random order; one to four sequences.
Acceptance is synthetic (rates of tests/engine/tuner_stream.py); the best fixed choice is found in hindsight on the same
text. Writes scripts/results/tuner.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localspec.engine.tuner import Tuner
from tests.engine.tuner_stream import (
    CODE,
    EDITING,
    HOPELESS,
    LIMITS,
    PROSE,
    REASONING,
    VERIFY_MS,
    Text,
    best_fixed,
    replay_tuned,
    worst_window,
)

KINDS = (CODE, PROSE, REASONING, EDITING, HOPELESS)


def simulate(num: int, seeds: int, part_tokens: int) -> dict[str, Any]:
    """Ratios by kind of text, the worst 2,000 tokens over plain, and host time of the tuner."""
    ratios: dict[str, list[float]] = {}
    worst, step_us = float("inf"), []
    for seed in range(seeds):
        kinds = list(KINDS)
        random.Random(seed).shuffle(kinds)
        texts = [Text([(kind, part_tokens) for kind in kinds], 7919 * seed + i) for i in range(num)]
        started = time.process_time()
        log = replay_tuned(texts, Tuner(dict(LIMITS), fixed_rows=True), seed)
        step_us.append((time.process_time() - started) / len(log.steps) * 1e6)
        worst = min(worst, worst_window(log, num / VERIFY_MS[num]))
        for name, (rate, _) in best_fixed(texts).items():
            ratios.setdefault(name, []).append(log.rate(name) / rate)
    return {
        "sequences": num,
        "over_best_fixed": {name: round(mean(values), 4) for name, values in sorted(ratios.items())},
        "smallest_part": {name: round(min(values), 4) for name, values in sorted(ratios.items())},
        "worst_2000_tokens_over_plain": round(worst, 4),
        "host_us_per_step_with_the_simulation": round(mean(step_us)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--part-tokens", type=int, default=4000)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/tuner.json"))
    arguments = parser.parse_args()
    document: dict[str, Any] = {
        "acceptance": "synthetic",
        "costs": "H200, 27B shapes, scripts/results/h200_engine.json and h200_drafting.json",
        "seeds": arguments.seeds,
        "part_tokens": arguments.part_tokens,
        "runs": [],
    }
    for num in (1, 2, 3, 4):
        document["runs"].append(simulate(num, arguments.seeds, arguments.part_tokens))
        print(json.dumps(document["runs"][-1]), flush=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What a tuner that knows nothing reaches, over texts of several lengths, beside the best fixed choice in hindsight.

Four drafters of different worth, as the demo's on four kinds of work; costs as measured on two CPU cores. Whether a
draft is right depends on the token more than on the drafter, as with real ones. The text repeats nothing, so the
text's own n-grams say nothing. Shows how much text a cold start needs. Writes scripts/results/tuner_cold.json.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.step_costs import OFF, Arm
from localspec.engine.tuner import Tuner
from localspec.scheduler.sequence import Sequence

DEPTH = 7
ACCEPTANCE: dict[str, dict[str, tuple[float, ...]]] = {
    "code": {
        "eagle3": (0.8, 0.72, 0.66, 0.6),
        "mtp": (0.68, 0.63, 0.55, 0.5),
        "dspark": (0.7, 0.6, 0.5, 0.4),
        "dflash": (0.68, 0.57, 0.45, 0.35),
    },
    "chat": {
        "eagle3": (0.45, 0.4, 0.35),
        "mtp": (0.45, 0.4, 0.33),
        "dspark": (0.42, 0.3, 0.2),
        "dflash": (0.4, 0.28, 0.2),
    },
    "summary": {"eagle3": (0.22, 0.2), "mtp": (0.3, 0.24), "dspark": (0.2, 0.15), "dflash": (0.2, 0.15)},
    "maths": {
        "eagle3": (0.78, 0.72, 0.68, 0.65),
        "mtp": (0.7, 0.65, 0.6, 0.55),
        "dspark": (0.65, 0.5, 0.4),
        "dflash": (0.6, 0.45, 0.35),
    },
}
"""Conditional, by position; the last goes on."""
VERIFY_MS = ((0, 54.0), (1, 54.0), (2, 55.0), (3, 56.0), (4, 58.0), (5, 62.0), (9, 82.0), (16, 140.0))
DRAFT_MS = {"eagle3": (0.5, 5.5), "mtp": (0.5, 6.5), "dspark": (6.0, 1.8), "dflash": (6.0, 1.4), "ngram": (0.8, 0.0)}
"""Of a proposal, and of each of its drafts."""
OF_THE_TOKEN = 0.7
LIMITS = {**dict.fromkeys(ACCEPTANCE["code"], DEPTH), "ngram": 15}
FIXED: list[Arm] = [OFF, *((name, depth) for name in ACCEPTANCE["code"] for depth in (2, 4))]


@dataclass(frozen=True)
class Text:
    """runs: by drafter and token, how many drafts behind it would stand."""

    runs: dict[str, list[int]]

    @classmethod
    def of(cls, kind: str, tokens: int, seed: int) -> Text:
        generator = random.Random(f"{kind} {seed}")
        difficulty = [generator.random() for _ in range(tokens + DEPTH + 1)]

        def run(rates: tuple[float, ...], at: int) -> int:
            for place in range(DEPTH):
                drawn = OF_THE_TOKEN * difficulty[at + 1 + place] + (1 - OF_THE_TOKEN) * generator.random()
                if drawn >= rates[min(place, len(rates) - 1)]:
                    return place
            return DEPTH

        return cls({name: [run(rates, at) for at in range(tokens)] for name, rates in ACCEPTANCE[kind].items()})


def verify_ms(rows: int) -> float:
    low, high = next(pair for pair in pairwise(VERIFY_MS) if pair[0][0] <= rows <= pair[1][0])
    return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])


def replay(text: Text, arm: Arm | None, seed: int) -> float:
    """Tokens per millisecond with a fixed choice, or (None) with a tuner that knows nothing."""
    tuner, generator = Tuner(dict(LIMITS)), random.Random(seed)
    sequence = Sequence(1, Request("", (1,), Sampling(), 1, 10**9, ()))
    tokens, at, ms = len(text.runs["eagle3"]), 0, 0.0
    while at < tokens:
        method, depth = arm or tuner.choose(sequence, 1)
        by = (method,) * depth if method in text.runs else ()
        stood = min(text.runs[method][at], depth) if by else 0
        begun, each = DRAFT_MS.get(method, (0.0, 0.0)) if depth else (0.0, 0.0)
        noise = 1 + generator.gauss(0, 0.02)
        draft, verify = (begun + each * depth) * noise, verify_ms(1 + len(by)) * noise
        ms += draft + verify
        at += stood + 1
        if arm is None:
            tuner.see_window(sequence, 1, (method, depth), by, stood)
            tuner.see_shadow(sequence, 1, 0, False, False)
            for _ in range(stood + 1):
                tuner.see_text(sequence, 1, False, False)
            tuner.known.see_step(at, 1 + len(by), [(method, depth)], draft, verify)
    return tokens / ms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=[192, 768, 3072])
    parser.add_argument("--out", type=Path, default=Path("scripts/results/tuner_cold.json"))
    chosen = parser.parse_args()
    found: dict[str, Any] = {}
    for tokens in chosen.tokens:
        shares: dict[str, list[float]] = {}
        for kind in ACCEPTANCE:
            for seed in range(chosen.seeds):
                text = Text.of(kind, tokens, seed)
                best = max(replay(text, arm, seed) for arm in FIXED)
                shares.setdefault(kind, []).append(replay(text, None, seed) / best)
        found[str(tokens)] = {
            kind: {"mean": round(mean(each), 3), "smallest": round(min(each), 3)} for kind, each in shares.items()
        }
        print(tokens, json.dumps(found[str(tokens)]), flush=True)
    document = {"acceptance": "synthetic", "seeds": chosen.seeds, "over_best_fixed_by_tokens": found}
    chosen.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

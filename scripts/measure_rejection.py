#!/usr/bin/env python3
"""How many drafts three ways of lossless verification accept, on real distributions of the demo model.

Coupled sampling (ours: draft and target draw with the same noise, or the draft is the likeliest token), standard
rejection (arXiv 2211.17192) and block verification (arXiv 2403.10444). The draft is the same model that sees only the
last few tokens, at several lengths, so that it is good or poor; drafts are paths of K tokens drawn from it at places of
real texts. Everything is an expectation along the path, so little is left to chance:
coupled, of a draft x: P(target draws x | draft drew x) = 1 / (q(x) * sum_y max(p(y) / p(x), q(y) / q(x)));
greedy: p(argmax q); standard: min(1, p(x) / q(x)); block: the longest i with u_i <= h_i.
The answer of coupled sampling does not depend on the draft; that of the two others has the same law only.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from localspec.core.records import PAGE_TOKENS, HiddenNeeds
from localspec.engine.build import load_model
from localspec.engine.tokenizer import Tokenizer
from localspec.matrix.workloads import WORKLOADS
from localspec.models import Model
from tests.helpers.models import make_cache, make_rows

K = 5
TEMPERATURES = (0.6, 1.0)
DRAFT_CONTEXTS = (8, 32)


def probabilities(model: Model, tokens: list[int], last: int, temperature: float) -> Tensor:
    """[last, V] float64: the law behind each of the last tokens."""
    pages = 1 + -(-len(tokens) // PAGE_TOKENS)
    tables = torch.arange(1, pages + 1, dtype=torch.int32).view(1, -1)
    rows = make_rows("prefill", {0: (0, tokens)}, tables)
    with torch.inference_mode():
        hidden = model.forward(rows, make_cache(model.cache_spec, pages + 1, 1), HiddenNeeds(True)).hidden
        return (model.logits(hidden[-last:]).double() / temperature).softmax(dim=1)


def coupled(p: Tensor, q: Tensor, x: int) -> float:
    """P(the target draws x | the draft drew x) with shared Gumbel noise."""
    if p[x] <= 0:
        return 0.0
    return float(1.0 / (q[x] * torch.maximum(p / p[x], q / q[x]).sum()))


def block_length(p: Tensor, q: Tensor, path: list[int]) -> float:
    """Expected accepted drafts of block verification. p [K + 1, V], q [K, V]."""
    running = 1.0
    chances = []
    for i, x in enumerate(path):
        running = min(running * float(p[i, x] / q[i, x]), 1.0)
        if i + 1 == len(path):
            chances.append(running)
            continue
        residual = float((running * p[i + 1] - q[i + 1]).clamp(min=0).sum())
        chances.append(residual / (residual + 1.0 - running) if residual + 1.0 - running > 1e-12 else 1.0)
    expected, none_behind = 0.0, 1.0
    for chance in reversed(chances):
        none_behind *= 1.0 - chance
        expected += 1.0 - none_behind
    return expected


def lengths(model: Model, text: list[int], context: int, temperature: float, seed: int) -> dict[str, float]:
    """Expected accepted drafts, by way, of one path behind a text."""
    generator = torch.Generator().manual_seed(seed)
    path: list[int] = []
    laws = []
    for _ in range(K):
        laws.append(probabilities(model, (text + path)[-context:], 1, temperature)[0])
        path.append(int(torch.multinomial(laws[-1], 1, generator=generator)))
    q = torch.stack(laws)
    p = probabilities(model, text + path, K + 1, temperature)
    greedy_path: list[int] = []
    greedy_survival = greedy = 0.0
    for i in range(K):
        law = probabilities(model, (text + greedy_path)[-context:], 1, temperature)[0] if i else q[0]
        greedy_path.append(int(law.argmax()))
    greedy_p = probabilities(model, text + greedy_path, K + 1, temperature)
    greedy_survival = 1.0
    for i, x in enumerate(greedy_path):
        greedy_survival *= float(greedy_p[i, x])
        greedy += greedy_survival
    found = {"greedy": greedy, "coupled": 0.0, "standard": 0.0, "block": block_length(p, q, path)}
    for name, chance in (("coupled", coupled), ("standard", lambda p, q, x: min(1.0, float(p[x] / q[x])))):
        survival = 1.0
        for i, x in enumerate(path):
            survival *= chance(p[i], q[i], x)
            found[name] += survival
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Folder of the installed demo model.")
    parser.add_argument("--places", type=int, default=10, help="Places in the text of each workload.")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/rejection.json"))
    arguments = parser.parse_args()
    model, _, _ = load_model(arguments.folder, "cpu")
    tokenizer = Tokenizer(arguments.folder)
    runs: list[dict[str, Any]] = []
    for context in DRAFT_CONTEXTS:
        for temperature in TEMPERATURES:
            sums: dict[str, float] = {}
            count = 0
            for prompts in WORKLOADS.values():
                ids = list(tokenizer.encode("\n".join(prompts)))
                step = max((len(ids) - 48) // arguments.places, 1)
                for place in range(48, len(ids), step)[: arguments.places]:
                    for name, value in lengths(
                        model, ids[max(0, place - 160) : place], context, temperature, place
                    ).items():
                        sums[name] = sums.get(name, 0.0) + value
                    count += 1
            means = {name: total / count for name, total in sums.items()}
            best_coupled = 1 + max(means["coupled"], means["greedy"])
            runs.append(
                {
                    "draft_context_tokens": context,
                    "temperature": temperature,
                    "paths": count,
                    "tokens_per_step": {name: round(1 + value, 4) for name, value in means.items()},
                    "standard_over_best_coupled": round((1 + means["standard"]) / best_coupled, 4),
                    "block_over_best_coupled": round((1 + means["block"]) / best_coupled, 4),
                }
            )
            print(json.dumps(runs[-1]), flush=True)
    document = {
        "model": arguments.folder.name,
        "drafts": K,
        "draft": "the same model with a short context",
        "runs": runs,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""What each part of a 27B step costs on a card: whole steps, steps with operations left out, and what kernels add.

Random weights of full size at a context of 2,048 tokens. An operation that is left out gives memory that nothing
filled, so its cost with all waiting is the difference to the whole step of the same run. Prompts are read in chunks of
two sizes. Some 60 seconds; one JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from localspec.engine.build import EngineOptions, assemble
from localspec.engine.rates import read_rate_bytes_per_s
from localspec.engine.step_bench import StepBench, matmul_rate_flop_per_s
from localspec.engine.synthetic_bench import prefill_flop_per_token
from localspec.kernels.ops import Ops
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import SyntheticCheckpoint, known_config

ROOT = Path(__file__).parent.parent
SHAPES = ((1, 1), (1, 8), (1, 16), (4, 1))
"""Sequences, and rows of each."""
CONTEXT_TOKENS, LIMIT_TOKENS = 2048, 12288
PROMPT_TOKENS = 8192
LEFT_OUT = (("gdn",), ("attention",), ("attention", "norm_rope_store"), ("gdn", "attention", "norm_rope_store"))


def stand_in(name: str) -> Callable[..., torch.Tensor]:
    """An operation's shape without its work."""
    if name == "gdn":
        return lambda inputs, weights, state: torch.empty_like(inputs.z, memory_format=torch.contiguous_format)
    return lambda q, *more, **options: torch.empty_like(q, memory_format=torch.contiguous_format)


@contextmanager
def left_out(ops: Ops, names: tuple[str, ...]) -> Iterator[None]:
    """While the block runs, these operations do nothing."""
    for name in names:
        setattr(ops, name, stand_in(name))
    try:
        yield
    finally:
        for name in names:
            delattr(ops, name)


def steps(model: Model, ops: Ops, read_rate: float, more: Callable[[StepBench], dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of each shape, over the floor too, and what `more` finds on the same engine."""
    bench = StepBench(assemble(model, ops, LIMIT_TOKENS, {}, EngineOptions(device="cuda", kv_cache="fp8")), read_rate)
    found: dict[str, Any] = {}
    for slots, rows in SHAPES:
        time = bench.verify(slots, rows, CONTEXT_TOKENS)
        found[f"{slots}x{rows}"] = {"ms": round(time.step_ms, 3), "over_floor": round(time.over_floor, 3)}
    found |= more(bench)
    print(json.dumps(found), flush=True)
    del bench
    gc.collect()
    torch.cuda.empty_cache()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts/results/h200_step_parts.json")
    parser.add_argument("--model", default="qwen3.8-27b")
    arguments = parser.parse_args()
    config = json.loads(json.dumps(known_config(arguments.model)))
    ops, _ = choose("cuda")
    ops.cache_dtype = torch.float8_e4m3fn
    read, matmul = read_rate_bytes_per_s(ops.device, 8 << 30), matmul_rate_flop_per_s(ops.device)
    with torch.inference_mode():
        model = architecture(config["model_type"]).load(config, SyntheticCheckpoint(config, ops.device), ops)
    flop = prefill_flop_per_token(config)

    def profile(bench: StepBench) -> dict[str, Any]:
        added = {f"{slots}x{rows}": bench.groups(slots, rows, CONTEXT_TOKENS) for slots, rows in SHAPES}
        chunks = {}
        for chunk in (2048, 4096):
            rate = bench.prefill_tok_per_s(PROMPT_TOKENS, chunk)
            chunks[str(chunk)] = {"tok_per_s": round(rate), "matmul_share": round(rate * flop / matmul, 4)}
        return {"kernels_add_ms": added, "prefill_8192_by_chunk": chunks}

    document: dict[str, Any] = {"model": arguments.model, "weights": "random", "kv_cache": "fp8"}
    document |= {"device": torch.cuda.get_device_name(ops.device), "context_tokens": CONTEXT_TOKENS}
    document |= {"read_gb_per_s": read / 1e9, "matmul_tflop_per_s": matmul / 1e12}
    document["whole"] = steps(model, ops, read, profile)
    for names in LEFT_OUT:
        with left_out(ops, names):
            document[f"without {', '.join(names)}"] = steps(model, ops, read, lambda bench: {})
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

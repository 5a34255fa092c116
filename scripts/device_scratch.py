#!/usr/bin/env python3
"""What a 27B with random weights takes of a card beside its weights, part by part, and who holds it at each peak.

    python scripts/device_scratch.py [--context TOKENS] [--out FILE]

Runs what the engine's warm-up runs, one part after the other, and replays PyTorch's record of allocations. The memory
plan (core/memory_budget.py) takes its constants from here: the driver's own memory, compiled modules, captured steps,
scratch of a prompt's chunk and of the widest step. Takes about a minute; needs the card for itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from localspec.api.types import Sampling  # noqa: E402
from localspec.core.records import MAX_ROWS, PAGE_TOKENS, PrefillPlan, Request  # noqa: E402
from localspec.engine import warm_up  # noqa: E402
from localspec.engine.build import Assembled, assemble  # noqa: E402
from localspec.engine.synthetic_bench import SyntheticBench, SyntheticPlan, driver_bytes  # noqa: E402
from localspec.runner.synthetic import known_config  # noqa: E402

MIB = 1 << 20
HOLDERS = 14


def now_mib() -> dict[str, int]:
    """Memory by PyTorch and by the driver."""
    reserved, driver = torch.cuda.memory_reserved(), driver_bytes(torch.device("cuda"))
    return {
        "allocated": torch.cuda.memory_allocated() // MIB,
        "reserved": reserved // MIB,
        "driver": driver // MIB,
        "outside": (driver - reserved) // MIB,
    }


def holders_at_peak(trace: list[dict[str, Any]]) -> list[str]:
    """The largest blocks that were held when most was."""
    live: dict[int, dict[str, Any]] = {}
    total = best = 0
    held: list[dict[str, Any]] = []
    for event in trace:
        if event["action"] == "alloc":
            live[event["addr"]] = event
            total += event["size"]
            if total > best:
                best, held = total, list(live.values())
        elif event["action"] == "free_requested" and event["addr"] in live:
            total -= live.pop(event["addr"])["size"]
    return [f"{event['size'] / MIB:.1f}  {_place(event)}" for event in sorted(held, key=lambda e: -e["size"])[:HOLDERS]]


def _place(event: dict[str, Any]) -> str:
    own = [frame for frame in event.get("frames", []) if "localspec/" in frame["filename"]]
    return " < ".join(f"{f['filename'].split('localspec/')[-1]}:{f['line']} {f['name']}" for f in own[:3])


class Parts:
    """Runs one part after the other and notes what each took."""

    def __init__(self, assembled: Assembled) -> None:
        self.assembled = assembled
        self.found: dict[str, Any] = {}

    def run(self, name: str, work: Callable[[], object]) -> None:
        """Peak over what was there before, what stays, memory afterwards, and the holders."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(max_entries=400_000, context="all", stacks="python")
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(None)
        self.found[name] = {
            "seconds": round(time.perf_counter() - started, 1),
            "peak_mib": (torch.cuda.max_memory_allocated() - before) // MIB,
            "stays_mib": (torch.cuda.memory_allocated() - before) // MIB,
            "after_mib": now_mib(),
            "graphs": self.assembled.loop.stages.device.captured.num_graphs,  # type: ignore[attr-defined]
            "holders_mib": holders_at_peak(trace),
        }
        print(name, json.dumps(self.found[name], indent=1), flush=True)


def measure(context_tokens: int) -> dict[str, Any]:
    """All parts for one context."""
    plan = SyntheticPlan("qwen3.8-27b", json.loads(json.dumps(known_config("qwen3.8-27b"))), kv_cache="fp8")
    bench = SyntheticBench(plan)
    bench._rates = {"read": 1.0, "matmul": 1.0}
    model, drafters = bench._load()
    found: dict[str, Any] = {"card": torch.cuda.get_device_name(), "context_tokens": context_tokens}
    found["loaded_mib"] = now_mib()
    assembled = assemble(model, bench._ops, context_tokens, drafters, bench._options())
    found["assembled_mib"] = now_mib()
    stages, limits, parts = assembled.loop.stages, assembled.scheduler.limits, Parts(assembled)
    found["chunk_tokens"] = limits.chunk_tokens
    length = context_tokens - MAX_ROWS
    request = Request("", (0,) * length, Sampling(), 0, 1 << 20, ())
    start = (length - limits.chunk_tokens) // PAGE_TOKENS * PAGE_TOKENS
    chunk = PrefillPlan(0, warm_up.SEQUENCE_ID, start, min(start + limits.chunk_tokens, length - 1), "off")
    steps = {
        "greedy": ("off", 0, warm_up.LAWS[0], None),
        "best few": ("off", 0, warm_up.LAWS[1], None),
        "16 rows, best few": ("ngram", 15, warm_up.LAWS[1], None),
        "16 rows, widest law": ("ngram", 15, warm_up.WIDEST_LAW, warm_up.LOGPROBS),
        "16 rows, plain law": ("ngram", 15, Sampling(temperature=0.7), None),
        "mtp": ("mtp", 7, warm_up.LAWS[1], None),
    }
    with torch.inference_mode():
        stages.runner.admit(0, request, list(range(1, 1 + -(-context_tokens // PAGE_TOKENS))), None)
        stages.device.admit(0, request)
        stages.drafters.admit(0, request)
        for name in ("first chunk", "another chunk"):
            parts.run(name, partial(stages.device.prefill, chunk))
        for name, (drafter, depth, law, logprobs) in steps.items():
            parts.run(name, partial(warm_up._step, stages, drafter, depth, length, law, logprobs))
        parts.run(
            "12 depths",
            lambda: [warm_up._step(stages, "ngram", d, length, warm_up.LAWS[1]) for d in range(1, 13)],
        )
    return found | {"parts": parts.found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=131072)
    parser.add_argument("--out", type=Path, default=ROOT / "scripts" / "results" / "h200_scratch.json")
    arguments = parser.parse_args()
    found = measure(arguments.context)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""The whole engine on a card with the 27B's shapes and random weights: steps, prefill, idle share, drafting, memory.

Runs in under six minutes on an H200 and writes a JSON; every figure is of random weights, and where acceptance is
synthetic it says so. Sections run on even if one before them failed, and say what failed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS, Request
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import EngineOptions, assemble
from localspec.engine.loop import EndNews, StepNews
from localspec.engine.rates import read_rate_bytes_per_s
from localspec.engine.step_bench import StepBench, matmul_rate_flop_per_s, step_table
from localspec.kernels.table import choose
from localspec.models import architecture
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint

PUBLISHED_MTP = (0.917, 0.837, 0.648, 0.538, 0.451, 0.348)
GREEDY = Sampling()
REPORT: dict[str, object] = {"weights": "random", "failed": []}


def section(name: str, function: Callable[[], object]) -> None:
    started = time.time()
    try:
        value = function()
        if value is not None:
            REPORT[name] = value
        print(f"== {name}: {time.time() - started:.1f} s {json.dumps(value)[:1500]}", flush=True)
    except Exception:
        REPORT["failed"].append(name)  # type: ignore[attr-defined]
        print(f"== {name} FAILED after {time.time() - started:.1f} s\n{traceback.format_exc()[-1100:]}", flush=True)


def run_requests(parts, requests: list[Request]) -> tuple[list[list[int]], float, dict[str, float]]:
    """Tokens of each, wall seconds of decoding, and the summed device milliseconds."""
    outs: list[list[int]] = [[] for _ in requests]
    ends = [threading.Event() for _ in requests]
    info: dict[str, float] = {"draft_ms": 0.0, "verify_ms": 0.0, "drafted": 0, "accepted": 0, "steps": 0}
    first = [0.0]

    def sink_for(index: int):
        def sink(news) -> None:
            if isinstance(news, StepNews):
                first[0] = first[0] or time.perf_counter()
                outs[index].extend(news.result.token_ids)
            elif isinstance(news, EndNews):
                timings = news.timings
                info["draft_ms"] += timings.draft_ms
                info["verify_ms"] += timings.verify_ms
                info["drafted"] += timings.draft_n
                info["accepted"] += timings.draft_n_accepted
                info["steps"] += timings.verify_steps
                if news.error is not None:
                    info["error"] = 1
                    print("error:", news.error.message, flush=True)
                ends[index].set()

        return sink

    for index, request in enumerate(requests):
        parts.loop.submit(request, sink_for(index))
    for end in ends:
        assert end.wait(120), "a request did not end"
    return outs, time.perf_counter() - first[0], info


def request(
    length: int, tokens: int, drafter: str, depth: int | None, seed: int = 1, law: Sampling = GREEDY
) -> Request:
    prompt = tuple((31 * i + 17 * seed + (i // 40) % 7) % 30000 for i in range(length))
    return Request("", prompt, law, seed, tokens, (), drafter=drafter, depth=depth)


def write_config(config: dict) -> Path:
    """A folder with config.json only: what a drafter of the target's own checkpoint reads."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_engine.json"))
    parser.add_argument("--layers", type=int, default=64)
    arguments = parser.parse_args()
    device = torch.device("cuda:0")
    REPORT["device"] = torch.cuda.get_device_name(device)
    rates: dict[str, float] = {}

    def measure_rates() -> dict[str, float]:
        rates["read"] = read_rate_bytes_per_s(device, 8 << 30)
        rates["matmul"] = matmul_rate_flop_per_s(device)
        return {"read_gb_per_s": rates["read"] / 1e9, "matmul_tflop_per_s": rates["matmul"] / 1e12}

    section("rates", measure_rates)
    config = json.loads(json.dumps(QWEN3_5_27B))
    config["text_config"]["num_hidden_layers"] = arguments.layers
    ops, _ = choose("cuda:0")
    holder: dict[str, object] = {}

    def load() -> dict[str, float]:
        started = time.time()
        checkpoint = SyntheticCheckpoint(config, device)
        with torch.inference_mode():
            holder["model"] = architecture("qwen3_5").load(config, checkpoint, ops)
        torch.cuda.empty_cache()
        model = holder["model"]
        return {
            "seconds": time.time() - started,
            "read_gb_per_token": model.read_bytes_per_token / 1e9,
            "allocated_gib": torch.cuda.memory_allocated() / 2**30,
        }

    section("load", load)
    model = holder["model"]
    limit = 131072 + 4096
    setup = DrafterSetup(
        ops=ops,
        model=model,
        num_slots=MAX_SLOTS,
        context_limit_tokens=limit,
        checkpoint=SyntheticCheckpoint(config, device, seed=1, draft_head_rows=32768),
        folder=write_config(config),
    )
    drafters = {"ngram": drafter_module("ngram").build(setup)}

    def build_mtp() -> float:
        with torch.inference_mode():
            drafters["mtp"] = drafter_module("mtp").build(setup)
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated() / 2**30

    section("mtp_built_gib", build_mtp)
    holder["parts"] = assemble(model, ops, limit, drafters, EngineOptions(device="cuda"))
    bench = StepBench(holder["parts"], rates["read"])

    def steps() -> list[dict[str, float]]:
        shapes = [(1, 1, 2048), (1, 2, 2048), (1, 4, 2048), (1, 8, 2048), (1, 16, 2048), (2, 1, 2048), (4, 1, 2048)]
        shapes += [(4, 4, 2048), (1, 1, 32768), (1, 8, 32768), (1, 1, 131072)]
        times = []
        for shape in shapes:
            times.append(bench.verify(*shape, repeats=20))
            print(step_table(times[-1:]).splitlines()[-1], flush=True)
        return [{"slots": t.slots, "rows": t.rows, "context": t.context_tokens, "ms": t.step_ms, "floor_ms": t.floor_ms}
                for t in times]  # fmt: skip

    section("steps", steps)
    section("prefill_tok_per_s", lambda: {n: bench.prefill_tok_per_s(n, 2048) for n in (2048, 8192)})
    section("memory_gib", lambda: {"reserved": torch.cuda.memory_reserved() / 2**30})

    def end_to_end(options: EngineOptions, drafter: str, depth: int | None) -> dict[str, float]:
        parts = assemble(model, ops, 8192, drafters, options)
        parts.loop.start()
        try:
            # The same request first, so that every graph of the measured one is captured.
            run_requests(parts, [request(2000, 400, drafter, depth)])
            outs, seconds, info = run_requests(parts, [request(2000, 400, drafter, depth)])
        finally:
            parts.loop.stop()
        tokens = len(outs[0])
        busy = (info["draft_ms"] + info["verify_ms"]) / 1e3
        steps = max(info["steps"], 1)
        return {
            "tok_per_s": tokens / seconds,
            "idle": 1 - busy / seconds,
            "length": tokens / steps,
            "draft_ms": info["draft_ms"] / steps,
            "verify_ms": info["verify_ms"] / steps,
        }

    section("decode_off", lambda: end_to_end(EngineOptions(device="cuda"), "off", None))
    if "mtp" in drafters:
        synthetic = EngineOptions(device="cuda", synthetic_acceptance=PUBLISHED_MTP)
        for depth in (1, 3, 5):
            section(f"decode_mtp_{depth}_synthetic_acceptance", lambda depth=depth: end_to_end(synthetic, "mtp", depth))

    def identity() -> dict[str, int]:
        parts = assemble(model, ops, 8192, drafters, EngineOptions(device="cuda"))
        parts.loop.start()
        differing, compared = 0, 0
        try:
            for law in (Sampling(), Sampling(temperature=0.8, top_k=20)):
                prompts = [(300 + 211 * i, i) for i in range(4)]
                plain = [run_requests(parts, [request(n, 64, "off", None, s, law)])[0][0] for n, s in prompts]
                for drafter, depth in (("ngram", 7), ("mtp", 3), ("mtp", 7)):
                    if drafter not in drafters:
                        continue
                    together, _, _ = run_requests(parts, [request(n, 64, drafter, depth, s, law) for n, s in prompts])
                    pairs = [pair for x, y in zip(together, plain, strict=True) for pair in zip(x, y, strict=True)]
                    differing += sum(a != b for a, b in pairs)
                    compared += sum(map(len, plain))
        finally:
            parts.loop.stop()
        return {"compared_tokens": compared, "differing_tokens": differing}

    section("identity", identity)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(REPORT, indent=1) + "\n")
    print(json.dumps(REPORT), flush=True)


if __name__ == "__main__":
    main()

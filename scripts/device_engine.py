#!/usr/bin/env python3
"""Every test that needs a card, then the whole engine on it with the 27B's shapes and random weights: one JSON.

The benchmark is `localspec bench --synthetic` with drafted answers against plain ones. Every figure is of random
weights, and where acceptance is synthetic it says so. Ends within nine minutes: tests may take half of it, no section
begins after the limit, and what is left out is named. Exits with an error if a test or a section failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
NO_TESTS = ("gpu_support.py",)
ENDING_S = 45.0
"""What a section that began just before the limit may take."""


def run_tests(limit_s: float) -> dict[str, Any]:
    """All gpu_*.py files, the quickest to compile first; what the limit cuts off counts as failed."""
    files = [str(path) for path in sorted(ROOT.glob("tests/**/gpu_*.py")) if path.name not in NO_TESTS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "200", "--tb=short", *files]
    started = time.perf_counter()
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit_s)
        passed, output = run.returncode == 0, run.stdout
    except subprocess.TimeoutExpired as cut:
        passed, output = False, (cut.stdout or b"").decode(errors="replace") + "\ncut off by the time limit"
    print(output[-6000:], flush=True)
    lines = output.strip().splitlines() or [""]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    seconds = round(time.perf_counter() - started, 1)
    return {"passed": passed, "files": len(files), "last_line": lines[-1], "failed": failed, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_engine.json"))
    parser.add_argument("--model", default="qwen3.8-27b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a first look")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--no-tests", action="store_true", help="the benchmark alone")
    parser.add_argument("--limit", type=float, default=540.0, help="seconds in all")
    arguments = parser.parse_args()
    started = time.perf_counter()
    tests = {} if arguments.no_tests else {"tests": run_tests(arguments.limit / 2)}

    from localspec.engine.synthetic_bench import SyntheticBench, SyntheticPlan
    from localspec.runner.synthetic import known_config

    config = json.loads(json.dumps(known_config(arguments.model)))
    if arguments.layers:
        config.get("text_config", config)["num_hidden_layers"] = arguments.layers
    left_s = arguments.limit - (time.perf_counter() - started) - ENDING_S
    plan = SyntheticPlan(arguments.model, config, kv_cache=arguments.kv_cache, identity=True, time_limit_s=left_s)
    document = tests | SyntheticBench(plan, lambda text: print(text, flush=True)).run()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document), flush=True)
    if document["failed"] or (tests and not tests["tests"]["passed"]):
        sys.exit(f"failed: {', '.join(document['failed']) or 'tests'}")


if __name__ == "__main__":
    main()

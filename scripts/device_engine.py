#!/usr/bin/env python3
"""The whole engine on a card with the 27B's shapes and random weights, and drafted answers against plain ones.

`localspec bench --synthetic` with an identity check, written to a JSON. Every figure is of random weights, and where
acceptance is synthetic it says so. Ends within nine minutes; what is left out then is named.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from localspec.engine.synthetic_bench import SyntheticBench, SyntheticPlan
from localspec.runner.synthetic import known_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_engine.json"))
    parser.add_argument("--model", default="qwen3.8-27b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, for a first look")
    parser.add_argument("--kv-cache", default="auto")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds after which no section begins")
    arguments = parser.parse_args()
    config = json.loads(json.dumps(known_config(arguments.model)))
    if arguments.layers:
        config.get("text_config", config)["num_hidden_layers"] = arguments.layers
    plan = SyntheticPlan(
        arguments.model,
        config,
        kv_cache=arguments.kv_cache,
        identity=True,
        time_limit_s=arguments.time_limit,
    )
    document = SyntheticBench(plan, lambda text: print(text, flush=True)).run()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document), flush=True)
    if document["failed"]:
        sys.exit(f"failed: {', '.join(document['failed'])}")


if __name__ == "__main__":
    main()

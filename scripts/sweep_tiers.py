"""Restores from every tier compared with the device, for every cut around page, tile and segment borders.

    python scripts/sweep_tiers.py [--out FILE]

Tiny random models with full attention and hybrid ones, 1 to 4 sequences at once, drafted by MTP, EAGLE-3 and n-grams.
Tokens, log-probabilities and acceptance per position must be equal. The long form of
`test_each_tier_equals_the_device`. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engine.tier_machine import Machine, compare_tiers

CUTS = (55, 56, 57, 64, 120, 184, 247, 248, 249, 256, 257, 312, 503, 504, 505, 512, 513, 760)
"""An answer's end lies 7 tokens after its prompt, so 57 ends on a page's border, 249 and 505 on a segment's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started_s = time.perf_counter()
    runs, accepted, different = 0, 0, []
    for kind in ("llama", "qwen3_5"):
        with tempfile.TemporaryDirectory() as folder:
            machine = Machine(kind, Path(folder), ("ngram", "mtp", "eagle3"))
            for index, num_tokens in enumerate(CUTS):
                count = 1 + index % 4
                compared = compare_tiers(machine, Path(folder) / str(num_tokens), num_tokens, count)
                runs, accepted = runs + 1, accepted + compared.accepted
                if not compared.equal:
                    different.append([kind, num_tokens, count])
    result = {
        "benchmark": "sweep_tiers",
        "runs": runs,
        "tiers": ["device", "host", "disk"],
        "accepted_drafts": accepted,
        "different": different,
        "seconds": round(time.perf_counter() - started_s, 1),
    }
    print(json.dumps(result))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

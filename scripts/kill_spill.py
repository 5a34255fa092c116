"""Kill a writer of the cache on disk at random points and check what is left: nothing wrong, nothing torn, no hole.

    python scripts/kill_spill.py [--rounds 200] [--writers 2]

Each round starts writers on one directory, kills them all with SIGKILL after a random time, opens the directory as a
fresh process would, reads every block that a lookup promises and compares it with what it must hold. The long form of
`test_killed_at_random_points`. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cache.test_spill import check_everything, start_writer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    generator = random.Random(arguments.seed)
    promised = []
    with tempfile.TemporaryDirectory() as folder:
        kv_dir = Path(folder) / "kv"
        for round_ in range(arguments.rounds):
            children = [start_writer(kv_dir, round_ * 3 + 5 * n) for n in range(arguments.writers)]
            time.sleep(generator.random() * 0.2)
            for child in children:
                child.send_signal(signal.SIGKILL)
            for child in children:
                child.wait()
            promised.append(check_everything(kv_dir))
    result = {
        "benchmark": "spill_kills",
        "kills": arguments.rounds * arguments.writers,
        "rounds_with_something_to_restore": sum(1 for tokens in promised if tokens),
        "promised_tokens": sum(promised),
        "wrong_blocks": 0,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

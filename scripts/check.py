#!/usr/bin/env python3
"""Runs every check of the project: lint, format, types, import contracts, tests. Stops at the first that fails.

With arguments, they go to pytest and only the tests run. The quick torch-free tests run first and are timed apart.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
# Tests run side by side, one thread each: threads of two processes that wait for each other only lose time.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}


def main() -> int:
    pytest = [sys.executable, "-m", "pytest"]
    # Three for two cores, as tests wait for processes; stealing keeps a file's tests together, and so its fixtures.
    side_by_side = [*pytest, "-n", "3", "--dist", "worksteal"]
    if len(sys.argv) > 1:
        return subprocess.call([*pytest, *sys.argv[1:]], cwd=ROOT, env=ENVIRONMENT)
    steps = [
        ("ruff", [str(BIN / "ruff"), "check", "localspec", "tests", "scripts"]),
        ("format", [str(BIN / "ruff"), "format", "--check", "localspec", "tests", "scripts"]),
        ("types", [str(BIN / "mypy")]),
        ("imports", [str(BIN / "lint-imports")]),
        ("tests without torch", [*side_by_side, "-m", "not torch and not gpu and not demo and not slow"]),
        ("tests with torch, and slow ones", [*side_by_side, "-m", "(torch or demo or slow) and not gpu"]),
    ]
    for name, command in steps:
        started = time.monotonic()
        print(f"== {name}", flush=True)
        status = subprocess.call(command, cwd=ROOT, env=ENVIRONMENT)
        print(f"== {name}: {'ok' if status == 0 else 'failed'} in {time.monotonic() - started:.0f} s", flush=True)
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())

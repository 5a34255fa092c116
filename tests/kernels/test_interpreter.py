"""The kernels' numerics without a card: interpreted_*.py in a process where Triton interprets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

CASES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, CASES)]
    run = subprocess.run(command, cwd=CASES[0].parents[2], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]

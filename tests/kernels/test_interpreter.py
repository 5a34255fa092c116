"""The kernels' numerics without a card: interpreted_*.py in a process where Triton interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

CASES = sorted(Path(__file__).parent.glob("interpreted_*.py"))


def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, CASES)]
    # The cases need no plugin, and importing those that are installed takes seconds.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    run = subprocess.run(command, cwd=CASES[0].parents[2], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]

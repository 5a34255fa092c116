"""The short form of scripts/soak_port.py: bad clients for some seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bad_clients_disturb_nobody() -> None:
    # Memory is judged by the long form: some seconds are too few for it to settle.
    command = [
        sys.executable,
        "scripts/soak_port.py",
        "--seconds",
        "5",
        "--streams",
        "8",
        "--bad",
        "6",
        "--max-spread",
        "1",
    ]
    env = {"PYTHONPATH": str(ROOT), "PATH": ""}
    run = subprocess.run(command, check=False, cwd=ROOT, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    figures = json.loads(run.stdout)
    assert figures["whole_streams"] >= 8
    assert figures["vanished"] > 0
    assert figures["refused"] > 0
    assert figures["stuck_requests"] == figures["broken_streams"] == figures["wrong_status"] == 0

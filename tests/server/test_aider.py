"""aider, a client without tools: it must get an edit out of the port and into the file.

aider pins what it needs, other releases than ours, so it has an environment of its own, `.venv-aider` in the checkout,
made here from exact releases. It is made once and again when the list changes. Where no package index can be reached
this is skipped; anything else that keeps aider from being installed or from editing is a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RELEASES = ROOT / "tests/server/aider.txt"
ENVIRONMENT = ROOT / ".venv-aider"
INSTALL_S = 240
# aider-chat 0.86.2 says that it wants a Python before 3.13.
AIDER_PYTHONS = ((3, 11), (3, 12))

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info[:2] not in AIDER_PYTHONS, reason="aider runs on Python 3.11 and 3.12 only"),
]


def install_aider() -> Path:
    """The environment with aider. Skips without an index, fails when it cannot be installed otherwise."""
    wanted = hashlib.sha256(RELEASES.read_bytes() + sys.version.encode()).hexdigest()
    stamp = ENVIRONMENT / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return ENVIRONMENT
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    venv.create(ENVIRONMENT, with_pip=False)
    # Compiling all of it ahead would cost more than it saves: one run imports a part.
    options = ["--no-deps", "--only-binary", ":all:", "--no-compile", "--retries", "1", "--timeout", "20"]
    into = ["--python", str(ENVIRONMENT / "bin/python")]
    command = [sys.executable, "-m", "pip", *into, "install", "--quiet", *options, "--requirement", str(RELEASES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode and "connection broken by" in done.stderr:
        pytest.skip("aider is not installed and no package index can be reached")
    assert done.returncode == 0, done.stderr
    stamp.write_text(wanted)
    return ENVIRONMENT


@pytest.mark.timeout(INSTALL_S + 120)
def test_aider_edits_a_file(tmp_path: Path) -> None:
    environment = install_aider()
    command = [sys.executable, "scripts/real_clients.py", "--only", "aider", "--kind", "tool"]
    command += ["--aider", str(environment)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["results"][0]
    assert found["tool"]["result"] == "passed", found
    assert found["version"] == "0.86.2"

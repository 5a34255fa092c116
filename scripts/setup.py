#!/usr/bin/env python3
"""Sets localspec up in .venv of this checkout and starts something: `chat` (default), `test`, or any command.

    python3 scripts/setup.py chat        set up, then chat with the demo model
    python3 scripts/setup.py test        set up with the test tools, then run every check
    python3 scripts/setup.py run -- ...  set up, then `localspec run ...` (or any other command)

Standard library only. Picks torch by the machine: with an NVIDIA card the version whose Triton was run on a card,
without one a CPU build, never a CUDA build. Installing again is skipped while pyproject.toml is unchanged.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
CUDA_TORCH = "torch==2.11.*"
CPU_TORCH = "torch==2.13.0+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
NEWEST_PYTHON = (3, 14)


def main() -> int:
    command = sys.argv[1] if len(sys.argv) > 1 else "chat"
    if command.startswith("-"):
        print(__doc__)
        return 0 if command in ("-h", "--help") else 2
    if not (3, 11) <= sys.version_info[:2] <= NEWEST_PYTHON:
        print(f"localspec needs Python 3.11 to 3.14; this is {sys.version.split()[0]}", file=sys.stderr)
        return 3
    for_tests = command == "test"
    try:
        install(for_tests)
    except subprocess.CalledProcessError as error:
        print(f"setting up failed: {' '.join(map(str, error.cmd))} ended with {error.returncode}", file=sys.stderr)
        return 1
    python = str(VENV / "bin" / "python")
    if for_tests:
        return subprocess.call([python, str(ROOT / "scripts" / "check.py"), *sys.argv[2:]], cwd=ROOT)
    rest = [argument for argument in sys.argv[2:] if argument != "--"]
    return subprocess.call([str(VENV / "bin" / "localspec"), command, *rest])


def install(for_tests: bool) -> None:
    """Create .venv and install torch, then the rest; a stamp records what was installed."""
    torch = CUDA_TORCH if has_nvidia_gpu() else CPU_TORCH
    wanted = hashlib.sha256(f"{(ROOT / 'pyproject.toml').read_text()}{torch}{sys.version}".encode()).hexdigest()
    stamp = VENV / f".localspec-{'dev' if for_tests else 'run'}"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not (VENV / "bin" / "python").exists():
        print(f"creating {VENV}", file=sys.stderr)
        shutil.rmtree(VENV, ignore_errors=True)
        venv.create(VENV, with_pip=True)
    pip = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    print(f"installing {torch}", file=sys.stderr)
    if torch == CPU_TORCH:
        # The CPU index is asked once and briefly: where it cannot be reached, a local copy of the same build serves.
        extra = ["--extra-index-url", CPU_INDEX, "--retries", "1", "--timeout", "20"]
        subprocess.run([*pip, *extra, torch], check=True)
    else:
        subprocess.run([*pip, torch], check=True)
    print("installing localspec", file=sys.stderr)
    subprocess.run([*pip, "--editable", f"{ROOT}[dev]" if for_tests else str(ROOT)], check=True)
    stamp.write_text(wanted)


def has_nvidia_gpu() -> bool:
    """Whether the driver lists a card."""
    if os.environ.get("LOCALSPEC_CPU"):
        return False
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True, check=False).stdout.startswith(b"GPU")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # What was running has said so itself.
        sys.exit(130)

"""What a compiled kernel needs of a card, read from its machine code without one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton.backends.nvidia

_CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    """Per thread: registers and stack bytes (spills lie on the stack); per block: shared memory."""

    registers: int
    stack_bytes: int
    shared_bytes: int


def resources(cubin: bytes, shared_bytes: int) -> Resources:
    """Read the resource table of a kernel's cubin. shared_bytes: what its launch asks for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        dump = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], check=True, capture_output=True, text=True)
    table = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", dump.stdout + dump.stderr)
    if table is None:
        raise ValueError(f"cuobjdump printed no resource table: {dump.stdout[:200]}")
    return Resources(int(table[1]), int(table[2]), max(int(table[3]), shared_bytes))

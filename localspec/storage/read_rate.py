"""How fast a disk reads large blocks: measured once with a file of our own, past the page cache.

Knows nothing of what is stored. The file is a temporary one, so a sweep removes it after a crash.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from pathlib import Path

from localspec.storage.aio import AsyncReader, OpenFile, Priority
from localspec.storage.files import TEMPORARY_PREFIX

PROBE_BYTES = 64 << 20
PIECE_BYTES = 8 << 20
MIN_FREE_BYTES = 16 * PROBE_BYTES


def measure_read_rate(folder: Path, probe_bytes: int = PROBE_BYTES) -> float:
    """Bytes per second. Raises OSError where the disk is nearly full or refuses."""
    if shutil.disk_usage(folder).free < MIN_FREE_BYTES:
        raise OSError(f"less than {MIN_FREE_BYTES / 1e9:.0f} GB are free in {folder}")
    path = folder / f"{TEMPORARY_PREFIX}read-rate-{os.getpid()}"
    try:
        _write(path, probe_bytes)
        with AsyncReader(threads=4, buffer_cap_bytes=2 * probe_bytes) as reader:
            file = OpenFile(path, no_follow=True)
            started_s = time.perf_counter()
            tickets = [
                reader.submit(file, offset, min(PIECE_BYTES, probe_bytes - offset), priority=Priority.BULK)
                for offset in range(0, probe_bytes, PIECE_BYTES)
            ]
            for ticket in tickets:
                ticket.result()
            return probe_bytes / (time.perf_counter() - started_s)
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, num_bytes: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # Not zeros: some disks keep those without storing them.
        block = os.urandom(min(1 << 20, num_bytes))
        for offset in range(0, num_bytes, len(block)):
            os.write(fd, block[: num_bytes - offset])
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)

"""Gives memory of large bodies back to the system once they are gone.

glibc keeps what was freed below anything that still lives, so that a few huge requests leave a process large for good.
Knows the C library; knows nothing of requests but that one was large.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

LARGE_BODY_BYTES = 1 << 20
TRIM_AFTER_S = 1.0


class HeapTrimmer:
    """Trims the heap some time after the last call was asked for, at most once in `TRIM_AFTER_S`."""

    def __init__(self) -> None:
        self._trim = _find_trim()
        self._due = False

    def later(self) -> None:
        """Trim in a moment, when the request at hand has probably ended. Needs a running event loop."""
        if self._trim is not None and not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(TRIM_AFTER_S, self._run)

    def _run(self) -> None:
        self._due = False
        if self._trim is not None:
            self._trim(0)


def _find_trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; other C libraries have none and need none."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    found: Callable[[int], int] = trim
    return found

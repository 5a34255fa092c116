"""Turns byte counts into progress records: one total, a rate over the last seconds, an ETA. Torch-free."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from localspec.hub.records import ProgressCallback, PullProgress

WINDOW_S = 5.0
LEAST_S = 0.5
LEAST_FOR_ETA_S = 2.0
"""Before so much has been seen, a speed would be a guess, and the time left nonsense."""
REPORT_INTERVAL_S = 0.1


class ProgressMeter:
    """Counts bytes from any thread and reports at most every `REPORT_INTERVAL_S`.

    The callback runs under this object's lock, so one call at a time; it must not block for long.
    """

    def __init__(self, callback: ProgressCallback, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._callback = callback
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._stage, self._message, self._file_name = "locate", "", ""
        self._done_bytes, self._shown_bytes = 0, 0
        self._total_bytes: int | None = None
        self._reported_at_s = float("-inf")
        self._history: deque[tuple[float, int]] = deque()

    def note(self, message: str) -> None:
        """A line for the user beside the running stage."""
        with self._lock:
            self._callback(PullProgress("note", message))

    def start(self, stage: str, message: str, total_bytes: int | None = None, held_bytes: int = 0) -> None:
        """Begins a stage; `held_bytes` are there already and do not count as speed."""
        with self._lock:
            self._stage, self._message, self._file_name = stage, message, ""
            self._done_bytes = self._shown_bytes = held_bytes
            self._total_bytes = total_bytes
            self._history.clear()
            self._report(self._clock_s())

    def file(self, name: str) -> None:
        """Names the file that the following bytes belong to."""
        with self._lock:
            self._file_name = name
            self._report(self._clock_s())

    def add(self, n_bytes: int) -> None:
        """Counts bytes; a negative number takes back what had to be thrown away, which the display never shows."""
        with self._lock:
            self._done_bytes += n_bytes
            now_s = self._clock_s()
            if now_s - self._reported_at_s >= REPORT_INTERVAL_S or self._done_bytes == self._total_bytes:
                self._report(now_s)

    def _report(self, now_s: float) -> None:
        self._reported_at_s = now_s
        self._shown_bytes = max(self._shown_bytes, self._done_bytes)
        self._history.append((now_s, self._done_bytes))
        while now_s - self._history[0][0] > WINDOW_S:
            self._history.popleft()
        first_s, first_bytes = self._history[0]
        rate = max(0.0, (self._done_bytes - first_bytes) / (now_s - first_s)) if now_s - first_s >= LEAST_S else 0.0
        is_steady = now_s - first_s >= LEAST_FOR_ETA_S
        left_bytes = None if self._total_bytes is None else self._total_bytes - self._shown_bytes
        self._callback(
            PullProgress(
                stage=self._stage,
                message=self._message,
                file_name=self._file_name,
                done_bytes=self._shown_bytes,
                total_bytes=self._total_bytes,
                rate_bytes_per_s=rate,
                eta_s=left_bytes / rate if left_bytes is not None and rate > 0 and is_steady else None,
            )
        )

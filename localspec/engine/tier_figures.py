"""What the tiers below the device hold and gain, and the rates that decide whether reading pays.

Fed by the tiers' threads; the prefill rate by the decode thread. Names in the metrics begin with the tier: `host_`,
`ssd_`.
"""

from __future__ import annotations

import contextlib
import logging

from localspec.cache.host_pool import HostPool
from localspec.cache.spill import SpillStore
from localspec.cache.spill_index import INDEX_ERRORS
from localspec.engine.metrics import MetricsRecorder
from localspec.engine.tier_memory import HostMemory
from localspec.engine.tier_restore import Restored
from localspec.storage.read_rate import measure_read_rate

log = logging.getLogger(__name__)
NEW_SHARE = 0.3
"""Weight of the newest measurement in a rate."""
MEASURED_CAP_BYTES = 4 << 30
"""A smaller cache does not deserve a file written only to be read."""


class TierFigures:
    """Counters and rates of one loaded model."""

    def __init__(self, store: SpillStore | None, pool: HostPool, memory: HostMemory, metrics: MetricsRecorder) -> None:
        self._store = store
        self._pool = pool
        self._memory = memory
        self._metrics = metrics
        self.prefill_tok_per_s: float | None = None
        self.read_bytes_per_s: float | None = None
        if store is not None:
            self.prefill_tok_per_s, self.read_bytes_per_s = store.rates()
        self._asked = self._from_host = self._from_disk = 0
        self._host_bytes = self._read_bytes = 0
        self._host_s = self._read_s = 0.0
        self._host_saved_s = self._disk_saved_s = 0.0
        self._stored: dict[str, float] = {}

    def see_prefill(self, tok_per_s: float) -> None:
        """How fast this machine reads prompts, as just measured."""
        self.prefill_tok_per_s = _mixed(self.prefill_tok_per_s, tok_per_s)

    def count(self, restored: Restored) -> None:
        """A prompt was looked for. What a restore saved is credited to the tiers by their bytes."""
        self._asked += 1
        total_bytes = restored.host_bytes + restored.read_bytes
        if restored.tokens and total_bytes:
            self._from_disk += restored.read_bytes > 0
            self._from_host += restored.host_bytes > 0
            self._host_bytes += restored.host_bytes
            self._read_bytes += restored.read_bytes
            self._host_s += restored.host_s
            self._read_s += restored.read_s
            if self.prefill_tok_per_s is not None:
                saved_s = restored.tokens / self.prefill_tok_per_s - restored.seconds
                self._host_saved_s += saved_s * restored.host_bytes / total_bytes
                self._disk_saved_s += saved_s * restored.read_bytes / total_bytes
            if restored.read_bytes and restored.read_s:
                self.read_bytes_per_s = _mixed(self.read_bytes_per_s, restored.read_bytes / restored.read_s)
        self._tell()

    def measure_disk(self) -> None:
        """On a disk whose rate nobody has measured yet: write and read a file, if the caps leave room for it."""
        if self.read_bytes_per_s is not None or self._store is None or self._store.cap_bytes < MEASURED_CAP_BYTES:
            return
        try:
            self.read_bytes_per_s = measure_read_rate(self._store.folder)
        except OSError as error:
            log.info("the disk's rate could not be measured: %s", error)
        self.store_rates()

    def store_rates(self) -> None:
        """Keep the rates for the next start."""
        if self._store is not None:
            self._store.set_rates(self.prefill_tok_per_s, self.read_bytes_per_s)

    def report(self) -> None:
        """Bring the figures into the metrics, with what the index says now."""
        if self._store is not None:
            with contextlib.suppress(*INDEX_ERRORS, OSError):
                self._stored = {
                    "ssd_bytes": self._store.index.total_bytes(),
                    "ssd_written_today_bytes": self._store.room.spent_today_bytes(),
                }
        self._tell()

    def _tell(self) -> None:
        # Prompts that memory served whole never asked the disk.
        asked_disk = self._asked - self._from_host
        figures: dict[str, float] = {
            "host_bytes": self._pool.stored_bytes,
            "host_cap_bytes": self._memory.cap_bytes,
            "host_pinned_bytes": self._memory.pinned_bytes,
            "host_hit_rate": _share(self._from_host, self._asked),
            "host_restore_mb_per_s": _rate(self._host_bytes, self._host_s),
            "host_saved_s": round(self._host_saved_s, 3),
        }
        if self._store is not None:
            figures |= {
                "ssd_cap_bytes": self._store.cap_bytes,
                "ssd_hit_rate": min(1.0, _share(self._from_disk, max(asked_disk, self._from_disk))),
                "ssd_restore_mb_per_s": _rate(self._read_bytes, self._read_s),
                "ssd_saved_s": round(self._disk_saved_s, 3),
                "ssd_writing": 0.0 if self._store.off_reason else 1.0,
                **self._stored,
            }
        rates = {"prefill_tok_per_s": self.prefill_tok_per_s, "ssd_read_bytes_per_s": self.read_bytes_per_s}
        figures |= {name: round(rate, 1) for name, rate in rates.items() if rate is not None}
        self._metrics.update(tiers=figures)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 3) if whole else 0.0


def _rate(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e6, 1) if seconds else 0.0


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEW_SHARE) * old + NEW_SHARE * new

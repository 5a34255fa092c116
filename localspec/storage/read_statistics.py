"""Counts and latencies of reads, cheap enough to keep for each of them.

Knows durations and sizes; does not know who reads what.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

# 8 buckets an octave: a percentile is right to an eighth. The last one starts above an hour.
_SUB_BITS = 3
_BUCKETS = 256


class LatencyHistogram:
    """Latencies in logarithmic buckets; one writer, any readers."""

    def __init__(self) -> None:
        """Start empty."""
        self.counts = [0] * _BUCKETS

    def add(self, seconds: float) -> None:
        """Count one latency."""
        microseconds = int(seconds * 1e6)
        shift = max(0, microseconds.bit_length() - _SUB_BITS - 1)
        self.counts[min((shift << _SUB_BITS) + (microseconds >> shift), _BUCKETS - 1)] += 1


def percentiles_us(histograms: Iterable[LatencyHistogram], shares: Iterable[float]) -> list[float]:
    """The latency, in microseconds, under which each share (0 to 1) of the counted ones stays; 0 if there is none."""
    totals = [sum(column) for column in zip(*(histogram.counts for histogram in histograms), strict=True)]
    wanted = [share * sum(totals) for share in shares]
    found = []
    for target in wanted:
        seen, value = 0, 0.0
        for bucket, count in enumerate(totals):
            seen += count
            if count and seen >= target:
                value = float(_upper_bound_us(bucket))
                break
        found.append(value)
    return found


def _upper_bound_us(bucket: int) -> int:
    shift = max(0, (bucket >> _SUB_BITS) - 1)
    return ((bucket - (shift << _SUB_BITS)) + 1) << shift


@dataclass(frozen=True)
class ReaderStatistics:
    """A snapshot of one reader; rates are over the time since the last snapshot that lies at least a second back."""

    reads: int
    read_bytes: int
    errors: int
    cancelled: int
    reads_per_s: float
    megabytes_per_s: float
    queued: int
    """Requests no worker has begun."""
    in_flight: int
    buffer_bytes: int
    """Lent out of the arena now, results that somebody still holds included."""
    buffer_cap_bytes: int
    latency_p50_us: float
    """From submit to completion."""
    latency_p90_us: float
    latency_p99_us: float
    device_p50_us: float
    """The read call alone."""
    device_p99_us: float

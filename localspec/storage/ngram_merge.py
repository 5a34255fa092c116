"""Streaming merge of sorted runs in bounded memory, and which runs are worth merging.

Knows runs and tombstones; does not know the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localspec.storage.files import WriteFunction
from localspec.storage.ngram_format import MAX_SOURCE, PAGE_BYTES, RECORD, RunHeader
from localspec.storage.ngram_records import reduce_records
from localspec.storage.ngram_run_file import Run, RunWriter

MERGE_MEMORY_BYTES = 128 << 20
# Raw pages, their records, the joined and the sorted copy, keys and order: bytes held for each byte of a block.
_COPIES = 6
TIER_FACTOR = 4
_SMALLEST_TIER_PAGES = 256


@dataclass(frozen=True)
class MergeResult:
    """What a merge did."""

    header: RunHeader
    read_bytes: int
    written_bytes: int
    damaged_pages: int
    """Left out; their records are lost from the table, no wrong one is in it."""


class _Cursor:
    """The part of a run that was read and not yet merged."""

    def __init__(self, run: Run, pages_per_block: int) -> None:
        self._blocks: Iterator[tuple[NDArray[np.void], int]] = run.blocks(pages_per_block)
        self._records = np.zeros(0, dtype=RECORD)
        self._addresses = np.zeros(0, dtype=np.uint32)
        self.damaged_pages = 0
        self.exhausted = False

    def fill(self) -> None:
        """Read on until there is something or the run ends."""
        while not len(self._records) and not self.exhausted:
            try:
                self._records, damaged = next(self._blocks)
            except StopIteration:
                self.exhausted = True
                return
            self.damaged_pages += damaged
            self._addresses = np.ascontiguousarray(self._records["address"])

    @property
    def last_address(self) -> np.uint32:
        """Up to here everything of this run is in hand; valid after `fill` found something."""
        return np.uint32(self._addresses[-1])

    def take(self, up_to: np.uint32) -> NDArray[np.void]:
        """Remove and return the records up to and with this address."""
        count = int(np.searchsorted(self._addresses, up_to, side="right"))
        taken, self._records = self._records[:count], self._records[count:]
        self._addresses = self._addresses[count:]
        return taken


def merge_runs(
    runs: Sequence[Run],
    directory: Path,
    *,
    deleted_sources: frozenset[int] = frozenset(),
    min_count: int = 1,
    memory_bytes: int = MERGE_MEMORY_BYTES,
    progress: Callable[[float], None] | None = None,
    write_function: WriteFunction = os.write,
) -> MergeResult:
    """Merge runs, oldest first, into one new file in the directory; the inputs stay.

    Each input is read once and each record written once. `progress` is told the share done, 0 to 1.

    Raises:
        OSError: the disk is full or refuses; no new file is left.
    """
    first = runs[0].header
    input_pages = sum(run.header.page_count for run in runs)
    pages_per_block = max(4, memory_bytes // (_COPIES * PAGE_BYTES * len(runs)))
    cursors = [_Cursor(run, pages_per_block) for run in runs]
    deleted = np.array(sorted(deleted_sources), dtype=np.uint32)
    writer = RunWriter(
        directory,
        first.order,
        first.tokenizer_fingerprint,
        record_bound=sum(run.header.record_count for run in runs),
        write_function=write_function,
    )
    with writer:
        for cut, records in _stretches(cursors):
            gone = np.isin(records["source_share"] & np.uint32(MAX_SOURCE), deleted)
            writer.append(reduce_records(records[~gone] if gone.any() else records, min_count))
            if progress is not None:
                # Hashed addresses are spread evenly, so the address is the progress.
                progress(cut / (1 << 32))
        header = writer.finish(sum(run.header.token_count for run in runs))
    return MergeResult(
        header, input_pages * PAGE_BYTES, header.file_bytes, sum(cursor.damaged_pages for cursor in cursors)
    )


def _stretches(cursors: Sequence[_Cursor]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """All records of all runs, by stretches of addresses that are complete, each with its last address."""
    while True:
        for cursor in cursors:
            cursor.fill()
        open_cursors = [cursor for cursor in cursors if not cursor.exhausted]
        if not open_cursors:
            return
        # No address straddles two pages of a run, so the smallest last address is complete everywhere.
        cut = min(cursor.last_address for cursor in open_cursors)
        yield int(cut), np.concatenate([cursor.take(cut) for cursor in open_cursors])


def plan_merge(page_counts: Sequence[int]) -> list[int]:
    """Indices of the runs to merge next, or nothing.

    Runs of like size (within a factor of 4) wait until there are four of them, so a record is rewritten at most once a
    factor of 4 in size: log4(table / smallest tier) times in all, and a look-up asks at most three runs a tier.
    """
    tiers: dict[int, list[int]] = {}
    for index, pages in enumerate(page_counts):
        tier = 0
        while pages >= _SMALLEST_TIER_PAGES * TIER_FACTOR**tier:
            tier += 1
        tiers.setdefault(tier, []).append(index)
    for tier in sorted(tiers):
        if len(tiers[tier]) >= TIER_FACTOR:
            return tiers[tier]
    return []

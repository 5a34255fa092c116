"""Reading an n-gram table that is larger than memory: fetch the pages the next step may need, then look up what came.

Knows contexts, pages and counts; does not know what a draft is worth, nor what the tokens mean. Nothing here waits for
a disk: a page that is late, damaged or gone is a miss.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localspec.storage.aio import AsyncReader, ReaderClosed
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.ngram_cache import FRAME_COST_BYTES, MIN_FRAMES, PageCache, PageKey
from localspec.storage.ngram_choice import Continuation, best_continuation
from localspec.storage.ngram_format import MAX_TOKEN, RECORD, RECORD_BYTES, RECORD_HEAD, prefix_hash
from localspec.storage.ngram_manifest import Manifest, TableDirectory
from localspec.storage.ngram_run_file import Run

_HASH_IN_RECORD = struct.Struct("<II")
MAX_WISHES = 64
"""Of texts whose pages are to be found; more means that no worker had time for any."""


@dataclass(frozen=True)
class TableStatistics:
    """A snapshot."""

    runs: int
    records: int
    table_bytes: int
    index_bytes: int
    """RAM of fences and filters."""
    cache_bytes: int
    """RAM of pages."""
    ram_cap_bytes: int
    lookups: int
    hits: int
    late: int
    """Look-ups in which a page had not arrived and nothing else was found."""
    requested_pages: int
    cached_pages: int
    dropped_pages: int
    pending_reads: int
    read_errors: int
    damaged_pages: int
    damaged_runs: int
    missing_runs: bool
    """Runs that the manifest names are not there: a merge passed by, or files were removed by hand."""
    gone: bool
    """The table was removed from the disk."""


@dataclass(frozen=True)
class _Slot:
    number: int
    run: Run


class _View(NamedTuple):
    """What answers look-ups; replaced as a whole. deleted: sources that are not served any more."""

    slots: tuple[_Slot, ...] = ()
    deleted: frozenset[int] = frozenset()


class NgramTable:
    """An opened table. `prefetch` and `lookup` belong to the decode thread, which waits for no lock in them; `refresh`
    belongs to any other. Which pages a wish means is found out by the reader's workers."""

    def __init__(
        self, table: TableDirectory, manifest: Manifest, reader: AsyncReader, ram_cap_bytes: int, max_pending: int
    ) -> None:
        """Use `open`."""
        self.order = manifest.order
        self.ram_cap_bytes = ram_cap_bytes
        self._table = table
        self._fingerprint = manifest.tokenizer_fingerprint
        self._index_cap_bytes = ram_cap_bytes // 3
        self._cache = PageCache(reader, ram_cap_bytes - self._index_cap_bytes, max_pending)
        self._reader = reader
        self._wishes: deque[list[int]] = deque()
        self._granting = threading.Lock()
        self._dropped_wishes = 0
        self._view = _View()
        self._next_slot = 0
        # Of the manifest that was taken up; the first refresh loads the runs.
        self._stamp: tuple[int, int] | None = None
        self._gone = False
        self._damaged_runs: set[int] = set()
        self._missing_runs = False
        self._lookups = self._hits = self._late = 0

    @classmethod
    def open(
        cls,
        directory: Path,
        tokenizer_fingerprint: bytes,
        reader: AsyncReader,
        *,
        ram_cap_bytes: int = 64 << 20,
        max_pending: int = 256,
    ) -> NgramTable:
        """Open a table for one tokenizer.

        `ram_cap_bytes` bounds fences, filters and pages together: a third at most for the index, the rest for pages.
        `max_pending` reads at most are under way; older wishes are taken back for newer ones.

        Raises:
            FileNotFoundError: there is no table.
            DamagedFile: its manifest is damaged; a damaged run is left out and counted instead.
            WrongOwner: it was built for another tokenizer.
            ValueError: the cap cannot hold the index.
        """
        table = TableDirectory(directory)
        manifest = table.load()
        if manifest.tokenizer_fingerprint != tokenizer_fingerprint:
            raise WrongOwner(f"The table {directory.name!r} was built for another tokenizer; build it for this model.")
        if ram_cap_bytes < 2 * MIN_FRAMES * FRAME_COST_BYTES:
            raise ValueError(f"A table needs a cap of at least {2 * MIN_FRAMES * FRAME_COST_BYTES} bytes of memory.")
        opened = cls(table, manifest, reader, ram_cap_bytes, max_pending)
        opened.refresh()
        if opened._missing_runs:
            opened.refresh()
        return opened

    def prefetch(self, contexts: Iterable[Sequence[int]]) -> None:
        """Have the pages read for contexts whose next token is not known yet; returns at once.

        Each context ends with the last known token; its last order - 1 tokens count, shorter ones are passed over.
        """
        width = self.order - 1
        for context in contexts:
            if len(context) >= width:
                self._wish(list(context[-width:]))

    def prefetch_step(self, history: Sequence[int], draft: Sequence[int]) -> None:
        """`prefetch` for every way a verification can end: after the history and 0 to all tokens of the draft."""
        tokens = [*history[1 - self.order :], *draft]
        if len(tokens) >= self.order - 1:
            self._wish(tokens)

    def _wish(self, tokens: list[int]) -> None:
        if len(tokens) < self.order and not self._pages_of(tokens):
            # Most texts are not in the table: the filter says so in a tenth of the time that waking a worker takes.
            return
        if len(self._wishes) >= MAX_WISHES:
            with contextlib.suppress(IndexError):
                self._wishes.popleft()
                self._dropped_wishes += 1
        self._wishes.append(tokens)
        try:
            self._reader.call(self._grant)
        except ReaderClosed:
            self._wishes.clear()

    def _grant(self) -> None:
        """Have the pages of the oldest wish read. On a worker of the reader."""
        width = self.order - 1
        with self._granting:
            try:
                tokens = self._wishes.popleft()
            except IndexError:
                return
            wanted: dict[PageKey, Run] = {}
            for at in range(len(tokens) - width + 1):
                wanted |= self._pages_of(tokens[at : at + width])
            if wanted:
                self._cache.request(list(wanted.items()))

    def _pages_of(self, prefix: Sequence[int]) -> dict[PageKey, Run]:
        """Pages that may hold what follows the order - 1 tokens, of every run."""
        found = {}
        hashed = prefix_hash(prefix)
        for slot in self._view.slots:
            number = slot.run.page_number(hashed)
            if number:
                found[PageKey(slot.number, number)] = slot.run
        return found

    @property
    def pending_reads(self) -> int:
        """Wishes that no worker has taken up and pages that have not arrived; 0 once all that was asked for is here."""
        # In this order: what leaves one place is in the next by then.
        return len(self._wishes) + self._granting.locked() + self._cache.pending_reads

    def lookup(self, context: Sequence[int]) -> Continuation | None:
        """What followed the context, if its page is here; never waits.

        The longest agreement speaks (16 tokens, 12, then the table's order), in it the next token that was seen most,
        over all runs and sources.
        """
        if len(context) < self.order:
            return None
        prefix = prefix_hash(context[-self.order : -1])
        self._lookups += 1
        records, late = self._matching(prefix, context[-1])
        if not records:
            self._late += late
            return None
        self._hits += 1
        return best_continuation(records, context, self.order)

    def ready_records(self, prefix: Sequence[int]) -> NDArray[np.void]:
        """All records here for the order - 1 tokens before an unknown last one, as RECORD; to fill a device's table."""
        records, _ = self._matching(prefix_hash(prefix[1 - self.order :]), None)
        return np.frombuffer(b"".join(records), dtype=RECORD)

    def _matching(self, prefix: int, last_token: int | None) -> tuple[list[bytes], bool]:
        """Live records of a prefix (and last token), and whether a page that may hold more is not here."""
        pattern = _HASH_IN_RECORD.pack(prefix >> 32, prefix & 0xFFFFFFFF)
        found: list[bytes] = []
        late = False
        view = self._view
        for slot in view.slots:
            number = slot.run.page_number(prefix)
            if not number:
                continue
            page = self._cache.page(PageKey(slot.number, number))
            if page is None:
                late = True
                continue
            at = page.find(pattern, RECORD_BYTES)
            while at >= 0:
                if at % RECORD_BYTES:
                    at = page.find(pattern, at + 1)
                    continue
                _, _, last_length, source_share, *_ = RECORD_HEAD.unpack_from(page, at)
                if (last_token is None or last_length & MAX_TOKEN == last_token) and (
                    source_share & MAX_TOKEN not in view.deleted
                ):
                    found.append(page[at : at + RECORD_BYTES])
                at = page.find(pattern, at + RECORD_BYTES)
        return found, late

    def refresh(self) -> bool:
        """Take up what builders and deletions changed; False when nothing did. For a thread that may touch the disk.

        Raises:
            DamagedFile: the manifest is damaged now; the table goes on with what it had.
            ValueError: the index has outgrown the cap; the same.
        """
        # Read before the manifest: one that comes in between is taken up the next time.
        stamp = self._manifest_stamp()
        if stamp == self._stamp and not self._missing_runs:
            return False
        # What is refused now is refused once; a disk that fails may do the next time.
        self._stamp = stamp
        try:
            return self._take_up(is_there=stamp is not None)
        except OSError:
            self._stamp = None
            raise

    def _take_up(self, is_there: bool) -> bool:
        try:
            manifest = self._table.load() if is_there else None
        except FileNotFoundError:
            manifest = None
        if manifest is None or manifest.tokenizer_fingerprint != self._fingerprint or manifest.order != self.order:
            self._view, self._gone = _View(), True
            return True
        self._install(manifest)
        return True

    @property
    def is_full(self) -> bool:
        """Whether a tenth of the memory for the index is left at most: beyond it the table would not open again."""
        fences = sum(slot.run.fences.nbytes for slot in self._view.slots)
        return 10 * fences >= 9 * self._index_cap_bytes

    def _manifest_stamp(self) -> tuple[int, int] | None:
        with contextlib.suppress(FileNotFoundError):
            status = self._table.manifest_path.stat()
            return status.st_ino, status.st_mtime_ns
        return None

    def _install(self, manifest: Manifest) -> None:
        known = {slot.run.header.run_id: slot for slot in self._view.slots}
        slots = []
        damaged = set()
        missing = False
        for entry in manifest.runs:
            slot = known.get(entry.run_id)
            if slot is None:
                try:
                    run = Run(self._table.path / entry.file_name, self._fingerprint)
                except FileNotFoundError:
                    # A merge went on between the manifest and this: the next refresh finds the run that took its place.
                    missing = True
                    continue
                except (DamagedFile, WrongOwner):
                    damaged.add(entry.run_id)
                    continue
                slot = _Slot(self._next_slot, run)
                self._next_slot += 1
            slots.append(slot)
        self._bound_index([slot.run for slot in slots])
        self._view, self._gone = _View(tuple(slots), manifest.deleted), False
        self._damaged_runs, self._missing_runs = damaged, missing

    def _bound_index(self, runs: Sequence[Run]) -> None:
        left_bytes = self._index_cap_bytes - sum(run.index_bytes for run in runs)
        if left_bytes < 0:
            needed = 3 * sum(run.fences.nbytes for run in runs)
            raise ValueError(f"The index of {self._table.path.name!r} needs a memory cap of at least {needed} bytes.")
        # Small filters first: each saves one read a look-up, whatever its size.
        for run in sorted(runs, key=lambda run: run.header.bloom_word_count):
            if run.bloom is None and 8 * run.header.bloom_word_count <= left_bytes and run.load_bloom():
                left_bytes -= 8 * run.header.bloom_word_count

    def statistics(self) -> TableStatistics:
        """Counters since the table was opened."""
        runs = [slot.run for slot in self._view.slots]
        cache = self._cache
        return TableStatistics(
            runs=len(runs),
            records=sum(run.header.record_count for run in runs),
            table_bytes=sum(run.header.file_bytes for run in runs),
            index_bytes=sum(run.index_bytes for run in runs),
            cache_bytes=cache.used_bytes,
            ram_cap_bytes=self.ram_cap_bytes,
            lookups=self._lookups,
            hits=self._hits,
            late=self._late,
            requested_pages=cache.requested_pages,
            cached_pages=cache.cached_pages,
            dropped_pages=cache.dropped_pages + self._dropped_wishes,
            pending_reads=self.pending_reads,
            read_errors=cache.read_errors,
            damaged_pages=len(cache.damaged),
            damaged_runs=len(self._damaged_runs),
            missing_runs=self._missing_runs,
            gone=self._gone,
        )

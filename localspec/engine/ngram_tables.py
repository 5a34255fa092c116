"""The n-gram tables of a loaded model: opened if they were built for its tokenizer, kept fresh, fed with its answers.

Answers go to a private table of their own on a thread of its own; nothing here runs on the decode thread, and nothing
of a private request is ever taken. A table that cannot be used is left out with a word.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from localspec.core.records import Request
from localspec.drafters import NgramTableHandle
from localspec.storage.aio import AsyncReader
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.ngram_build import RunBuilder, delete_sources
from localspec.storage.ngram_manifest import TableDirectory
from localspec.storage.ngram_runs import NgramTable

log = logging.getLogger(__name__)
OWN = "own"
"""Shown name of the table of the user's own answers; its folder also names the tokenizer, as each has its own."""
OWN_ORDER = 8
READ_THREADS = 4
RAM_CAP_BYTES = 256 << 20
"""Of all tables together: fences, filters and pages."""
RAM_CAP_PER_TABLE_BYTES = 64 << 20
MAX_PENDING_READS = 128
REFRESH_S = 2.0
FLUSH_TOKENS = 4096
FLUSH_S = 20.0
MAX_WAITING_TOKENS = 1 << 18
LEAD_TOKENS = 15
"""Of the prompt's end, put before an answer so that its first tokens have a context."""
Report = Callable[[str], None]


@dataclass(frozen=True)
class _Answer:
    source: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Forget:
    source: str


class NgramTables:
    """All usable tables of a folder; a worker thread refreshes and feeds them until `close`."""

    def __init__(self, folder: Path, fingerprint: bytes, learn: bool, report: Report) -> None:
        """`learn` keeps answers in the table "own". `report` is told of every table that is left out, and why."""
        self._fingerprint = fingerprint
        self._own = folder / f"{OWN}-{fingerprint.hex()[:8]}"
        self._learns = learn and self._make_own(report)
        self.reader = AsyncReader(threads=READ_THREADS)
        self.handles = self._open(folder, report)
        self._inbox: queue.SimpleQueue[_Answer | _Forget | None] = queue.SimpleQueue()
        self._waiting: list[_Answer] = []
        self._was_full = False
        self._forgotten: set[str] = set()
        """Sources of which nothing is taken any more: an answer may still run when its chat is forgotten."""
        self._to_delete: list[str] = []
        self._may_purge = any(handle.name == OWN for handle in self.handles)
        """Whether the own table may hold bytes of deleted sources; its manifest says so, in the next process too."""
        self._was_refused = False
        self._before_close: list[Callable[[], None]] = []
        self._flushed_s = time.monotonic()
        self._worker = threading.Thread(target=self._work, name="ngram", daemon=True)
        self._worker.start()

    def remember(self, request: Request, answer_ids: tuple[int, ...]) -> None:
        """Take a finished answer for the own table; not if the request is private or its chat was forgotten. Returns at
        once."""
        if self._learns and not request.private and answer_ids:
            lead = request.prompt_ids[-LEAD_TOKENS:]
            self._inbox.put(_Answer(_source(request.chat_id), (*lead, *answer_ids)))

    def forget(self, chat_id: str) -> None:
        """Remove what was learnt from a chat, from the disk too, and learn no more from it. Returns at once."""
        self._forgotten.add(_source(chat_id))
        if self._own.is_dir():
            self._inbox.put(_Forget(_source(chat_id)))

    def figures(self) -> Mapping[str, float]:
        """What the panel and /metrics show."""
        reads = self.reader.statistics()
        drafts = sum(handle.counts.drafts for handle in self.handles)
        accepted = sum(handle.counts.accepted_tokens for handle in self.handles)
        tables = [handle.table.statistics() for handle in self.handles]
        requested = sum(table.requested_pages for table in tables)
        return {
            "ngram_lookups": sum(table.lookups for table in tables),
            "ngram_hits": sum(table.hits for table in tables),
            "ngram_accepted_per_hit": round(accepted / drafts, 3) if drafts else 0.0,
            "ngram_reads_per_s": round(reads.reads_per_s, 1),
            "ngram_read_mb_per_s": round(reads.megabytes_per_s, 3),
            "ngram_read_p50_ms": reads.latency_p50_us / 1e3,
            "ngram_read_p99_ms": reads.latency_p99_us / 1e3,
            "ngram_cache_share": round(sum(table.cached_pages for table in tables) / requested, 3)
            if requested
            else 0.0,
            "ngram_late": sum(table.late for table in tables),
            "ngram_damaged_pages": sum(table.damaged_pages for table in tables),
        }

    def before_close(self, function: Callable[[], None]) -> None:
        """Have something called first when the tables close: the end of whatever still asks them."""
        self._before_close.append(function)

    def close(self) -> None:
        """Write what waits and end the threads. The drafter goes on without an answer, should it still be asked."""
        for function in self._before_close:
            function()
        self._inbox.put(None)
        self._worker.join()
        self.reader.close()

    def _make_own(self, report: Report) -> bool:
        try:
            TableDirectory(self._own).create(self._fingerprint, OWN_ORDER)
        except (OSError, DamagedFile, WrongOwner) as error:
            report(f"answers are not kept for drafting: {error}")
            log.warning("Answers are not kept for drafting: %s", error)
            return False
        return True

    def _open(self, folder: Path, report: Report) -> tuple[NgramTableHandle, ...]:
        places = [path for path in sorted(folder.iterdir()) if path.is_dir()] if folder.is_dir() else []
        cap_bytes = min(RAM_CAP_PER_TABLE_BYTES, RAM_CAP_BYTES // max(1, len(places)))
        handles = []
        for place in places:
            try:
                table = NgramTable.open(
                    place, self._fingerprint, self.reader, ram_cap_bytes=cap_bytes, max_pending=MAX_PENDING_READS
                )
            except (OSError, ValueError) as error:  # DamagedFile and WrongOwner are ValueErrors
                # Every tokenizer has an own table; that of another one is not worth a word.
                if not (isinstance(error, WrongOwner) and place.name.startswith(f"{OWN}-")):
                    report(f"n-gram table {place.name} is left out: {error}")
                    log.warning("The n-gram table %s is left out: %s", place.name, error)
                continue
            handles.append(NgramTableHandle(OWN if place == self._own else place.name, table))
        return tuple(handles)

    def _work(self) -> None:
        while True:
            try:
                item = self._inbox.get(timeout=REFRESH_S)
            except queue.Empty:
                self._refresh()
            else:
                if item is None:
                    self._flush()
                    self._clean()
                    return
                if isinstance(item, _Forget):
                    self._forget(item.source)
                elif item.source not in self._forgotten:
                    self._waiting.append(item)
            tokens = sum(len(answer.token_ids) for answer in self._waiting)
            if tokens >= FLUSH_TOKENS or (tokens and time.monotonic() - self._flushed_s >= FLUSH_S):
                self._flush()

    def _refresh(self) -> None:
        self._clean()
        for handle in self.handles:
            try:
                handle.table.refresh()
            except (OSError, ValueError) as error:
                log.warning("The n-gram table %s stays as it was: %s", handle.name, error)

    def _flush(self) -> None:
        """Write the waiting answers as a run of the own table. What cannot be written is dropped in the end."""
        if not self._waiting:
            return
        self._flushed_s = time.monotonic()
        if self._is_full():
            self._waiting = []
            return
        try:
            with self._builder() as builder:
                for answer in self._waiting:
                    builder.add(answer.source, answer.token_ids)
                builder.finish()
            self._waiting = []
        except (OSError, ValueError) as error:
            log.warning("Answers could not be kept for drafting: %s", error)
            while sum(len(answer.token_ids) for answer in self._waiting) > MAX_WAITING_TOKENS:
                self._waiting.pop(0)
        self._refresh()

    def _is_full(self) -> bool:
        """Whether the own table takes no more answers, said once."""
        own = next((handle.table for handle in self.handles if handle.name == OWN), None)
        full = own is not None and own.is_full
        if full and not self._was_full:
            name = self._own.name
            log.warning("The table %s is full and learns no more: `localspec ngram rm %s` begins it anew.", name, name)
        self._was_full = full
        return full

    def _forget(self, source: str) -> None:
        self._waiting = [answer for answer in self._waiting if answer.source != source]
        self._to_delete.append(source)
        self._refresh()

    def _clean(self) -> None:
        """Delete what is to be deleted: its name at once, its bytes when nobody else writes to the table. What cannot
        be done now is tried again at every refresh."""
        try:
            if self._to_delete:
                delete_sources(self._own, self._to_delete)
                self._to_delete, self._may_purge = [], True
            if self._may_purge:
                if TableDirectory(self._own).load().deleted:
                    with self._builder() as builder:
                        builder.purge_deleted()
                self._may_purge = False
            self._was_refused = False
        except (OSError, ValueError) as error:
            if not self._was_refused:
                log.warning("What was learnt from a deleted chat is not removed yet: %s", error)
            self._was_refused = True

    def _builder(self) -> RunBuilder:
        return RunBuilder(self._own, self._fingerprint, order=OWN_ORDER)


def _source(chat_id: str | None) -> str:
    return f"chat:{chat_id}" if chat_id else "answers"

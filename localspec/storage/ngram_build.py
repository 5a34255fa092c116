"""Building and changing a table: text in, runs out, merges, deletion. Everything here may be killed at any moment.

Knows the manifest and the order of writes (file synced, renamed, then named in the manifest); does not know where token
ids come from, nor how the table is read.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from localspec.storage.errors import DamagedFile, TableFull
from localspec.storage.files import WriteFunction
from localspec.storage.ngram_format import MAX_SOURCE
from localspec.storage.ngram_manifest import Manifest, RunEntry, TableDirectory, entry_of
from localspec.storage.ngram_merge import MERGE_MEMORY_BYTES, merge_runs, plan_merge
from localspec.storage.ngram_records import TextPiece, reduce_records, split_document, text_records
from localspec.storage.ngram_run_file import Run, RunWriter

Progress = Callable[[float], None]


@dataclass(frozen=True)
class BuildReport:
    """What a build or a rewrite did."""

    tokens: int
    records: int
    table_bytes: int
    """All runs that answer look-ups now."""
    written_bytes: int
    """Run files written by this builder, merges included."""
    damaged_pages: int
    damaged_runs: int
    """Gone, or found unusable while merging; what they held is not in the table any more."""


class RunBuilder:
    """Adds text to a table; a context manager that holds the builder lock.

    Text is collected to `chunk_tokens`, sorted in memory and written as a run; `finish` merges those runs into one.
    An unfinished build continues where it was: open the builder with the same build name, skip `documents_done`
    documents of the same sequence and go on; the first `add` under another name gives it up. Memory is about 200
    bytes a token of a chunk, plus the merge's, whatever the corpus.
    """

    def __init__(
        self,
        directory: Path,
        tokenizer_fingerprint: bytes,
        *,
        order: int = 8,
        build: str = "",
        chunk_tokens: int = 1 << 21,
        fan_in: int = 64,
        merge_memory_bytes: int = MERGE_MEMORY_BYTES,
        write_function: WriteFunction = os.write,
    ) -> None:
        """Set up; the table is opened or made on entry. `fan_in` runs at most are read by one merge."""
        self._table = TableDirectory(directory, write_function=write_function)
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._order = order
        self._build = build
        self._chunk_tokens = chunk_tokens
        self._fan_in = fan_in
        self._merge_memory_bytes = merge_memory_bytes
        self._write_function = write_function
        self._stack = contextlib.ExitStack()
        self._pieces: list[TextPiece] = []
        self._piece_tokens = 0
        self._unpublished: list[RunEntry] = []
        self._new_sources: dict[str, int] = {}
        self._documents_done = 0
        self._written_bytes = 0
        self._damaged_pages = 0
        self._damaged_runs = 0
        self._manifest: Manifest

    @property
    def documents_done(self) -> int:
        """Documents of this build that earlier calls of `add` handed over, in earlier processes too."""
        return self._documents_done

    @property
    def sources(self) -> frozenset[str]:
        """Names that can be deleted; what was added since the last flush is not among them yet."""
        return frozenset(self._manifest.sources)

    def __enter__(self) -> RunBuilder:
        """Take the lock, open or make the table, remove what dead builders left.

        Raises:
            BlockingIOError: another process is building this table.
            WrongOwner, DamagedFile: see `TableDirectory.create`.
        """
        self._manifest = self._table.create(self._tokenizer_fingerprint, self._order)
        self._stack.enter_context(self._table.builder_lock())
        self._manifest = self._table.load()
        self._table.sweep()
        self._documents_done = self._manifest.documents_done if self._continues else 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def _continues(self) -> bool:
        return self._manifest.build == self._build

    def _begin(self, manifest: Manifest) -> Manifest:
        # Another build was given up half-way: what it added is gone, so are the names it brought.
        rest = {name: number for name, number in manifest.sources.items() if name not in manifest.staged_sources}
        return replace(manifest.without_build(), build=self._build, sources=rest)

    def add(self, source: str, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Take one document. `source` is what can later be deleted as one: a file, a chat, a corpus.

        Raises:
            ValueError: a token id is negative or above 16,777,215.
            TableFull: there are too many sources.
            OSError: the disk is full; what was flushed before stays and the build can be resumed.
        """
        array = np.asarray(tokens)
        if len(array) and (int(array.min()) < 0 or int(array.max()) > (1 << 24) - 1):
            raise ValueError(f"Token ids of {source!r} must lie between 0 and 16777215.")
        if not self._continues:
            self._manifest = self._table.update(self._begin)
        number = self._source_number(source)
        if self._piece_tokens + len(array) > self._chunk_tokens:
            self.flush()
        for piece in split_document(array.astype(np.uint32), number, self._chunk_tokens):
            if self._piece_tokens + len(piece.tokens) > self._chunk_tokens:
                self._write_chunk()
            self._pieces.append(piece)
            self._piece_tokens += len(piece.tokens)
        self._documents_done += 1
        if self._unpublished:
            # Larger than a chunk: its runs get their names together, so that it counts as a whole or not at all.
            self.flush()

    def delete(self, *sources: str) -> int:
        """`delete_sources` for the holder of the builder: what is added under the names afterwards is new text.

        For a file that changed: delete, then add.
        """
        if any(source in self._new_sources for source in sources):
            self.flush()
        found = delete_sources(self._table.path, sources)
        if found:
            self._manifest = self._table.load()
        return found

    def _source_number(self, source: str) -> int:
        known = self._manifest.sources.get(source, self._new_sources.get(source))
        if known is not None:
            return known
        number = self._manifest.next_source + len(self._new_sources)
        if number > MAX_SOURCE:
            raise TableFull(f"A table holds at most {MAX_SOURCE} sources; give a whole corpus one name.")
        self._new_sources[source] = number
        return number

    def flush(self) -> None:
        """Write what was added so far; after this a kill loses none of it."""
        self._write_chunk()
        if self._unpublished:
            new, self._unpublished = tuple(self._unpublished), []
            self._manifest = self._table.update(lambda manifest: self._with_staged(manifest, new))
            self._new_sources = {}
        while len(self._manifest.staged) >= self._fan_in:
            self._merge(self._manifest.staged[: self._fan_in], 1, None, serve=False)

    def _with_staged(self, manifest: Manifest, new: tuple[RunEntry, ...]) -> Manifest:
        return replace(
            manifest,
            staged=manifest.staged + new,
            documents_done=self._documents_done,
            staged_sources=(*manifest.staged_sources, *self._new_sources),
            sources={**manifest.sources, **self._new_sources},
            next_source=max([manifest.next_source, *(number + 1 for number in self._new_sources.values())]),
        )

    def _write_chunk(self) -> None:
        if not self._pieces:
            return
        token_count = sum(len(p.tokens) - p.lead_tokens - p.tail_tokens for p in self._pieces)
        sources = frozenset(piece.source for piece in self._pieces)
        raw = text_records(self._pieces, self._order)
        self._pieces, self._piece_tokens = [], 0
        records = reduce_records(raw)
        del raw
        with RunWriter(
            self._table.path,
            self._order,
            self._tokenizer_fingerprint,
            record_bound=len(records),
            write_function=self._write_function,
        ) as writer:
            writer.append(records)
            header = writer.finish(token_count)
        self._written_bytes += header.file_bytes
        self._unpublished.append(entry_of(header, sources))

    def finish(self, min_count: int = 1, progress: Progress | None = None) -> BuildReport:
        """End the build: one run of it all, which then answers look-ups; then merges that are due.

        `min_count` above 1 prunes this build's n-grams that were seen less often (for foreign corpora).
        """
        self.flush()
        # An unfinished build of another name waits for its own builder, as long as nothing was added here.
        staged = self._manifest.staged if self._continues else ()
        if len(staged) == 1 and min_count == 1:
            self._manifest = self._table.update(
                lambda manifest: replace(manifest.without_build(), runs=manifest.runs + staged)
            )
        elif staged:
            self._merge(staged, min_count, progress, serve=True)
        self._build, self._documents_done = "", 0
        self.maintain()
        return self.report()

    def maintain(self) -> None:
        """Merge the runs of like size that have become many; for idle time."""
        while due := plan_merge([entry.page_count for entry in self._manifest.runs]):
            self._merge(tuple(self._manifest.runs[index] for index in due), 1, None, serve=True)

    def purge_deleted(self) -> BuildReport:
        """Rewrite the runs that hold records of deleted sources, so that these are gone from the disk too."""
        self.flush()
        gone = self._manifest.deleted
        for entry in self._manifest.runs:
            if entry.sources is None or gone.intersection(entry.sources):
                self._merge((entry,), 1, None, serve=True)
        for entry in self._manifest.staged:
            if entry.sources is None or gone.intersection(entry.sources):
                self._merge((entry,), 1, None, serve=False)
        self._manifest = self._table.update(lambda manifest: replace(manifest, deleted=manifest.deleted - gone))
        return self.report()

    def report(self) -> BuildReport:
        """The table as it is now, and what this builder wrote."""
        runs = self._manifest.runs
        sizes_bytes = [_size_bytes(self._table.path / entry.file_name) for entry in runs]
        return BuildReport(
            tokens=sum(entry.token_count for entry in runs),
            records=sum(entry.record_count for entry in runs),
            table_bytes=sum(size for size in sizes_bytes if size is not None),
            written_bytes=self._written_bytes,
            damaged_pages=self._damaged_pages,
            damaged_runs=self._damaged_runs + sizes_bytes.count(None),
        )

    def _merge(self, entries: tuple[RunEntry, ...], min_count: int, progress: Progress | None, *, serve: bool) -> None:
        """Put one run in the place of several; the merged build's end when they are its staged ones and it serves."""
        deleted = self._manifest.deleted
        runs = [run for run in map(self._opened, entries) if run is not None]
        merged: tuple[RunEntry, ...] = ()
        if runs:
            result = merge_runs(
                runs,
                self._table.path,
                deleted_sources=deleted,
                min_count=min_count,
                memory_bytes=self._merge_memory_bytes,
                progress=progress,
                write_function=self._write_function,
            )
            self._written_bytes += result.written_bytes
            self._damaged_pages += result.damaged_pages
            merged = (entry_of(result.header, _joined_sources(entries, deleted)),)
            if not result.header.record_count:
                # All of it was deleted: the sweep of the next builder takes the file if this one does not get to it.
                (self._table.path / merged[0].file_name).unlink()
                merged = ()
        self._manifest = self._table.update(lambda manifest: _exchanged(manifest, entries, merged, serve))
        for entry in entries:
            (self._table.path / entry.file_name).unlink(missing_ok=True)

    def _opened(self, entry: RunEntry) -> Run | None:
        try:
            return Run(self._table.path / entry.file_name, self._tokenizer_fingerprint)
        except (DamagedFile, FileNotFoundError):
            self._damaged_runs += 1
            return None


def _size_bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _joined_sources(entries: Sequence[RunEntry], deleted: frozenset[int]) -> frozenset[int] | None:
    found: set[int] = set()
    for entry in entries:
        if entry.sources is None:
            return None
        found.update(entry.sources)
    return frozenset(found - deleted)


def _exchanged(
    manifest: Manifest, entries: tuple[RunEntry, ...], merged: tuple[RunEntry, ...], serve: bool
) -> Manifest:
    """The manifest with `merged` where the last of `entries` stood: age decides which of two equals wins."""

    def exchange(listed: tuple[RunEntry, ...], place_of: RunEntry) -> tuple[RunEntry, ...]:
        kept: list[RunEntry] = []
        for entry in listed:
            if entry == place_of:
                kept.extend(merged)
            elif entry not in entries:
                kept.append(entry)
        return tuple(kept)

    if entries[-1] in manifest.runs:
        return replace(manifest, runs=exchange(manifest.runs, entries[-1]))
    if not serve:
        return replace(manifest, staged=exchange(manifest.staged, entries[-1]))
    return replace(manifest.without_build(), runs=manifest.runs + merged)


def delete_source(directory: Path, source: str) -> bool:
    """See `delete_sources`."""
    return bool(delete_sources(directory, [source]))


def delete_sources(directory: Path, sources: Sequence[str]) -> int:
    """Put tombstones on sources: readers stop serving them at their next refresh. Returns how many the table had.

    Works while a builder runs, as one change of its list. The bytes go with `RunBuilder.purge_deleted`.
    """
    found: set[int] = set()

    def change(manifest: Manifest) -> Manifest:
        rest = dict(manifest.sources)
        found.update(rest.pop(source) for source in sources if source in rest)
        return replace(manifest, sources=rest, deleted=manifest.deleted | found) if found else manifest

    if sources:
        TableDirectory(directory).update(change)
    return len(found)

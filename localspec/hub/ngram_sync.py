"""Keeping an n-gram table in step with files: what is new is tokenised and added, what changed is replaced.

Knows corpora, a tokenizer and the table's builder. Everything that was read before is known by the names of the
table's sources ("path#size.time.hash"), so a build that was killed goes on where it was, and adding twice adds nothing.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash
from tokenizers import Tokenizer

from localspec.hub.away import folders_away, is_below, mount_points_above
from localspec.hub.corpus import (
    MAX_TEXT_BYTES,
    CorpusFile,
    CorpusText,
    Passed,
    absolute_path,
    find_files,
    read_texts,
    stored_name,
    tokenizer_fingerprint,
)
from localspec.hub.records import HubError
from localspec.storage.ngram_build import BuildReport, RunBuilder
from localspec.storage.ngram_manifest import Manifest, TableDirectory

BATCH_CHARS = 1 << 20
TEXTS_PER_PART = 1 << 14
PIECES_PER_PART = 16
"""A file of many texts, or a large one in pieces, is taken in parts of so many: what is done again after a kill."""
PROGRESS_EVERY_S = 0.2


@dataclass(frozen=True)
class SyncOptions:
    """How to build. Singletons of the user's own text are worth keeping; prune foreign corpora with `min_count` 2."""

    order: int = 8
    min_count: int = 1
    max_text_bytes: int = MAX_TEXT_BYTES
    remove_missing: bool = False
    """Delete what came from the given paths and is not there any more, unless it may only be away."""


@dataclass(frozen=True)
class SyncProgress:
    """A moment of a build. `eta_s` None until a rate is known; merging counts from 0 to 1 in `merged_share`."""

    done_bytes: int
    total_bytes: int
    tokens: int
    elapsed_s: float
    merged_share: float | None = None

    @property
    def eta_s(self) -> float | None:
        if not self.done_bytes or self.elapsed_s < 1.0:
            return None
        return self.elapsed_s * (self.total_bytes - self.done_bytes) / self.done_bytes


@dataclass(frozen=True)
class SyncReport:
    """What a build did to the table."""

    files: int
    new_sources: int
    removed_sources: int
    duplicates: int
    added_tokens: int
    tokenise_s: float
    index_s: float
    table: BuildReport
    passed_over: Mapping[str, int]
    """How much was left out, by reason."""


Progress = Callable[[SyncProgress], None]


@dataclass(frozen=True)
class SourceName:
    """A source of a table, read back from its name."""

    source: str
    stamp: str
    part: str

    @classmethod
    def parse(cls, name: str) -> SourceName:
        source, _, tail = name.rpartition("#")
        parts = tail.split(".")
        return cls(source, ".".join(parts[:2]), parts[2] if len(parts) > 2 else "")

    @property
    def digest(self) -> str:
        """Hash of the content; empty for parts of a file of many texts."""
        return "" if self.part.startswith("p") else self.part


@dataclass
class _Known:
    """Names that the table has."""

    by_source: dict[str, list[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)
    digests: set[str] = field(default_factory=set)

    def add(self, name: str) -> None:
        parsed = SourceName.parse(name)
        self.names.add(name)
        self.by_source.setdefault(parsed.source, []).append(name)
        self.digests.add(parsed.digest)

    def outdated(self, source: str, stamp: str) -> list[str]:
        """Names of the source as it was at another time."""
        return [name for name in self.by_source.get(source, ()) if SourceName.parse(name).stamp != stamp]


class TableSync:
    """One table, one model's tokenizer. A call of `run` is one pass over the paths."""

    def __init__(self, directory: Path, model_folder: Path, options: SyncOptions = SyncOptions()) -> None:
        """Raises HubError if the tokenizer is missing or damaged."""
        self._directory = directory
        self._options = options
        self._fingerprint = tokenizer_fingerprint(model_folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a damaged file
            raise HubError(f"{model_folder / 'tokenizer.json'} is damaged ({error}); pull the model again") from error
        self._known = _Known()
        self._fruitless: set[tuple[str, str]] = set()
        """Path and stamp of files in which there was nothing new: duplicates, and what is no text."""
        self.away: frozenset[Path] = frozenset()
        """Of the last pass: folders of which nothing is deleted, because they may be disks that are not mounted."""
        self.prune = False
        """Delete what is missing even there, and where a path itself is missing."""
        self._reset()

    def _reset(self) -> None:
        self._duplicates = self._new = self._removed = self._tokens = 0
        self._tokenise_s = self._started_s = self._shown_s = 0.0
        self._done_bytes = self._total_bytes = 0
        self._passed: Passed = Counter()
        self._doomed: list[str] = []

    def manifest(self) -> Manifest | None:
        """The table as it is, or None if there is none. Raises DamagedFile."""
        try:
            return TableDirectory(self._directory).load()
        except FileNotFoundError:
            return None

    def changed(self, paths: Sequence[Path]) -> bool:
        """Whether a pass would do anything, by names, sizes and times alone; chats databases always may."""
        manifest = self.manifest()
        known = _Known()
        for name in manifest.sources if manifest is not None else ():
            known.add(name)
        files = list(find_files(self._present(paths), self._options.max_text_bytes))
        if self._options.remove_missing and self._missing(known, files, paths, manifest):
            return True
        return any(
            file.kind == "chats" or file.name not in known.by_source or known.outdated(file.name, _stamp(file))
            for file in files
            if (file.name, _stamp(file)) not in self._fruitless
        )

    def run(self, paths: Sequence[Path], progress: Progress) -> SyncReport:
        """Bring the table up to date with the paths.

        Raises:
            HubError: a path does not exist.
            BlockingIOError: another process is building this table.
            WrongOwner, DamagedFile: the table is of another tokenizer or its list is damaged.
            OSError: the disk is full; what was written stays, and the same call goes on from there.
        """
        self._reset()
        files = list(find_files(self._present(paths), self._options.max_text_bytes, self._passed))
        self._total_bytes = sum(file.size_bytes for file in files)
        self._started_s = time.monotonic()
        build = hashlib.sha256(b"\0".join(sorted(os.fsencode(path.absolute()) for path in paths))).hexdigest()[:16]
        with RunBuilder(self._directory, self._fingerprint, order=self._options.order, build=build) as builder:
            manifest = self._open(builder, build)
            if self._options.remove_missing:
                self._doom(self._missing(self._known, files, paths, manifest))
            self._note_mount_points(files, paths, manifest)
            begun_s = time.monotonic()
            for batch in _batches(self._new_texts(files)):
                self._add(builder, batch, progress)
            self._delete_doomed(builder)
            table = builder.finish(self._options.min_count, lambda share: progress(self._progress(merged_share=share)))
            index_s = time.monotonic() - begun_s - self._tokenise_s
        return SyncReport(
            files=len(files),
            new_sources=self._new,
            removed_sources=self._removed,
            duplicates=self._duplicates,
            added_tokens=self._tokens,
            tokenise_s=self._tokenise_s,
            index_s=index_s,
            table=table,
            passed_over=dict(self._passed),
        )

    def _open(self, builder: RunBuilder, build: str) -> Manifest:
        """Learn what is there. Of a build that was killed the last part may be half: it is done again."""
        manifest = TableDirectory(self._directory).load()
        if manifest.build == build and manifest.staged_sources:
            last = manifest.staged_sources[-1]
            if not SourceName.parse(last).digest:
                builder.delete(last)
        given_up = set(manifest.staged_sources) if manifest.build != build else set()
        self._known = _Known()
        for name in builder.sources - given_up:
            self._known.add(name)
        return manifest

    def _present(self, paths: Sequence[Path]) -> list[Path]:
        """The paths, when pruning without those that are gone but from which the table has something."""
        manifest = self.manifest() if self.prune else None
        sources = [SourceName.parse(name).source for name in manifest.sources] if manifest is not None else []

        def is_left(path: Path) -> bool:
            roots = _roots([path])
            return not path.expanduser().exists() and any(is_below(source, roots) for source in sources)

        return [path for path in paths if not is_left(path)]

    def _missing(
        self, known: _Known, files: Sequence[CorpusFile], paths: Sequence[Path], manifest: Manifest | None
    ) -> list[str]:
        """Names of what came from the paths and is gone; what may be away is not among them."""
        here = {file.name for file in files}
        roots = _roots(paths)
        gone = [source for source in known.by_source if source not in here and is_below(source, roots)]
        mounted = manifest.mount_points if manifest is not None else ()
        away = frozenset[Path]() if self.prune or not gone else folders_away(gone, here, roots, mounted)
        self.away = away
        return [name for source in gone if not is_below(source, away) for name in known.by_source[source]]

    def _note_mount_points(self, files: Sequence[CorpusFile], paths: Sequence[Path], manifest: Manifest) -> None:
        """Keep in the table which folders were disks of their own, for the day when one is away."""
        roots = _roots(paths)
        found = mount_points_above((file.path for file in files), roots)
        # A folder that was pruned is an ordinary one from then on.
        pruned = roots if self.prune else frozenset[Path]()
        kept = (point for point in manifest.mount_points if not is_below(point, pruned))
        points = tuple(sorted(found.union(kept)))
        if points != manifest.mount_points:
            TableDirectory(self._directory).update(lambda newest: replace(newest, mount_points=points))

    def _new_texts(self, files: Sequence[CorpusFile]) -> Iterator[tuple[str, str]]:
        """(source name, text) of what the table does not have; old forms of a source are deleted on the way."""
        counts: dict[str, int] = {}
        settled: set[str] = set()
        chats: set[str] = set()
        chats_whole = True
        for file in files:
            before_bytes, before_settled = self._done_bytes, len(settled)
            before_passed = self._passed.total()
            if file.kind == "text" and self._has(file):
                self._done_bytes += file.size_bytes
                continue
            seen: set[str] = set()
            for text in read_texts(file, self._passed):
                seen.add(text.source)
                name = _name(file, text, counts)
                self._done_bytes = min(before_bytes + file.size_bytes, self._done_bytes + len(text.text))
                if self._is_new(file, name):
                    if text.source not in settled:
                        settled.add(text.source)
                        self._doom(self._known.outdated(text.source, text.stamp))
                    yield name, text.text
            if file.kind == "chats":
                chats.update(seen)
                chats_whole &= self._passed.total() == before_passed
            if file.kind == "text" and len(settled) == before_settled:
                self._fruitless.add((file.name, _stamp(file)))
            self._done_bytes = before_bytes + file.size_bytes
        if chats_whole and any(file.kind == "chats" for file in files):
            gone = [source for source in self._known.by_source if source.startswith("chat:") and source not in chats]
            self._doom([name for source in gone for name in self._known.by_source[source]])

    def _is_new(self, file: CorpusFile, name: str) -> bool:
        if name in self._known.names:
            return False
        if file.kind == "text":
            digest = SourceName.parse(name).digest
            if digest in self._known.digests:
                self._duplicates += 1
                return False
            self._known.digests.add(digest)
        return True

    def _doom(self, names: Iterable[str]) -> None:
        """They go before the next batch is added, together: each change of the table's list writes it anew."""
        for name in names:
            self._doomed.append(name)
            # A copy of what went is no duplicate any more.
            self._known.digests.discard(SourceName.parse(name).digest)

    def _delete_doomed(self, builder: RunBuilder) -> None:
        if self._doomed:
            self._removed += builder.delete(*self._doomed)
            self._doomed = []

    def _has(self, file: CorpusFile) -> bool:
        source, stamp = file.name, _stamp(file)
        return any(SourceName.parse(name).stamp == stamp for name in self._known.by_source.get(source, ()))

    def _add(self, builder: RunBuilder, batch: list[tuple[str, str]], progress: Progress) -> None:
        begun_s = time.monotonic()
        encodings = self._tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
        self._tokenise_s += time.monotonic() - begun_s
        self._delete_doomed(builder)
        for (name, _), encoding in zip(batch, encodings, strict=True):
            builder.add(name, encoding.ids)
            self._tokens += len(encoding.ids)
        self._new += len({name for name, _ in batch})
        if time.monotonic() - self._shown_s >= PROGRESS_EVERY_S:
            self._shown_s = time.monotonic()
            progress(self._progress())

    def _progress(self, merged_share: float | None = None) -> SyncProgress:
        elapsed_s = time.monotonic() - self._started_s
        return SyncProgress(self._done_bytes, self._total_bytes, self._tokens, elapsed_s, merged_share)


def _roots(paths: Sequence[Path]) -> frozenset[Path]:
    """The paths as the names of sources begin with them."""
    return frozenset(Path(stored_name(absolute_path(path))) for path in paths)


def _stamp(file: CorpusFile) -> str:
    return f"{file.size_bytes:x}.{file.mtime_ns:x}"


def _name(file: CorpusFile, text: CorpusText, counts: dict[str, int]) -> str:
    if file.kind == "text":
        return f"{text.source}#{text.stamp}.{xxhash.xxh3_64_hexdigest(text.text.encode())}"
    number = counts[text.source] = counts.get(text.source, -1) + 1
    return f"{text.source}#{text.stamp}.p{number // (PIECES_PER_PART if file.kind == 'large' else TEXTS_PER_PART)}"


def _batches(texts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch: list[tuple[str, str]] = []
    chars = 0
    for item in texts:
        batch.append(item)
        chars += len(item[1])
        if chars >= BATCH_CHARS:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch

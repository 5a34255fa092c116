"""The list of runs that make up a table, and the only way to change it: one checked file, replaced by rename.

Knows which runs, sources and tombstones there are; does not read runs. A file the manifest does not name does not
exist: that is what makes a kill at any moment harmless.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import xxhash

from localspec.storage.errors import DamagedFile, TableFull, WrongOwner
from localspec.storage.files import (
    AtomicFile,
    WriteFunction,
    exclusive_lock,
    make_private_directory,
    sweep_temporary_files,
)
from localspec.storage.ngram_format import MAX_ORDER, MAX_SOURCE, MIN_ORDER, RunHeader
from localspec.storage.ngram_run_file import RUN_SUFFIX, run_file_name

MANIFEST_NAME = "manifest"
MAX_MANIFEST_BYTES = 64 << 20
MAX_LISTED_SOURCES = 4096


@dataclass(frozen=True)
class RunEntry:
    """One run of a table."""

    run_id: int
    page_count: int
    record_count: int
    token_count: int
    sources: tuple[int, ...] | None
    """Every source with records in it; None when they are too many to list."""

    @property
    def file_name(self) -> str:
        """In the table's directory."""
        return run_file_name(self.run_id)


@dataclass(frozen=True)
class Manifest:
    """The state of a table; changed only through `TableDirectory.update`."""

    tokenizer_fingerprint: bytes
    order: int
    runs: tuple[RunEntry, ...] = ()
    """Oldest first; these answer look-ups."""
    staged: tuple[RunEntry, ...] = ()
    """Parts of a build that is not finished."""
    build: str = ""
    """Name of that build."""
    documents_done: int = 0
    """Of that build: how many are wholly in `staged`."""
    staged_sources: tuple[str, ...] = ()
    """Names that this build brought in; they go if it is given up."""
    sources: Mapping[str, int] = field(default_factory=dict)
    deleted: frozenset[int] = frozenset()
    """Tombstones: records of these sources are not served, and go with the next merge of their run."""
    next_source: int = 1
    mount_points: tuple[str, ...] = ()
    """Folders that were file systems of their own when text came from them; kept for whoever fills the table."""

    def without_build(self) -> Manifest:
        """No build is going on: its runs answer look-ups by now, or are given up."""
        return replace(self, staged=(), build="", documents_done=0, staged_sources=())


def entry_of(header: RunHeader, sources: frozenset[int] | None) -> RunEntry:
    """The entry for a run just written."""
    listed = tuple(sorted(sources)) if sources is not None and len(sources) <= MAX_LISTED_SOURCES else None
    return RunEntry(header.run_id, header.page_count, header.record_count, header.token_count, listed)


class TableDirectory:
    """A table's directory (0700) with its manifest, locks and run files."""

    def __init__(self, path: Path, *, write_function: WriteFunction = os.write) -> None:
        """Remember the path; nothing is touched."""
        self.path = path
        self.manifest_path = path / MANIFEST_NAME
        self._write_function = write_function

    def create(self, tokenizer_fingerprint: bytes, order: int) -> Manifest:
        """Open the table for writing, making it if there is none.

        Raises:
            WrongOwner: it exists with another tokenizer or order.
            DamagedFile: its manifest is damaged.
        """
        if len(tokenizer_fingerprint) != 32 or not MIN_ORDER <= order <= MAX_ORDER:
            raise ValueError(f"A table needs a fingerprint of 32 bytes and an order of {MIN_ORDER} to {MAX_ORDER}.")
        make_private_directory(self.path)
        with self._manifest_lock():
            if not self.manifest_path.exists():
                self._store(Manifest(tokenizer_fingerprint, order))
        manifest = self.load()
        if manifest.tokenizer_fingerprint != tokenizer_fingerprint or manifest.order != order:
            raise WrongOwner(
                f"The table {self.path.name!r} belongs to another tokenizer or has order {manifest.order}; "
                "choose another name or remove it first."
            )
        return manifest

    def load(self) -> Manifest:
        """Read and check the manifest.

        Raises:
            FileNotFoundError: there is no table.
            DamagedFile: torn, flipped or impossible.
        """
        fd = os.open(self.manifest_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        try:
            return _parse(data)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DamagedFile(f"{self.manifest_path} is damaged; remove this table and build it again.") from None

    def update(self, change: Callable[[Manifest], Manifest]) -> Manifest:
        """Replace the manifest by what `change` makes of the newest one; safe against other processes.

        Raises TableFull if it names too many sources; the old one stays.
        """
        with self._manifest_lock():
            manifest = change(self.load())
            self._store(manifest)
        return manifest

    def builder_lock(self) -> contextlib.AbstractContextManager[None]:
        """Held by whoever adds or rewrites runs; BlockingIOError on entry when another process does so."""
        return exclusive_lock(self.path / "builder.lock", wait=False)

    def sweep(self) -> int:
        """Remove files that no manifest names: leftovers of killed builds and merges. Needs the builder lock."""
        manifest = self.load()
        named = {entry.file_name for entry in (*manifest.runs, *manifest.staged)}
        removed = sweep_temporary_files(self.path)
        for path in self.path.glob(f"*{RUN_SUFFIX}"):
            if path.name not in named:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def remove(self) -> None:
        """Delete the table; readers that have it open keep what they opened until they refresh."""
        self.manifest_path.unlink(missing_ok=True)
        sweep_temporary_files(self.path)
        for path in (*self.path.glob(f"*{RUN_SUFFIX}"), *self.path.glob("*.lock")):
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _manifest_lock(self) -> contextlib.AbstractContextManager[None]:
        return exclusive_lock(self.path / "manifest.lock", wait=True)

    def _store(self, manifest: Manifest) -> None:
        fields = asdict(manifest)
        fields["tokenizer_fingerprint"] = manifest.tokenizer_fingerprint.hex()
        fields["deleted"] = sorted(manifest.deleted)
        body = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
        if len(body) > MAX_MANIFEST_BYTES - 64:
            # It could not be read again.
            raise TableFull(
                f"The table {self.path.name!r} cannot name {len(manifest.sources):,} sources; build several from parts."
            )
        with AtomicFile(self.manifest_path, write_function=self._write_function) as file:
            file.write(f"{xxhash.xxh3_64_intdigest(body):016x}\n".encode() + body)


def _parse(data: bytes) -> Manifest:
    checksum, _, body = data.partition(b"\n")
    if len(data) > MAX_MANIFEST_BYTES or int(checksum, 16) != xxhash.xxh3_64_intdigest(body):
        raise ValueError
    fields: dict[str, Any] = json.loads(body)
    sources = fields["sources"]
    numbers = (*sources.values(), *fields["deleted"], fields["next_source"])
    staged_sources = tuple(fields["staged_sources"])
    # Tables of earlier versions do not name any.
    mount_points = tuple(fields.get("mount_points", ()))
    named = (fields["build"], *sources, *staged_sources, *mount_points)
    if not all(isinstance(name, str) for name in named) or not all(
        type(number) is int and 0 < number <= MAX_SOURCE + 1 for number in numbers
    ):
        raise ValueError
    fingerprint = bytes.fromhex(fields["tokenizer_fingerprint"])
    if len(fingerprint) != 32 or not MIN_ORDER <= fields["order"] <= MAX_ORDER:
        raise ValueError
    return Manifest(
        tokenizer_fingerprint=fingerprint,
        order=fields["order"],
        runs=tuple(_parse_entry(item) for item in fields["runs"]),
        staged=tuple(_parse_entry(item) for item in fields["staged"]),
        build=fields["build"],
        documents_done=int(fields["documents_done"]),
        staged_sources=staged_sources,
        sources=sources,
        deleted=frozenset(fields["deleted"]),
        next_source=fields["next_source"],
        mount_points=mount_points,
    )


def _parse_entry(item: dict[str, Any]) -> RunEntry:
    listed = item["sources"]
    # run_id becomes a file name, by way of a number: nothing in a manifest can name a path.
    return RunEntry(
        run_id=int(item["run_id"]) & ((1 << 64) - 1),
        page_count=int(item["page_count"]),
        record_count=int(item["record_count"]),
        token_count=int(item["token_count"]),
        sources=None if listed is None else tuple(int(source) for source in listed),
    )

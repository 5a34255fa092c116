"""Steps that every kind of pull shares: files into the partial folder, what is there already, room on the disk.

Knows one pull under way (`Job`) and its files. Does not know in which order sources are tried (`hub.pull`). Torch-free.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx

from localspec.hub import layout, sources
from localspec.hub.catalogue import HubSource, ModelEntry
from localspec.hub.install import CONVERTED_SIZE_FACTOR, LocalFile
from localspec.hub.layout import Manifest
from localspec.hub.meter import ProgressMeter
from localspec.hub.pins import Pin
from localspec.hub.records import HubSettings
from localspec.hub.replies import get_reply
from localspec.hub.transfer import Transfer, git_sha1_of
from localspec.hub.web import CorruptFile, FileChanged, RemoteFile, SourceUnavailable, probe

FETCH_ATTEMPTS = 2


@dataclass(frozen=True)
class Job:
    """What all steps of one pull share."""

    entry: ModelEntry
    data_dir: Path
    settings: HubSettings
    client: httpx.Client
    meter: ProgressMeter
    folder: Path
    offline: bool
    pins: Mapping[str, Pin]
    installed: Manifest | None = None
    """What is to be replaced; its unchanged files are taken over."""


@dataclass(frozen=True)
class Plan:
    """A located source: what would be fetched, and the step that fetches it."""

    label: str
    licence: str
    files: tuple[RemoteFile, ...]
    fetch: Callable[[], list[LocalFile]]
    resolved: tuple[HubSource, str] | None = None
    """A source that was resolved by listing it, and the commit: to be pinned."""
    base_model: str = ""
    """The repository that this one says it was made from."""


def held_bytes(job: Job, remote: RemoteFile) -> int:
    """Bytes of a file that earlier runs left behind."""
    finished = job.folder / remote.name
    if finished.is_file():
        return finished.stat().st_size
    return Transfer(job.client, remote, finished, job.settings, lambda n: None).held_bytes


def fetch_file(job: Job, remote: RemoteFile) -> LocalFile:
    """One file into the partial folder; a wrong hash or a changed file is tried once more from the beginning."""
    destination = job.folder / layout.check_file_name(remote.name)
    job.meter.file(remote.name)
    if destination.is_file():
        if (found := _finished_before(remote, destination)) is not None:
            return found
        job.meter.add(-destination.stat().st_size)
        destination.unlink()
    for attempt in range(1, FETCH_ATTEMPTS + 1):
        try:
            sha256 = Transfer(job.client, remote, destination, job.settings, job.meter.add).run()
            return LocalFile(remote.name, destination, sha256, "own")
        except (CorruptFile, FileChanged) as error:
            if attempt == FETCH_ATTEMPTS or remote.whole_bytes is not None:
                raise
            job.meter.note(f"{error}; fetching it again")
            remote = probe(job.client, remote)
    raise AssertionError("the loop returns or raises")


def _finished_before(remote: RemoteFile, destination: Path) -> LocalFile | None:
    """A file that an earlier run completed, if its hash is the one that the source states; None without one."""
    sha256 = layout.sha256_of(destination)
    if remote.sha256 is not None:
        is_same = sha256 == remote.sha256
    else:
        is_same = remote.git_sha1 is not None and git_sha1_of(destination) == remote.git_sha1
    return LocalFile(remote.name, destination, sha256, "own") if is_same else None


def file_here(job: Job, source: HubSource, remote: RemoteFile) -> Callable[[], LocalFile] | None:
    """How to take a file that is on this disk already, in the hub cache or the installed model; None if it is not.

    The returned step checks its hash and raises CorruptFile for a damaged file of the hub cache.
    """
    blob = sources.cached_blob(job.settings, source, remote)
    if blob is not None:
        return lambda: _check_blob(job, remote, blob)
    record = job.installed.files.get(remote.name) if job.installed is not None else None
    path = layout.models_directory(job.data_dir) / job.entry.id / remote.name
    if record is None or remote.sha256 is None or record.sha256 != remote.sha256 or not path.is_file():
        return None
    # A damaged one is fetched, so its hash is looked at before the disk is planned.
    if path.stat().st_size != record.size_bytes or layout.sha256_of(path) != remote.sha256:
        return None
    return lambda: LocalFile(remote.name, path.resolve(), remote.sha256, "kept")


def _check_blob(job: Job, remote: RemoteFile, blob: Path) -> LocalFile:
    job.meter.note(f"{remote.name} is in the hub cache and is used from there")
    sha256 = layout.sha256_of(blob)
    if remote.sha256 is not None and sha256 != remote.sha256:
        raise CorruptFile(f"{remote.name} in the hub cache ({blob}) is damaged; remove it there and pull again")
    return LocalFile(remote.name, blob.resolve(), sha256, "shared")


def small_file(job: Job, source: HubSource, remote: RemoteFile) -> bytes:
    """A small file's bytes, from the hub cache or the network, checked against what the listing states.

    Raises CorruptFile when they are others, SourceUnavailable when offline and not cached.
    """
    blob = sources.cached_blob(job.settings, source, remote)
    if blob is not None:
        body = blob.read_bytes()
    elif job.offline:
        raise SourceUnavailable(f"{remote.name} is not in the hub cache and offline mode was asked for")
    else:
        body = get_reply(job.client, remote, job.settings).body
    wrong = remote.sha256 is not None and hashlib.sha256(body).hexdigest() != remote.sha256
    if remote.git_sha1 is not None:
        git_hash = hashlib.sha1(f"blob {len(body)}\0".encode() + body, usedforsecurity=False)
        wrong = wrong or git_hash.hexdigest() != remote.git_sha1
    if wrong:
        raise CorruptFile(f"{remote.name} of {source.repo} has the wrong hash")
    return body


def check_disk(job: Job, to_fetch: list[RemoteFile], extra_bytes: int = 0) -> None:
    """Refuses before the first byte, with numbers, when the download and its conversion cannot fit."""
    size_bytes = sum(remote.size_bytes or 0 for remote in to_fetch)
    left_bytes = size_bytes - sum(held_bytes(job, remote) for remote in to_fetch if remote.url)
    if job.entry.format == "gguf":
        extra_bytes += int(max(size_bytes, extra_bytes) * CONVERTED_SIZE_FACTOR)
    layout.refuse_small_disk(job.entry.id, left_bytes + extra_bytes, job.data_dir)

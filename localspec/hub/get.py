"""What `localspec pull NAME` gets: a model and the drafters that go with it, or one drafter. Torch-free.

Knows names of models and drafters and what an export may have lost. How one entry comes to this disk is `hub.pull`'s
matter.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from localspec.hub import layout
from localspec.hub.catalogue import (
    DRAFTER_KINDS,
    Catalogue,
    DrafterEntry,
    ModelEntry,
    drafter_entry,
    find_drafter,
    is_repo,
    with_drafter,
)
from localspec.hub.install import LocalFile, NewModel, install
from localspec.hub.local import other_source
from localspec.hub.meter import ProgressMeter
from localspec.hub.parts import holds_mtp
from localspec.hub.pull import drafters_directory, pull
from localspec.hub.records import HubError, HubSettings, ProgressCallback, PullProgress, PullResult, ignore_progress
from localspec.storage.errors import DamagedFile
from localspec.storage.safetensors import SafetensorsFile

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class Wish:
    """What a user asked for. `name`: a model, `MODEL.KIND`, or a hub address. `drafters`: kinds, `KIND=owner/name`,
    `auto` (drafters that come with this program, and the model's own MTP block, from its base repository where the
    export lost it) or `none`."""

    name: str
    drafters: tuple[str, ...] = (AUTO,)
    offline: bool = False
    dry_run: bool = False
    force: bool = False
    update: bool = False


def get(
    catalogue: Catalogue,
    wish: Wish,
    data_dir: Path,
    settings: HubSettings,
    progress: ProgressCallback = ignore_progress,
) -> tuple[PullResult, ...]:
    """Pulls what was wished for; the model first, then its drafters.

    Raises HubError when the model, or a drafter that was asked for by name, cannot be had, or when another model of
    the same name is installed. A drafter that nobody named
    is left out with a note: the model answers the same without it.
    """
    known = find_drafter(catalogue, wish.name)
    if known is not None:
        return (_get_drafter(catalogue, known[0], known[1], wish, data_dir, settings, progress),)
    model = catalogue.find(wish.name)
    other = other_source(data_dir, model)
    if other is not None and not wish.force:
        raise HubError(
            f"another model is installed as {model.id}, from {other}; remove it with: localspec rm {model.id}, or "
            "replace it with --force"
        )
    for text in wish.drafters:
        kind, _, repo = text.partition("=")
        if repo:
            model = with_drafter(model, kind, repo)
        elif kind not in (AUTO, NONE):
            # Refused here and not after the model's gigabytes.
            _known_kind(catalogue, model, kind)
    result = _pull(model, wish, data_dir, settings, progress)
    found = [result]
    named = [text.partition("=")[0] for text in wish.drafters if text not in (AUTO, NONE)]
    for kind in named:
        if kind == "mtp" and _brings_mtp(result):
            progress(PullProgress("note", f"{model.id} holds its mtp block; there is nothing more to pull for it"))
            continue
        found.append(_get_drafter(catalogue, model, kind, wish, data_dir, settings, progress))
    if AUTO in wish.drafters:
        own = [drafter.kind for drafter in model.drafters if drafter.bundled is not None and drafter.kind not in named]
        found += [_get_drafter(catalogue, model, kind, wish, data_dir, settings, progress) for kind in own]
    if AUTO in wish.drafters and "mtp" not in named:
        with contextlib.suppress(_LeftOut):
            found += _missing_mtp(catalogue, model, result, wish, data_dir, settings, progress)
    return tuple(found)


class _LeftOut(Exception):
    """A drafter that nobody named could not be had; why was said."""


def _known_kind(catalogue: Catalogue, model: ModelEntry, kind: str) -> None:
    if kind not in DRAFTER_KINDS:
        raise HubError(f"there is no kind of drafter {kind!r}; there are {', '.join(DRAFTER_KINDS)}")
    if not any(drafter.kind == "mtp" and drafter.repo is None for drafter in model.drafters if drafter.kind == kind):
        drafter_entry(catalogue, model, kind)


def _pull(
    entry: ModelEntry, wish: Wish, data_dir: Path, settings: HubSettings, progress: ProgressCallback
) -> PullResult:
    return pull(
        entry,
        data_dir,
        settings,
        progress,
        offline=wish.offline,
        dry_run=wish.dry_run,
        force=wish.force,
        update=wish.update,
    )


def _get_drafter(
    catalogue: Catalogue,
    model: ModelEntry,
    kind: str,
    wish: Wish,
    data_dir: Path,
    settings: HubSettings,
    progress: ProgressCallback,
) -> PullResult:
    entry = drafter_entry(catalogue, model, kind)
    small = next((drafter.model for drafter in model.drafters if drafter.kind == kind), None)
    source = data_dir / "models" / catalogue.find(small).id if small is not None else None
    if source is not None and not (wish.dry_run or wish.update) and (source / layout.MANIFEST_NAME).is_file():
        taken = _take_installed(entry, source, data_dir, wish.force, progress)
        if taken is not None:
            return taken
    return _pull(entry, wish, drafters_directory(data_dir), settings, progress)


def _take_installed(
    entry: ModelEntry, source: Path, data_dir: Path, force: bool, progress: ProgressCallback
) -> PullResult | None:
    """A small model that is installed already drafts from links to its files. None when it cannot be used so."""
    target = drafters_directory(data_dir) / "models" / entry.id
    if target.is_dir() and not force:
        return None
    manifest = layout.read_manifest(source)
    files = [LocalFile(name, source / name, record.sha256, "kept") for name, record in manifest.files.items()]
    if any(not file.path.is_file() for file in files):
        return None
    model = NewModel(entry.id, manifest.source, manifest.licence)
    directory = install(files, model, drafters_directory(data_dir), ProgressMeter(progress))
    progress(PullProgress("done", f"{entry.id} is ready, from the installed {source.name}"))
    sizes: dict[str, int | None] = {name: record.size_bytes for name, record in manifest.files.items()}
    return PullResult(entry.id, str(directory), manifest.source, sizes)


def _missing_mtp(
    catalogue: Catalogue,
    model: ModelEntry,
    result: PullResult,
    wish: Wish,
    data_dir: Path,
    settings: HubSettings,
    progress: ProgressCallback,
) -> list[PullResult]:
    """The MTP block of the base repository for a model whose config promises one that its files do not hold."""
    if result.dry_run or not promises_mtp(Path(result.directory)) or _brings_mtp(result):
        return []
    stated = next((drafter.repo for drafter in model.drafters if drafter.kind == "mtp"), None)
    base = stated or result.base_model or model.base or ""
    if not is_repo(base) or base == result.source.partition("@")[0]:
        return []
    progress(PullProgress("note", f"{model.id} lost its mtp block when it was exported; taking it from {base}"))
    fuller = replace(
        model, drafters=(DrafterEntry("mtp", base), *(each for each in model.drafters if each.kind != "mtp"))
    )
    try:
        return [_get_drafter(catalogue, fuller, "mtp", wish, data_dir, settings, progress)]
    except HubError as error:
        progress(PullProgress("note", f"{model.id} goes without its mtp block: {error}"))
        raise _LeftOut from error


def promises_mtp(folder: Path) -> bool:
    """Whether a model's config.json speaks of an MTP block. Raises HubError for a damaged one."""
    config = layout.read_json(folder / "config.json")
    nested = config.get("text_config")
    text = nested if isinstance(nested, dict) else config
    n_layers = text.get("mtp_num_hidden_layers", 0)
    return type(n_layers) is int and n_layers > 0


def _brings_mtp(result: PullResult) -> bool:
    """Whether the installed files hold `mtp.*`, told from their headers."""
    for path in sorted(Path(result.directory).glob("*.safetensors")):
        try:
            with SafetensorsFile.open(path) as file:
                if holds_mtp(file.entries):
                    return True
        except (DamagedFile, OSError):
            continue
    return False

"""`pull`, `ls`, `show`, `rm`: models on this machine."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.common import (
    catalogue,
    drafter_ids,
    fail,
    gib,
    hub_settings,
    installed_ids,
    known_id,
    print_json,
    settings,
)
from localspec.commands.options import json_option, offline_option
from localspec.commands.progress import ProgressLines
from localspec.config import Settings

if TYPE_CHECKING:
    from localspec.hub.budget import Use
    from localspec.hub.catalogue import DrafterEntry, ModelEntry
    from localspec.hub.records import PullResult


@click.command()
@click.argument("model")
@click.option(
    "--drafter",
    "drafters",
    multiple=True,
    metavar="KIND[=OWNER/NAME]",
    help="Also get this drafter: eagle3, dflash, dspark, draft_model, mtp; or none. May be given more than once. "
    "Default: the model's own MTP block, from its base repository if the export lost it.",
)
@click.option("--update", is_flag=True, help="Ask for the newest revision, and replace the model if it is another one.")
@click.option("--force", is_flag=True, help="Replace the installed model; files that are whole are kept.")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, and fetch nothing.")
@offline_option
@json_option
def pull(
    model: str, drafters: tuple[str, ...], update: bool, force: bool, dry_run: bool, offline: bool, as_json: bool
) -> None:
    """Get MODEL: a name of the catalogue, a hub address owner/name or owner/name:file.gguf, or a drafter MODEL.KIND."""
    from localspec.hub.get import AUTO, Wish, get
    from localspec.hub.records import HubError

    config = settings()
    offline = offline or config.network.offline
    wish = Wish(model, drafters or (AUTO,), offline=offline, dry_run=dry_run, force=force, update=update)
    try:
        _warn_unsuited(config, model)
        results = get(catalogue(config), wish, config.paths.data_dir, hub_settings(config), ProgressLines())
    except HubError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); free space or mend its permissions")
    if as_json:
        documents = [_pull_document(result) for result in results]
        print_json({**documents[0], "drafters": documents[1:]})
        return
    for result in results:
        done = "would come" if dry_run else "already here" if result.already_installed else "ready"
        click.echo(f"{result.model_id}: {done} from {result.source}{_sizes(result) if dry_run else ''}")


def _warn_unsuited(config: Settings, model: str) -> None:
    """Said before the gigabytes come, not refused: the files may be for another machine. Raises HubError."""
    from localspec.hub.catalogue import find_drafter
    from localspec.hub.gpus import read_gpus
    from localspec.hub.suits import why_unsuited

    known = catalogue(config)
    entry = known.find(model) if find_drafter(known, model) is None else None
    reason = why_unsuited(entry, read_gpus()) if entry is not None and entry.smallest_gpu_gib else None
    if reason is not None:
        click.echo(f"Note: {reason}.", err=True)


def _pull_document(result: PullResult) -> dict[str, Any]:
    document = dataclasses.asdict(dataclasses.replace(result, files={}))
    return {**document, "files": dict(result.files), "total_bytes": sum(size or 0 for size in result.files.values())}


def _sizes(result: PullResult) -> str:
    rows = [(name, "size not stated" if size is None else gib(size)) for name, size in result.files.items()]
    rows.append(("in all", gib(sum(size or 0 for size in result.files.values()))))
    return "".join(f"\n  {name:60} {size:>12}" for name, size in rows)


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """List installed models with their drafters, and those of the catalogue that are not installed."""
    config = settings()
    known = {entry.id: entry for entry in catalogue(config).models}
    here = installed_ids(config)
    rows = [
        {
            "id": model_id,
            "installed": model_id in here,
            "size_bytes": _size(config.paths.models_dir / model_id),
            "title": known[model_id].title if model_id in known else model_id,
            "demo": known[model_id].demo if model_id in known else False,
            "drafters": _installed_drafters(config, model_id),
            "smallest_gpu_gib": known[model_id].smallest_gpu_gib if model_id in known else None,
            "verified": known[model_id].verified if model_id in known else None,
        }
        for model_id in [*here, *(name for name in known if name not in here)]
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        size = gib(int(str(row["size_bytes"]))) if row["installed"] else "not installed"
        marks = " (demo)" if row["demo"] else ""
        marks += " (unverified)" if row["verified"] is False and not row["installed"] else ""
        marks += "".join(f" +{kind}" for kind in _installed_drafters(config, str(row["id"])))
        click.echo(f"{row['id']:32} {size:>14}  {row['title']}{marks}")


def _installed_drafters(config: Settings, model_id: str) -> list[str]:
    """Kinds of drafters that were installed for a model."""
    kinds = [name.removeprefix(f"{model_id}.") for name in drafter_ids(config) if name.startswith(f"{model_id}.")]
    return sorted(kind for kind in kinds if "." not in kind)


@click.command()
@click.argument("model")
@click.option("--fit", "with_fit", is_flag=True, help="Also: the memory budget by use, and the context that fits.")
@click.option(
    "--gpu-gib", type=click.FloatRange(min=0, min_open=True, max=4096), help="With --fit: for a card of this size."
)
@json_option
def show(model: str, with_fit: bool, gpu_gib: float | None, as_json: bool) -> None:
    """Show what is known of MODEL: source, files, drafters, presets; with --fit what of it fits a card."""
    from localspec.hub.records import HubError

    config = settings()
    try:
        document = _show_document(config, model)
        budgets = _budgets(config, model, gpu_gib) if with_fit or gpu_gib is not None else None
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        fits = {} if budgets is None else {"fit": [dataclasses.asdict(budget) for budget in budgets]}
        print_json({**document, **fits})
        return
    for name, value in document.items():
        click.echo(f"{name:26} {value}")
    for line in _budget_lines(budgets or ()):
        click.echo(line)


def _show_document(config: Settings, model: str) -> dict[str, Any]:
    from localspec.hub import local
    from localspec.hub.catalogue import find_drafter

    model_id = known_id(config, model)
    drafter = find_drafter(catalogue(config), model)
    if drafter is not None or model_id in drafter_ids(config):
        return _drafter_document(config, model_id)
    if model_id in installed_ids(config) and not _in_catalogue(config, model_id):
        facts = local.show(config.paths.data_dir, model_id)
        manifest = facts.model.manifest
        return {
            "id": model_id,
            "title": model_id,
            "architecture": facts.architecture,
            "format": facts.weight_format,
            "licence": manifest.licence if manifest else "not stated",
            "source": manifest.source if manifest else "not stated",
            "context_limit_tokens": facts.context_tokens,
            "has_chat_template": facts.has_chat_template,
            "drafters_installed": _installed_drafters(config, model_id),
            "installed": True,
            "folder": str(facts.model.directory),
            "size_bytes": facts.model.size_bytes,
            "problem": facts.model.problem,
        }
    entry = catalogue(config).find(model)
    folder = config.paths.models_dir / entry.id
    return {
        "id": entry.id,
        "title": entry.title,
        "architecture": entry.architecture,
        "format": entry.format,
        "licence": entry.licence,
        "demo": entry.demo,
        "advice": entry.advice,
        "verified": entry.verified,
        "pinned_revisions": _pinned_revisions(config, entry),
        "download_gb": entry.download_gb or None,
        "sources": [_described_source(source) for source in entry.sources],
        "drafters": [_described_drafter(drafter) for drafter in entry.drafters],
        "drafters_installed": _installed_drafters(config, entry.id),
        "sampling": {name: dict(preset) for name, preset in entry.sampling.items()},
        "smallest_gpu_gib": entry.smallest_gpu_gib,
        "context_tokens_by_gpu_gib": {str(size): tokens for size, tokens in entry.context_tokens.items()},
        "installed": (folder / "localspec.json").is_file(),
        "folder": str(folder),
        "size_bytes": _size(folder),
    }


def _drafter_document(config: Settings, drafter_id: str) -> dict[str, Any]:
    """What is known of a drafter by its id, `MODEL.KIND`."""
    model_id, _, kind = drafter_id.rpartition(".")
    folder = config.paths.drafters_dir / drafter_id
    entry = next((each for each in catalogue(config).models if each.id == model_id), None)
    known = next((each for each in entry.drafters if each.kind == kind), None) if entry is not None else None
    return {
        "id": drafter_id,
        "kind": kind,
        "drafts_for": model_id,
        "source": _described_drafter(known) if known is not None else "not in the catalogue",
        "verified": known.verified if known is not None else None,
        "installed": drafter_id in drafter_ids(config),
        "folder": str(folder),
        "size_bytes": _size(folder),
    }


def _in_catalogue(config: Settings, model_id: str) -> bool:
    return any(model_id == entry.id for entry in catalogue(config).models)


def _pinned_revisions(config: Settings, entry: ModelEntry) -> dict[str, str]:
    """Repository -> commit, for what was resolved at a pull. A damaged record counts as none; a pull says so."""
    from localspec.hub.catalogue import HubSource
    from localspec.hub.pins import pin_of, read_pins
    from localspec.hub.records import HubError

    try:
        pins = read_pins(config.paths.data_dir)
    except HubError:
        return {}
    sources = [source for source in entry.sources if isinstance(source, HubSource)]
    return {source.repo: pin.commit for source in sources if (pin := pin_of(source, pins)) is not None}


def _described_source(source: Any) -> str:
    from localspec.hub.catalogue import HubSource

    if not isinstance(source, HubSource):
        return f"wheel {source.requirement}"
    files = ", ".join(file.name for file in source.files) or " ".join(source.include)
    return f"{source.repo}@{source.revision}: {files}"


def _described_drafter(drafter: DrafterEntry) -> str:
    if drafter.bundled is not None:
        return f"{drafter.kind}, which comes with this program"
    place = drafter.repo or drafter.model
    return f"{drafter.kind} from {place}" if place else f"{drafter.kind} in the model's own files"


def _budgets(config: Settings, model: str, gpu_gib: float | None) -> tuple[Use, ...]:
    """The budget on the asked size, or on each card of this machine, or on sizes that cards are sold in."""
    from localspec.hub import budget
    from localspec.hub.fit import cache_shape, weights_of
    from localspec.hub.gpus import read_gpus
    from localspec.hub.layout import read_json

    model_id = known_id(config, model)
    folder = config.paths.models_dir / model_id
    cards: tuple[budget.Card, ...] = tuple(budget.card_of(gpu) for gpu in read_gpus().gpus)
    if gpu_gib is not None:
        cards = (budget.sold_card(gpu_gib),)
    elif not cards:
        cards = tuple(budget.sold_card(size) for size in budget.SOLD_SIZES_GIB)
    if not (folder / "localspec.json").is_file():
        entry = catalogue(config).find(model)
        return tuple(budget.estimated_use(card, entry) for card in cards)
    weights, shape = weights_of(folder), cache_shape(read_json(folder / "config.json"))
    drafters = budget.drafter_bytes(config.paths.drafters_dir, model_id)
    return tuple(budget.use_of(card, weights, shape, drafters) for card in cards)


def _budget_lines(budgets: tuple[Use, ...]) -> list[str]:
    lines: list[str] = []
    for budget in budgets:
        lines += ["", f"on {budget.card}: {gib(budget.available_bytes)} usable"]
        lines += [f"  {part.name:34} {gib(part.bytes):>12}" for part in budget.parts]
        for context in budget.contexts:
            takes = f", {context.bytes_per_token / 1024:.1f} KiB a token" if context.bytes_per_token else ""
            fitted = f"{context.tokens:,} tokens" if context.tokens else "does not fit"
            lines.append(f"  context with a {context.kv_dtype} cache{takes}: {fitted}")
        lines += [f"  {budget.note}"] if budget.note else []
    return lines


@click.command()
@click.argument("model")
@json_option
def rm(model: str, as_json: bool) -> None:
    """Remove the installed MODEL with its drafters, or the drafter MODEL.KIND alone. Chats are kept."""
    from localspec.hub.local import remove
    from localspec.hub.pull import drafters_directory
    from localspec.hub.records import HubError

    config = settings()
    data_dir, drafters_dir = config.paths.data_dir, drafters_directory(config.paths.data_dir)
    model_id = known_id(config, model)
    removed: dict[str, int] = {}
    try:
        if model_id in drafter_ids(config):
            removed[model_id] = remove(drafters_dir, model_id)
        else:
            kinds = _installed_drafters(config, model_id)
            removed[model_id] = remove(data_dir, model_id)
            removed |= {name: remove(drafters_dir, name) for name in (f"{model_id}.{kind}" for kind in kinds)}
    except HubError as error:
        fail(str(error), error.exit_code)
    if as_json:
        print_json({"removed": removed, "freed_bytes": sum(removed.values())})
        return
    for name, freed_bytes in removed.items():
        click.echo(f"{name}: removed, {gib(freed_bytes)} freed")


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0

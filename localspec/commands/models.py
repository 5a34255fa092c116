"""`pull`, `ls`, `show`, `rm`: models on this machine."""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.common import catalogue, fail, gib, hub_settings, installed_ids, print_json, settings
from localspec.commands.options import json_option, offline_option

if TYPE_CHECKING:
    from localspec.hub.records import PullProgress

PROGRESS_LINE_EVERY_S = 2.0


@click.command()
@click.argument("model")
@click.option("--dry-run", is_flag=True, help="Say what would be fetched, and fetch nothing.")
@offline_option
@json_option
def pull(model: str, dry_run: bool, offline: bool, as_json: bool) -> None:
    """Get MODEL: a name of the catalogue, or a hub address owner/name."""
    from localspec.hub.pull import pull as fetch
    from localspec.hub.records import HubError

    config = settings()
    try:
        result = fetch(
            catalogue(config).find(model),
            config.paths.data_dir,
            hub_settings(config),
            ProgressLines(),
            offline=offline or config.network.offline,
            dry_run=dry_run,
        )
    except HubError as error:
        fail(str(error), error.exit_code)
    except OSError as error:
        fail(f"{error.filename or 'a file'} cannot be written ({error.strerror}); free space or mend its permissions")
    if as_json:
        document = dataclasses.asdict(dataclasses.replace(result, files={}))
        print_json({**document, "files": dict(result.files)})
    else:
        click.echo(f"{result.model_id}: {'would come' if dry_run else 'ready'} from {result.source}")


@click.command()
@json_option
def ls(as_json: bool) -> None:
    """List installed models, and those of the catalogue that are not."""
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
        }
        for model_id in [*here, *(name for name in known if name not in here)]
    ]
    if as_json:
        print_json(rows)
        return
    for row in rows:
        size = gib(int(str(row["size_bytes"]))) if row["installed"] else "not installed"
        click.echo(f"{row['id']:32} {size:>14}  {row['title']}{' (demo)' if row['demo'] else ''}")


@click.command()
@click.argument("model")
@json_option
def show(model: str, as_json: bool) -> None:
    """Show what is known of MODEL: source, files, drafters, presets."""
    from localspec.hub.records import HubError

    config = settings()
    try:
        entry = catalogue(config).find(model)
    except HubError as error:
        fail(str(error), error.exit_code)
    folder = config.paths.models_dir / entry.id
    document: dict[str, Any] = {
        "id": entry.id,
        "title": entry.title,
        "architecture": entry.architecture,
        "format": entry.format,
        "licence": entry.licence,
        "demo": entry.demo,
        "advice": entry.advice,
        "verified": entry.verified,
        "drafters": [drafter.kind for drafter in entry.drafters],
        "sampling": {name: dict(preset) for name, preset in entry.sampling.items()},
        "smallest_gpu_gib": entry.smallest_gpu_gib,
        "context_tokens_by_gpu_gib": {str(size): tokens for size, tokens in entry.context_tokens.items()},
        "installed": (folder / "localspec.json").is_file(),
        "folder": str(folder),
        "size_bytes": _size(folder),
    }
    if as_json:
        print_json(document)
        return
    for name, value in document.items():
        click.echo(f"{name:26} {value}")


@click.command()
@click.argument("model")
def rm(model: str) -> None:
    """Remove the installed MODEL. Chats are kept."""
    from localspec.hub.local import remove
    from localspec.hub.records import HubError

    config = settings()
    try:
        freed = remove(config.paths.data_dir, _installed_id(model))
    except HubError as error:
        fail(str(error), error.exit_code)
    click.echo(f"{model}: removed, {gib(freed)} freed")


def _installed_id(model: str) -> str:
    from localspec.hub.records import HubError

    try:
        return catalogue(settings()).find(model).id
    except HubError:
        return model


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


class ProgressLines:
    """Progress on stderr: one moving line on a terminal, a plain line every few seconds elsewhere."""

    def __init__(self) -> None:
        self._moving = sys.stderr.isatty()
        self._last_s = 0.0
        self._last_stage = ""

    def __call__(self, progress: PullProgress) -> None:
        now = time.monotonic()
        new_stage = progress.stage != self._last_stage or progress.stage in ("note", "done")
        if not new_stage and now - self._last_s < (0.1 if self._moving else PROGRESS_LINE_EVERY_S):
            return
        self._last_s, self._last_stage = now, progress.stage
        text = progress.message
        if progress.total_bytes:
            share = progress.done_bytes * 100 // progress.total_bytes
            text += f" · {share}% of {gib(progress.total_bytes)} · {gib(int(progress.rate_bytes_per_s))}/s"
            if progress.eta_s is not None:
                text += f" · {progress.eta_s:.0f} s left"
        if self._moving and not new_stage:
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        else:
            click.echo(f"\r\x1b[K{text}" if self._moving else text, err=True)

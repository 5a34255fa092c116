"""`localspec ngram`: tables of n-grams of the user's own text, which the engine drafts from."""

from __future__ import annotations

import dataclasses
import errno
import math
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.common import (
    EXIT_FAILED,
    EXIT_MACHINE_CANNOT,
    EXIT_WRONG_USE,
    catalogue,
    default_model,
    fail,
    gib,
    installed_ids,
    print_json,
    settings,
)
from localspec.commands.options import json_option, model_option

if TYPE_CHECKING:
    from localspec.hub.ngram_sync import SyncProgress, SyncReport, TableSync

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PROGRESS_LINE_EVERY_S = 2.0
_LARGEST_SHARE = 0.04
"""Of a core, for looking at files that do not change: in large trees the looks are further apart."""

paths_argument = click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
min_count_option = click.option(
    "--min-count",
    type=click.IntRange(1, 100),
    default=1,
    show_default=True,
    help="Keep what was seen this often. 2 for foreign text.",
)


@click.group()
def ngram() -> None:
    """Tables of your own text on the SSD, from which the engine drafts."""


@ngram.command()
@click.argument("name")
@paths_argument
@model_option
@min_count_option
@click.option("--order", type=click.IntRange(3, 12), default=8, show_default=True, help="Shortest match in tokens.")
@json_option
def build(name: str, paths: tuple[Path, ...], model: str | None, min_count: int, order: int, as_json: bool) -> None:
    """Make table NAME from files, source trees, JSON lines or the chats database at PATHS. Goes on after a kill."""
    with _explained(name):
        sync = _sync(name, model, order=order, min_count=min_count)
        manifest = sync.manifest()
        if manifest is not None and manifest.runs:
            fail(f"the table {name} exists; add to it with: localspec ngram add {name} PATH", EXIT_WRONG_USE)
        _show(name, sync.run(paths, ProgressLines(name)), as_json)
        if not as_json:
            click.echo(f"{name}: engines draft from it from their next start on", err=True)


@ngram.command()
@click.argument("name")
@paths_argument
@model_option
@min_count_option
@json_option
def add(name: str, paths: tuple[Path, ...], model: str | None, min_count: int, as_json: bool) -> None:
    """Add what is new at PATHS to table NAME; files that changed are replaced."""
    with _explained(name):
        sync = _existing(name, model, min_count=min_count)
        _show(name, sync.run(paths, ProgressLines(name)), as_json)


@ngram.command()
@click.argument("name")
@paths_argument
@model_option
@click.option(
    "--every", "every_s", type=click.FloatRange(0.05), default=5.0, show_default=True, help="Seconds at least."
)
@click.option("--rounds", type=click.IntRange(1), help="Stop after as many looks. Default: at Ctrl-C.")
@click.option(
    "--prune", is_flag=True, help="At the first look, drop what was in folders that are empty or unmounted now."
)
def watch(
    name: str, paths: tuple[Path, ...], model: str | None, every_s: float, rounds: int | None, prune: bool
) -> None:
    """Keep table NAME in step with the files at PATHS until Ctrl-C. What may only be away, as files of a disk that is
    not mounted, stays in the table until --prune."""
    if not math.isfinite(every_s):
        fail(f"--every {every_s} is no number of seconds; give one such as 5", EXIT_WRONG_USE)
    with _explained(name):
        watching = _Watching(name, paths, _existing(name, model, remove_missing=True))
        watching.sync.prune = prune
        done = 0
        while rounds is None or done < rounds:
            if done:
                time.sleep(max(every_s, watching.looked_s / _LARGEST_SHARE))
            # A folder that is not there at the first look was misspelt; later on it is away for now.
            watching.look(first=not done)
            watching.sync.prune = False
            done += 1


@ngram.command()
@json_option
def ls(as_json: bool) -> None:
    """List the tables, and the installed models that they fit."""
    models = _models_by_fingerprint()
    rows = [_row(path, models) for path in _tables()]
    if as_json:
        print_json(rows)
        return
    if not rows:
        click.echo("no tables yet; make one with: localspec ngram build NAME PATH", err=True)
    for row in rows:
        fits = ", ".join(row["models"]) or "no installed model"
        state = row["problem"] or f"{row['tokens']:>12,} tokens  {gib(row['size_bytes']):>10}  for {fits}"
        if row["unfinished_tokens"]:
            state += f"  unfinished: {row['unfinished_tokens']:,} tokens wait for the same command again"
        click.echo(f"{row['name']:24} {state}")


@ngram.command()
@click.argument("name")
@json_option
def stats(name: str, as_json: bool) -> None:
    """Show what table NAME holds."""
    with _explained(name):
        row = _row(_place(name), _models_by_fingerprint())
    if row["problem"]:
        fail(row["problem"])
    if as_json:
        print_json(row)
        return
    for key, value in row.items():
        if key != "problem":
            click.echo(f"{key:18} {', '.join(value) if isinstance(value, list) else value}")


@ngram.command()
@click.argument("name")
def rm(name: str) -> None:
    """Remove table NAME. An engine that uses it goes on without."""
    from localspec.storage.ngram_manifest import TableDirectory

    with _explained(name):
        place = _place(name)
        size_bytes = _size_bytes(place)
        table = TableDirectory(place)
        with table.builder_lock():
            table.remove()
    click.echo(f"{name}: removed, {gib(size_bytes)} freed")


@dataclasses.dataclass
class _Watching:
    """A table that follows some paths. told: what was last said to be away."""

    name: str
    paths: tuple[Path, ...]
    sync: TableSync
    told: frozenset[Path] = frozenset()
    looked_s: float = 0.0
    """Processor time of the last look at what has changed."""

    def look(self, first: bool) -> None:
        """Take up what has changed. Raises HubError if a path is not there at the first look."""
        from localspec.hub.records import HubError

        try:
            begun_s = time.process_time()
            changed = self.sync.changed(self.paths)
            self.looked_s = time.process_time() - begun_s
            report = self.sync.run(self.paths, ProgressLines(self.name)) if changed else None
        except BlockingIOError:
            return
        except HubError:
            gone = frozenset(path for path in self.paths if not path.expanduser().exists())
            if first or not gone:
                raise
            self._tell(gone)
            return
        self._tell(self.sync.away)
        if report is not None and (report.new_sources or report.removed_sources):
            click.echo(f"{self.name}: {report.new_sources} new, {report.removed_sources} replaced or gone", err=True)

    def _tell(self, away: frozenset[Path]) -> None:
        for place in sorted(away - self.told):
            click.echo(
                f"{self.name}: nothing is left at {place}, a disk not mounted? What the table has of it stays; "
                f"drop it with: localspec ngram watch {self.name} {place} --rounds 1 --prune",
                err=True,
            )
        self.told = away


class ProgressLines:
    """Progress on stderr: one moving line on a terminal, a line every few seconds elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._moving = sys.stderr.isatty()
        self._last_s = time.monotonic()

    def __call__(self, progress: SyncProgress) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < (0.1 if self._moving else _PROGRESS_LINE_EVERY_S):
            return
        self._last_s = now_s
        if progress.merged_share is not None:
            text = f"{self._name}: merging · {progress.merged_share:.0%}"
        else:
            share = progress.done_bytes / max(progress.total_bytes, 1)
            rate = progress.tokens / max(progress.elapsed_s, 1e-6)
            text = f"{self._name}: {share:.0%} of {gib(progress.total_bytes)} · {rate:,.0f} tokens/s"
            if progress.eta_s is not None:
                text += f" · {progress.eta_s:.0f} s left"
        click.echo(f"\r\x1b[K{text}" if self._moving else text, err=True, nl=not self._moving)


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Errors of the layers below as one line and an exit code."""
    from localspec.hub.records import HubError
    from localspec.storage.errors import DamagedFile, TableFull, WrongOwner

    try:
        yield
    except HubError as error:
        fail(str(error), error.exit_code)
    except (DamagedFile, TableFull, WrongOwner) as error:
        fail(str(error))
    except FileNotFoundError:
        fail(f"there is no table {name}; make it with: localspec ngram build {name} PATH")
    except BlockingIOError:
        fail(f"another process is working on the table {name}; try again when it is done")
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        again = "free space and run the same command again: it goes on from there" if full else "mend its permissions"
        code = EXIT_MACHINE_CANNOT if full else EXIT_FAILED
        fail(f"the table {name} cannot be written ({error.strerror or error}); {again}", code)


def _place(name: str) -> Path:
    if not _NAME.fullmatch(name):
        fail(f"{name!r} cannot name a table; use letters, digits, dots and dashes, at most 64", EXIT_WRONG_USE)
    return settings().paths.ngram_dir / name


def _sync(name: str, model: str | None, **options: Any) -> TableSync:
    """The table with the tokenizer of the given or default model, which must be installed."""
    from localspec.hub.ngram_sync import SyncOptions, TableSync

    place = _place(name)
    config = settings()
    model_id = model or default_model(config)
    if model_id not in installed_ids(config):
        model_id = catalogue(config).find(model_id).id
    folder = config.paths.models_dir / model_id
    if not (folder / "localspec.json").is_file():
        fail(f"{model_id} is not installed, so its tokenizer is not here; get it with: localspec pull {model_id}")
    return TableSync(place, folder, SyncOptions(**options))


def _existing(name: str, model: str | None, **options: Any) -> TableSync:
    """Like `_sync`, for a table that is there: its order, and without --model the model that it was built for."""
    from localspec.storage.ngram_manifest import TableDirectory

    manifest = TableDirectory(_place(name)).load()
    fitting = _models_by_fingerprint().get(manifest.tokenizer_fingerprint, [])
    return _sync(name, model or (fitting[0] if fitting else None), order=manifest.order, **options)


def _models_by_fingerprint() -> dict[bytes, list[str]]:
    from localspec.hub.corpus import tokenizer_fingerprint
    from localspec.hub.records import HubError

    config = settings()
    found: dict[bytes, list[str]] = {}
    for model_id in installed_ids(config):
        try:
            found.setdefault(tokenizer_fingerprint(config.paths.models_dir / model_id), []).append(model_id)
        except HubError:
            continue
    return found


def _tables() -> list[Path]:
    folder = settings().paths.ngram_dir
    return sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def _row(path: Path, models: dict[bytes, list[str]]) -> dict[str, Any]:
    from localspec.storage.errors import DamagedFile
    from localspec.storage.ngram_manifest import Manifest, TableDirectory

    problem = ""
    manifest = Manifest(bytes(32), 0)
    try:
        manifest = TableDirectory(path).load()
    except DamagedFile as error:
        problem = str(error)
    except FileNotFoundError:
        if not path.is_dir():
            raise
        problem = f"{path} holds no finished table; remove it with: localspec ngram rm {path.name}"
    return {
        "name": path.name,
        "models": models.get(manifest.tokenizer_fingerprint, []),
        "tokenizer": manifest.tokenizer_fingerprint.hex(),
        "order": manifest.order,
        "tokens": sum(entry.token_count for entry in manifest.runs),
        "records": sum(entry.record_count for entry in manifest.runs),
        "sources": len(manifest.sources),
        "runs": len(manifest.runs),
        "deleted_sources": len(manifest.deleted),
        "unfinished_tokens": sum(entry.token_count for entry in manifest.staged),
        "size_bytes": _size_bytes(path),
        "folder": str(path),
        "problem": problem,
    }


def _size_bytes(path: Path) -> int:
    return sum(item.stat().st_size for item in path.iterdir() if item.is_file())


def _show(name: str, report: SyncReport, as_json: bool) -> None:
    table = report.table
    if as_json:
        print_json({"name": name, **dataclasses.asdict(report)})
        return
    rate = report.added_tokens / max(report.tokenise_s + report.index_s, 1e-6)
    click.echo(
        f"{name}: {report.new_sources} sources with {report.added_tokens:,} tokens added from {report.files} files "
        f"({report.duplicates} duplicates, {report.removed_sources} replaced or gone) at {rate:,.0f} tokens/s; "
        f"the table holds {table.tokens:,} tokens in {gib(table.table_bytes)}"
    )
    if report.passed_over:
        counts = ", ".join(f"{reason} ({count})" for reason, count in sorted(report.passed_over.items()))
        click.echo(f"{name}: left out {counts}", err=True)

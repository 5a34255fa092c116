"""`localspec cache`: what is kept of conversations on this disk, and how to be rid of it. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import click

from localspec.cache.spill_admin import SpillAdmin, sweep_all
from localspec.cache.spill_index import INDEX_ERRORS
from localspec.cache.spill_limits import ChosenLimits, read_limits, write_limits
from localspec.commands.common import fail, gib, print_json, settings
from localspec.commands.options import json_option


class _OverAnIndex(click.Group):
    """Commands that say so where the index turns out to be damaged in the middle."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except INDEX_ERRORS as error:
            fail(f"the index in {settings().paths.kv_dir} cannot be read ({error}); localspec cache wipe removes all")


@click.group(cls=_OverAnIndex)
def cache() -> None:
    """Conversations kept on disk, so that opening one again costs no recompute. All of it may be deleted."""


@cache.command("ls")
@json_option
def cache_ls(as_json: bool) -> None:
    """List chats that have something on disk."""
    admin = _open()
    rows = admin.chats() if admin is not None else []
    if as_json:
        print_json([dataclasses.asdict(row) for row in rows])
        return
    for row in rows:
        names = f"{_shown(row.chat_id):<36}  {_shown(row.model_id):<24}"
        click.echo(f"{names} {row.tokens:>8,} tokens {gib(row.stored_bytes):>10}")
    num_blocks, other_bytes = admin.without_chat() if admin is not None else (0, 0)
    if num_blocks:
        click.echo(f"{gib(other_bytes)} more are of programs that named no chat; they go with their model.", err=True)
    elif not rows:
        click.echo("No conversation is kept on disk.", err=True)


@cache.command("df")
@json_option
def cache_df(as_json: bool) -> None:
    """Show how much each model's cache takes."""
    admin = _open()
    models = admin.models() if admin is not None else []
    free_bytes = admin.free_bytes() if admin is not None else None
    written_bytes = admin.written_today_bytes() if admin is not None else 0
    if as_json:
        fields = ("model_id", "stored_bytes", "num_blocks", "prefill_tok_per_s", "read_bytes_per_s")
        rows = [
            {"cache": row.fingerprint.hex()[:12], **{name: getattr(row, name) for name in fields}} for row in models
        ]
        print_json({"models": rows, "free_bytes": free_bytes, "written_today_bytes": written_bytes})
        return
    for row in models:
        name = f"{_shown(row.model_id):<24} {row.fingerprint.hex()[:12]}"
        click.echo(f"{name}  {row.num_blocks:>7,} blocks {gib(row.stored_bytes):>10}")
    total_bytes = sum(row.stored_bytes for row in models)
    rest = f", {gib(free_bytes)} free on the disk, {gib(written_bytes)} written today" if free_bytes is not None else ""
    click.echo(f"total {gib(total_bytes)}{rest}")


@cache.command("rm")
@click.argument("name")
@json_option
def cache_rm(name: str, as_json: bool) -> None:
    """Delete what is kept of a chat or of a model; NAME is an id that `ls` or `df` shows."""
    admin = _open()
    known_chats = {row.chat_id for row in admin.chats()} if admin is not None else set()
    known_models = {row.model_id for row in admin.models()} if admin is not None else set()
    if admin is None or name not in known_chats | known_models:
        unnamed = admin is not None and admin.has_lost_names()
        where = "chats lost their names with an index: rm a model, or wipe" if unnamed else "see localspec cache ls"
        fail(f"nothing is kept of {_shown(name)} by name; {where}")
    try:
        removed = admin.remove_chat(name) if name in known_chats else admin.remove_model(name)
    except OSError as error:
        fail(f"not all of {name} is deleted: {error}")
    if as_json:
        print_json({"name": name, "removed_blocks": removed})
    else:
        click.echo(f"{removed:,} blocks of {_shown(name)} are deleted")


@cache.command("verify")
@json_option
def cache_verify(as_json: bool) -> None:
    """Read every block and remove those that are damaged."""
    admin = _open()
    last: Any = None
    for total_bytes, checked in admin.verify() if admin is not None else ():
        last = checked
        if not as_json and checked.num_blocks % 64 == 0:
            click.echo(f"{gib(checked.read_bytes)} of {gib(total_bytes)}", err=True)
    damaged = last.damaged if last is not None else ()
    if as_json:
        print_json(dataclasses.asdict(last) if last is not None else {"num_blocks": 0, "read_bytes": 0, "damaged": []})
        return
    for line in damaged:
        click.echo(line)
    count = last.num_blocks if last is not None else 0
    click.echo(f"{count:,} blocks read, {len(damaged)} damaged and removed")


@cache.command("wipe")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def cache_wipe(yes: bool, as_json: bool) -> None:
    """Delete everything that is kept of conversations. Chats themselves stay."""
    if not yes:
        click.confirm("Delete all cached conversations? Chats stay, they will be computed again.", abort=True, err=True)
    folder = settings().paths.kv_dir
    stored_bytes = 0
    try:
        with SpillAdmin(folder) as admin:
            stored_bytes = admin.wipe()
    except FileNotFoundError:
        pass
    except (OSError, *INDEX_ERRORS):
        try:
            sweep_all(folder)
        except OSError as error:
            fail(f"the cache in {folder} cannot be deleted: {error}")
    if as_json:
        print_json({"deleted_bytes": stored_bytes})
    else:
        click.echo(f"{gib(stored_bytes)} deleted")


@cache.command("limit")
@click.option("--size-gib", "cap", type=click.FloatRange(0, 1 << 20), help="Most that may lie on disk.")
@click.option("--free-gib", "free", type=click.FloatRange(0, 1 << 20), help="What must stay free on the disk.")
@click.option("--daily-gib", "daily", type=click.FloatRange(0, 1 << 20), help="Most that is written in a day.")
@click.option("--memory-gib", "memory", type=click.FloatRange(0, 1 << 20), help="Most that copies in memory take.")
@click.option("--usual", is_flag=True, help="Back to the usual limits.")
@json_option
def cache_limit(
    cap: float | None, free: float | None, daily: float | None, memory: float | None, usual: bool, as_json: bool
) -> None:
    """Show or set what the cache may take. An engine reads it when it starts."""
    folder = settings().paths.kv_dir
    asked = {"cap_bytes": cap, "min_free_bytes": free, "daily_write_bytes": daily, "host_bytes": memory}
    if any(value is not None and math.isnan(value) for value in asked.values()):
        raise click.UsageError("a limit is a number of GiB")
    given = {name: int(value * (1 << 30)) for name, value in asked.items() if value is not None}
    chosen = dataclasses.replace(ChosenLimits() if usual else read_limits(folder), **given)
    if given or usual:
        try:
            write_limits(folder, chosen)
        except OSError as error:
            fail(f"the limits cannot be kept in {folder}: {error}")
    disk = chosen.of_disk()
    if as_json:
        print_json({**dataclasses.asdict(disk), "host_bytes": chosen.host_bytes})
        return
    size = "a fifth of what is free, at most 100 GB" if disk.cap_bytes is None else gib(disk.cap_bytes)
    memory_size = "a share of what is free" if chosen.host_bytes is None else gib(chosen.host_bytes)
    click.echo(f"on disk           {size}")
    click.echo(f"left free there   {gib(disk.min_free_bytes)}")
    click.echo(f"written in a day  {gib(disk.daily_write_bytes)}")
    click.echo(f"copies in memory  {memory_size}")


def _shown(name: str) -> str:
    """A name for a terminal: clients of the port choose the ids of their chats, and nothing in one may act on it."""
    return "".join(char if char.isprintable() else "\ufffd" for char in name)


def _open() -> SpillAdmin | None:
    folder = settings().paths.kv_dir
    try:
        return SpillAdmin(folder)
    except FileNotFoundError:
        return None
    except (OSError, *INDEX_ERRORS) as error:
        fail(f"the cache in {folder} cannot be opened ({error}); localspec cache wipe removes it")

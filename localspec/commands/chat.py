"""`localspec chat`: the terminal app, joined to a running engine, one of its own, or a remote server."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.api.types import EngineError
from localspec.commands.common import (
    EXIT_WRONG_USE,
    catalogue,
    default_model,
    fail,
    fail_engine,
    installed_ids,
    settings,
)
from localspec.commands.options import (
    context_option,
    depth_option,
    device_option,
    drafter_option,
    learn_option,
    model_option,
    offline_option,
)
from localspec.config import Settings

if TYPE_CHECKING:
    from localspec.api.remote import RemoteEngine
    from localspec.chats import StoreWorker
    from localspec.commands.engine_process import EngineProcess

START_TIMEOUT_S = 120.0


@click.command()
@model_option
@click.option("--url", help="Talk to the OpenAI server at this address instead of an engine here.")
@click.option("--api-key", help="Key for --url.")
@drafter_option
@depth_option
@context_option
@device_option
@offline_option
@learn_option
@click.option("--private", is_flag=True, help="Write nothing of this chat to the disk.")
@click.option("--plain", is_flag=True, help="Lines in and out, no cursor tricks.")
@click.option("--keep", is_flag=True, help="Leave the engine running when the last chat ends.")
def chat(**options: Any) -> None:
    """Chat in the terminal, and see what drafting gains."""
    config = settings()
    plain = options["plain"] or not (sys.stdin.isatty() and sys.stdout.isatty())
    process: EngineProcess | None = None
    try:
        engine, process = connect(config, options)
    except (EngineError, ValueError) as error:
        fail(str(error), EXIT_WRONG_USE)
    store = _store(config)
    try:
        if plain:
            _run_plain(engine, store, options)
        else:
            _run_app(config, engine, store, options)
    finally:
        if process is not None:
            process.leave()
        store.close()


def connect(config: Settings, options: dict[str, Any]) -> tuple[RemoteEngine, EngineProcess | None]:
    """An engine to talk to: the given address, one that another chat started, or a new process."""
    from localspec.api.remote import RemoteEngine, RemoteSettings
    from localspec.commands.engine_process import EngineProcess, running_engine
    from localspec.server.serve import load_or_create_key

    if options["url"]:
        return RemoteEngine(RemoteSettings(options["url"], api_key=options["api_key"], model=options["model"])), None
    key = load_or_create_key(config.paths.key_file)
    url = running_engine(config)
    process = None
    if url is None:
        process = EngineProcess(config, _serve_arguments(config, options), options["keep"])
        url = process.url
    return RemoteEngine(RemoteSettings(url, control_key=key, connect_timeout_s=START_TIMEOUT_S)), process


def _serve_arguments(config: Settings, options: dict[str, Any]) -> list[str]:
    arguments = ["--model", options["model"] or default_model(config), "--device", options["device"]]
    arguments += ["--drafter", options["drafter"]]
    for name in ("depth", "context"):
        if options[name] is not None:
            arguments += [f"--{name}", str(options[name])]
    arguments += [] if options["learn"] else ["--no-learn"]
    return [*arguments, *(["--offline"] if options["offline"] else [])]


def _store(config: Settings) -> StoreWorker:
    """The durable store, for private chats too: nothing of them is written unless the user saves one."""
    from localspec.chats import StoreWorker, open_store

    return StoreWorker(lambda: open_store(config.paths.chats_file))


def _run_app(config: Settings, engine: RemoteEngine, store: StoreWorker, options: dict[str, Any]) -> None:
    from localspec.tui.app import LocalspecApp
    from localspec.tui.options import ChatSettings, UiOptions

    known = {entry.id: entry.title for entry in catalogue(config).models}
    ui = UiOptions(
        export_dir=Path.cwd(),
        copy_file=config.paths.cache_dir / "copied.txt",
        address=options["url"] or "",
        models=tuple((model_id, known.get(model_id, model_id)) for model_id in installed_ids(config)),
        private=options["private"],
        no_color=config.no_color,
        over_ssh=config.over_ssh,
    )
    LocalspecApp(engine, store, ui, _chat_settings(options, ChatSettings)).run()


def _run_plain(engine: RemoteEngine, store: StoreWorker, options: dict[str, Any]) -> None:
    from localspec.tui.options import ChatSettings
    from localspec.tui.plain import run_plain

    chosen = _chat_settings(options, ChatSettings)
    try:
        num_failed = asyncio.run(run_plain(engine, store, chosen, private=options["private"]))
    except EngineError as error:
        fail_engine(error)
    if num_failed:
        fail(f"{num_failed} answers failed")


def _chat_settings(options: dict[str, Any], record: Any) -> Any:
    chosen = None if options["drafter"] == "auto" else options["drafter"]
    return record(drafter=chosen, depth=options["depth"])

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
    known_id,
    settings,
)
from localspec.commands.first_start import offer_model
from localspec.commands.options import (
    context_option,
    depth_option,
    device_option,
    drafter_option,
    fp4_prompts_option,
    kv_cache_option,
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
GROUP_S = 0.12
"""The app shows a growing answer six times a second, so it need not be woken for each token."""


@click.command()
@model_option
@click.option("--url", help="Talk to the OpenAI server at this address instead of an engine here.")
@click.option("--api-key", help="Key for --url.")
@drafter_option
@depth_option
@context_option
@device_option
@kv_cache_option
@fp4_prompts_option
@offline_option
@learn_option
@click.option("--private", is_flag=True, help="Write nothing of this chat to the disk.")
@click.option("--plain", is_flag=True, help="Lines in and out, no cursor tricks.")
@click.option("--keep", is_flag=True, help="Leave the engine running when the last chat ends.")
def chat(**options: Any) -> None:
    """Chat in the terminal, and see what drafting gains."""
    config = settings()
    plain = options["plain"] or not (sys.stdin.isatty() and sys.stdout.isatty())
    store = _store(config)
    process: EngineProcess | None = None
    try:
        if not options["url"] and not options["model"]:
            options["model"] = offer_model(config, options["offline"] or config.network.offline, asks=not plain)
        engine, process = connect(config, options)
        if plain:
            _run_plain(engine, store, options)
        else:
            _run_app(config, engine, store, options)
    finally:
        if process is not None:
            process.leave()
        store.close()


def connect(config: Settings, options: dict[str, Any]) -> tuple[RemoteEngine, EngineProcess | None]:
    """An engine to talk to: the given address, one that another chat started, or a new process. Raises Fail."""
    from localspec.api.remote import RemoteEngine, RemoteSettings
    from localspec.commands.engine_process import EngineProcess
    from localspec.server.serve import load_or_create_key

    if options["url"]:
        try:
            given = {"api_key": options["api_key"], "model": options["model"], "group_s": GROUP_S}
            return RemoteEngine(RemoteSettings(options["url"], **given)), None
        except ValueError as error:
            fail(str(error), EXIT_WRONG_USE)
    try:
        key = load_or_create_key(config.paths.key_file)
        _make_room(config, options, key)
        process = EngineProcess(config.paths, key, _serve_arguments(config, options), options["keep"])
    except EngineError as error:
        fail(error.message)
    except OSError as error:
        fail(f"The engine cannot be started from {config.paths.data_dir}: {error}. Check the folder's rights.")
    return RemoteEngine(
        RemoteSettings(
            process.address(),
            control_key=key,
            connect_timeout_s=START_TIMEOUT_S,
            find_url=process.address,
            unreachable=f"The engine does not answer; {process.log_path} says why.",
            group_s=GROUP_S,
        )
    ), process


def _make_room(config: Settings, options: dict[str, Any], key: str) -> None:
    """End a running engine that is not what was asked for, unless it is in use. Raises EngineError then."""
    from localspec.commands.engine_process import engine_arguments, engine_state, find_engine, stop_engine
    from localspec.commands.engine_wanted import differences

    wanted = _known_model(config, options["model"]) if options["model"] else None
    found = find_engine(config.paths, key)
    if found is None:
        return
    state = (None if found.is_starting else engine_state(found, key)) or {}
    device, arguments = options["device"], engine_arguments(found)
    differ = differences(
        wanted, options["context"], device, arguments, state, options["kv_cache"], options["fp4_prompts"]
    )
    if not differ:
        return
    metrics = state.get("metrics", {})
    if found.is_starting or state.get("holders") or metrics.get("active_requests"):
        raise EngineError(
            "bad_request",
            f"The engine that another chat uses has {' and '.join(differ)}: "
            "leave that chat first, or start this one without the option.",
        )
    stop_engine(config.paths, found, key)


def _known_model(config: Settings, name: str) -> str:
    """Id of an installed model, or of the demo, which is fetched when it is missing. Raises EngineError."""
    from localspec.hub.records import HubError

    try:
        model_id = known_id(config, name)
        if model_id in installed_ids(config):
            return model_id
        entry = catalogue(config).find(name)
    except HubError as error:
        raise EngineError("model_not_found", str(error)) from error
    if not entry.demo:
        raise EngineError("model_not_found", f"{entry.id} is not installed; get it with: localspec pull {entry.id}")
    return entry.id


def _serve_arguments(config: Settings, options: dict[str, Any]) -> list[str]:
    arguments = ["--model", options["model"] or default_model(config), "--device", options["device"]]
    arguments += ["--drafter", options["drafter"], "--kv-cache", options["kv_cache"]]
    for name in ("depth", "context"):
        if options[name] is not None:
            arguments += [f"--{name}", str(options[name])]
    arguments += [] if options["learn"] else ["--no-learn"]
    arguments += ["--experimental-fp4-prompts"] if options["fp4_prompts"] else []
    return [*arguments, *(["--offline"] if options["offline"] else [])]


def _store(config: Settings) -> StoreWorker:
    """The durable store, for private chats too: nothing of them is written unless the user saves one."""
    from localspec.chats import ChatError, StoreWorker, open_store

    store = StoreWorker(lambda: open_store(config.paths.chats_file))
    try:
        store.submit(lambda opened: opened.notice).result()
    except (ChatError, OSError) as error:
        store.close()
        fail(str(error))
    return store


def _run_app(config: Settings, engine: RemoteEngine, store: StoreWorker, options: dict[str, Any]) -> None:
    from localspec.commands.model_library import HubLibrary
    from localspec.tui.app import LocalspecApp
    from localspec.tui.options import ChatSettings, UiOptions

    # The models of another machine are not ours to manage.
    library = None if options["url"] else HubLibrary(config, options["device"], options["kv_cache"])
    known = {entry.id: entry.title for entry in catalogue(config).models}
    installed = installed_ids(config) if library is not None else []
    ui = UiOptions(
        export_dir=Path.cwd(),
        copy_file=config.paths.cache_dir / "copied.txt",
        address=options["url"] or "",
        find_address=lambda: engine.address,
        models=tuple((model_id, known.get(model_id, model_id)) for model_id in installed),
        private=options["private"],
        no_color=config.no_color,
        over_ssh=config.over_ssh,
    )
    LocalspecApp(engine, store, ui, _chat_settings(options, ChatSettings), library).run()


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

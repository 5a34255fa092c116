"""`localspec serve`: the port, with the engine in the same process."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from localspec.commands.common import (
    EXIT_WRONG_USE,
    catalogue,
    default_model,
    fail,
    hub_settings,
    local_engine,
    settings,
)
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
from localspec.config import DEFAULT_PORT, Settings

if TYPE_CHECKING:
    from localspec.hub.records import PullProgress


@click.command()
@model_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on. Others need --api-key.")
@click.option(
    "--port", default=DEFAULT_PORT, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free port."
)
@click.option("--api-key", help="Ask clients for this key.")
@click.option("--cors-origins", default="", help="Comma-separated origins whose pages may call, or *.")
@click.option("--allow-host", multiple=True, help="Another name that requests may call this machine by.")
@click.option(
    "--max-requests", default=128, show_default=True, type=click.IntRange(1), help="Running and waiting ones."
)
@click.option("--strict-model", is_flag=True, help="Refuse names of other models instead of answering with this one.")
@click.option("--emit-reasoning", is_flag=True, help="Give thoughts under `reasoning` too, not reasoning_content only.")
@drafter_option
@depth_option
@context_option
@device_option
@kv_cache_option
@fp4_prompts_option
@offline_option
@learn_option
@click.option("--for-chat", is_flag=True, hidden=True, help="Started by chat: announce the address in the data folder.")
@click.option("--until-unused", is_flag=True, hidden=True, help="Stop when the last chat has left.")
def serve(**options: Any) -> None:
    """Serve the OpenAI API on this machine. The model loads in the background; /health says when it is ready."""
    from localspec.api.types import EngineError
    from localspec.server.context import ControlHooks
    from localspec.server.security import UnsafeAddress, check_settings
    from localspec.server.serve import load_or_create_key, run_server
    from localspec.server.settings import ServerSettings

    config = settings()
    offline = options["offline"] or config.network.offline
    try:
        port_settings = ServerSettings(
            host=options["host"],
            port=options["port"],
            api_key=options["api_key"],
            control_key=load_or_create_key(config.paths.key_file),
            cors_origins=tuple(filter(None, options["cors_origins"].split(","))),
            allowed_hosts=options["allow_host"],
            max_requests=options["max_requests"],
            strict_model=options["strict_model"],
            emit_reasoning=options["emit_reasoning"],
            stop_when_unused=options["until_unused"],
        )
        # Before the engine is imported, which takes seconds.
        check_settings(port_settings)
        engine = local_engine(config, offline, options, kv_dir=config.paths.kv_dir)
        engine.start(options["model"] or default_model(config))
        hooks = ControlHooks(
            pull=lambda model_id: pull_events(config, model_id, offline),
            explain_tuner=engine.explain_tuner,
            reset_tuner=engine.reset_tuner,
        )
        announce = _announcer(config.paths.engine_file) if options["for_chat"] else None
        run_server(engine, port_settings, hooks, announce)
    except UnsafeAddress as error:
        fail(str(error), EXIT_WRONG_USE)
    except EngineError as error:
        fail(error.message)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    finally:
        if options["for_chat"]:
            _withdraw(config.paths.engine_file)


async def pull_events(config: Settings, model_id: str, offline: bool) -> AsyncIterator[Mapping[str, Any]]:
    """Progress of a pull as plain mappings. Raises EngineError."""
    import dataclasses

    from localspec.api.types import EngineError
    from localspec.hub.get import Wish, get
    from localspec.hub.records import HubError

    event_loop = asyncio.get_running_loop()
    steps: asyncio.Queue[PullProgress | None] = asyncio.Queue()

    def post(progress: PullProgress | None) -> None:
        event_loop.call_soon_threadsafe(steps.put_nowait, progress)

    def work() -> None:
        try:
            wish = Wish(model_id, offline=offline)
            get(catalogue(config), wish, config.paths.data_dir, hub_settings(config), post)
        finally:
            post(None)

    task = asyncio.create_task(asyncio.to_thread(work))
    while (progress := await steps.get()) is not None:
        yield dataclasses.asdict(progress)
    try:
        await task
    except HubError as error:
        raise EngineError("model_not_found", str(error)) from error


def _announcer(path: Path) -> Callable[[str], None]:
    """Write the address and the process for chats to find; the file is replaced in one piece."""

    def announce(address: str) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps({"url": address, "pid": os.getpid()}))
        draft.replace(path)

    return announce


def _withdraw(path: Path) -> None:
    """Remove the announcement if it is ours."""
    try:
        if json.loads(path.read_text())["pid"] == os.getpid():
            path.unlink()
    except (OSError, ValueError, KeyError, TypeError):
        return

"""A real server on a free loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx
import pytest

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.server.context import ControlHooks
from localspec.server.serve import serve
from localspec.server.settings import ServerSettings

KEY = "control-key-of-the-tests"
Serving = Callable[..., AbstractAsyncContextManager[str]]


@asynccontextmanager
async def serving(engine: Any, hooks: ControlHooks | None = None, **settings: Any) -> AsyncIterator[str]:
    """Base address of a server over this engine."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    configured = ServerSettings(**{"port": 0, "control_key": KEY, "first_event_s": 0.2, **settings})
    task = asyncio.create_task(serve(engine, configured, hooks, address.set_result))
    try:
        await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
        yield address.result() if address.done() else task.result()  # type: ignore[misc]
    finally:
        await engine.aclose()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def echo_port() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server that says "Scripted answer."."""
    async with serving(ScriptedEngine()) as address, httpx.AsyncClient(base_url=address, timeout=20) as client:
        yield client


def says(*replies: str | Reply, **script: Any) -> ScriptedEngine:
    """A scripted engine with these replies in turn."""
    return ScriptedEngine(Script(tuple(Reply(r) if isinstance(r, str) else r for r in replies), **script))

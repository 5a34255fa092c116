"""Streams of server-sent events, and work that ends when its client leaves.

A stream sends its headers at once, a comment after some seconds of silence, and closes its source within one
step when the client goes away or takes nothing any more. Knows ASGI; knows nothing of what is in the frames.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localspec.api.closing import closing
from localspec.server.errors import ApiError, as_api_error
from localspec.server.settings import ServerSettings

log = logging.getLogger(__name__)

Result = TypeVar("Result")
OnError = Callable[[ApiError], Iterable[bytes]]

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"


class ClientLeft(Exception):
    """The client closed its connection before the answer was whole."""


def frame(data: Any, event: str | None = None) -> bytes:
    """One event. JSON text has no line breaks, so one data line holds it."""
    head = f"event: {event}\n" if event else ""
    return f"{head}data: {dump(data)}\n\n".encode()


def dump(data: Any) -> str:
    """Compact JSON. Lone surrogates were refused at the door, so this always encodes."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


async def open_stream(
    frames: AsyncIterator[bytes], on_error: OnError, settings: ServerSettings, media_type: str = EVENT_STREAM
) -> Response:
    """A streaming response. What `frames` raises at once is raised here, so that it gets a status of its own."""
    first = asyncio.ensure_future(_next(frames))
    try:
        await asyncio.wait({first}, timeout=settings.first_event_s)
        if first.done() and first.exception() is not None:
            first.result()
    except BaseException:
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        async with closing(frames):
            raise
    return EventStream(first, frames, on_error, settings, media_type)


async def until_client_leaves(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Result of `work`. Raises ClientLeft, with the work cancelled, when the client goes away first."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeft
        return worker.result()
    finally:
        await _stop(worker, watcher)


class EventStream(Response):
    """The streaming response of `open_stream`."""

    def __init__(
        self,
        first: asyncio.Future[bytes | None],
        frames: AsyncIterator[bytes],
        on_error: OnError,
        settings: ServerSettings,
        media_type: str,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._first = first
        self._frames = frames
        self._on_error = on_error
        self._settings = settings
        self._pings = media_type == EVENT_STREAM
        self._sent_s = time.monotonic()
        self._sending_since_s: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send frames until they end or the client leaves."""
        lock = asyncio.Lock()

        async def put(body: bytes, more: bool = True) -> None:
            async with lock:
                self._sending_since_s = time.monotonic()
                await send({"type": "http.response.body", "body": body, "more_body": more})
                self._sent_s, self._sending_since_s = time.monotonic(), None

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        tasks = [
            asyncio.ensure_future(self._write(put)),
            asyncio.ensure_future(_disconnected(receive)),
            asyncio.ensure_future(self._watch(put)),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _stop(*tasks)

    async def _write(self, put: Callable[..., Coroutine[Any, Any, None]]) -> None:
        async with closing(self._frames) as frames:
            try:
                first = await self._first
                if first is not None:
                    await put(first)
                    async for body in frames:
                        await put(body)
            except OSError:
                return
            except Exception as error:
                if not isinstance(error, ApiError) and as_api_error(error).code == "internal":
                    log.exception("a stream failed")
                for body in self._on_error(as_api_error(error)):
                    await put(body)
            finally:
                self._first.cancel()
        await put(b"", more=False)

    async def _watch(self, put: Callable[..., Coroutine[Any, Any, None]]) -> None:
        """Ping through silence; return, which drops the client, when a frame stays unsent for too long."""
        pause_s = min(self._settings.keep_alive_s, self._settings.send_timeout_s) / 4
        while True:
            await asyncio.sleep(pause_s)
            now_s = time.monotonic()
            if self._sending_since_s is not None:
                if now_s - self._sending_since_s > self._settings.send_timeout_s:
                    return
            elif self._pings and now_s - self._sent_s >= self._settings.keep_alive_s - pause_s:
                await put(PING)


async def _next(frames: AsyncIterator[bytes]) -> bytes | None:
    return await anext(frames, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stop(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

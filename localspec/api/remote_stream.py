"""Reading what a port answers over httpx: errors, data lines, events, entries of a model list."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import httpx

from localspec.api.codec import event_from_json
from localspec.api.remote_metrics import MAX_METRICS_BYTES
from localspec.api.remote_wire import ForeignReply, error_of
from localspec.api.types import Done, EngineError, Event, ModelInfo

MAX_LINE_BYTES = 8 << 20
MAX_ERROR_BYTES = 1 << 20
METRICS_TIMEOUT_S = 10.0
UNKNOWN_CONTEXT_TOKENS = 8192
_LINE_END = re.compile(rb"[\r\n]")


async def check(response: httpx.Response) -> None:
    """Raise the EngineError behind a status that is not 200."""
    if response.status_code != 200:
        body = bytearray()
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_ERROR_BYTES:
                break
        raise error_of(_json_or_text(bytes(body)), response.status_code)


def json_or_text(response: httpx.Response) -> Any:
    """JSON value of a body that was read, or its beginning as text."""
    return _json_or_text(response.content)


def _json_or_text(body: bytes) -> Any:
    text = body.decode("utf-8", "replace")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text[:500]


async def metrics_page(http: httpx.AsyncClient) -> str | None:
    """Text of /metrics, None if there is none. A server that hides or garbles its figures still answers questions,
    so only a connection that cannot be made raises (httpx errors).
    """
    body = bytearray()
    try:
        async with (
            asyncio.timeout(METRICS_TIMEOUT_S),
            http.stream("GET", "/metrics", follow_redirects=True) as response,
        ):
            if response.status_code != 200:
                return None
            async for part in response.aiter_bytes():
                body += part
                if len(body) > MAX_METRICS_BYTES:
                    break
    except (TimeoutError, httpx.ReadTimeout, httpx.ProtocolError, httpx.DecodingError, httpx.TooManyRedirects):
        return None
    except httpx.InvalidURL:  # a redirect to nowhere
        return None
    return body.decode("utf-8", "replace")


async def payloads(response: httpx.Response) -> AsyncGenerator[dict[str, Any], None]:
    """Objects of the data lines of a stream; ends at [DONE]. Raises EngineError for lines that are none."""
    async with aclosing(_lines(response)) as lines:
        async for line in lines:
            if not line.startswith("data:"):
                continue
            text = line[5:].strip()
            if text == "[DONE]":
                return
            try:
                data = json.loads(text)
            except (ValueError, RecursionError):
                data = None
            if not isinstance(data, dict):
                raise EngineError("internal", f"The server sent an event that is no JSON object: {text[:80]!r}.")
            yield data


async def _lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Lines of a stream; empty ones too. A line separator of Unicode ends none: an answer may hold it.

    Raises EngineError before an endless line fills the memory.
    """
    held = bytearray()
    async for part in response.aiter_bytes():
        first, *others = _LINE_END.split(part)
        held += first
        for begun in others:
            yield held.decode("utf-8", "replace")
            held = bytearray(begun)
        if len(held) > MAX_LINE_BYTES:
            raise EngineError("internal", f"The server sent a line of more than {MAX_LINE_BYTES >> 20} MiB.")
    if held:
        yield held.decode("utf-8", "replace")


async def raw_events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    """Events of our own port. Raises EngineError for an error event or an answer that stops before its end."""
    async for data in payloads(response):
        if data.get("error"):
            raise error_of(data, 500)
        wrapped = data.get("localspec")
        if isinstance(wrapped, dict) and "event" in wrapped:
            try:
                event = event_from_json(wrapped["event"])
            except ValueError as reason:
                raise EngineError("internal", f"The server sent an event of another form: {reason}.") from reason
            yield event
            if isinstance(event, Done):
                return
    raise httpx.RemoteProtocolError("the answer stopped before its end")


async def foreign_events(response: httpx.Response) -> AsyncGenerator[Event, None]:
    """Events of any OpenAI server. Raises EngineError for an error event."""
    reply, n_chunks = ForeignReply(), 0
    async for data in payloads(response):
        n_chunks += 1
        try:
            events = reply.read(data)
        except (AttributeError, TypeError, ValueError) as reason:
            raise EngineError("internal", f"The server sent a chunk of another form ({reason}).") from reason
        for event in events:
            yield event
    if not n_chunks:
        raise EngineError("internal", "The server answered without a stream of events; is the address right?")
    for event in reply.end():
        yield event


def foreign_model(entry: dict[str, Any]) -> ModelInfo:
    """What an entry of /v1/models tells of a model."""
    meta = entry.get("meta")
    lengths = (entry.get("max_model_len"), entry.get("context_length"))
    more = (meta.get("n_ctx"), meta.get("n_ctx_train")) if isinstance(meta, dict) else ()
    known = [value for value in (*lengths, *more) if type(value) is int and value > 0]
    return ModelInfo(
        id=entry["id"],
        title=str(entry.get("name") or entry["id"]),
        context_limit_tokens=known[0] if known else UNKNOWN_CONTEXT_TOKENS,
        vocab_size=0,
        note="" if known else "The server does not say how large its context is.",
        drafters=("auto",),
    )


def words(error: Exception) -> str:
    """What happened, for errors that have no text too."""
    return str(error) or type(error).__name__

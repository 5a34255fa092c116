"""Reading what a port answers over httpx: errors, data lines, events, entries of a model list."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx

from localspec.api.codec import event_from_json
from localspec.api.remote_metrics import MAX_METRICS_BYTES
from localspec.api.remote_wire import ForeignReply, error_of
from localspec.api.types import Done, EngineError, Event, ModelInfo

MAX_LINE_CHARS = 8 << 20
METRICS_TIMEOUT_S = 10.0
UNKNOWN_CONTEXT_TOKENS = 8192


async def check(response: httpx.Response) -> None:
    """Raise the EngineError behind a status that is not 200."""
    if response.status_code != 200:
        await response.aread()
        raise error_of(json_or_text(response), response.status_code)


def json_or_text(response: httpx.Response) -> Any:
    """JSON value of a body, or its beginning as text."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return response.text[:500]


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
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        text = line[5:].strip()
        if text == "[DONE]":
            return
        try:
            data = json.loads(text) if len(text) <= MAX_LINE_CHARS else None
        except (ValueError, RecursionError):
            data = None
        if not isinstance(data, dict):
            raise EngineError("internal", f"The server sent an event that is no JSON object: {text[:80]!r}.")
        yield data


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

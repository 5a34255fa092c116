"""/localspec/v1: what `localspec chat` and the commands ask of a running engine beyond the public port.

Reached from this machine with the key of the data directory only (see `security`). Knows the engine's control
calls; knows nothing of what they do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localspec.api.closing import closing
from localspec.api.codec import to_json
from localspec.api.engine import DrafterChoice
from localspec.api.types import GenerateRequest
from localspec.server.body import read_fields
from localspec.server.context import Port, port_of
from localspec.server.errors import ApiError, bad
from localspec.server.fields import MAX_TOKEN_IDS, Fields
from localspec.server.openai import read_chat
from localspec.server.sse import frame, open_stream, until_client_leaves

PREFIX = "/localspec/v1"
PROTOCOL_VERSION = 1

Handler = Callable[[Port, Request, Fields], Awaitable[dict[str, Any]]]


async def state(request: Request) -> Response:
    """GET state: the model, a snapshot, the process."""
    return JSONResponse(_state(port_of(request)))


async def metrics_stream(request: Request) -> Response:
    """GET metrics?hz=2: snapshots as events. Who holds it open counts as a user of this engine."""
    port = port_of(request)
    try:
        hz = min(20.0, max(0.1, float(request.query_params.get("hz", "2"))))
    except ValueError:
        raise bad("hz must be a number.", "hz") from None
    return await open_stream(_snapshots(port, 1 / hz), _error_frames, port.settings)


async def pull(request: Request) -> Response:
    """POST pull {model}: fetch a model, progress as events."""
    port = port_of(request)
    fields = await read_fields(request, port.settings)
    if port.hooks.pull is None:
        raise ApiError(404, "This engine was started without a way to fetch models.", code="unsupported")
    return await open_stream(_pull_frames(port, fields.need_text("model")), _error_frames, port.settings)


def routes() -> list[Route]:
    """All control routes."""
    calls: dict[str, Handler] = {
        "load": _load,
        "warm": _warm,
        "forget": _forget,
        "drafter": _drafter,
        "explain": _explain,
        "count_tokens": _count_tokens,
        "tokenize": _tokenize,
        "detokenize": _detokenize,
        "shutdown": _shutdown,
        "tuner": _tuner,
    }
    found = [
        Route(f"{PREFIX}/state", state, methods=["GET"]),
        Route(f"{PREFIX}/metrics", metrics_stream, methods=["GET"]),
        Route(f"{PREFIX}/pull", pull, methods=["POST"]),
    ]
    return found + [Route(f"{PREFIX}/{name}", _endpoint(call), methods=["POST"]) for name, call in calls.items()]


def _endpoint(call: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        port = port_of(request)
        fields = await read_fields(request, port.settings)
        return JSONResponse(await until_client_leaves(request, _as_coroutine(call(port, request, fields))))

    return endpoint


async def _as_coroutine(work: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await work


def _state(port: Port) -> dict[str, Any]:
    model = port.engine.model()
    return {
        "protocol": PROTOCOL_VERSION,
        "pid": os.getpid(),
        "started_s": port.started_s,
        "holders": port.n_holders,
        "model": None if model is None else to_json(model),
        "metrics": to_json(port.engine.metrics()),
    }


async def _snapshots(port: Port, pause_s: float) -> AsyncGenerator[bytes, None]:
    port.n_holders += 1
    try:
        while True:
            yield frame(_state(port))
            if port.engine.metrics().state == "stopped":
                return
            await asyncio.sleep(pause_s)
    finally:
        port.n_holders -= 1
        if port.n_holders == 0 and port.settings.stop_when_unused and port.hooks.shutdown is not None:
            asyncio.get_running_loop().call_later(port.settings.unused_grace_s, stop_if_unused, port)


def stop_if_unused(port: Port) -> None:
    """Shut down unless someone holds a metrics stream; running answers are waited for."""
    if port.n_holders or port.hooks.shutdown is None:
        return
    if port.n_requests:
        # An editor may still read an answer: look again later.
        asyncio.get_running_loop().call_later(port.settings.unused_grace_s, stop_if_unused, port)
    else:
        port.hooks.shutdown()


async def _pull_frames(port: Port, model_id: str) -> AsyncGenerator[bytes, None]:
    assert port.hooks.pull is not None
    async with closing(port.hooks.pull(model_id)) as steps:
        async for step in steps:
            yield frame(dict(step))
    yield frame({"done": True})


def _error_frames(error: ApiError) -> Iterable[bytes]:
    return (frame(error.openai()),)


async def _load(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    return {"model": to_json(await port.engine.load(fields.need_text("model")))}


async def _warm(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    return {"cached_tokens": await port.engine.warm(await _generation(port, request, fields))}


async def _forget(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    await port.engine.forget(fields.need_text("chat_id"))
    return {}


async def _drafter(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    choice = DrafterChoice(fields.need_text("drafter"), fields.integer("depth", 0, 64))
    await port.engine.choose_drafter(choice)
    return {}


async def _explain(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    return {"report": to_json(await port.engine.explain())}


async def _count_tokens(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    return {"tokens": await port.engine.count_tokens(await _generation(port, request, fields))}


async def _tokenize(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    return {"tokens": await port.engine.tokenize(fields.need_text("text"))}


async def _detokenize(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    tokens = fields.items("tokens", MAX_TOKEN_IDS)
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise fields.wrong("tokens", "a list of token ids")
    return {"text": await port.engine.detokenize(tuple(tokens))}


async def _tuner(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    """What the tuner knows; with `reset` it forgets that first."""
    if port.hooks.explain_tuner is None or port.hooks.reset_tuner is None:
        raise ApiError(404, "This engine has no tuner that could be asked.", code="unsupported")
    if fields.flag("reset"):
        await port.hooks.reset_tuner()
    return {"lines": await port.hooks.explain_tuner()}


async def _shutdown(port: Port, request: Request, fields: Fields) -> dict[str, Any]:
    if port.hooks.shutdown is None:
        raise ApiError(404, "This engine cannot be stopped through its port.", code="unsupported")
    asyncio.get_running_loop().call_later(0.1, port.hooks.shutdown)
    return {}


async def _generation(port: Port, request: Request, fields: Fields) -> GenerateRequest:
    """The request of a chat or completion body, as its own route would read it."""
    caller = port.caller(request, None)
    if fields.has("messages"):
        return (await read_chat(fields, caller, port)).request
    tokens = fields.value("prompt")
    if isinstance(tokens, list):
        return GenerateRequest(prompt_token_ids=tuple(tokens), client=caller.client)
    return GenerateRequest(prompt=fields.need_text("prompt"), client=caller.client)

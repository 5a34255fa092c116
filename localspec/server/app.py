"""The port as one ASGI application: routes, errors, and the gate in front of them.

Made for one engine; sees it through its protocol only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from localspec.api.engine import Engine
from localspec.api.types import EngineError
from localspec.server import anthropic, completions, control, llamacpp, metrics, ollama, openai, responses
from localspec.server.context import ControlHooks, Port, port_of
from localspec.server.errors import ApiError, as_api_error
from localspec.server.openapi import openapi
from localspec.server.security import Gate, check_settings
from localspec.server.settings import ServerSettings
from localspec.server.sse import ClientLeft

log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(engine: Engine, settings: ServerSettings | None = None, hooks: ControlHooks | None = None) -> Starlette:
    """The application. Raises UnsafeAddress for settings that would let strangers in."""
    settings = settings or ServerSettings()
    check_settings(settings)
    app = Starlette(
        routes=_routes(),
        middleware=[Middleware(Gate, settings=settings)],
        exception_handlers={
            ApiError: _on_error,
            EngineError: _on_error,
            HTTPException: _on_http_error,
            ClientLeft: _on_client_left,
            Exception: _on_error,
        },
    )
    app.state.port = Port(engine, settings, hooks or ControlHooks())
    return app


def _routes() -> list[Route]:
    routes = [Route(path, endpoint, methods=methods) for path, endpoint, methods in _FIXED]
    for path, endpoint, methods in _VERSIONED:
        # Clients differ in whether their base address ends in /v1.
        routes += [Route(prefix + path, endpoint, methods=methods) for prefix in ("/v1", "")]
    return routes + control.routes()


async def health(request: Request) -> Response:
    """GET /health: 200 when requests are served, 503 with the stage while loading."""
    port = port_of(request)
    snapshot = port.engine.metrics()
    if port.engine.model() is not None and snapshot.state == "ready":
        return JSONResponse({"status": "ok", "model": snapshot.model_id})
    body = {"status": snapshot.state, "stage": snapshot.stage}
    error = ApiError(503, f"The engine is {snapshot.state}: {snapshot.stage or 'no details'}.", code="not_ready")
    return JSONResponse({**body, **error.openai()}, 503, headers={"retry-after": "2"})


async def embeddings(request: Request) -> Response:
    """POST /v1/embeddings and its like: refused in words."""
    raise ApiError(400, "This server generates text; it has no embedding model.", code="unsupported")


_VERSIONED: tuple[tuple[str, Endpoint, list[str]], ...] = (
    ("/models", openai.models, ["GET"]),
    ("/models/{model:path}", openai.models, ["GET"]),
    ("/chat/completions", openai.chat_completions, ["POST"]),
    ("/completions", completions.completions, ["POST"]),
    ("/responses", responses.responses, ["POST"]),
    ("/messages", anthropic.messages, ["POST"]),
    ("/messages/count_tokens", anthropic.count_tokens, ["POST"]),
    ("/embeddings", embeddings, ["POST"]),
)
_FIXED: tuple[tuple[str, Endpoint, list[str]], ...] = (
    ("/", ollama.root, ["GET"]),
    ("/openapi.json", openapi, ["GET"]),
    ("/health", health, ["GET"]),
    ("/v1/health", health, ["GET"]),
    ("/metrics", metrics.metrics, ["GET"]),
    ("/api/chat", ollama.chat, ["POST"]),
    ("/api/generate", ollama.generate, ["POST"]),
    ("/api/tags", ollama.tags, ["GET"]),
    ("/api/ps", ollama.tags, ["GET"]),
    ("/api/show", ollama.show, ["POST"]),
    ("/api/version", ollama.version, ["GET"]),
    ("/api/embed", embeddings, ["POST"]),
    ("/api/embeddings", embeddings, ["POST"]),
    ("/embedding", embeddings, ["POST"]),
    ("/api/v0/models", llamacpp.lmstudio_models, ["GET"]),
    ("/api/v0/models/{model:path}", llamacpp.lmstudio_models, ["GET"]),
    ("/api/v0/completions", completions.completions, ["POST"]),
    ("/api/v0/embeddings", embeddings, ["POST"]),
    ("/api/v0/chat/completions", openai.chat_completions, ["POST"]),
    ("/completion", llamacpp.completion, ["POST"]),
    ("/infill", llamacpp.infill, ["POST"]),
    ("/tokenize", llamacpp.tokenize, ["POST"]),
    ("/detokenize", llamacpp.detokenize, ["POST"]),
    ("/props", llamacpp.props, ["GET"]),
    ("/slots", llamacpp.slots, ["GET"]),
)


async def _on_error(request: Request, error: Exception) -> Response:
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("request to %s failed", request.url.path, exc_info=error)
    headers = {"retry-after": str(api_error.retry_after_s)} if api_error.retry_after_s else {}
    if api_error.status == 413:
        headers["connection"] = "close"
    return JSONResponse(api_error.for_path(request.url.path), api_error.status, headers=headers)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        api_error = ApiError(404, f"No route {path[:200]!r} here; the API is under /v1.", code="not_found")
    elif error.status_code == 405:
        api_error = ApiError(405, f"{path[:200]!r} does not take {request.method}.", code="method_not_allowed")
    else:
        api_error = ApiError(error.status_code, str(error.detail), code="bad_request")
    return JSONResponse(api_error.for_path(path), error.status_code, headers=error.headers)


async def _on_client_left(request: Request, error: Exception) -> Response:
    """Nobody reads this."""
    return Response(status_code=400)

"""Who may talk to the port: Host and Origin against pages that rebind names, CORS, keys, body size.

A local server without a key is reachable from every page in a browser, so the names it is called by are checked.
Knows headers; knows nothing of what requests ask.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from localspec.server.errors import ApiError
from localspec.server.settings import ServerSettings

CONTROL_HEADER = "x-localspec-key"
CONTROL_PREFIX = "/localspec/v1"
OPEN_PATHS = frozenset(("/health", "/v1/health"))
_LOCAL_NAMES = frozenset(("localhost", "127.0.0.1", "::1"))
_LOCAL_SCHEMES = frozenset(("vscode-webview", "vscode-file", "app", "tauri"))
_LOCAL_ORIGIN_NAMES = _LOCAL_NAMES | {"tauri.localhost"}
_CORS_METHODS = "GET, POST, DELETE, OPTIONS, HEAD"


class UnsafeAddress(ValueError):
    """The settings would open the port to others without a key."""


def check_settings(settings: ServerSettings) -> None:
    """Raise UnsafeAddress for an address beyond loopback without a key, and for a key that is empty.

    An empty key is most often a variable that is not set: whoever gives it believes that the port asks for one.
    """
    if settings.api_key is not None and not settings.api_key.strip():
        raise UnsafeAddress("The API key is empty: give a key, or leave --api-key out to ask for none.")
    if not is_loopback(settings.host) and not settings.api_key:
        raise UnsafeAddress(
            f"Listening on {settings.host} lets others in: give --api-key as well, or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether an address or the name localhost stays on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0]).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def same_secret(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


class Gate:
    """ASGI middleware that answers for requests that may not pass and adds the CORS headers to the others."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings
        self._hosts = _LOCAL_NAMES | {_bare(settings.host)} | {_bare(host) for host in settings.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        try:
            self._check_names(headers, origin)
            if scope["method"] == "OPTIONS":
                await self._preflight(headers)(scope, receive, send)
                return
            self._check_keys(scope, headers)
            self._check_length(headers)
        except ApiError as error:
            body, extra = error.for_path(scope["path"]), _cors(origin if error.status != 403 else None)
            if error.status == 401:
                extra["www-authenticate"] = "Bearer"
            # The rest of the body is not wanted.
            extra["connection"] = "close"
            await JSONResponse(body, error.status, headers=extra)(scope, receive, send)
            return
        await self._app(scope, receive, _with_headers(send, _cors(origin)) if origin else send)

    def _check_names(self, headers: Headers, origin: str | None) -> None:
        host = headers.get("host", "")
        if not self._settings.api_key and _bare(host) not in self._hosts:
            raise ApiError(
                403, f"The host name {host[:100]!r} is not served; use 127.0.0.1 or localhost.", code="host_not_allowed"
            )
        if origin is not None and not self._is_allowed_origin(origin):
            raise ApiError(
                403,
                f"Pages of {origin[:100]!r} may not call this server; allow them with --cors-origins.",
                code="origin_not_allowed",
            )

    def _is_allowed_origin(self, origin: str) -> bool:
        if "*" in self._settings.cors_origins or origin in self._settings.cors_origins:
            return True
        try:
            parts = urlsplit(origin)
            name = parts.hostname or ""
        except ValueError:
            return False
        return parts.scheme in _LOCAL_SCHEMES or (parts.scheme in ("http", "https") and name in _LOCAL_ORIGIN_NAMES)

    def _preflight(self, headers: Headers) -> Response:
        extra = _cors(headers.get("origin"))
        extra["access-control-allow-methods"] = _CORS_METHODS
        extra["access-control-allow-headers"] = headers.get("access-control-request-headers", "*")
        extra["access-control-max-age"] = "600"
        if headers.get("access-control-request-private-network") == "true":
            extra["access-control-allow-private-network"] = "true"
        return Response(status_code=204, headers=extra)

    def _check_keys(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if path.startswith(CONTROL_PREFIX):
            self._check_control(scope, headers)
        elif self._settings.api_key and path not in OPEN_PATHS and not self._has_key(headers, self._settings.api_key):
            raise ApiError(
                401, "The key is missing or wrong; send it as Bearer token or x-api-key.", code="invalid_api_key"
            )

    def _has_key(self, headers: Headers, expected: str) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        return same_secret(given, expected) or same_secret(headers.get("x-api-key", ""), expected)

    def _check_control(self, scope: Scope, headers: Headers) -> None:
        client = scope.get("client")
        expected = self._settings.control_key
        if expected is None or client is None or not is_loopback(client[0]) or "origin" in headers:
            raise ApiError(403, "Control calls are for programs on this machine only.", code="control_not_allowed")
        if not same_secret(headers.get(CONTROL_HEADER, ""), expected):
            raise ApiError(
                401, f"Control calls need the key of the data directory in {CONTROL_HEADER}.", code="invalid_api_key"
            )

    def _check_length(self, headers: Headers) -> None:
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > self._settings.max_body_bytes:
            raise too_large(self._settings)


def too_large(settings: ServerSettings) -> ApiError:
    """The body is over the limit."""
    return ApiError(413, f"The body is larger than {settings.max_body_bytes} bytes.", code="request_too_large")


def _bare(host: str) -> str:
    """Host without port, brackets and case."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() and ":" not in name else host).lower().rstrip(".")


def _cors(origin: str | None) -> dict[str, str]:
    return {"access-control-allow-origin": origin, "vary": "Origin"} if origin else {}


def _with_headers(send: Send, extra: dict[str, str]) -> Send:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in extra.items()]

    async def send_with(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *raw]}
        await send(message)

    return send_with

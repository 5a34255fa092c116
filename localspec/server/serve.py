"""Runs the application on real sockets: binding, who holds a taken port, signals, the order of stopping.

Knows uvicorn; knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import uvicorn

from localspec.api.engine import Engine
from localspec.api.types import EngineError
from localspec.server.app import create_app
from localspec.server.context import ControlHooks
from localspec.server.control import stop_if_unused
from localspec.server.security import check_settings
from localspec.server.settings import ServerSettings

BACKLOG = 128
GRACE_S = 5
SIGNALS_TO_KILL = 3
WATCH_S = 2.0

OnListening = Callable[[str], None]


class PortInUse(OSError):
    """Another program listens there; the message says which, if this user may see it."""


def run_server(
    engine: Engine,
    settings: ServerSettings | None = None,
    hooks: ControlHooks | None = None,
    on_listening: OnListening | None = None,
) -> None:
    """Serve until SIGTERM or a shutdown call; the engine is closed at the end. See `serve`.

    SIGINT ends it too, and raises KeyboardInterrupt when all is closed; further ones are ignored from then on, as
    the process is about to end. While the server stops, a third signal ends the process at once.
    """
    try:
        import uvloop
    except ImportError:
        interrupted = asyncio.run(serve(engine, settings, hooks, on_listening))
    else:
        interrupted = uvloop.run(serve(engine, settings, hooks, on_listening))
    if interrupted:
        raise KeyboardInterrupt


async def serve(
    engine: Engine,
    settings: ServerSettings | None = None,
    hooks: ControlHooks | None = None,
    on_listening: OnListening | None = None,
) -> bool:
    """Serve in this event loop; says whether SIGINT ended it.

    `on_listening` gets the base address (`http://127.0.0.1:8012`) once connections are taken; by default it is
    printed. Raises PortInUse, UnsafeAddress, OSError for an address that is not this machine's, or EngineError when
    the engine's device failed for good.
    """
    settings = settings or ServerSettings()
    check_settings(settings)
    sockets = bind(settings)
    port = sockets[0].getsockname()[1]
    server = _Server(engine)
    hooks = replace(hooks or ControlHooks(), shutdown=server.stop)
    app = create_app(engine, replace(settings, port=port), hooks)
    server.config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="off",
        # Behind a proxy on this machine strangers must not count as this machine.
        proxy_headers=True,
        forwarded_allow_ips=["127.0.0.1", "::1"],
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_S,
        backlog=BACKLOG,
    )
    address = base_address(settings.host, port)
    (on_listening or _print_address)(address)
    watch = asyncio.create_task(_watch(engine, server))
    if settings.stop_when_unused:
        asyncio.get_running_loop().call_later(settings.unclaimed_s, stop_if_unused, app.state.port)
    try:
        await server.serve(sockets)
    except asyncio.CancelledError:
        if server.started:
            await server.shutdown(sockets)
        raise
    finally:
        watch.cancel()
        # Cancelled from outside, uvicorn leaves its listeners registered with the loop.
        for listener in getattr(server, "servers", []):
            listener.close()
        for item in sockets:
            item.close()
        await engine.aclose()
    if server.failure:
        raise EngineError("internal", f"The engine failed: {server.failure}; start it again.")
    return server.interrupted


async def _watch(engine: Engine, server: _Server) -> None:
    """A model that does not load is said where the server was started, too: a typing error would wait unseen. An engine
    whose device failed for good ends the server: who started it can start it again."""
    try:
        await engine.wait_ready()
    except EngineError as error:
        if engine.metrics().state == "failed":
            print(f"The model failed to load: {error.message}", file=sys.stderr, flush=True)
    while True:
        await asyncio.sleep(WATCH_S)
        now = engine.metrics()
        if now.state == "failed" and engine.model() is not None:
            server.failure = now.stage
            server.stop()
            return


class _Server(uvicorn.Server):
    """Stops the engine first, so that running streams end by themselves and in good order."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(uvicorn.Config(app=_no_app))
        self._engine = engine
        self.interrupted = False
        self.failure = ""
        self._n_signals = 0

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Take signals while serving; uvicorn would raise them again, and what comes after it would not run."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                # Someone impatient at the keys must not get a traceback out of the interpreter's own ending.
                ignores = self.interrupted and number == signal.SIGINT
                signal.signal(number, signal.SIG_IGN if ignores else handler)

    def _on_signal(self, number: int, stack: FrameType | None) -> None:
        self.interrupted = self.interrupted or number == signal.SIGINT
        self._n_signals += 1
        if self._n_signals >= SIGNALS_TO_KILL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self.handle_exit(number, stack)

    def stop(self) -> None:
        """Begin to shut down."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the connections."""
        await self._engine.aclose()
        await super().shutdown(sockets)


async def _no_app(scope: object, receive: object, send: object) -> None:
    """Stands in until the real application is there."""


def bind(settings: ServerSettings) -> list[socket.socket]:
    """Listening sockets: the address, and ::1 with the same port beside 127.0.0.1 where the machine has it."""
    host = "127.0.0.1" if settings.host == "localhost" else settings.host
    sockets = [_bind_one(host, settings.port)]
    if host == "127.0.0.1":
        # No IPv6, or someone else has that port there: 127.0.0.1 is what we say.
        with contextlib.suppress(OSError):
            sockets.append(_bind_one("::1", sockets[0].getsockname()[1]))
    return sockets


def _bind_one(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            who = holder_of(port)
            raise PortInUse(
                errno.EADDRINUSE,
                f"Port {port} on {host} is in use{f' by {who}' if who else ''}; "
                f"stop that or give another port (--port 0 takes a free one).",
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise OSError(error.errno, f"This machine has no address {host}; try 127.0.0.1.") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise OSError(error.errno, f"Port {port} is reserved by the system; take one above 1023.") from error
        if isinstance(error, socket.gaierror):
            raise OSError(error.errno, f"The name {host} has no address here; try 127.0.0.1.") from error
        raise
    return listener


def holder_of(port: int) -> str:
    """`name (pid n)` of the program that listens on a port, empty if this user may not know."""
    import psutil

    try:
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
                continue
            if connection.laddr.port == port:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except (psutil.Error, OSError):
        return ""
    return ""


def base_address(host: str, port: int) -> str:
    """Address that clients of this machine use; `/v1` is not part of it."""
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "localhost": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name and not name.startswith('[') else name}:{port}"


def load_or_create_key(path: Path) -> str:
    """The control key of a data directory, made on first use with mode 0600. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    for _ in range(2):
        try:
            key = path.read_text(encoding="ascii").strip()
            if len(key) >= 32:
                return key
            path.unlink()
        except FileNotFoundError:
            pass
        except UnicodeDecodeError:
            path.unlink()
        # Written whole beside it and linked, so that two starts agree on one key.
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_urlsafe(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text(encoding="ascii").strip()


def _print_address(address: str) -> None:
    print(f"Listening on {address} (OpenAI API under {address}/v1)", flush=True)

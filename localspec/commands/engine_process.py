"""The engine process that `chat` joins or starts, and starts anew when it goes.

One engine serves all chats of a data directory. Its address lies in a file that is written under a lock, by the chat
that starts it and again by the engine itself, so that two chats never start two engines. Knows the process and the
control port's state; knows nothing of what is said to the engine.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import psutil

from localspec.api.types import EngineError
from localspec.config import Paths, Settings

MAX_RESTARTS = 3
HEALTHY_S = 60.0
POLL_S = 0.5
ENDING_S = 10.0
PROGRAM = (sys.executable, "-m", "localspec.cli")
LOG_NAME = "engine.log"
LOCK_NAME = "engine.lock"
_FOR_CHAT = "--for-chat"


@dataclass(frozen=True)
class FoundEngine:
    """An engine that was announced and whose process lives. `is_starting`: its port does not answer yet."""

    url: str
    pid: int
    is_starting: bool = False


def running_engine(config: Settings) -> str | None:
    """Address of an engine that a chat started and that answers, or None."""
    said = _read_announcement(config.paths.engine_file)
    url = said.get("url")
    if not _is_local(url) or not _lives(said.get("pid")):
        return None
    try:
        httpx.get(f"{url}/health", timeout=2.0, trust_env=False)
    except httpx.HTTPError:
        return None
    return str(url)


def find_engine(paths: Paths, key: str) -> FoundEngine | None:
    """The engine that a chat of this data directory started, or None. One that ends just now is waited for."""
    end_s = time.monotonic() + ENDING_S
    while (found := _announced(paths)) is not None:
        state = engine_state(found, key)
        if state is None and found.is_starting:
            return found
        if state is not None and state.get("metrics", {}).get("state") != "stopped":
            return replace(found, is_starting=False)
        if time.monotonic() > end_s:
            return None
        time.sleep(POLL_S / 5)
    return None


def engine_state(found: FoundEngine, key: str, client: httpx.Client | None = None) -> dict[str, Any] | None:
    """What the engine's port says of itself: empty if it refuses the key, None if it does not answer.

    client: for one who asks often; a new one takes 20 ms.
    """
    asker = httpx.Client(trust_env=False) if client is None else contextlib.nullcontext(client)
    try:
        with asker as asked:
            reply = asked.get(f"{found.url}/localspec/v1/state", headers={"x-localspec-key": key}, timeout=2.0)
        said = reply.json() if reply.status_code == 200 else {}
    except (httpx.HTTPError, ValueError):
        return None
    return said if isinstance(said, dict) else {}


def engine_arguments(found: FoundEngine) -> list[str]:
    """The command line that an engine was started with; empty if it is gone."""
    try:
        return psutil.Process(found.pid).cmdline()
    except psutil.Error:
        return []


def stop_engine(paths: Paths, found: FoundEngine, key: str) -> None:
    """Ask an engine to end, and wait until its memory is free. Raises EngineError if it stays."""
    with contextlib.suppress(httpx.HTTPError):
        headers = {"x-localspec-key": key}
        httpx.post(f"{found.url}/localspec/v1/shutdown", json={}, headers=headers, timeout=5.0, trust_env=False)
    end_s = time.monotonic() + 2 * ENDING_S
    while _lives(found.pid):
        if time.monotonic() > end_s:
            raise EngineError(
                "not_ready", f"The running engine (pid {found.pid}) does not end; stop it, then try again."
            )
        time.sleep(POLL_S / 5)


class EngineProcess:
    """The engine that a chat uses: one that runs, or a `localspec serve` of our own on a free loopback port.

    A thread watches it for as long as the chat is open, whoever started it. It outlives the chat only with `keep`, or
    for other chats. `address` is for RemoteSettings.find_url. Raises OSError for a directory that cannot be written.
    """

    def __init__(
        self, paths: Paths, key: str, arguments: Sequence[str], keep: bool, program: Sequence[str] = PROGRAM
    ) -> None:
        self.log_path: Path = paths.cache_dir / LOG_NAME
        self._paths = paths
        self._key = key
        self._command = [*program, "serve", _FOR_CHAT, *([] if keep else ["--until-unused"]), *arguments]
        self._model_id = ""
        self._leaving = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0
        self._problem = ""
        self._since_s = time.monotonic()
        self._found = self._join_or_start()
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()

    @property
    def started_here(self) -> bool:
        """Whether this chat started the engine that it uses."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """The process of the engine."""
        return self._found.pid

    def address(self) -> str:
        """Where the engine is now. Raises EngineError if it ended too often to be started again."""
        if self._problem:
            raise EngineError("not_ready", self._problem)
        return self._found.url

    def leave(self) -> None:
        """Stop watching. The engine notices by itself when its last chat is gone."""
        self._leaving.set()
        self._watcher.join(timeout=2 * POLL_S)

    def _join_or_start(self) -> FoundEngine:
        with _locked(self._paths.data_dir / LOCK_NAME):
            found = find_engine(self._paths, self._key)
            self._process = None
            self._since_s = time.monotonic()
            return found if found is not None else self._start()

    def _start(self) -> FoundEngine:
        port = _free_port()
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The model that the user changed to since; of an option given twice the last counts.
        model = ["--model", self._model_id] if self._model_id else []
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            self._process = subprocess.Popen(
                [*self._command, *model, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)
        found = FoundEngine(f"http://127.0.0.1:{port}", self._process.pid, is_starting=True)
        # The engine writes the same without `starting` once it listens.
        draft = self._paths.engine_file.with_name(f".{self._paths.engine_file.name}.{os.getpid()}")
        draft.touch(mode=0o600)
        draft.write_text(json.dumps({"url": found.url, "pid": found.pid, "starting": True}))
        draft.replace(self._paths.engine_file)
        return found

    def _watch(self) -> None:
        """Find or start another engine when this one goes while a chat is open; clients ask `address` for it."""
        with httpx.Client(trust_env=False) as client:
            self._watch_with(client)

    def _watch_with(self, client: httpx.Client) -> None:
        while not self._leaving.wait(POLL_S):
            if self._is_alive():
                self._note_model(engine_state(self._found, self._key, client))
                if time.monotonic() - self._since_s > HEALTHY_S:
                    self._restarts = 0
                continue
            if not self._ended_well():
                self._restarts += 1
            if self._restarts > MAX_RESTARTS:
                self._problem = f"The engine ended {self._restarts} times in a row; why is said in {self.log_path}."
                return
            try:
                self._found = self._join_or_start()
            except OSError as error:
                self._problem = f"The engine ended and cannot be started again: {error}."
                return

    def _note_model(self, state: dict[str, Any] | None) -> None:
        """Keep the name of a model that is ready: it is the one to come back with."""
        model = (state or {}).get("model")
        if isinstance(model, dict) and isinstance(model.get("id"), str):
            self._model_id = model["id"]

    def _is_alive(self) -> bool:
        return self._process.poll() is None if self._process is not None else _lives(self._found.pid)

    def _ended_well(self) -> bool:
        """Whether it ended because it was told to, or nobody used it: no reason to give up starting it."""
        if self._process is not None:
            return self._process.returncode == 0
        return _read_announcement(self._paths.engine_file).get("pid") != self._found.pid


def _announced(paths: Paths) -> FoundEngine | None:
    said = _read_announcement(paths.engine_file)
    if not _is_local(said.get("url")) or not _lives(said.get("pid")):
        return None
    found = FoundEngine(said["url"], said["pid"], said.get("starting") is True)
    # A number that another program got since is no engine. A program that begins just now has no words yet.
    end_s = time.monotonic() + POLL_S
    while not (words := engine_arguments(found)) and time.monotonic() < end_s and _lives(found.pid):
        time.sleep(0.01)
    return found if _FOR_CHAT in words else None


def _is_local(url: object) -> bool:
    return isinstance(url, str) and url.startswith(("http://127.0.0.1:", "http://[::1]:"))


def _read_announcement(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _lives(pid: object) -> bool:
    try:
        return isinstance(pid, int) and bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except (psutil.Error, ValueError, OverflowError):
        return False


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One chat at a time looks for an engine or starts one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

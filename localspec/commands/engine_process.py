"""The engine process that `chat` joins or starts, and restarts when it dies."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from localspec.config import Settings

MAX_RESTARTS = 3
POLL_S = 0.5
LOG_NAME = "engine.log"


def running_engine(config: Settings) -> str | None:
    """Address of an engine that a chat started and that answers, or None."""
    try:
        said = json.loads(config.paths.engine_file.read_text())
        url, pid = str(said["url"]), int(said["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not url.startswith(("http://127.0.0.1:", "http://[::1]:")) or not psutil.pid_exists(pid):
        return None
    try:
        httpx.get(f"{url}/health", timeout=2.0, trust_env=False)
    except httpx.HTTPError:
        return None
    return url


class EngineProcess:
    """A `localspec serve` of our own on a free loopback port. It outlives us only with `keep`, or for other chats."""

    def __init__(self, config: Settings, arguments: Sequence[str], keep: bool) -> None:
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log_path: Path = config.paths.cache_dir / LOG_NAME
        command = [sys.executable, "-m", "localspec.cli", "serve", "--for-chat", "--port", str(port)]
        self._command = [*command, *([] if keep else ["--until-unused"]), *arguments]
        self._leaving = threading.Event()
        self._process = self._start()
        self._watcher = threading.Thread(target=self._watch, name="engine-watch", daemon=True)
        self._watcher.start()

    def leave(self) -> None:
        """Stop watching. The engine notices by itself when its last chat is gone."""
        self._leaving.set()
        self._watcher.join(timeout=2 * POLL_S)

    def _start(self) -> subprocess.Popen[bytes]:
        self.log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            return subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=descriptor,
                stderr=descriptor,
                start_new_session=True,
            )
        finally:
            os.close(descriptor)

    def _watch(self) -> None:
        """Start the engine again when it dies while a chat is open; clients reconnect by themselves."""
        restarts = 0
        while not self._leaving.wait(POLL_S):
            if self._process.poll() is not None and restarts < MAX_RESTARTS:
                restarts += 1
                self._process = self._start()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

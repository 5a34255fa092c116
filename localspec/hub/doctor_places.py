"""Checks of the doctor on directories, files and the port: room, speed, privacy, models, chats, cache. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import sqlite3
import time
from pathlib import Path
from typing import Any

from localspec.hub import local
from localspec.hub.doctor_report import Check, in_gib

LEAST_FREE_DISK_BYTES = 2 << 30
SLOW_DISK_BYTES_PER_S = 500e6
SPEED_TEST_BYTES = 64 << 20


def check_disk_space(directory: Path) -> Check:
    """Free space for models, with the largest ones when there is little."""
    use = local.disk_use(directory)
    finding = f"{in_gib(use.free_bytes)} free at {directory}, models take {in_gib(use.total_bytes)}"
    if use.free_bytes < LEAST_FREE_DISK_BYTES:
        largest = ", ".join(f"{name} ({in_gib(size)})" for name, size in use.models[:3])
        advice = "free space" + (f", or remove models with 'localspec rm': {largest}" if largest else "")
        return Check("disk space", "failed", finding, advice, machine=True)
    return Check("disk space", "ok", finding)


def check_disk_speed(directory: Path, size_bytes: int | None = None) -> Check:
    """Writes and reads back a file; reading is what decides how fast models and chats open."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        written_per_s, read_per_s = _measure_disk(directory, size_bytes or SPEED_TEST_BYTES)
    except OSError as error:
        advice = "free space" if error.errno == errno.ENOSPC else "mend its permissions, or set LOCALSPEC_HOME"
        return Check("disk speed", "failed", f"{directory} cannot be written: {error.strerror}", advice)
    finding = f"reads {read_per_s / 1e9:.2f} GB/s, writes {written_per_s / 1e9:.2f} GB/s"
    if read_per_s < SLOW_DISK_BYTES_PER_S:
        return Check("disk speed", "warning", finding, "models load slowly from this disk; an NVMe disk is much faster")
    return Check("disk speed", "ok", finding)


def _measure_disk(directory: Path, size_bytes: int) -> tuple[float, float]:
    path = directory / f".tmp-speed-{secrets.token_hex(4)}"
    block = secrets.token_bytes(1 << 20)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        began_s = time.perf_counter()
        for _ in range(size_bytes >> 20):
            os.write(handle, block)
        os.fsync(handle)
        written_s = time.perf_counter() - began_s
        # Synced pages can be dropped, so that the read comes from the disk and not from memory.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        began_s = time.perf_counter()
        os.lseek(handle, 0, os.SEEK_SET)
        while os.read(handle, 1 << 20):
            pass
        return size_bytes / written_s, size_bytes / (time.perf_counter() - began_s)
    finally:
        os.close(handle)
        path.unlink()


def check_private(directory: Path) -> Check:
    """Chats lie here: nobody else may read them."""
    if not directory.exists():
        return Check("privacy", "skipped", f"{directory} does not exist yet")
    status = directory.stat()
    if status.st_uid != os.geteuid():
        return Check("privacy", "failed", f"{directory} belongs to another user", "choose another data directory")
    if status.st_mode & 0o077:
        return Check("privacy", "warning", f"others may read {directory}", f"run: chmod 700 {directory}")
    return Check("privacy", "ok", f"{directory} is readable by this user only")


def check_models(data_dir: Path) -> Check:
    """Installed models and what is wrong with them; hashes are `verify`'s work."""
    models = local.list_installed(data_dir)
    broken = [f"{model.model_id}: {model.problem}" for model in models if model.problem]
    if broken:
        return Check("models", "failed", "; ".join(broken), "'localspec verify' tells all that is wrong")
    if not models:
        return Check("models", "warning", "no model is installed", "run 'localspec chat', which fetches the demo model")
    return Check("models", "ok", ", ".join(m.model_id + (" (demo)" if m.is_demo else "") for m in models))


def check_database(name: str, path: Path, advice: str) -> Check:
    """An SQLite file by its own quick check, opened for reading only. One that is not there yet is fine."""
    if not path.exists():
        return Check(name, "ok", f"{path} does not exist yet")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0)) as db:
            found = [str(row[0]) for row in db.execute("PRAGMA quick_check(3)")]
    except sqlite3.Error as error:
        found = [str(error)]
    if found != ["ok"]:
        return Check(name, "failed", f"{path}: {'; '.join(found)[:200]}", advice)
    return Check(name, "ok", f"{path} is whole ({path.stat().st_size / 2**20:.1f} MiB)")


def check_cache(cache_dir: Path) -> Check:
    """The cache may be deleted at any time; it must only be readable and writable."""
    if not cache_dir.exists():
        return Check("cache", "ok", f"{cache_dir} is empty")
    if not os.access(cache_dir, os.R_OK | os.W_OK | os.X_OK):
        return Check(
            "cache", "failed", f"{cache_dir} is not readable and writable", "mend its permissions or delete it"
        )
    return Check("cache", "ok", f"{in_gib(local.tree_bytes(cache_dir))} at {cache_dir}")


def check_port(host: str, port: int) -> Check:
    """Whether the port can be opened, and who holds it if not."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            holder = _port_holder(port)
            finding = f"{host}:{port} cannot be opened ({error.strerror})" + (f", held by {holder}" if holder else "")
            return Check("port", "warning", finding, "that is fine if it is localspec; else 'localspec serve --port 0'")
    return Check("port", "ok", f"{host}:{port} is free")


def _port_holder(port: int) -> str | None:
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("inet"):
            local_address: Any = connection.laddr
            if (
                connection.status == psutil.CONN_LISTEN
                and local_address
                and local_address.port == port
                and connection.pid
            ):
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return None

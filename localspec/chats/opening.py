"""How the chat database is opened: rights, damage, migration, answers cut off by a kill."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

from localspec.chats.records import ChatError
from localspec.chats.schema import migrate
from localspec.chats.store import ChatStore


def open_store(path: Path, clock: Callable[[], float] = time.time) -> ChatStore:
    """Open or create the database (folder 0700, files 0600), migrate it, mark answers that a kill cut off.

    A damaged file is moved aside, never deleted, and a new one begun; `notice` of the store says so.
    Raises ChatError if the folder cannot be written or the file is of a newer version.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    except OSError as error:
        raise ChatError(
            f"The chats file {path} cannot be opened ({error.strerror}): check the folder's rights."
        ) from error
    notice = ""
    try:
        connection = _connect(path)
    except sqlite3.OperationalError as error:
        raise ChatError(
            f"The chats file {path} cannot be used ({error}): close what holds it or free disk space."
        ) from error
    except sqlite3.DatabaseError as error:
        aside = _move_aside(path, clock())
        notice = f"The chats file was damaged ({error}). It was kept as {aside}, and a new one was begun."
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        connection = _connect(path)
    return ChatStore(connection, notice=notice, clock=clock)


def private_store(clock: Callable[[], float] = time.time) -> ChatStore:
    """A store in memory: nothing of it ever reaches the disk."""
    return ChatStore(_connect(None), private=True, clock=clock)


def _connect(path: Path | None) -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:" if path is None else path, timeout=5.0)
    try:
        connection.execute("PRAGMA temp_store = MEMORY")
        connection.execute("PRAGMA foreign_keys = ON")
        if path is not None:
            # FULL: a message that was shown as saved survives a power cut, at one fsync a transaction.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise sqlite3.DatabaseError(problem)
        migrate(connection)
        # Harmless if another process is still writing one: its next save sets the state again.
        with connection:
            connection.execute("UPDATE messages SET state = 'interrupted' WHERE state = 'streaming'")
    except BaseException:
        connection.close()
        raise
    return connection


def _move_aside(path: Path, now_s: float) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now_s))
    aside = path.with_name(f"{path.name}.damaged-{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.damaged-{stamp}-{number}")
    for suffix in ("", "-wal", "-shm"):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside

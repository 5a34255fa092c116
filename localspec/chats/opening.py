"""How the chat database is opened: rights, damage, migration, answers cut off by a kill."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from localspec.chats.records import ChatError
from localspec.chats.rescue import copy_rows
from localspec.chats.schema import migrate
from localspec.chats.store import ChatStore


def open_store(path: Path, clock: Callable[[], float] = time.time) -> ChatStore:
    """Open or create the database (folder 0700, files 0600), migrate it, mark answers that a kill cut off.

    A damaged file is moved aside, never deleted, and what can be read of it is copied into a new one; `notice` of the
    store says so. Damage of the search index alone loses no message that way.
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
    except sqlite3.DatabaseError as error:
        if not _is_damage(error):
            raise ChatError(
                f"The chats file {path} cannot be used ({error}): close what holds it or free disk space."
            ) from error
        notice = _renew(path, clock(), error)
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


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    # A table that is not there or has another form is SQLITE_ERROR; locks, rights and a full disk have their own codes.
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return not isinstance(error, sqlite3.OperationalError) or code & 0xFF == sqlite3.SQLITE_ERROR


def _renew(path: Path, now_s: float, error: sqlite3.DatabaseError) -> str:
    """Put a new file with what can be read of a damaged one in its place; says what was done. Raises ChatError."""
    # The old file keeps its name until the new one is whole.
    fresh = path.with_name(f"{path.name}.mending-{os.getpid()}")
    try:
        os.close(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600))
        with closing(_connect(fresh)) as connection:
            num_chats, num_messages = copy_rows(path, connection)
        aside = _move_aside(path, now_s)
        fresh.rename(path)
    except (OSError, sqlite3.Error) as problem:
        for suffix in ("", "-wal", "-shm"):
            fresh.with_name(fresh.name + suffix).unlink(missing_ok=True)
        raise ChatError(
            f"The chats file {path} is damaged ({error}) and could not be copied ({problem}): free some disk space."
        ) from problem
    return (
        f"The chats file was damaged ({error}). It was kept as {aside}, and a new one was begun: "
        f"{num_chats} chats with {num_messages} messages could be read and are in it."
    )


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

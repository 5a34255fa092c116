"""Copies what can be read of a damaged chat database into a new one, row by row. The search index is made anew by that.

Knows the tables and that any value of them may be wrong; how files are opened and moved is `opening.py`.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import NoneType
from typing import Any

from localspec.chats.store import title_from

_CHATS: dict[str, type | tuple[type, ...]] = {
    "id": str,
    "title": str,
    "model_id": str,
    "system_prompt": str,
    "settings": str,
    "leaf_id": (int, NoneType),
    "draft": str,
    "created_s": float,
    "updated_s": float,
}
_MESSAGES: dict[str, type | tuple[type, ...]] = {
    "id": int,
    "chat_id": str,
    "parent_id": (int, NoneType),
    "role": str,
    "content": str,
    "reasoning": str,
    "state": str,
    "model_id": str,
    "token_ids": bytes,
    "spans": str,
    "rejections": str,
    "stats": str,
    "created_s": float,
}
_NOTES: dict[str, type | tuple[type, ...]] = {"name": str, "value": str}
_TOKEN_BYTES = 8
_GAP_ROWS = 10_000
"""After so many numbers without a row the end of a table is taken for reached, if the file does not tell its end."""
_MOST_ROWS = 10_000_000
"""Bounds what a damaged file may claim."""


def copy_rows(damaged: Path, fresh: sqlite3.Connection) -> tuple[int, int]:
    """Numbers of chats and messages that were taken over, in one transaction. Raises sqlite3.Error of `fresh` only.

    A message whose parent cannot be read follows the message before it; a chat of which only messages are left is made.
    """
    # Without a log nothing else is read, and no empty one is left beside the file.
    log = damaged.with_name(damaged.name + "-wal")
    how = "mode=ro" if log.exists() else "mode=ro&immutable=1"
    old = sqlite3.connect(f"{damaged.absolute().as_uri()}?{how}", uri=True)
    # Text of which a page is lost is still worth reading.
    old.text_factory = lambda raw: raw.decode("utf-8", "replace")
    with closing(old), fresh:
        for row in _rows(old, "notes", _NOTES):
            _insert(fresh, "notes", row)
        for row in _rows(old, "chats", _CHATS):
            _insert(fresh, "chats", row | {"settings": _json(row["settings"], {})})
        _copy_messages(old, fresh)
        fresh.execute(
            "UPDATE chats SET leaf_id = (SELECT max(id) FROM messages WHERE chat_id = chats.id)"
            " WHERE leaf_id IS NOT NULL AND leaf_id NOT IN (SELECT id FROM messages)"
        )
        (chats, messages) = fresh.execute(
            "SELECT (SELECT count(*) FROM chats), (SELECT count(*) FROM messages)"
        ).fetchone()
    return chats, messages


def _copy_messages(old: sqlite3.Connection, fresh: sqlite3.Connection) -> None:
    known = {str(row[0]) for row in fresh.execute("SELECT id FROM chats")}
    chat_of: dict[int, str] = {}
    last: dict[str, int] = {}
    for row in _rows(old, "messages", _MESSAGES):
        number, chat_id = row["id"], row["chat_id"]
        if chat_id not in known:
            known.add(chat_id)
            _insert(fresh, "chats", _chat_of(row))
        if row["parent_id"] is not None and chat_of.get(row["parent_id"]) != chat_id:
            row["parent_id"] = last.get(chat_id)
        chat_of[number], last[chat_id] = chat_id, number
        whole = {
            "state": "interrupted" if row["state"] == "streaming" else row["state"],
            "token_ids": row["token_ids"] if len(row["token_ids"]) % _TOKEN_BYTES == 0 else b"",
            "spans": _json(row["spans"], []),
            "rejections": _json(row["rejections"], []),
            "stats": _json(row["stats"], {}),
        }
        _insert(fresh, "messages", row | whole)


def _chat_of(message: dict[str, Any]) -> dict[str, Any]:
    """A chat for messages whose own cannot be read."""
    return {
        "id": message["chat_id"],
        "title": title_from(message["content"]),
        "model_id": message["model_id"],
        "system_prompt": "",
        "settings": "{}",
        # Shows the last message: there is none of this number.
        "leaf_id": 0,
        "draft": "",
        "created_s": message["created_s"],
        "updated_s": message["created_s"],
    }


def _rows(old: sqlite3.Connection, table: str, kinds: dict[str, type | tuple[type, ...]]) -> Iterator[dict[str, Any]]:
    """Rows that can be read and whose values are of the right kinds. Not by a scan: that ends at the first bad page."""
    asked = f"SELECT {', '.join(kinds)} FROM {table} WHERE rowid = ?"
    end, number, gap = _end(old, table), 0, 0
    while number < _MOST_ROWS and (number < end or gap < _GAP_ROWS):
        number += 1
        gap += 1
        try:
            values = old.execute(asked, (number,)).fetchone()
        except sqlite3.Error:
            continue
        if values is not None and all(map(isinstance, values, kinds.values())):
            gap = 0
            yield dict(zip(kinds, values, strict=True))


def _end(old: sqlite3.Connection, table: str) -> int:
    """The last row as far as the file tells; 0 if it does not."""
    found = 0
    for asked in (f"SELECT max(rowid) FROM {table}", f"SELECT seq FROM sqlite_sequence WHERE name = '{table}'"):
        try:
            row = old.execute(asked).fetchone()
        except sqlite3.Error:
            continue
        found = max(found, row[0]) if row is not None and isinstance(row[0], int) else found
    return found


def _insert(fresh: sqlite3.Connection, table: str, row: dict[str, Any]) -> None:
    marks = ", ".join("?" * len(row))
    fresh.execute(f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))


def _json(text: str, empty: dict[str, Any] | list[Any]) -> str:
    """The text if it is JSON of the same kind as `empty`, else that."""
    try:
        return text if isinstance(json.loads(text), type(empty)) else json.dumps(empty)
    except (ValueError, RecursionError):
        return json.dumps(empty)

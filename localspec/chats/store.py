"""The store of conversations: one SQLite connection and the calls on it.

A store belongs to the thread that opened it (see `worker.py`). It knows nothing of engines or screens. A private store
has the same calls and lives in memory only.
"""

from __future__ import annotations

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from localspec.chats.records import Chat, ChatError, Hit, NewChat, Stored
from localspec.chats.rows import (
    CHAT_COLUMNS,
    MESSAGE_COLUMNS,
    body_values,
    chat_from,
    chat_values,
    stored_from,
    text_values,
    writable,
)

TITLE_LIMIT_CHARS = 60
_INDEX_CODES = (sqlite3.SQLITE_CORRUPT_VTAB, sqlite3.SQLITE_CONSTRAINT)
"""What a damaged search index says; the constraints of our own tables have codes of their own."""


def title_from(text: str) -> str:
    """A one-line title from the first words of a prompt."""
    line = " ".join(text.split())
    return line if len(line) <= TITLE_LIMIT_CHARS else line[: TITLE_LIMIT_CHARS - 1].rstrip() + "…"


class ChatStore:
    """Conversations behind one connection. Every call is one transaction; a full disk raises ChatError."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        private: bool = False,
        notice: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._connection = connection
        self._clock = clock
        self.private = private
        self.notice = notice
        """What the user should know about how the file was opened; empty when all is well."""

    def close(self) -> None:
        """Close the file. The store cannot be used afterwards."""
        self._connection.close()

    # Chats

    def create(self, new: NewChat) -> Chat:
        """Start a conversation and return it."""
        now = self._clock()
        chat_id = uuid.uuid4().hex
        with self._write() as connection:
            connection.execute(
                "INSERT INTO chats (id, title, model_id, system_prompt, settings, created_s, updated_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                chat_values(chat_id, new, now),
            )
        return self.chat(chat_id)

    def chat(self, chat_id: str) -> Chat:
        """One conversation. Raises ChatError if there is none of that id."""
        row = self._connection.execute(f"SELECT {CHAT_COLUMNS} FROM chats WHERE id = ?", (chat_id,)).fetchone()
        if row is None:
            raise ChatError(f"There is no chat {chat_id!r}: it may have been deleted elsewhere.")
        return chat_from(row)

    def chats(self, limit: int = 5000) -> tuple[Chat, ...]:
        """Conversations, the latest changed first."""
        rows = self._connection.execute(
            f"SELECT {CHAT_COLUMNS} FROM chats ORDER BY updated_s DESC, rowid DESC LIMIT ?", (limit,)
        )
        return tuple(chat_from(row) for row in rows)

    def update_chat(
        self,
        chat_id: str,
        *,
        title: str | None = None,
        model_id: str | None = None,
        system_prompt: str | None = None,
        settings: Mapping[str, Any] | None = None,
        draft: str | None = None,
    ) -> None:
        """Change what is not None."""
        given = {
            "title": title,
            "model_id": model_id,
            "system_prompt": system_prompt,
            "settings": None if settings is None else json.dumps(dict(settings)),
            "draft": draft,
        }
        changes = {name: writable(value) for name, value in given.items() if value is not None}
        if changes:
            assignments = ", ".join(f"{name} = ?" for name in changes)
            with self._write() as connection:
                connection.execute(f"UPDATE chats SET {assignments} WHERE id = ?", (*changes.values(), chat_id))

    def delete(self, chat_id: str) -> None:
        """Remove a conversation with all its branches."""
        with self._write() as connection:
            # Deleting down a chain of parents nests a trigger for each message, and SQLite takes no more than 1000.
            connection.execute("UPDATE messages SET parent_id = NULL WHERE chat_id = ?", (chat_id,))
            connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))

    def show_branch(self, chat_id: str, leaf_id: int | None) -> None:
        """Make the branch that ends at `leaf_id` the one that is shown; None shows no message."""
        with self._write() as connection:
            connection.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (leaf_id, chat_id))

    # Messages

    def add(self, chat_id: str, message: Stored) -> Stored:
        """Append a message under `message.parent_id` and show its branch."""
        now = self._clock()
        with self._write() as connection:
            cursor = connection.execute(
                "INSERT INTO messages (chat_id, parent_id, role, content, reasoning, state, model_id, token_ids, spans,"
                " rejections, stats, created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (chat_id, message.parent_id, message.role, *body_values(message), now),
            )
            connection.execute(
                "UPDATE chats SET leaf_id = ?, updated_s = ? WHERE id = ?", (cursor.lastrowid, now, chat_id)
            )
        return self.message(int(cursor.lastrowid or 0))

    def save(self, message: Stored) -> None:
        """Write the present state of a message (a growing answer, or its end); its place in the tree stays."""
        with self._write() as connection:
            connection.execute(
                "UPDATE messages SET content = ?, reasoning = ?, state = ?, model_id = ?, token_ids = ?, spans = ?,"
                " rejections = ?, stats = ? WHERE id = ?",
                (*body_values(message), message.id),
            )
            connection.execute("UPDATE chats SET updated_s = ? WHERE id = ?", (self._clock(), message.chat_id))

    def save_text(self, message: Stored) -> None:
        """Write the text and tokens of a growing answer. Who drafted what is left to `save`: its cost grows with it."""
        content, reasoning, state, model_id, token_ids = text_values(message)
        with self._write() as connection:
            connection.execute(
                "UPDATE messages SET content = ?, reasoning = ?, state = ?, model_id = ?, token_ids = ? WHERE id = ?",
                (content, reasoning, state, model_id, token_ids, message.id),
            )

    def message(self, message_id: int) -> Stored:
        """One message. Raises ChatError if there is none of that id."""
        row = self._connection.execute(f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE id = ?", (message_id,)).fetchone()
        if row is None:
            raise ChatError(f"There is no message {message_id}: its chat may have been deleted elsewhere.")
        return stored_from(row)

    def path(self, chat_id: str, leaf_id: int | None = None) -> tuple[Stored, ...]:
        """Messages from the first to `leaf_id` (by default to the shown leaf), in order."""
        end = leaf_id if leaf_id is not None else self.chat(chat_id).leaf_id
        rows = self._connection.execute(
            "WITH RECURSIVE up (id, parent_id, depth) AS ("
            " SELECT id, parent_id, 0 FROM messages WHERE id = ? AND chat_id = ?"
            " UNION ALL SELECT m.id, m.parent_id, up.depth + 1 FROM messages m JOIN up ON m.id = up.parent_id)"
            f" SELECT {', '.join('m.' + name for name in MESSAGE_COLUMNS.split(', '))}"
            " FROM up JOIN messages m ON m.id = up.id ORDER BY up.depth DESC",
            (end, chat_id),
        )
        return tuple(stored_from(row) for row in rows)

    def all_messages(self, chat_id: str) -> tuple[Stored, ...]:
        """Every message of every branch, oldest first."""
        rows = self._connection.execute(
            f"SELECT {MESSAGE_COLUMNS} FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,)
        )
        return tuple(stored_from(row) for row in rows)

    def siblings(self, message: Stored) -> tuple[int, ...]:
        """Ids of the messages that share this one's parent, itself included, oldest first."""
        rows = self._connection.execute(
            "SELECT id FROM messages WHERE chat_id = ? AND parent_id IS ? ORDER BY id",
            (message.chat_id, message.parent_id),
        )
        return tuple(int(row[0]) for row in rows)

    def places(self, chat_id: str) -> dict[int, tuple[int, int]]:
        """(number, count) of every message among its siblings, counted from 1."""
        families: dict[int | None, list[int]] = {}
        rows = self._connection.execute("SELECT id, parent_id FROM messages WHERE chat_id = ? ORDER BY id", (chat_id,))
        for message_id, parent_id in rows:
            families.setdefault(parent_id, []).append(message_id)
        return {
            message_id: (number, len(family))
            for family in families.values()
            for number, message_id in enumerate(family, start=1)
        }

    def latest_leaf(self, message_id: int) -> int:
        """The newest leaf below a message (itself if it has no children)."""
        row = self._connection.execute(
            "WITH RECURSIVE down (id) AS (SELECT ? UNION ALL"
            " SELECT m.id FROM messages m JOIN down ON m.parent_id = down.id) SELECT max(id) FROM down",
            (message_id,),
        ).fetchone()
        return int(row[0])

    def recent_prompts(self, limit: int = 200) -> tuple[str, ...]:
        """What the user wrote last, newest first, each text once."""
        rows = self._connection.execute(
            "SELECT content FROM messages WHERE role = 'user' GROUP BY content ORDER BY max(id) DESC LIMIT ?", (limit,)
        )
        return tuple(str(row[0]) for row in rows)

    def search(self, query: str, limit: int = 100) -> tuple[Hit, ...]:
        """Messages that hold all words of `query`; the last word may be the start of one. Best first."""
        # A search has no way to write a NUL, and no lone surrogate can be handed over.
        typed = writable(query.replace("\0", " "))
        words = ['"' + word.replace('"', '""') + '"' for word in typed.split()]
        if not words:
            return ()
        try:
            return self._found(words, limit)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError:
            # The file was checked when it was opened, without the index.
            self._rebuild_index()
            return self._found(words, limit)

    def _found(self, words: list[str], limit: int) -> tuple[Hit, ...]:
        rows = self._connection.execute(
            "SELECT m.chat_id, c.title, m.id, m.role,"
            " snippet(messages_text, 0, char(2), char(3), '…', 16), m.created_s"
            " FROM messages_text t JOIN messages m ON m.id = t.rowid JOIN chats c ON c.id = m.chat_id"
            " WHERE messages_text MATCH ? ORDER BY rank LIMIT ?",
            (" ".join(words) + "*", limit),
        )
        return tuple(Hit(*row) for row in rows)

    # Notes: small values of the interface that outlive a run (an unsent prompt of a new chat, the panel's form).

    def note(self, name: str, default: str = "") -> str:
        """A remembered value."""
        row = self._connection.execute("SELECT value FROM notes WHERE name = ?", (name,)).fetchone()
        return default if row is None else str(row[0])

    def remember(self, name: str, value: str) -> None:
        """Keep a value under a name."""
        with self._write() as connection:
            connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (name, writable(value)))

    def notes_like(self, start: str) -> dict[str, str]:
        """Remembered values whose names start so, the latest remembered last."""
        rows = self._connection.execute(
            "SELECT name, value FROM notes WHERE substr(name, 1, ?) = ? ORDER BY rowid", (len(start), start)
        )
        return {str(name): str(value) for name, value in rows}

    def rename_note(self, name: str, new_name: str) -> bool:
        """Give a value another name; False if it is no longer there."""
        with self._write() as connection:
            return connection.execute("UPDATE notes SET name = ? WHERE name = ?", (new_name, name)).rowcount == 1

    def forget_note(self, name: str) -> None:
        """Remove a value."""
        with self._write() as connection:
            connection.execute("DELETE FROM notes WHERE name = ?", (name,))

    def insert_tree(self, new: NewChat, messages: Iterable[tuple[int, Stored]], leaf: int | None) -> Chat:
        """Write an imported conversation in one transaction.

        `messages` are (foreign id, message) with `parent_id` a foreign id that came before; `leaf` is a foreign id.
        """
        chat_id, now = uuid.uuid4().hex, self._clock()
        own_id: dict[int, int] = {}
        with self._write() as connection:
            connection.execute(
                "INSERT INTO chats (id, title, model_id, system_prompt, settings, created_s, updated_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                chat_values(chat_id, new, now),
            )
            for foreign_id, message in messages:
                parent = None if message.parent_id is None else own_id[message.parent_id]
                cursor = connection.execute(
                    "INSERT INTO messages (chat_id, parent_id, role, content, reasoning, state, model_id, token_ids,"
                    " spans, rejections, stats, created_s) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (chat_id, parent, message.role, *body_values(message), message.created_s or now),
                )
                own_id[foreign_id] = int(cursor.lastrowid or 0)
            shown = own_id.get(leaf) if leaf is not None else None
            connection.execute("UPDATE chats SET leaf_id = ? WHERE id = ?", (shown, chat_id))
        return self.chat(chat_id)

    @contextmanager
    def _write(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection:
                yield self._connection
        except sqlite3.Error as error:
            raise self._refused(error) from error

    def _refused(self, error: sqlite3.Error) -> ChatError:
        """The error that says what a refused write needs; a damaged search index is made anew here."""
        if getattr(error, "sqlite_errorcode", 0) in _INDEX_CODES:
            with suppress(sqlite3.Error):
                self._rebuild_index()
                return ChatError("The search index of the chats was damaged and has been made anew: do that again.")
        if isinstance(error, sqlite3.IntegrityError):
            return ChatError("The chat is no longer there: it may have been deleted elsewhere.")
        return ChatError(
            f"The chats could not be written ({error}): free some disk space or check the folder's rights."
        )

    def _rebuild_index(self) -> None:
        with self._connection as connection:
            connection.execute("INSERT INTO messages_text (messages_text) VALUES ('rebuild')")
            # An answer that is being written belongs into it when it is complete.
            connection.execute(
                "INSERT INTO messages_text (messages_text, rowid, content)"
                " SELECT 'delete', id, content FROM messages WHERE state = 'streaming'"
            )

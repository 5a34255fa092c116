"""Tables of the chat database and the steps that bring an older file up to date.

A step is never changed once released: a new one is appended. `PRAGMA user_version` counts the steps that were applied.
"""

from __future__ import annotations

import sqlite3

from localspec.chats.records import ChatError

# A message is indexed only when it is complete, so that saving a growing answer twice a second stays cheap.
_FIRST = """
CREATE TABLE chats (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    model_id TEXT NOT NULL,
    system_prompt TEXT NOT NULL,
    settings TEXT NOT NULL,
    leaf_id INTEGER,
    draft TEXT NOT NULL DEFAULT '',
    created_s REAL NOT NULL,
    updated_s REAL NOT NULL
);
CREATE INDEX chats_by_time ON chats (updated_s);
CREATE TABLE messages (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
    parent_id INTEGER REFERENCES messages (id) ON DELETE CASCADE,
    role TEXT NOT NULL,
    content TEXT NOT NULL,
    reasoning TEXT NOT NULL,
    state TEXT NOT NULL,
    model_id TEXT NOT NULL,
    token_ids BLOB NOT NULL,
    spans TEXT NOT NULL,
    rejections TEXT NOT NULL,
    stats TEXT NOT NULL,
    created_s REAL NOT NULL
);
CREATE INDEX messages_by_chat ON messages (chat_id, parent_id);
CREATE INDEX messages_by_parent ON messages (parent_id);
CREATE VIRTUAL TABLE messages_text USING fts5 (content, content='messages', content_rowid='id', tokenize='unicode61');
CREATE TRIGGER messages_added AFTER INSERT ON messages WHEN new.state != 'streaming' BEGIN
    INSERT INTO messages_text (rowid, content) VALUES (new.id, new.content);
END;
CREATE TRIGGER messages_removed AFTER DELETE ON messages WHEN old.state != 'streaming' BEGIN
    INSERT INTO messages_text (messages_text, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER messages_left AFTER UPDATE OF content, state ON messages WHEN old.state != 'streaming' BEGIN
    INSERT INTO messages_text (messages_text, rowid, content) VALUES ('delete', old.id, old.content);
END;
CREATE TRIGGER messages_changed AFTER UPDATE OF content, state ON messages WHEN new.state != 'streaming' BEGIN
    INSERT INTO messages_text (rowid, content) VALUES (new.id, new.content);
END;
CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

MIGRATIONS: tuple[str, ...] = (_FIRST,)


def migrate(connection: sqlite3.Connection) -> None:
    """Apply the missing steps, each in its own transaction.

    Raises ChatError for a file of a newer version of localspec: its rows may mean something else there.
    """
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise ChatError(
            f"The chats were written by a newer localspec (format {version}, this one knows {len(MIGRATIONS)}): "
            "update localspec, or set LOCALSPEC_HOME to another folder."
        )
    for number in range(version, len(MIGRATIONS)):
        # executescript commits first, so the transaction is part of the script.
        connection.executescript(f"BEGIN IMMEDIATE;{MIGRATIONS[number]};PRAGMA user_version = {number + 1};COMMIT;")

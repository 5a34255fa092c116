"""The tables of the index, and their version: an index of another one is made again from the files."""

from __future__ import annotations

VERSION = 1
TABLES = """
CREATE TABLE block(
    key BLOB PRIMARY KEY, fingerprint BLOB NOT NULL, parent BLOB NOT NULL, kind INTEGER NOT NULL,
    token_begin INTEGER NOT NULL, token_end INTEGER NOT NULL, file_bytes INTEGER NOT NULL,
    worth REAL NOT NULL, priority REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX block_by_parent ON block(parent, kind);
CREATE INDEX block_by_priority ON block(priority, token_end DESC);
CREATE TABLE segment_ids(parent BLOB, ids BLOB, key BLOB, PRIMARY KEY(parent, ids)) WITHOUT ROWID;
CREATE INDEX segment_ids_by_key ON segment_ids(key);
CREATE TABLE chat(chat_id TEXT, key BLOB, PRIMARY KEY(chat_id, key)) WITHOUT ROWID;
CREATE INDEX chat_by_key ON chat(key);
CREATE TABLE model(
    fingerprint BLOB PRIMARY KEY, model_id TEXT NOT NULL, folder TEXT NOT NULL, needs_state INTEGER NOT NULL,
    stored_bytes INTEGER NOT NULL DEFAULT 0, num_blocks INTEGER NOT NULL DEFAULT 0,
    prefill_tok_per_s REAL, read_bytes_per_s REAL);
CREATE TABLE counter(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER block_added AFTER INSERT ON block BEGIN
    UPDATE model SET stored_bytes = stored_bytes + new.file_bytes, num_blocks = num_blocks + 1
    WHERE fingerprint = new.fingerprint;
END;
CREATE TRIGGER block_removed AFTER DELETE ON block BEGIN
    UPDATE model SET stored_bytes = stored_bytes - old.file_bytes, num_blocks = num_blocks - 1
    WHERE fingerprint = old.fingerprint;
    DELETE FROM segment_ids WHERE key = old.key;
    DELETE FROM chat WHERE key = old.key;
END;
"""

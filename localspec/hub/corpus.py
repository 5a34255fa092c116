"""Text for n-gram tables: which files of a tree, and the texts in them. Plain text, source, JSON lines, chats.

Knows files, not tokens and not tables. Follows no link, respects .gitignore, passes over what is binary or too large.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localspec.chats.records import ChatError
from localspec.chats.store import ChatStore
from localspec.hub.gitignore import IgnoreRules
from localspec.hub.records import HubError

MAX_TEXT_BYTES = 2 << 20
MAX_LINE_BYTES = 4 << 20
_SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules"})
_PROBE_BYTES = 8192

Kind = Literal["text", "jsonl", "chats"]


@dataclass(frozen=True)
class CorpusFile:
    """A file to read, as it was when it was found."""

    path: Path
    kind: Kind
    size_bytes: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """The path as text that can be stored: bytes of a name that are no UTF-8 are spelled out."""
        return os.fsencode(self.path).decode("utf-8", errors="backslashreplace")


@dataclass(frozen=True)
class CorpusText:
    """One text. `source`: what can later be deleted as one; `stamp` differs whenever the source's content may."""

    source: str
    stamp: str
    text: str


def tokenizer_fingerprint(folder: Path) -> bytes:
    """SHA-256 of a model's tokenizer.json: what a table is bound to. Raises HubError if there is none."""
    path = folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise HubError(f"{path} cannot be read ({error.strerror}); pull the model again") from error


def find_files(paths: Sequence[Path], max_text_bytes: int = MAX_TEXT_BYTES) -> Iterator[CorpusFile]:
    """Every file under the paths that may hold text, in an order that stays.

    Raises HubError for a path that is not there, and for a text file given by name that is too large.
    """
    for path in paths:
        given = path.expanduser().absolute()
        if given.is_dir():
            yield from _walk(given, IgnoreRules.above(given), max_text_bytes)
        elif given.is_file():
            found = _described(given, MAX_LINE_BYTES)
            if found is not None:
                yield found
            elif _is_large_text(given):
                raise HubError(
                    f"{path} holds more than {MAX_LINE_BYTES >> 20} MiB of text; split it or give it as JSON lines"
                )
        else:
            raise HubError(f"{path} is no file or folder; give paths that exist")


def _walk(folder: Path, above: IgnoreRules, max_text_bytes: int) -> Iterator[CorpusFile]:
    """Depth first, by a stack of its own: trees may be deeper than calls can be."""
    open_folders = [(iter(_entries(folder)), above.inside(folder))]
    while open_folders:
        entries, rules = open_folders[-1]
        entry = next(entries, None)
        if entry is None:
            open_folders.pop()
            continue
        path = Path(entry.path)
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name in _SKIPPED_FOLDERS or entry.is_symlink() or rules.ignores(path, is_folder):
            continue
        if is_folder:
            open_folders.append((iter(_entries(path)), rules.inside(path)))
        elif entry.is_file(follow_symlinks=False):
            found = _described(path, max_text_bytes)
            if found is not None:
                yield found


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Of a folder, by name; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        return []


def _described(path: Path, max_text_bytes: int) -> CorpusFile | None:
    """None for what is empty, too large or binary by its first bytes."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            probe = file.read(_PROBE_BYTES)
    except OSError:
        return None
    kind: Kind = "jsonl" if path.suffix in (".jsonl", ".ndjson") else "text"
    if probe.startswith(b"SQLite format 3\0"):
        kind = "chats"
    elif not probe or b"\0" in probe or (kind == "text" and status.st_size > max_text_bytes):
        return None
    return CorpusFile(path, kind, status.st_size, status.st_mtime_ns)


def _is_large_text(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" not in file.read(_PROBE_BYTES) and path.stat().st_size > MAX_LINE_BYTES
    except OSError:
        return False


def read_texts(file: CorpusFile) -> Iterator[CorpusText]:
    """The texts of a file; nothing for one that went away, is no UTF-8 or is another program's database."""
    try:
        if file.kind == "chats":
            yield from _chat_texts(file.path)
        elif file.kind == "jsonl":
            yield from _line_texts(file)
        else:
            text = file.path.read_bytes().decode("utf-8")
            yield CorpusText(file.name, _stamp(file), text)
    except (OSError, UnicodeDecodeError, sqlite3.Error, ChatError):
        return


def _stamp(file: CorpusFile) -> str:
    return f"{file.size_bytes:x}.{file.mtime_ns:x}"


def _line_texts(file: CorpusFile) -> Iterator[CorpusText]:
    with file.path.open("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            for text in _texts_of_line(line):
                yield CorpusText(file.name, _stamp(file), text)


def _texts_of_line(line: bytes) -> list[str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return []
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict):
        return []
    for name in ("text", "content"):
        if isinstance(value.get(name), str):
            return [value[name]]
    messages = value.get("messages")
    return [text for message in messages for text in _message_text(message)] if isinstance(messages, list) else []


def _message_text(message: Any) -> list[str]:
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return []
    return [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _chat_texts(path: Path) -> Iterator[CorpusText]:
    """Messages of the chats database, read only; private chats are never in it."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=5.0)
    store = ChatStore(connection)
    try:
        for chat in store.chats(limit=1 << 30):
            for message in store.all_messages(chat.id):
                if message.content:
                    yield CorpusText(f"chat:{chat.id}", f"{chat.updated_s:.6f}", message.content)
    finally:
        store.close()

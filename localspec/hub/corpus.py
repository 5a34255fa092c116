"""Text for n-gram tables: which files of a tree, and the texts in them. Plain text, source, JSON lines, chats.

Knows files, not tokens and not tables. Follows no link, respects .gitignore, passes over what is binary or too large
and counts it. Large texts come in pieces, so that memory is bounded whatever the file.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from localspec.chats.records import ChatError
from localspec.chats.store import ChatStore
from localspec.hub.gitignore import IgnoreRules
from localspec.hub.records import HubError

MAX_TEXT_BYTES = 2 << 20
"""Of a file in a tree; larger ones are data more often than text."""
WHOLE_TEXT_BYTES = 4 << 20
"""A file given by name that is larger comes in pieces."""
MAX_LINE_BYTES = 32 << 20
PIECE_CHARS = 1 << 20
BINARY, NOT_UTF8, UNREADABLE = "binary files", "files that are not UTF-8", "files or folders that cannot be read"
LARGE, LONG_LINES = "large files of a tree", f"JSON lines above {MAX_LINE_BYTES >> 20} MiB"
BAD_LINES = "lines that are no JSON with text"
_SKIPPED_FOLDERS = frozenset({".git", ".hg", ".svn", "__pycache__", "node_modules"})
_PROBE_BYTES = 8192

Kind = Literal["text", "large", "jsonl", "chats"]
Passed = Counter[str]
"""How much was passed over, by reason."""


@dataclass(frozen=True)
class CorpusFile:
    """A file to read, as it was when it was found."""

    path: Path
    kind: Kind
    size_bytes: int
    mtime_ns: int

    @property
    def name(self) -> str:
        """See `stored_name`."""
        return stored_name(self.path)


@dataclass(frozen=True)
class CorpusText:
    """One text. `source`: what can later be deleted as one; `stamp` differs whenever the source's content may."""

    source: str
    stamp: str
    text: str


def stored_name(path: Path) -> str:
    """A path as text that can be stored: bytes of a name that are no UTF-8 are spelled out."""
    return os.fsencode(path).decode("utf-8", errors="backslashreplace")


def tokenizer_fingerprint(folder: Path) -> bytes:
    """SHA-256 of a model's tokenizer.json: what a table is bound to. Raises HubError if there is none."""
    path = folder / "tokenizer.json"
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise HubError(f"{path} cannot be read ({error.strerror}); pull the model again") from error


def find_files(
    paths: Sequence[Path], max_text_bytes: int = MAX_TEXT_BYTES, passed: Passed | None = None
) -> Iterator[CorpusFile]:
    """Every file under the paths that may hold text, once, in an order that stays.

    `passed` is told what is left out. Raises HubError for a path that is not there.
    """
    passed = Counter() if passed is None else passed
    seen: set[Path] = set()
    for path in paths:
        given = absolute_path(path)
        if given.is_dir():
            found = _walk(given, IgnoreRules.above(given), max_text_bytes, passed)
        elif given.is_file():
            found = _described(given, None, passed)
        else:
            raise HubError(f"{path} is no file or folder; give paths that exist")
        for file in found:
            if file.path not in seen:
                seen.add(file.path)
                yield file


def absolute_path(path: Path) -> Path:
    """The path as files below it are named. Raises HubError for the home folder of nobody."""
    try:
        given = path.expanduser()
    except RuntimeError:
        raise HubError(f"{path} names a home folder that is not known; give the whole path") from None
    # Without "..", so that a file has one name however it was reached; a link keeps its name, whatever it points to.
    return given.resolve() if ".." in given.parts else given.absolute()


def _walk(folder: Path, above: IgnoreRules, max_text_bytes: int, passed: Passed) -> Iterator[CorpusFile]:
    """Depth first, by a stack of its own: trees may be deeper than calls can be."""
    open_folders = [(iter(_entries(folder, passed)), above.inside(folder))]
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
            open_folders.append((iter(_entries(path, passed)), rules.inside(path)))
        elif entry.is_file(follow_symlinks=False):
            yield from _described(path, max_text_bytes, passed)


def _entries(folder: Path, passed: Passed) -> list[os.DirEntry[str]]:
    """Of a folder, by name; none if it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError:
        passed[UNREADABLE] += 1
        return []


def _described(path: Path, max_text_bytes: int | None, passed: Passed) -> Iterator[CorpusFile]:
    """Nothing for what is empty, too large for a tree or binary by its first bytes."""
    try:
        status = path.stat()
        with path.open("rb") as file:
            probe = file.read(_PROBE_BYTES)
    except OSError:
        passed[UNREADABLE] += 1
        return
    kind: Kind = "jsonl" if path.suffix in (".jsonl", ".ndjson") else "text"
    if probe.startswith(b"SQLite format 3\0"):
        kind = "chats"
    elif b"\0" in probe:
        passed[BINARY] += 1
        return
    elif kind == "text" and max_text_bytes is None and status.st_size > WHOLE_TEXT_BYTES:
        kind = "large"
    elif kind == "text" and max_text_bytes is not None and status.st_size > max_text_bytes:
        passed[LARGE] += 1
        return
    if probe:
        yield CorpusFile(path, kind, status.st_size, status.st_mtime_ns)


def read_texts(file: CorpusFile, passed: Passed | None = None) -> Iterator[CorpusText]:
    """The texts of a file; nothing for one that went away, is no UTF-8 or is another program's database.

    `passed` is told what is left out.
    """
    passed = Counter() if passed is None else passed
    try:
        if file.kind == "chats":
            yield from _chat_texts(file.path)
        elif file.kind == "jsonl":
            yield from _line_texts(file, passed)
        elif file.kind == "large":
            yield from _pieces_of_file(file)
        else:
            text = file.path.read_bytes().decode("utf-8")
            yield CorpusText(file.name, _stamp(file), text)
    except UnicodeDecodeError:
        passed[NOT_UTF8] += 1
    except (OSError, sqlite3.Error, ChatError):
        passed[UNREADABLE] += 1


def _stamp(file: CorpusFile) -> str:
    return f"{file.size_bytes:x}.{file.mtime_ns:x}"


def _pieces_of_file(file: CorpusFile) -> Iterator[CorpusText]:
    with file.path.open(encoding="utf-8", newline="") as stream:
        rest = ""
        while read := stream.read(PIECE_CHARS):
            *pieces, rest = _pieces(rest + read)
            for piece in pieces:
                yield CorpusText(file.name, _stamp(file), piece)
        if rest:
            yield CorpusText(file.name, _stamp(file), rest)


def _pieces(text: str) -> Iterator[str]:
    """The text in order, cut where a line ends if there is such a place, else anywhere."""
    begin = 0
    while len(text) - begin > PIECE_CHARS:
        end = text.rfind("\n", begin + PIECE_CHARS // 2, begin + PIECE_CHARS) + 1 or begin + PIECE_CHARS
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _line_texts(file: CorpusFile, passed: Passed) -> Iterator[CorpusText]:
    with file.path.open("rb") as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                passed[LONG_LINES] += 1
                while (line := lines.readline(MAX_LINE_BYTES)) and not line.endswith(b"\n"):
                    pass
                continue
            texts = _texts_of_line(line)
            if not texts and line.strip():
                passed[BAD_LINES] += 1
            for text in texts:
                # A string of JSON may hold halves of surrogate pairs, which no tokenizer takes.
                for piece in _pieces(text.encode("utf-8", errors="replace").decode("utf-8")):
                    yield CorpusText(file.name, _stamp(file), piece)


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

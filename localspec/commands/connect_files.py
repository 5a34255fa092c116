"""Puts a piece of text into another program's configuration file and takes it out again, byte for byte.

A piece is one insertion: everything else in the file stays as it is, in every byte. What was inserted is recorded
beside a copy of the file, so that undoing needs no understanding of the file. Knows nothing of clients.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK_START, MARK_END = ">>> localspec >>>", "<<< localspec <<<"
MAX_FILE_BYTES = 8 << 20


class CannotWrite(Exception):
    """The file is not one that a piece can be put into safely; the message says what to do by hand."""


@dataclass(frozen=True)
class Insertion:
    """`text` stands at `offset` characters of the file afterwards."""

    offset: int
    text: str


@dataclass(frozen=True)
class Record:
    """What was done to a file. `created`: there was none before."""

    path: str
    inserted: str
    created: bool
    backup: str


def append_block(content: str, body: str, comment: str, taken: Sequence[str]) -> Insertion:
    """A marked block at the end. Raises CannotWrite if a line of the file matches one of the `taken` patterns."""
    for pattern in taken:
        if re.search(pattern, content, re.MULTILINE):
            raise CannotWrite(f"the file sets {pattern.strip('^')!r} itself already; change it by hand")
    start = "" if not content or content.endswith("\n") else "\n"
    return Insertion(len(content), f"{start}{comment} {MARK_START}\n{body.rstrip()}\n{comment} {MARK_END}\n")


def yaml_item(content: str, key: str, item: str) -> Insertion:
    """An item (its lines unindented, the first after "- ") at the head of a block list. Raises CannotWrite."""
    found = re.search(rf"^{key}:[ \t]*\r?\n(?=([ \t]*)- )", content, re.MULTILINE)
    if found is None:
        raise CannotWrite(f"the file has no block list {key!r} of the form that can be added to; change it by hand")
    indent = found.group(1)
    lines = item.rstrip().split("\n")
    text = "".join(f"{indent}{'- ' if index == 0 else '  '}{line}\n" for index, line in enumerate(lines))
    return Insertion(found.end(), text)


def json_members(content: str, path: Sequence[str], members: Mapping[str, Any]) -> Insertion:
    """Members for the object at `path`, whose missing part is made. Comments and trailing commas may stand in the file.

    Raises CannotWrite for what is no JSON object, or if a member is there already.
    """
    scanner = _Json(content)
    position = scanner.skip(0)
    depth = 0
    for depth, key in enumerate((*path, None)):  # noqa: B007
        entries = scanner.entries(position)
        if key is None or key not in entries:
            break
        position = entries[key]
    missing = list(path[depth:])
    value: dict[str, Any] = dict(members)
    for key in reversed(missing):
        value = {key: value}
    clash = set(value) & set(entries)
    if clash:
        raise CannotWrite(f"the file sets {', '.join(sorted(clash))} itself already; change it by hand")
    indent = "  " * (depth + 1)
    lines = json.dumps(value, ensure_ascii=False, indent=2).split("\n")[1:-1]
    text = "".join(f"\n{indent}{line[2:]}" for line in lines)
    text += "," if entries else "\n" + indent[2:]
    return Insertion(position + 1, text)


class _Json:
    """Finds members in JSON with comments, without changing it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def skip(self, at: int) -> int:
        """Past blanks and comments."""
        found = re.compile(r"(?:[\s\ufeff]+|//[^\n]*|/\*.*?\*/)*", re.DOTALL).match(self._text, at)
        return found.end() if found else at

    def entries(self, at: int) -> dict[str, int]:
        """Where the value of each member of the object at `at` begins. Raises CannotWrite."""
        self._need(at, "{")
        found: dict[str, int] = {}
        at = self.skip(at + 1)
        while self._at(at) != "}":
            end = self._string_end(at)
            key = json.loads(self._text[at:end])
            at = self.skip(end)
            self._need(at, ":")
            at = self.skip(at + 1)
            found[key] = at
            at = self.skip(self._value_end(at))
            if self._at(at) == ",":
                at = self.skip(at + 1)
            else:
                self._need(at, "}")
        return found

    def _value_end(self, at: int) -> int:
        if self._at(at) == '"':
            return self._string_end(at)
        if self._at(at) not in "{[":
            found = re.compile(r"[\w.+-]+").match(self._text, at)
            if found is None:
                raise _no_object()
            return found.end()
        depth = 0
        while True:
            character = self._at(at)
            if character == '"':
                at = self._string_end(at)
            else:
                depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
                at = self.skip(at + 1)
            if depth == 0:
                return at

    def _string_end(self, at: int) -> int:
        found = re.compile(r'"(?:[^"\\\n]|\\.)*"').match(self._text, at)
        if found is None:
            raise _no_object()
        return found.end()

    def _at(self, at: int) -> str:
        if at >= len(self._text):
            raise _no_object()
        return self._text[at]

    def _need(self, at: int, character: str) -> None:
        if self._at(at) != character:
            raise _no_object()


def _no_object() -> CannotWrite:
    return CannotWrite("the file is not the JSON object that was expected; change it by hand")


class Ledger:
    """Records and copies of changed files in a folder, one for each client."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def record(self, name: str) -> Record | None:
        """What was done for a client, or None."""
        try:
            return Record(**json.loads(self._path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, name: str, path: Path, insertion: Insertion, content: str, existed: bool) -> Record:
        """Insert, after keeping a copy. The file is replaced in one piece and keeps its mode; links are followed."""
        target = path.resolve()
        text = insertion.text.replace("\n", "\r\n") if "\r\n" in content else insertion.text
        backup = self._folder / f"{name}.backup"
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(backup, content.encode(), 0o600)
        record = Record(str(target), text, not existed, str(backup))
        _replace(self._path(name), json.dumps(record.__dict__).encode(), 0o600)
        target.parent.mkdir(parents=True, exist_ok=True)
        new = content[: insertion.offset] + text + content[insertion.offset :]
        _replace(target, new.encode(), target.stat().st_mode & 0o777 if existed else 0o600)
        return record

    def undo(self, name: str) -> Record:
        """Take out what was inserted; a file that we made and nobody changed goes. Raises CannotWrite."""
        record = self.record(name)
        if record is None:
            raise CannotWrite("nothing was written for this client, so there is nothing to undo")
        path = Path(record.path)
        content = read_text(path)
        if content.count(record.inserted) != 1:
            raise CannotWrite(
                f"{path} was changed where localspec had written; take it out by hand (the old file: {record.backup})"
            )
        rest = content.replace(record.inserted, "", 1)
        if record.created and not rest:
            path.unlink()
        else:
            _replace(path, rest.encode(), path.stat().st_mode & 0o777)
        self._path(name).unlink()
        Path(record.backup).unlink(missing_ok=True)
        return record

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def read_text(path: Path) -> str:
    """A whole file, every byte of it. Raises CannotWrite."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise CannotWrite(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB; change it by hand")
        return path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CannotWrite(f"{path} cannot be read ({error}); change it by hand") from error


def _replace(path: Path, data: bytes, mode: int) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.chmod(mode)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

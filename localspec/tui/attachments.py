"""Text that is put into a prompt as a chip: files and long pastes. The chip stands in the prompt, the text is sent."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from localspec.tui.text import clean, clean_line

FILE_LIMIT_BYTES = 4 * 1024 * 1024
PASTE_CHIP_LINES = 40
# No key types this sign, so that no prompt begins with it.
_PACKED = "\x01"
# A box with so much in one line is slow to type in.
PASTE_CHIP_CHARS = 8_000


class AttachmentError(Exception):
    """A file that cannot be attached; the message says why."""


@dataclass(frozen=True)
class Attachment:
    """`chip` is what the prompt shows, `text` what is sent in its place."""

    chip: str
    text: str


def read_file(path: Path) -> str:
    """Text of a file. Raises AttachmentError for a folder, a binary or a large file, OSError if it cannot be read."""
    if not path.is_file():
        raise AttachmentError(f"{path} is not a file: give the name of a text file.")
    if path.stat().st_size > FILE_LIMIT_BYTES:
        raise AttachmentError(f"{path} is larger than {FILE_LIMIT_BYTES >> 20} MiB: attach a part of it.")
    content = path.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise AttachmentError(f"{path} is not UTF-8 text: only text files can be attached.") from error
    if "\x00" in text:
        raise AttachmentError(f"{path} is a binary file: only text files can be attached.")
    return clean(text)


def fenced(name: str, text: str) -> str:
    """A file as the model sees it: its name and its text in a fence that the text cannot close."""
    mark = "```"
    while mark in text:
        mark += "`"
    suffix = Path(name).suffix.lstrip(".")
    return f"File `{name}`:\n{mark}{suffix}\n{text.rstrip(chr(10))}\n{mark}\n"


class Attachments:
    """The chips of the prompt that is being written."""

    def __init__(self) -> None:
        self._items: list[Attachment] = []

    def names(self) -> tuple[str, ...]:
        """The chips."""
        return tuple(item.chip for item in self._items)

    def add(self, label: str, text: str) -> str:
        """Keep a text; returns its chip. A name in the label may hold anything, the chip is one clean line."""
        label = clean_line(label)
        number = sum(item.chip.startswith(f"[{label}") for item in self._items) + 1
        chip = f"[{label}]" if number == 1 else f"[{label} #{number}]"
        self._items.append(Attachment(chip, text))
        return chip

    def expand(self, prompt: str) -> str:
        """The prompt with each chip replaced by its text."""
        if not self._items:
            return prompt
        # In one pass: a text that holds the name of another chip stays as it is.
        texts = {item.chip: item.text for item in self._items}
        return re.sub("|".join(map(re.escape, texts)), lambda match: texts[match[0]], prompt)

    def pack(self, prompt: str) -> str:
        """The prompt and the texts behind its chips as one text, to be kept with a chat."""
        used = [[item.chip, item.text] for item in self._items if item.chip in prompt]
        return _PACKED + json.dumps([prompt, used]) if used else prompt

    def unpack(self, kept: str) -> str:
        """The prompt of a text that `pack` gave; its chips stand for their texts again."""
        self._items.clear()
        if not kept.startswith(_PACKED):
            return kept
        try:
            prompt, used = json.loads(kept.removeprefix(_PACKED))
            self._items = [Attachment(str(chip), str(text)) for chip, text in used]
            return str(prompt)
        except (ValueError, TypeError):
            return kept.removeprefix(_PACKED)

    def clear(self) -> None:
        """The prompt was sent."""
        self._items.clear()


def find_files(folder: Path, typed: str, limit: int = 50, walk_limit: int = 4000) -> list[str]:
    """Names below `folder` that hold the typed letters in order, the shortest first. Hidden folders are left out."""
    found: list[tuple[int, str]] = []
    waiting, seen = [folder], 0
    while waiting and seen < walk_limit:
        here = waiting.pop(0)
        try:
            entries = sorted(here.iterdir())
        except OSError:
            continue
        for entry in entries:
            seen += 1
            if entry.name.startswith(".") or entry.is_symlink():
                continue
            if entry.is_dir():
                waiting.append(entry)
            elif _holds(name := str(entry.relative_to(folder)), typed):
                found.append((len(name), name))
    return [name for _, name in sorted(found)[:limit]]


def _holds(name: str, typed: str) -> bool:
    letters = iter(name.casefold())
    return all(letter in letters for letter in typed.casefold())

"""Prompt files: JSON lines or plain text, read as untrusted input. Knows the forms in which questions are kept."""

from __future__ import annotations

import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

MAX_LINE_CHARACTERS = 1 << 20
MAX_PROMPTS = 1 << 20
MAX_CHARACTERS = 1 << 29
HELD_OUT_ONE_IN = 20
KEYS = ("prompt", "question", "text", "instruction")


def read_prompts(paths: Sequence[Path]) -> list[str]:
    """Every distinct prompt of the files, in order.

    *.jsonl (also packed with gzip): objects with one of KEYS, or `turns` (the first), or `messages` (the first of a
    user); any other file: one prompt a line. Raises ValueError naming file and line, OSError where a file is missing.
    """
    found: dict[str, None] = {}
    characters = 0
    for path in paths:
        for number, line in enumerate(_lines(path), 1):
            if len(line) > MAX_LINE_CHARACTERS:
                raise ValueError(f"{path}, line {number} is longer than {MAX_LINE_CHARACTERS} characters")
            # JSON can spell half a surrogate pair, which no tokenizer takes.
            text = _text_of(line, path, number).encode("utf-8", "replace").decode().strip()
            if text and text not in found:
                found[text] = None
                characters += len(text)
            if len(found) > MAX_PROMPTS or characters > MAX_CHARACTERS:
                raise ValueError(
                    f"{path}: more than {MAX_PROMPTS} prompts or {MAX_CHARACTERS} characters in all; give fewer"
                )
    return list(found)


def is_held_out(prompt: str) -> bool:
    """One prompt of twenty, by its own hash: the same in every run and whatever else is in the files."""
    return hashlib.sha256(prompt.encode("utf-8", "surrogatepass")).digest()[0] % HELD_OUT_ONE_IN == 0


def _lines(path: Path) -> Iterator[str]:
    try:
        with _opened(path) as file:
            # A bounded read, so that a file without line ends is not taken whole.
            while line := file.readline(MAX_LINE_CHARACTERS + 2):
                yield line
    except (EOFError, zlib.error) as error:
        raise ValueError(f"{path} is a damaged gzip file ({error}); fetch it again") from None


def _opened(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8", errors="replace")
    return path.open(encoding="utf-8", errors="replace")


def _text_of(line: str, path: Path, number: int) -> str:
    if ".jsonl" not in path.suffixes or not line.strip():
        return line
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}, line {number} is no JSON: {error}") from None
    text = row if isinstance(row, str) else _first_text(row) if isinstance(row, dict) else None
    if text is None:
        raise ValueError(f"{path}, line {number} has none of {', '.join((*KEYS, 'turns', 'messages'))}")
    return text


def _first_text(row: dict[str, Any]) -> str | None:
    for key in KEYS:
        if isinstance(row.get(key), str):
            return str(row[key])
    turns = row.get("turns")
    if isinstance(turns, list) and turns and isinstance(turns[0], str):
        return str(turns[0])
    messages = row.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") == "user" and isinstance(message.get("content"), str):
            return str(message["content"])
    return None

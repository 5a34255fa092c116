"""The prompts of a measurement: records, and reading the user's own from files. What a file holds is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localspec.api.types import Message

MAX_FILE_BYTES = 16 << 20
MAX_PROMPTS = 1000
SEPARATOR = "---"
OWN = "own"
"""Workload of prompts that name none."""
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """One conversation to be answered."""

    messages: tuple[Message, ...]

    @classmethod
    def of(cls, text: str) -> Prompt:
        """A single question."""
        return cls((Message("user", text),))


def read_prompts(path: Path) -> Mapping[str, tuple[Prompt, ...]]:
    """Prompts of a file by workload.

    `.jsonl`: an object a line with `prompt` (text) or `messages` (role and content), and `workload` if wanted. Any
    other file: texts that lines of three dashes part. Raises ValueError naming the line and what would work.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} is larger than {MAX_FILE_BYTES >> 20} MiB")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    pairs = _of_jsonl(text, path) if path.suffix == ".jsonl" else [(OWN, Prompt.of(part)) for part in _parts(text)]
    if not pairs:
        raise ValueError(f"{path} holds no prompt")
    if len(pairs) > MAX_PROMPTS:
        raise ValueError(f"{path} holds {len(pairs)} prompts; at most {MAX_PROMPTS} can be measured")
    found: dict[str, tuple[Prompt, ...]] = {}
    for workload, prompt in pairs:
        found[workload] = (*found.get(workload, ()), prompt)
    return found


def _parts(text: str) -> list[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines():
        if line.strip() == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(line)
    joined = ("\n".join(lines).strip() for lines in parts)
    return [part for part in joined if part]


def _of_jsonl(text: str, path: Path) -> list[tuple[str, Prompt]]:
    found = []
    # A line separator of Unicode may stand inside a text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(_read(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found


def _read(data: Any) -> tuple[str, Prompt]:
    if not isinstance(data, Mapping):
        raise ValueError("an object is needed")
    workload = data.get("workload", OWN)
    if not isinstance(workload, str) or not 0 < len(workload) <= 40 or not workload.isprintable():
        raise ValueError("workload must be a short name")
    messages = data.get("messages", [{"role": "user", "content": data.get("prompt")}])
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one")
    return workload, Prompt(tuple(_message(message) for message in messages))


def _message(data: Any) -> Message:
    if not isinstance(data, Mapping) or not isinstance(data.get("content"), str) or not data["content"]:
        raise ValueError("a prompt must be text that is not empty")
    if data.get("role") not in _ROLES:
        raise ValueError(f"a message's role must be one of {', '.join(_ROLES)}")
    return Message(data["role"], data["content"])

"""Conversations as Markdown and JSON, and JSON back into the store. A file to import is hostile until checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from localspec.chats.records import ROLES, STATES, Chat, ChatError, NewChat, State, Stored
from localspec.chats.store import ChatStore

FORMAT = "localspec-chat"
VERSION = 1
IMPORT_LIMIT_BYTES = 256 * 1024 * 1024
MESSAGE_LIMIT = 200_000


def to_markdown(chat: Chat, path: tuple[Stored, ...]) -> str:
    """The shown branch as Markdown: a heading a message, thoughts as quotes."""
    parts = [f"# {chat.title or 'Chat'}\n"]
    if chat.system_prompt:
        parts.append(f"## System\n\n{chat.system_prompt}\n")
    for message in path:
        name = message.role.capitalize()
        suffix = f" ({message.model_id})" if message.role == "assistant" and message.model_id else ""
        parts.append(f"## {name}{suffix}\n")
        if message.reasoning:
            quoted = "\n".join("> " + line if line else ">" for line in message.reasoning.strip().split("\n"))
            parts.append(quoted + "\n")
        parts.append(message.content.rstrip("\n") + "\n")
        if message.state in ("cancelled", "interrupted", "error"):
            parts.append(f"*({message.state})*\n")
    return "\n".join(parts)


def to_json(chat: Chat, messages: tuple[Stored, ...]) -> str:
    """The whole tree with token ids and statistics; `from_json` reads it back."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "title": chat.title,
        "model_id": chat.model_id,
        "system_prompt": chat.system_prompt,
        "settings": dict(chat.settings),
        "leaf_id": chat.leaf_id,
        "messages": [{k: v for k, v in asdict(message).items() if k != "chat_id"} for message in messages],
    }
    return json.dumps(document, ensure_ascii=False, indent=1)


def from_json(store: ChatStore, text: str) -> Chat:
    """Add the conversation of an exported file. Raises ChatError that names the first thing wrong with it."""
    if len(text) > IMPORT_LIMIT_BYTES:
        raise ChatError(f"The file is larger than {IMPORT_LIMIT_BYTES >> 20} MiB: export a smaller chat.")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"The file is not JSON ({error}): give one that /export json wrote.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ChatError(f'The file is not a chat: it needs "format": "{FORMAT}".')
    if document.get("version") != VERSION:
        raise ChatError(f"The chat file has version {document.get('version')!r}: this localspec reads {VERSION}.")
    rows = document.get("messages")
    if not isinstance(rows, list) or len(rows) > MESSAGE_LIMIT:
        raise ChatError(f'The chat file needs "messages", a list of at most {MESSAGE_LIMIT}.')
    seen: set[int] = set()
    messages: list[tuple[int, Stored]] = []
    for number, row in enumerate(rows):
        foreign_id, message = _read_message(row, number, seen)
        seen.add(foreign_id)
        messages.append((foreign_id, message))
    leaf = document.get("leaf_id")
    if leaf is not None and not (_is_count(leaf) and leaf in seen):
        raise ChatError(f"The chat file shows message {leaf!r} as its last, which is not in it.")
    settings = document.get("settings")
    new = NewChat(
        title=_text(document, "title", "chat"),
        model_id=_text(document, "model_id", "chat"),
        system_prompt=_text(document, "system_prompt", "chat"),
        settings=settings if isinstance(settings, dict) else {},
    )
    return store.insert_tree(new, messages, leaf)


def _read_message(row: Any, number: int, seen: set[int]) -> tuple[int, Stored]:
    where = f"message {number + 1}"
    if not isinstance(row, dict):
        raise ChatError(f"The chat file's {where} is not an object.")
    foreign_id, parent_id = row.get("id"), row.get("parent_id")
    if not isinstance(foreign_id, int) or not _is_count(foreign_id) or foreign_id in seen:
        raise ChatError(f"The chat file's {where} needs an id of its own (a number).")
    # A parent must come first: this rules out cycles.
    if parent_id is not None and not (_is_count(parent_id) and parent_id in seen):
        raise ChatError(f"The chat file's {where} names a parent that does not come before it.")
    role = row.get("role")
    if role not in ROLES:
        raise ChatError(f"The chat file's {where} has role {role!r}: it must be one of {', '.join(ROLES)}.")
    stats = row.get("stats")
    created_s = row.get("created_s")
    return foreign_id, Stored(
        role=role,
        content=_text(row, "content", where),
        parent_id=parent_id,
        reasoning=_text(row, "reasoning", where),
        state=_read_state(row.get("state")),
        model_id=_text(row, "model_id", where),
        token_ids=_read_token_ids(row.get("token_ids", []), where),
        spans=tuple((n, o, p) for n, o, p in _read_rows(row.get("spans", []), (int, str, str), where)),
        rejections=tuple((at, n) for at, n in _read_rows(row.get("rejections", []), (int, int), where)),
        stats=stats if isinstance(stats, dict) else {},
        created_s=float(created_s) if isinstance(created_s, int | float) and 0 <= created_s < 1e12 else 0.0,
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row.get(name, "")
    if not isinstance(value, str):
        raise ChatError(f'The chat file\'s {where} needs "{name}" as text.')
    # A lone surrogate cannot be stored as UTF-8.
    return value.encode("utf-8", "replace").decode("utf-8")


def _read_state(value: Any) -> State:
    for state in STATES:
        if state == value and state != "streaming":
            return state
    return "interrupted" if value == "streaming" else "done"


def _read_token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_count(item) for item in value):
        raise ChatError(f'The chat file\'s {where} needs "token_ids" as a list of numbers.')
    return tuple(value)


def _read_rows(value: Any, kinds: tuple[type, ...], where: str) -> list[list[Any]]:
    if not isinstance(value, list):
        raise ChatError(f"The chat file's {where} has spans or rejections that are not a list.")
    for item in value:
        shaped = isinstance(item, list) and len(item) == len(kinds)
        if not shaped or not all(
            _is_count(part) if kind is int else isinstance(part, kind) for part, kind in zip(item, kinds, strict=True)
        ):
            raise ChatError(f"The chat file's {where} has spans or rejections of another form.")
    return value

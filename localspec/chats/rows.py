"""How chats and messages are written into rows and read from them. Knows no connection."""

from __future__ import annotations

import json
from array import array
from typing import Any

from localspec.chats.records import Chat, NewChat, State, Stored

MESSAGE_COLUMNS = (
    "id, chat_id, parent_id, role, content, reasoning, state, model_id, token_ids, spans, rejections, stats, created_s"
)
CHAT_COLUMNS = (
    "id, title, model_id, system_prompt, settings, leaf_id, draft, created_s, updated_s, "
    "(SELECT count(*) FROM messages WHERE messages.chat_id = chats.id)"
)


def chat_values(chat_id: str, new: NewChat, now_s: float) -> tuple[object, ...]:
    """Values of a new chat in the order of its columns."""
    title, prompt = writable(new.title), writable(new.system_prompt)
    return (chat_id, title, new.model_id, prompt, json.dumps(dict(new.settings)), now_s, now_s)


def text_values(message: Stored) -> tuple[object, ...]:
    """Content, thought, state, model and tokens of a message."""
    return (
        writable(message.content),
        writable(message.reasoning),
        message.state,
        message.model_id,
        array("q", message.token_ids).tobytes(),
    )


def body_values(message: Stored) -> tuple[object, ...]:
    """All that a message says, in the order of the columns of a saved one."""
    return (
        *text_values(message),
        json.dumps(message.spans),
        json.dumps(message.rejections),
        json.dumps(dict(message.stats)),
    )


def writable(text: str) -> str:
    """Text as it can be stored."""
    # A lone surrogate (from a pipe that is not UTF-8) cannot be stored.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def chat_from(row: tuple[Any, ...]) -> Chat:
    """A chat from a row of CHAT_COLUMNS."""
    (chat_id, title, model_id, system_prompt, settings, leaf_id, draft, created_s, updated_s, message_count) = row
    return Chat(
        id=chat_id,
        title=title,
        model_id=model_id,
        system_prompt=system_prompt,
        settings=_mapping(settings),
        leaf_id=leaf_id,
        draft=draft,
        created_s=created_s,
        updated_s=updated_s,
        message_count=message_count,
    )


def stored_from(row: tuple[Any, ...]) -> Stored:
    """A message from a row of MESSAGE_COLUMNS."""
    (message_id, chat_id, parent_id, role, content, reasoning, state, model_id, ids, spans, rejections, stats, at) = row
    token_ids = array("q")
    token_ids.frombytes(ids)
    return Stored(
        role=role,
        content=content,
        parent_id=parent_id,
        reasoning=reasoning,
        state=_state(state),
        model_id=model_id,
        token_ids=tuple(token_ids),
        spans=tuple((int(count), str(origin), str(phase)) for count, origin, phase in json.loads(spans)),
        rejections=tuple((int(offset), int(count)) for offset, count in json.loads(rejections)),
        stats=_mapping(stats),
        id=message_id,
        chat_id=chat_id,
        created_s=at,
    )


def _state(text: str) -> State:
    known: dict[str, State] = {
        "streaming": "streaming",
        "done": "done",
        "cancelled": "cancelled",
        "interrupted": "interrupted",
    }
    return known.get(text, "error")


def _mapping(text: str) -> dict[str, Any]:
    value = json.loads(text)
    return value if isinstance(value, dict) else {}

"""Records that the store takes and gives. Plain frozen values; they know nothing of SQL or of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

State = Literal["streaming", "done", "cancelled", "interrupted", "error"]
"""`streaming` is an answer being written; one left so by a killed process is `interrupted` at the next start."""

STATES: tuple[State, ...] = ("streaming", "done", "cancelled", "interrupted", "error")
ROLES = ("system", "user", "assistant", "tool")


class ChatError(Exception):
    """Something the store cannot do; the message is one sentence that says what would work."""


@dataclass(frozen=True)
class NewChat:
    """What a conversation starts with."""

    title: str = ""
    model_id: str = ""
    system_prompt: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Chat:
    """A conversation. `leaf_id` is the last message of the branch that is shown; `draft` is an unsent prompt."""

    id: str
    title: str
    model_id: str
    system_prompt: str
    settings: Mapping[str, Any]
    leaf_id: int | None
    draft: str
    created_s: float
    updated_s: float
    message_count: int = 0


@dataclass(frozen=True)
class Stored:
    """One message of the tree. `parent_id` None marks a first message; siblings share their parent.

    `token_ids` are those the engine generated, so that the next turn hits its cache. `spans` are runs of characters
    as (count, origin, phase) and `rejections` (offset in the generated text, count), both for the draft view.
    `stats` is a JSON object: finish reason, usage, timings.
    """

    role: str
    content: str
    parent_id: int | None = None
    reasoning: str = ""
    state: State = "done"
    model_id: str = ""
    token_ids: tuple[int, ...] = ()
    spans: tuple[tuple[int, str, str], ...] = ()
    rejections: tuple[tuple[int, int], ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    id: int = 0
    chat_id: str = ""
    created_s: float = 0.0


@dataclass(frozen=True)
class Hit:
    """A message that a search found. `snippet` marks the matched words with \\x02 and \\x03."""

    chat_id: str
    chat_title: str
    message_id: int
    role: str
    snippet: str
    created_s: float

"""Unsent prompts of new chats, one for each interface that is open, kept among the notes of a store.

Each belongs to an owner, a name that says which process it is; who has gone is for the caller to know. An interface
that begins takes over one whose owner has gone, so none is shown in two of them and none is wiped by another.
"""

from __future__ import annotations

from collections.abc import Callable

from localspec.chats.store import ChatStore

_NOTE = "draft"
"""The whole name of one that was kept before they had owners."""


def take_draft(store: ChatStore, owner: str, has_gone: Callable[[str], bool]) -> str:
    """The owner's unsent prompt, else the latest of those whose owner has gone, which is the owner's from now on."""
    kept = store.notes_like(_NOTE)
    own = _name(owner)
    if own in kept:
        return kept[own]
    for name in reversed(kept):
        is_free = name == _NOTE or (name.startswith(_name("")) and has_gone(name.removeprefix(_name(""))))
        # Only one of several that try at once can rename it.
        if kept[name] and is_free and store.rename_note(name, own):
            return store.note(own)
    return ""


def keep_draft(store: ChatStore, owner: str, text: str) -> None:
    """Keep the owner's unsent prompt; an empty one is forgotten. Those of others stay as they are."""
    if text:
        store.remember(_name(owner), text)
    else:
        store.forget_note(_name(owner))


def leave_draft(store: ChatStore, owner: str) -> None:
    """The owner ends: its unsent prompt is whoever's begins next."""
    # A name that no process has.
    store.rename_note(_name(owner), _name(f"left by {owner}"))


def _name(owner: str) -> str:
    return f"{_NOTE} {owner}"

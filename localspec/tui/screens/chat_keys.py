"""Keys of the chat screen and the actions they call."""

from __future__ import annotations

from textual.binding import Binding, BindingType


def _key(key: str, action: str, label: str, *, show: bool = False) -> Binding:
    # Priority: the prompt has the focus nearly always, and its own editing keys would win.
    return Binding(key, action, label, show=show, priority=True)


KEYS: list[BindingType] = [
    _key("escape", "stop", "Stop", show=True),
    _key("ctrl+n", "new", "New", show=True),
    _key("ctrl+r", "browse('chats')", "Chats", show=True),
    _key("ctrl+d", "toggle_drafts", "Drafts", show=True),
    _key("ctrl+b", "cycle_panel", "Panel", show=True),
    _key("f1", "help", "Help", show=True),
    _key("f2", "browse('settings')", "Settings"),
    _key("f3", "browse('bench')", "Bench"),
    _key("f4", "browse('tuner')", "Tuner"),
    _key("ctrl+f", "browse('search')", "Search"),
    _key("ctrl+l", "browse('models')", "Models"),
    _key("ctrl+g", "retry", "Answer again"),
    _key("ctrl+t", "toggle_thoughts", "Thoughts"),
    _key("ctrl+y", "copy_code", "Copy code"),
    _key("ctrl+c", "copy_or_stop", "Copy or stop"),
    _key("ctrl+o", "open_chips", "Open chips"),
    _key("alt+up", "mark(-1)", "Mark message above"),
    _key("alt+down", "mark(1)", "Mark message below"),
    _key("ctrl+home", "scroll('home')", "To the start"),
    _key("ctrl+end", "scroll('end')", "To the end"),
    _key("pageup", "scroll('page_up')", "Page up"),
    _key("pagedown", "scroll('page_down')", "Page down"),
]

"""Rows of the lists: chats, search results, models. Text in, text out."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from localspec.chats import Chat, Hit
from localspec.tui.screens.pick import Row
from localspec.tui.text import clean_line


def age_text(seconds: float) -> str:
    """How long ago, roughly: `now`, `5 min`, `3 h`, `12 d`."""
    if seconds < 60:
        return "now"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    if seconds < 86_400:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86_400:.0f} d"


def chat_rows(chats: Iterable[Chat], typed: str, now_s: float) -> list[Row]:
    """Chats whose title holds all typed words."""
    words = typed.casefold().split()
    rows = []
    for chat in chats:
        title = clean_line(chat.title) or "(no title)"
        if all(word in title.casefold() for word in words):
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append(f"{age_text(now_s - chat.updated_s):>7}  ", "dim")
            text.append(f"{chat.message_count:>4} messages  ", "dim")
            if chat.draft:
                text.append("(unsent text) ", "italic")
            text.append(title)
            rows.append(Row(chat.id, text))
    return rows


def hit_rows(hits: Iterable[Hit]) -> list[Row]:
    """Search results; the matched words are bold. The key is `chat:message`."""
    rows = []
    for hit in hits:
        text = Text(no_wrap=True, overflow="ellipsis")
        text.append(f"{clean_line(hit.chat_title)[:24]:<24}  ", "dim")
        for part in " ".join(hit.snippet.split()).split("\x02"):
            bold, mark, rest = part.partition("\x03")
            text.append(clean_line(bold), "bold underline" if mark else "")
            text.append(clean_line(rest))
        rows.append(Row(f"{hit.chat_id}:{hit.message_id}", text))
    return rows


def model_rows(models: Iterable[tuple[str, str]], current: str, typed: str) -> list[Row]:
    """Installed models; the loaded one is marked."""
    rows = []
    for name, note in models:
        if typed.casefold() in name.casefold():
            text = Text(no_wrap=True, overflow="ellipsis")
            text.append("● " if name == current else "  ")
            text.append(clean_line(name), "bold")
            text.append(f"  {clean_line(note)}", "dim")
            rows.append(Row(name, text))
    return rows

"""Keys and commands."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Label, Static

from localspec.tui.slash import SLASHES

KEYS: tuple[tuple[str, str], ...] = (
    ("Enter", "send"),
    ("Ctrl+J, Alt+Enter", "new line"),
    ("Esc", "stop the answer; again: clear the prompt"),
    ("Up in an empty prompt", "recall earlier prompts"),
    ("@ and part of a name", "put a text file into the message"),
    ("Ctrl+N", "new chat"),
    ("Ctrl+R", "chats"),
    ("Ctrl+F", "search all chats"),
    ("Ctrl+L", "models: what fits, fetch, load, remove"),
    ("F2", "settings: presets, sampling, thinking, drafter, system prompts, theme"),
    ("F3", "bench: drafters and depths against plain decoding, here and now"),
    ("F4", "tuner: which drafter is used, and why"),
    ("Ctrl+G", "answer again (the old answer stays as a branch)"),
    ("Ctrl+T", "unfold or fold thoughts"),
    ("Ctrl+D", "draft view: who wrote which characters"),
    ("Ctrl+B", "panel: automatic, full, compact (two lines), off"),
    ("Alt+Up, Alt+Down", "mark a message; then Up and Down mark its blocks, Esc goes back to the prompt"),
    ("on what is marked", "Enter folds, c copies, y copies code, e edits and resends, r answers again,"),
    ("", "b branches, ← → show other branches; clicking marks and folds too"),
    ("Ctrl+Y", "copy the last code block (y when the transcript has the focus)"),
    ("Ctrl+C", "copy the selection; stops a running answer"),
    ("Ctrl+O", "put the text of chips (files, long pastes) into the prompt"),
    ("PageUp, PageDown", "scroll; Ctrl+Home and Ctrl+End go to the start and the end"),
    ("F1", "this help"),
    ("Ctrl+P", "command palette"),
    ("Ctrl+Q", "quit"),
)


class HelpScreen(ModalScreen[None]):
    """Everything that can be pressed or typed."""

    BINDINGS = [("escape,f1,q", "dismiss(None)", "Close")]  # noqa: RUF012 - the base class declares it

    def __init__(self) -> None:
        super().__init__(classes="dialog")

    def compose(self) -> ComposeResult:
        table = Table.grid(padding=(0, 2))
        for title, rows in (("Keys", KEYS), ("Commands", tuple((s.usage, s.help) for s in SLASHES))):
            table.add_row(Text(title, "bold underline"), "")
            for left, right in rows:
                table.add_row(Text(left, "bold"), Text(right))
        with Vertical():
            with VerticalScroll():
                yield Static(table)
            yield Label("Esc closes", classes="hint")

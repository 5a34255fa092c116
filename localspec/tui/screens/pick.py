"""A list to pick from, filtered by what is typed. Chats, search results and models are shown with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label, OptionList
from textual.widgets.option_list import Option

from localspec.chats import ChatError


@dataclass(frozen=True)
class Row:
    """One thing to pick; `key` is given back."""

    key: str
    text: Text


@dataclass(frozen=True)
class Picked:
    """What was picked, and by which action (`open` for Enter)."""

    action: str
    key: str


Loader = Callable[[str], Awaitable[Sequence[Row]]]


class PickScreen(ModalScreen[Picked | None]):
    """`load` gives the rows for a typed text; `actions` are (key, action, label) beside Enter.

    `empty` is said where there are no rows, `before` where nothing was typed yet.
    """

    def __init__(
        self,
        title: str,
        load: Loader,
        actions: tuple[tuple[str, str, str], ...] = (),
        empty: str = "",
        before: str = "",
    ) -> None:
        super().__init__(classes="dialog")
        self._title = title
        self._load = load
        self._actions = {key: action for key, action, _ in actions}
        self._hint = " · ".join(
            ["Enter opens", *(f"{_key_name(key)} {label}" for key, _, label in actions), "Esc closes"]
        )
        self._empty = empty
        self._before = before or empty

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._title, markup=False)
            yield Input(placeholder="type to filter")
            yield OptionList(markup=False)
            yield Label(self._hint, classes="hint", markup=False)

    def on_mount(self) -> None:
        self._fill("")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill(event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._pick("open")

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._pick("open")

    def on_key(self, event: events.Key) -> None:
        options = self.query_one(OptionList)
        if event.key == "escape":
            event.stop()
            self.dismiss(None)
        elif event.key in self._actions:
            event.stop()
            event.prevent_default()
            self._pick(self._actions[event.key])
        elif event.key in ("up", "down", "pageup", "pagedown") and not options.has_focus:
            event.stop()
            if not options.size.height:  # a terminal of a line or two
                return
            moves: dict[str, Callable[[], None]] = {
                "up": options.action_cursor_up,
                "down": options.action_cursor_down,
                "pageup": options.action_page_up,
                "pagedown": options.action_page_down,
            }
            moves[event.key]()

    @work(exclusive=True)
    async def _fill(self, typed: str) -> None:
        rows: Sequence[Row] = ()
        empty = self._empty if typed.strip() else self._before
        try:
            rows = await self._load(typed)
        except ChatError as error:
            empty = str(error)
        options = self.query_one(OptionList)
        options.clear_options()
        if rows:
            options.add_options([Option(row.text, id=row.key) for row in rows])
            options.highlighted = 0
        elif empty:
            options.add_option(Option(empty, disabled=True))

    def _pick(self, action: str) -> None:
        options = self.query_one(OptionList)
        if options.highlighted is not None:
            key = options.get_option_at_index(options.highlighted).id
            if key is not None:
                self.dismiss(Picked(action, key))


def _key_name(key: str) -> str:
    return key.upper() if len(key) <= 3 else key.replace("ctrl+", "Ctrl+").replace("delete", "Del")

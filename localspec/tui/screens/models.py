"""The models screen: what is installed and what could be, what fits this machine, fetching, switching, removing."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import Button, Input, Label, OptionList, Static
from textual.widgets.option_list import Option

from localspec.api.library import Budget, LibraryError, LibraryModel, ModelLibrary
from localspec.api.types import ModelInfo
from localspec.tui.model_text import details_lines, matching, row_text
from localspec.tui.pulls import Pulls
from localspec.tui.screens.ask import AskScreen
from localspec.tui.screens.large import LargeScreen
from localspec.tui.text import bytes_text

REFRESH_S = 0.25


class ModelsScreen(LargeScreen[str | None]):
    """Returns the id of the model to load, or None. `held_bytes` is what the running engine would give back."""

    AUTO_FOCUS = "#typed"
    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("escape", "dismiss(None)", "Close", priority=True),
        Binding("f5", "pull", "Fetch", priority=True),
        Binding("f6", "stop", "Stop fetching", priority=True),
        Binding("f8", "remove", "Remove", priority=True),
    ]

    def __init__(
        self,
        library: ModelLibrary,
        pulls: Pulls,
        loaded: ModelInfo | None,
        held_bytes: int,
        changed: Callable[[], None],
    ) -> None:
        super().__init__("models")
        self._library = library
        self._pulls = pulls
        self._loaded_id = loaded.id if loaded is not None else ""
        self._loaded_drafters = loaded.drafters if loaded is not None else ()
        self._held_bytes = held_bytes
        self._changed = changed
        self._models: tuple[LibraryModel, ...] = ()
        self._budgets: dict[str, Budget] = {}
        self._fetching: tuple[str, ...] = ()

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Input(
                placeholder="type to filter; owner/name of a hub repository; MODEL.KIND for a drafter",
                compact=True,
                id="typed",
            )
            yield OptionList(markup=False, id="rows")
            yield Static(id="details", markup=False)
            yield Label("", id="said", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Enter Load", compact=True, id="load")
                yield Button("F5 Fetch", compact=True, id="pull")
                yield Button("F6 Stop", compact=True, id="stop")
                yield Button("F8 Remove", compact=True, id="remove")
                yield Button("Esc Close", compact=True, id="close")

    def on_mount(self) -> None:
        self._fetching = self._pulls.names
        self._list()
        self.set_interval(REFRESH_S, self._follow_pulls)

    # What can be done

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        actions: dict[str, Callable[[], object]] = {
            "load": self._choose,
            "pull": self.action_pull,
            "stop": self.action_stop,
            "remove": self.action_remove,
            "close": lambda: self.dismiss(None),
        }
        actions[event.button.id or ""]()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._fill()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        self._choose()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self._choose()

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self._draw_details()

    def on_key(self, event: events.Key) -> None:
        rows = self._rows
        if event.key in ("up", "down") and not rows.has_focus and self.query_one("#typed").has_focus:
            event.stop()
            (rows.action_cursor_up if event.key == "up" else rows.action_cursor_down)()

    def sized(self) -> None:
        self._draw_details()

    def action_pull(self) -> None:
        name = self._marked or self._typed_address
        model = self._model(name)
        if not name:
            self._say("Mark a model, or type owner/name of a hub repository.")
        elif model is not None and model.installed and not model.problem:
            self._say(f"{name} is installed already.")
        else:
            self._pulls.start(name)
            self._say(f"Fetching {name}; it goes on when this screen is closed.")
            self._follow_pulls()

    def action_stop(self) -> None:
        name = self._marked if self._marked in self._pulls.names else next(iter(self._pulls.names), "")
        if name:
            self._pulls.stop(name)
        else:
            self._say("Nothing is being fetched.")

    @work(exclusive=True, group="remove")
    async def action_remove(self) -> None:
        model = self._model(self._marked)
        if model is None or not model.installed:
            self._say("Only an installed model can be removed.")
            return
        if model.id == self._loaded_id:
            self._say(f"{model.id} is loaded: switch to another model first.")
            return
        size = bytes_text(model.size_bytes or 0)
        asked = AskScreen(f"Remove {model.id} ({size}) from this disk? Chats are kept. Type yes.")
        answer = await self.app.push_screen_wait(asked)
        if answer is None or answer.strip().lower() != "yes":
            return
        try:
            freed = await self._library.remove(model.id)
            self._say(f"{model.id} is removed, {bytes_text(freed)} are free again.")
        except LibraryError as error:
            self._say(str(error))
        self._list()

    # Inside

    def _choose(self) -> None:
        """Enter: load what is installed, fetch what is not."""
        model = self._model(self._marked)
        if model is None or not model.installed:
            self.action_pull()
        elif model.problem:
            self._say(model.problem)
        elif model.id == self._loaded_id and not self._has_news(model):
            self._say(f"{model.id} is loaded already.")
        else:
            self.dismiss(model.id)

    def _has_news(self, model: LibraryModel) -> bool:
        """Whether a drafter came since the model was loaded: loading it anew takes it in."""
        return any(kind not in self._loaded_drafters for kind in model.drafters_here)

    @work(exclusive=True, group="list")
    async def _list(self) -> None:
        try:
            self._models = await self._library.models()
        except LibraryError as error:
            self._say(str(error))
            return
        self._changed()
        self._fill()
        for model in self._models:
            try:
                budget = await self._library.budget(model.id, self._held_bytes)
            except LibraryError:
                continue
            if budget is not None:
                self._budgets[model.id] = budget
                self._redraw(model)
        self._draw_details()

    def _follow_pulls(self) -> None:
        """Show progress; a pull that ended may have changed the list."""
        before, self._fetching = self._fetching, self._pulls.names
        ended = [name for name in before if name not in self._fetching]
        if ended:
            self._say(self._pulls.problem(ended[-1]) or f"{ended[-1]} is ready.")
            self._list()
        for model in self._models:
            if model.id in self._fetching or model.id in before:
                self._redraw(model)
        if self._fetching:
            self._draw_details()

    def _fill(self) -> None:
        rows = self._rows
        marked = self._marked
        found = matching(self._models, self.query_one("#typed", Input).value)
        rows.clear_options()
        rows.add_options([Option(self._row(model), id=model.id) for model in found])
        if found:
            ids = [model.id for model in found]
            rows.highlighted = ids.index(marked) if marked in ids else 0
        self._draw_details()

    def _redraw(self, model: LibraryModel) -> None:
        if any(option.id == model.id for option in self._rows.options):
            self._rows.replace_option_prompt(model.id, self._row(model))

    def _row(self, model: LibraryModel) -> Text:
        budget, step = self._budgets.get(model.id), self._pulls.step(model.id)
        return row_text(model, budget, step, model.id == self._loaded_id)

    def _draw_details(self) -> None:
        width = self.query_one("#details").size.width
        if width <= 0:
            return
        name = self._marked
        model = self._model(name)
        if model is not None:
            lines = details_lines(model, self._budgets.get(name), self._pulls.step(name), width)
        elif self._typed_address:
            step = self._pulls.step(self._typed_address)
            what = "a hub repository" if "/" in self._typed_address else "a drafter"
            foreign = LibraryModel(self._typed_address, f"{self._typed_address} ({what})")
            lines = details_lines(foreign, None, step, width)
        else:
            lines = [Text("No model of that name; an address owner/name fetches one from the hub.")]
        self.query_one("#details", Static).update(Text("\n").join(lines))

    def _say(self, text: str) -> None:
        self.query_one("#said", Label).update(text)

    def _model(self, name: str) -> LibraryModel | None:
        return next((model for model in self._models if model.id == name), None)

    @property
    def _rows(self) -> OptionList:
        return self.query_one("#rows", OptionList)

    @property
    def _marked(self) -> str:
        rows = self._rows
        if rows.highlighted is None or rows.highlighted >= rows.option_count:
            return ""
        return rows.get_option_at_index(rows.highlighted).id or ""

    @property
    def _typed_address(self) -> str:
        """What was typed, if it can be the address of a repository or names a drafter of a model."""
        typed = self.query_one("#typed", Input).value.strip()
        owner, slash, name = typed.partition("/")
        if slash and owner and name and " " not in typed:
            return typed
        base, _, kind = typed.rpartition(".")
        model = self._model(base)
        return typed if model is not None and kind in model.drafters else ""

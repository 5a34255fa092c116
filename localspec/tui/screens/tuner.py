"""The tuner screen: which drafter is used for which work and why, what others would give, how fresh the figures are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.widgets import Button, Label, Static

from localspec.api.engine import DrafterChoice
from localspec.api.tuning import TunerReport
from localspec.api.types import EngineError
from localspec.tui.drafter_choice import choose_drafter
from localspec.tui.screens.large import LargeScreen
from localspec.tui.tuner_text import report_lines

if TYPE_CHECKING:
    from localspec.tui.conversation import Conversation

REFRESH_S = 1.0


class TunerScreen(LargeScreen[str | None]):
    """Asks the engine every second while it is open. Returns `bench` if that is to be opened next."""

    AUTO_FOCUS = "#told"
    BINDINGS = [  # noqa: RUF012 - the base class declares it
        Binding("escape,f4", "dismiss(None)", "Close", priority=True),
        Binding("f5", "auto", "Let the tuner choose", priority=True),
        Binding("f6", "bench", "Bench", priority=True),
    ]

    def __init__(self, conversation: Conversation) -> None:
        super().__init__("tuner")
        self._talk = conversation
        self._report: TunerReport | None = None
        self._problem = ""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label("Tuner: which drafter, and why", classes="title", markup=False)
            with VerticalScroll(id="told"):
                yield Static(id="report")
            with Horizontal(classes="buttons"):
                yield Button("F5 Automatic", compact=True, id="auto")
                yield Button("F6 Bench", compact=True, id="bench")
                yield Button("Esc Close", compact=True, id="close")

    def on_mount(self) -> None:
        self.set_interval(REFRESH_S, self._ask)
        self._ask()

    def sized(self) -> None:
        self._draw()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        event.stop()
        actions: dict[str, Callable[[], object]] = {
            "auto": self.action_auto,
            "bench": self.action_bench,
            "close": lambda: self.dismiss(None),
        }
        actions[event.button.id or ""]()

    def action_bench(self) -> None:
        self.dismiss("bench")

    @work(exclusive=True, group="auto")
    async def action_auto(self) -> None:
        with contextlib.suppress(EngineError):
            await choose_drafter(self._talk, DrafterChoice("auto"))
        self._ask()

    @work(exclusive=True, group="ask")
    async def _ask(self) -> None:
        try:
            self._report, self._problem = await self._talk.engine.explain(), ""
        except EngineError as error:
            self._report, self._problem = None, error.message
        self._draw()

    def _draw(self) -> None:
        width = self.query_one("#told").scrollable_content_region.width
        if width <= 0:
            return
        if self._report is None:
            text = Text(self._problem or "Asking the engine.")
        else:
            text = Text("\n").join(report_lines(self._report, width))
        self.query_one("#report", Static).update(text)

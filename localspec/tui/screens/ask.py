"""A small question: a line of text, or yes or no."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input, Label


class AskScreen(ModalScreen[str | None]):
    """Returns the text that Enter confirmed, None after Esc."""

    BINDINGS = [("escape", "dismiss(None)", "Cancel")]  # noqa: RUF012 - the base class declares it

    def __init__(self, question: str, value: str = "") -> None:
        super().__init__(classes="dialog ask")
        self._question = question
        self._value = value

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Label(self._question, markup=False)
            yield Input(self._value)
            yield Label("Enter confirms · Esc cancels", classes="hint")

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.dismiss(event.value)

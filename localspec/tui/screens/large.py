"""A screen over the chat that takes nearly the whole terminal, and all of a small one."""

from __future__ import annotations

from typing import Generic, TypeVar

from textual import events
from textual.screen import ModalScreen
from textual.widgets import Select

Result = TypeVar("Result")
TIGHT = (84, 26)


class LargeScreen(ModalScreen[Result], Generic[Result]):
    """Leaves its border out where columns or rows are few."""

    def __init__(self, kind: str) -> None:
        super().__init__(classes=f"dialog large {kind}")

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.width < TIGHT[0] or event.size.height < TIGHT[1], "tight")
        self.call_after_refresh(self.sized)

    def close_list(self) -> bool:
        """Close the list of choices that is open, if one is: Esc means that first."""
        for select in self.query(Select):
            if select.expanded:
                select.expanded = False
                return True
        return False

    def sized(self) -> None:
        """The screen has its place: draw what depends on it."""

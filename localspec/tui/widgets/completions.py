"""The list above the prompt while a command is typed."""

from __future__ import annotations

from rich.style import Style
from rich.text import Text
from textual.widgets import Static

SHOWN = 8


class Completions(Static):
    """Shows (value, help) pairs and marks one. Hidden while there are none."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self._choices: list[tuple[str, str]] = []
        self._marked = 0
        self.display = False

    @property
    def marked(self) -> str | None:
        """The value that Tab takes."""
        return self._choices[self._marked][0] if self._choices else None

    def offer(self, choices: list[tuple[str, str]]) -> None:
        """Show these choices, the first one marked."""
        if choices != self._choices:
            self._choices, self._marked = choices, 0
            self.display = bool(choices)
            self._draw()

    def move(self, step: int) -> None:
        """Mark the next (1) or previous (-1) choice."""
        if self._choices:
            self._marked = (self._marked + step) % len(self._choices)
            self._draw()

    def _draw(self) -> None:
        first = max(0, min(self._marked - SHOWN + 1, len(self._choices) - SHOWN))
        text = Text(no_wrap=True, overflow="ellipsis")
        for number, (value, note) in enumerate(self._choices[first : first + SHOWN], start=first):
            is_marked = number == self._marked
            text.append("› " if is_marked else "  ")
            text.append(note or value, Style(bold=is_marked))
            text.append("\n")
        text.right_crop(1)
        self.update(text)

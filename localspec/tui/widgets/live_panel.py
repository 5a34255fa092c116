"""The panel that shows what drafting gains, in its full and its two-line form."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from localspec.tui.panel_text import PanelState, full_lines, strip_lines


class LivePanel(Static):
    """Draws a PanelState. `is_strip` makes it the two-line form."""

    def __init__(self, *, is_strip: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self._is_strip = is_strip
        self._state = PanelState()
        self._shown = ""

    def show(self, state: PanelState) -> None:
        """Draw another state."""
        self._state = state
        self._draw()

    def on_resize(self) -> None:
        self._draw()

    @property
    def plain_text(self) -> str:
        """What is drawn, for tests."""
        return self._shown

    def _draw(self) -> None:
        width, height = self.content_size
        if width <= 0 or not self.display:
            return
        lines = (strip_lines if self._is_strip else full_lines)(self._state, width)
        text = Text("\n", no_wrap=True, end="").join(lines[:height])
        # Styles follow the text, so that equal text needs no new paint.
        if text.plain != self._shown:
            self._shown = text.plain
            self.update(text, layout=False)

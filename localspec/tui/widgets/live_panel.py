"""The panel that shows what drafting gains, in its full and its two-line form."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from localspec.tui.panel_text import PanelState, full_lines, strip_lines

_CONSOLE = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=80, legacy_windows=False)
MARGIN = 1


class LivePanel(Widget):
    """Draws a PanelState line by line and repaints only the lines that changed. `is_strip` is the two-line form."""

    def __init__(self, *, is_strip: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self._write: Callable[[PanelState, int], list[Text]] = strip_lines if is_strip else full_lines
        self._state = PanelState()
        self._lines: list[Text] = []
        self._finished: dict[int, Strip] = {}
        self._base: Style | None = None

    def show(self, state: PanelState) -> None:
        """Draw another state."""
        self._state = state
        width, height = self.size.width - 2 * MARGIN, self.size.height
        if width <= 0 or height <= 0 or not self.display:
            return
        before, self._lines = self._lines, self._write(state, width)[:height]
        for y in range(max(len(before), len(self._lines))):
            if y >= len(before) or y >= len(self._lines) or before[y] != self._lines[y]:
                self._finished.pop(y, None)
                self.refresh(Region(0, y, self.size.width, 1))

    @property
    def plain_text(self) -> str:
        """What is drawn, for tests."""
        return "\n".join(line.plain for line in self._lines)

    def on_resize(self) -> None:
        self._finished.clear()
        self._lines = []
        self.show(self._state)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._base = None
        self._finished.clear()

    def render_lines(self, crop: Region) -> list[Strip]:
        strips = [self._line(y) for y in crop.line_range]
        start, end = crop.column_span
        return strips if (start, end) == (0, self.size.width) else [strip.crop(start, end) for strip in strips]

    def _line(self, y: int) -> Strip:
        strip = self._finished.get(y)
        if strip is None:
            if self._base is None:
                self._base = self.rich_style
            base, width = self._base, self.size.width
            line = self._lines[y] if y < len(self._lines) else Text()
            # `Text.render` leaves out the style of a text without spans.
            line_style = base + _CONSOLE.get_style(line.style)
            segments = [Segment(" " * MARGIN, base)]
            segments += [
                Segment(s.text, line_style + s.style if s.style else line_style) for s in line.render(_CONSOLE, end="")
            ]
            for line_filter in self.get_line_filters():
                segments = line_filter.apply(segments, self.background_colors[1])
            strip = Strip(segments).adjust_cell_length(width, segments[0].style)
            self._finished[y] = strip
        return strip

"""A scroll bar that looks and acts like Textual's and repaints only the rows that changed.

Textual lays a scroll bar out anew as a rich renderable for each line by which a view grows, and paints all of it;
beside a streaming answer that costs as much as the answer.
"""

from __future__ import annotations

from math import ceil
from typing import Self

from rich.segment import Segment
from textual.geometry import Region
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.widget import Widget

Look = tuple[object, ...]


class QuickScrollBar(ScrollBar):
    """For vertical bars, one or more cells wide."""

    def __init__(self, *, thickness: int = 1) -> None:
        self._look: Look = ()
        self._strips: list[Strip] = []
        super().__init__(vertical=True, name="vertical", thickness=thickness)

    def refresh(self, *regions: Region, repaint: bool = True, layout: bool = False, recompose: bool = False) -> Self:
        if regions or layout or recompose or not repaint or not self._strips:
            return super().refresh(*regions, repaint=repaint, layout=layout, recompose=recompose)
        before = self._strips
        changed = [y for y, strip in enumerate(self._drawn()) if y >= len(before) or before[y] != strip]
        rows = [Region(0, y, self.size.width, 1) for y in changed]
        return super().refresh(*rows) if rows else self

    def notify_style_update(self) -> None:
        self._look, self._strips = (), []
        super().notify_style_update()

    def render_lines(self, crop: Region) -> list[Strip]:
        strips = self._drawn()[crop.y : crop.bottom]
        start, end = crop.column_span
        return strips if (start, end) == (0, self.size.width) else [strip.crop(start, end) for strip in strips]

    def _drawn(self) -> list[Strip]:
        """A strip for each row, kept while nothing changes that it depends on."""
        width, height = self.size
        window = ceil(self.window_size) if self.window_size < self.window_virtual_size else 0
        state = "active" if self.grabbed else "hover" if self.mouse_over else ""
        look = (width, height, window, ceil(self.window_virtual_size), self.position, state)
        if look != self._look or len(self._strips) != height:
            self._look, self._strips = look, self._draw(window, state)
        return self._strips

    def _draw(self, window: int, state: str) -> list[Strip]:
        width, height = self.size
        assert isinstance(self.parent, Widget)
        styles, suffix = self.parent.styles, f"_{state}" if state else ""
        back, bar = getattr(styles, f"scrollbar_background{suffix}"), getattr(styles, f"scrollbar_color{suffix}")
        back = self.parent.background_colors[0] + back if back.a < 1 else back
        drawn = self.renderer.render_bar(
            size=height,
            virtual_size=ceil(self.window_virtual_size),
            window_size=window,
            position=self.position,
            thickness=width,
            back_color=back.rich_color,
            bar_color=(back + bar).rich_color,
        )
        # A run of rows is one segment many times over, so its strip is one as well.
        strips: dict[int, Strip] = {}
        filters, base = self.get_line_filters(), self.rich_style
        rows = []
        for segment in list(drawn.segments)[:height]:
            if id(segment) not in strips:
                segments = [Segment(segment.text, base + segment.style if segment.style else base)]
                for line_filter in filters:
                    segments = line_filter.apply(segments, back)
                strips[id(segment)] = Strip(segments, width)
            rows.append(strips[id(segment)])
        return rows

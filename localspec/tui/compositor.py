"""Paints what changed of a screen, and asks for nothing else.

Textual cuts every line of the screen at the borders of all widgets, for each paint, however small, and asks widgets for
all of their lines where they are children of the screen itself. On a chat that streams several paints a second that is
a third of the interface's time. Here the borders of a row are found once a layout, a line that is painted whole goes to
the terminal in the form that its strip keeps, and widgets are asked only for the rows that are painted.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from textual._compositor import Compositor, CompositorUpdate
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

Piece = tuple[int, int, Widget, Region]
"""(left, right, who is seen there, where its own lines lie), in cells of the screen."""


class PiecesUpdate(CompositorUpdate):
    """Strips and their places. (left, row, strip)"""

    def __init__(self, placed: list[tuple[int, int, Strip]]) -> None:
        self._placed = placed

    def render_segments(self, console: Console) -> str:
        """What the terminal is sent."""
        return "".join([f"\x1b[{y + 1};{x + 1}H{strip.render(console)}" for x, y, strip in self._placed])


class CroppingCompositor(Compositor):
    """The same picture as its base, from fewer lines. Textual is pinned exactly: the methods that it replaces are not
    public."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces_of: object = None
        self._pieces: dict[int, list[Piece]] = {}

    def render_partial_update(self) -> CompositorUpdate | None:  # type: ignore[override]
        """What changed since the last paint; None if nothing did."""
        regions = self._dirty_regions.copy()
        self._dirty_regions.clear()
        screen = self.size.region
        spans = list(self._regions_to_spans([region.intersection(screen) for region in regions]))
        return PiecesUpdate(self._placed(spans)) if spans else None

    def _placed(self, spans: list[tuple[int, int, int]]) -> list[tuple[int, int, Strip]]:
        """(left, row, strip) for (row, left, right), in order of rows."""
        wanted: list[tuple[int, int, int, Widget, Region]] = []
        rows: dict[Widget, tuple[int, int]] = {}
        for y, x1, x2 in spans:
            for left, right, widget, region in self._row(y):
                if left < x2 and x1 < right:
                    wanted.append((y, max(left, x1), min(right, x2), widget, region))
                    first, last = rows.get(widget, (y, y))
                    rows[widget] = (min(first, y), max(last, y))
        lines = {widget: self._lines(widget, *found) for widget, found in rows.items()}
        placed = []
        for y, left, right, widget, region in wanted:
            strip = lines[widget][y - rows[widget][0]]
            start, end = left - region.x, right - region.x
            is_whole = start == 0 and end == strip.cell_length
            placed.append((left, y, strip if is_whole else strip.crop(start, end)))
        return placed

    def _lines(self, widget: Widget, first: int, last: int) -> list[Strip]:
        region = self.visible_widgets[widget][0]
        return widget.render_lines(Region(0, first - region.y, region.width, last - first + 1))

    def _row(self, y: int) -> list[Piece]:
        """Who is seen in a row, from the left."""
        widgets = self.visible_widgets
        if widgets is not self._pieces_of:
            self._pieces_of, self._pieces = widgets, {}
        found = self._pieces.get(y)
        if found is None:
            found = self._pieces[y] = self._find_row(y)
        return found

    def _find_row(self, y: int) -> list[Piece]:
        pieces: list[Piece] = []
        free = [(0, self.size.width)]
        # From front to back: a widget is seen where none before it is.
        for widget, (region, clip) in self.visible_widgets.items():
            shown = region.intersection(clip)
            if not shown.y <= y < shown.bottom:
                continue
            rest = []
            for left, right in free:
                start, end = max(left, shown.x), min(right, shown.right)
                if start >= end:
                    rest.append((left, right))
                    continue
                pieces.append((start, end, widget, region))
                rest += [span for span in ((left, start), (end, right)) if span[0] < span[1]]
            free = rest
        return sorted(pieces, key=lambda piece: piece[0])

    def _get_renders(self, crop: Region | None = None) -> Iterable[tuple[Region, Region, list[Strip]]]:
        """(place, clip, lines) of each widget in view; with `crop` only the rows of it."""
        if not crop:
            yield from super()._get_renders(crop)
            return
        for widget, (region, clip) in self.visible_widgets.items():
            shown = region.intersection(clip)
            painted = shown.intersection(crop)
            if not painted:
                continue
            # Whole rows: the lines are cut by column later.
            rows = Region(shown.x, painted.y, shown.width, painted.height)
            wanted = Region(rows.x - region.x, rows.y - region.y, rows.width, rows.height)
            yield rows, clip, widget.render_lines(wanted)

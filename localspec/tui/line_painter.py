"""Finishes the lines of a scrolling view: margin, marks, background, places for the mouse. Keeps lines that stay."""

from __future__ import annotations

from collections.abc import Sequence

from rich.cells import cell_len
from rich.color import Color
from rich.segment import Segment
from rich.style import Style
from textual.color import Color as TextualColor
from textual.filter import LineFilter
from textual.selection import Selection
from textual.strip import Strip

MARGIN = 1
KEPT_LINES = 2000
COMPARED_LINES = 64
MARK = "▌"
_MARK_STYLE = Style(color=Color.parse("#4fc38a"), bold=True)


class LinePainter:
    """One new strip a line: strips are heavy objects, and a chain of their methods would make six."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Strip, Strip]] = {}

    def forget(self) -> None:
        """The width, the theme or the styles changed."""
        self._kept.clear()

    def kept(self, line_number: int, source: Strip) -> Strip | None:
        """The finished line, if it was finished before from this very source."""
        found = self._kept.get(line_number)
        return found[1] if found is not None and found[0] is source else None

    def keep(self, line_number: int, source: Strip, finished: Strip) -> None:
        """Keep a finished line."""
        if len(self._kept) > KEPT_LINES:
            self._kept.clear()
        self._kept[line_number] = (source, finished)

    @staticmethod
    def finish(
        source: Strip,
        line_number: int,
        width: int,
        base: Style,
        *,
        is_marked: bool,
        filters: Sequence[LineFilter],
        background: TextualColor,
    ) -> Strip:
        """A line `width` cells wide over `base`; a marked one has a bar in its margin."""
        segments = [Segment(MARK, base + _MARK_STYLE) if is_marked else Segment(" " * MARGIN, base)]
        x = 0
        for text, style, _ in source:
            place = Style.from_meta({"offset": (x, line_number)})
            segments.append(Segment(text, (base + style if style else base) + place))
            x += len(text)
        rest = width - MARGIN - source.cell_length
        if rest > 0:
            segments.append(Segment(" " * rest, base))
        for line_filter in filters:
            segments = line_filter.apply(segments, background)
        strip = Strip(segments, width - min(rest, 0))
        return strip if rest >= 0 else strip.crop(0, width)


def selected(strip: Strip, selection: Selection, line_number: int, style: Style) -> Strip:
    """The line with the part that is selected in another style."""
    span = selection.get_span(line_number)
    if span is None:
        return strip
    text, (start, end) = strip.text, span
    low = cell_len(text[:start])
    high = strip.cell_length if end == -1 else min(strip.cell_length, cell_len(text[:end]))
    if high <= low:
        return strip
    marked = Strip([Segment(s.text, (s.style or Style.null()) + style) for s in strip.crop(low, high)])
    return Strip.join([strip.crop(0, low), marked, strip.crop(high, strip.cell_length)])


def same_lines(before: list[Strip], after: list[Strip]) -> int:
    """How many lines at the beginning are the same in both. Of a long message nearly all are, mostly the very same."""
    most = min(len(before), len(after))
    same = 0
    while same < most and before[same : same + COMPARED_LINES] == after[same : same + COMPARED_LINES]:
        same += COMPARED_LINES
    while same < most and (before[same] is after[same] or before[same] == after[same]):
        same += 1
    return min(same, most)

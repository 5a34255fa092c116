"""Wraps styled plain text into strips of a given width. Results are cached by line, so a growing text costs its end."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from io import StringIO

from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from localspec.tui.text import drawable

Run = tuple[str, Style | None]

TAB_SIZE = 4
_CONSOLE = Console(file=StringIO(), force_terminal=True, color_system="truecolor", width=80, legacy_windows=False)


def wrap_text(text: str, width: int, style: Style | None = None) -> list[Strip]:
    """Strips of a text of one style; its newlines are kept."""
    strips: list[Strip] = []
    for line in text.split("\n"):
        strips.extend(wrap_line(((line, style),), width))
    return strips


def wrap_runs(runs: Iterable[Run], width: int) -> list[Strip]:
    """Strips of a text made of styled runs; newlines in the runs are kept."""
    strips: list[Strip] = []
    line: list[Run] = []
    for text, style in runs:
        first, *others = text.split("\n")
        if first:
            line.append((first, style))
        for other in others:
            strips.extend(wrap_line(tuple(line), width))
            line = [(other, style)] if other else []
    strips.extend(wrap_line(tuple(line), width))
    return strips


@lru_cache(maxsize=8192)
def wrap_line(runs: tuple[Run, ...], width: int) -> tuple[Strip, ...]:
    """Strips of one line. Breaks at spaces, inside a word only if it is wider than the line."""
    width = max(2, width)  # a wide character needs two cells
    text = "".join(part for part, _ in runs)
    if not text:
        return (Strip([], 0),)
    if not text.isascii() or "\t" in text:
        return _wrap_wide(runs, width)
    if len(text) <= width:
        return (Strip([Segment(part, style) for part, style in runs if part], len(text)),)
    return tuple(_cut(runs, start, end) for start, end in _breaks(text, width))


def _breaks(text: str, width: int) -> list[tuple[int, int]]:
    rows = []
    start, length = 0, len(text)
    while length - start > width:
        space = text.rfind(" ", start + 1, start + width + 1)
        end = space if space > start and text[start:space].strip() else start + width
        rows.append((start, end))
        start = end + 1 if end == space else end
    if start < length:
        rows.append((start, length))
    return rows


def _cut(runs: tuple[Run, ...], start: int, end: int) -> Strip:
    segments, position = [], 0
    for text, style in runs:
        low, high = max(start - position, 0), min(end - position, len(text))
        if low < high:
            segments.append(Segment(text[low:high], style))
        position += len(text)
    return Strip(segments, end - start)


def _wrap_wide(runs: tuple[Run, ...], width: int) -> tuple[Strip, ...]:
    # Wide and combining characters, and tabs: rich knows their cells.
    text = Text(tab_size=TAB_SIZE)
    for part, style in runs:
        text.append(drawable(part), style)
    lines = text.wrap(_CONSOLE, width, overflow="fold", tab_size=TAB_SIZE)
    strips = []
    for line in lines:
        line.rstrip_end(width)
        strips.append(Strip([segment for segment in line.render(_CONSOLE) if segment.text]))
    return tuple(strips)

"""A Markdown text that may still grow, as strips: closed blocks rendered once and kept, the open block plain."""

from __future__ import annotations

import re

from textual.strip import Strip

from localspec.tui.blocks import BlockSplitter
from localspec.tui.markdown import LABEL_STYLE, MarkdownRenderer, code_label
from localspec.tui.wrap import wrap_text

_OPEN_FENCE = re.compile(r" {0,3}(?:`{3,}|~{3,})[ ]*([^\s`]*)[^\n]*\n?")
_FENCE_END = re.compile(r"(?:^|\n) {0,3}(?:`{3,}|~{3,}) *\n*$")
_BLANK = Strip([], 0)


class StreamedDocument:
    """Append text, ask for the strips of a width. After `finish` they equal those of a document made at once."""

    def __init__(self, renderer: MarkdownRenderer, source: str = "") -> None:
        self._renderer = renderer
        self._splitter = BlockSplitter()
        self._blocks: list[str] = []
        self._strips: list[Strip] = []
        self._rendered_blocks = 0
        self._ranges: list[tuple[int, int]] = []
        self._open: tuple[int, int] | None = None
        self._width = 0
        if source:
            self.append(source)
            self.finish()

    def append(self, text: str) -> None:
        """Add text to the end."""
        self._blocks.extend(self._splitter.feed(text))

    def finish(self) -> None:
        """No more text comes: the open block is closed."""
        self._blocks.extend(self._splitter.finish())

    def restyle(self, renderer: MarkdownRenderer) -> None:
        """Use another renderer from now on."""
        if renderer is not self._renderer:
            self._renderer = renderer
            self._width = 0

    def strips(self, width: int) -> list[Strip]:
        """The whole text, `width` cells wide, a blank line between blocks."""
        if width != self._width:
            self._strips, self._ranges, self._rendered_blocks, self._width = [], [], 0, width
        for block in self._blocks[self._rendered_blocks :]:
            if self._strips:
                self._strips.append(_BLANK)
            start = len(self._strips)
            self._strips.extend(self._renderer.render(block, width))
            self._ranges.append((start, len(self._strips)))
        self._rendered_blocks = len(self._blocks)
        open_text = self._splitter.open_text
        self._open = None
        if not open_text.strip():
            return list(self._strips)
        lines = [*self._strips, *([_BLANK] if self._strips else [])]
        start = len(lines)
        lines += _open_strips(open_text, width)
        self._open = (start, len(lines))
        return lines

    def ranges(self) -> list[tuple[int, int, str]]:
        """(first line, line after the last, source) of each block of the strips that were given last."""
        found = [(start, end, block) for (start, end), block in zip(self._ranges, self._blocks, strict=False)]
        return found if self._open is None else [*found, (*self._open, self._splitter.open_text)]


def _open_strips(text: str, width: int) -> list[Strip]:
    fence = _OPEN_FENCE.match(text)
    if fence is None:
        return wrap_text(text.rstrip("\n"), width)
    label = wrap_text(code_label(fence.group(1), width), width, LABEL_STYLE)
    code = _FENCE_END.sub("", text[fence.end() :])
    return [*label, *wrap_text(code.rstrip("\n"), width)] if code.strip() else label

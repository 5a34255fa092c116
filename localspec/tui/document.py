"""A Markdown text that may still grow, as strips: closed blocks rendered once and kept, the open block plain."""

from __future__ import annotations

import re
from collections.abc import Sequence

from textual.strip import Strip

from localspec.tui.blocks import BlockSplitter
from localspec.tui.markdown import LABEL_STYLE, MarkdownRenderer, code_label
from localspec.tui.wrap import wrap_text

_OPEN_FENCE = re.compile(r" {0,3}(?:`{3,}|~{3,})[ ]*([^\s`]*)")
_FENCE_END = re.compile(r" {0,3}(?:`{3,}|~{3,}) *$")
_BLANK = Strip([], 0)
BEGUN_PIECE_CHARS = 4000


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
        self._open_block = (-1, 0)
        self._open_lines: list[Sequence[Strip]] = []
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
        self._open = None
        if not self._splitter.open_text.strip():
            return list(self._strips)
        lines = [*self._strips, *([_BLANK] if self._strips else [])]
        start = len(lines)
        lines += self._open_strips(width)
        self._open = (start, len(lines))
        return lines

    def _open_strips(self, width: int) -> list[Strip]:
        """The open block as plain text. Whole lines are wrapped once, so that a long table or list costs its end."""
        whole, begun = self._splitter.open_lines
        if self._open_block != (len(self._blocks), width):
            self._open_block, self._open_lines = (len(self._blocks), width), []
        first = whole[0] if whole else begun
        fence = _OPEN_FENCE.match(first)
        for line in whole[len(self._open_lines) :]:
            is_label = fence is not None and not self._open_lines
            self._open_lines.append(self._label(fence, width) if is_label else wrap_text(line, width))
        end = len(whole)
        if not begun:
            while end and not whole[end - 1]:
                end -= 1
            if fence is not None and end > 1 and _FENCE_END.match(whole[end - 1]):
                end -= 1
        strips = [strip for line in self._open_lines[:end] for strip in line]
        if begun and not whole:
            strips += self._label(fence, width) if fence is not None else _begun_strips(begun, width)
        elif begun and not (fence is not None and _FENCE_END.match(begun)):
            strips += _begun_strips(begun, width)
        return strips

    @staticmethod
    def _label(fence: re.Match[str] | None, width: int) -> list[Strip]:
        return wrap_text(code_label(fence[1] if fence is not None else "", width), width, LABEL_STYLE)

    def ranges(self) -> list[tuple[int, int, str]]:
        """(first line, line after the last, source) of each block of the strips that were given last."""
        found = [(start, end, block) for (start, end), block in zip(self._ranges, self._blocks, strict=False)]
        return found if self._open is None else [*found, (*self._open, self._splitter.open_text)]


def _begun_strips(text: str, width: int) -> list[Strip]:
    # A line without an end (base64, minified code) would be wrapped anew from its beginning with each update; in
    # pieces, all but the last come from the cache.
    strips: list[Strip] = []
    start = 0
    while len(text) - start > 2 * BEGUN_PIECE_CHARS:
        end = text.rfind(" ", start, start + BEGUN_PIECE_CHARS) + 1 or start + BEGUN_PIECE_CHARS
        strips += wrap_text(text[start:end].rstrip(" "), width)
        start = end
    return strips + wrap_text(text[start:], width)

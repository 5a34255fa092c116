"""Splits Markdown that arrives in pieces into top-level blocks, each handed out once, when nothing can change it.

Only whole lines are looked at. A cheap test finds lines that may begin a block, and the Markdown parser confirms it on
the open block alone, so the work for an answer grows with its length, whatever the pieces were. A link definition
(`[name]: address`) acts only inside its own block.
"""

from __future__ import annotations

import re

from markdown_it import MarkdownIt

from localspec.tui.text import clean

_LIST_ITEM = re.compile(r" {0,3}(?:[-+*]|\d{1,9}[.)])(?:\s|$)")
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})")
_HEADING = re.compile(r" {0,3}#{1,6}(?:\s|$)")
_INDENTED = re.compile(r"\s")


def markdown_parser() -> MarkdownIt:
    """The dialect that answers are read in. HTML is shown as it is written, and a picture as a link to it."""
    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable("image")


class BlockSplitter:
    """Feed it text; it returns the blocks that the text has closed."""

    def __init__(self) -> None:
        self._parser = markdown_parser().disable("inline")
        self._lines: list[str] = []
        self._partial = ""
        self._fence = ""
        self._fence_closed = False

    @property
    def open_text(self) -> str:
        """Source of the block that is still open, without blank lines before it."""
        return "\n".join([*self._lines, self._partial]).lstrip("\n")

    @property
    def open_lines(self) -> tuple[list[str], str]:
        """The same as whole lines and the begun one; not to be changed."""
        return self._lines, self._partial

    def feed(self, text: str) -> list[str]:
        """Take more text; return the blocks that are closed now, in order, without blank lines around them."""
        *whole, self._partial = (self._partial + clean(text)).split("\n")
        closed = []
        for line in whole:
            block = self._take(line)
            if block:
                closed.append(block)
        return closed

    def finish(self) -> list[str]:
        """The text is complete: return what was still open and start anew."""
        closed = []
        if self._partial:
            # The last line may begin a block of its own, as it would with a newline after it.
            block = self._take(self._partial)
            closed = [block] if block else []
        rest = _trimmed(self._lines)
        self._partial, self._lines, self._fence, self._fence_closed = "", [], "", False
        return [*closed, rest] if rest else closed

    def _take(self, line: str) -> str:
        if not self._lines and not line.strip():
            return ""
        index = len(self._lines)
        self._lines.append(line)
        if index and self._may_begin(line, index) and self._begins(index):
            closed, self._lines = _trimmed(self._lines[:index]), [line]
            self._note_fence(line, first=True)
            return closed
        self._note_fence(line, first=index == 0)
        return ""

    def _note_fence(self, line: str, *, first: bool) -> None:
        match = _FENCE.match(line)
        if first:
            self._fence = match.group(1) if match else ""
            self._fence_closed = False
        elif self._fence and not self._fence_closed:
            mark = line.strip()
            is_closing = len(mark) >= len(self._fence) and not mark.strip(self._fence[0])
            self._fence_closed = is_closing and len(line) - len(line.lstrip(" ")) <= 3

    def _may_begin(self, line: str, index: int) -> bool:
        if not line.strip() or line.startswith(("    ", "\t")):
            return False
        if self._fence:
            return self._fence_closed
        if _LIST_ITEM.match(self._lines[0]) and (_INDENTED.match(line) or _LIST_ITEM.match(line)):
            return False
        before = self._lines[index - 1]
        return (
            not before.strip()
            or _FENCE.match(line) is not None
            or _HEADING.match(line) is not None
            or (index == 1 and _HEADING.match(before) is not None)
        )

    def _begins(self, index: int) -> bool:
        tokens = self._parser.parse("\n".join(self._lines))
        return any(token.level == 0 and token.map is not None and token.map[0] == index for token in tokens)


def _trimmed(lines: list[str]) -> str:
    # Blank lines around a block say nothing, but the indentation of its first line may.
    start, end = 0, len(lines)
    while start < end and not lines[start].strip():
        start += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return "\n".join(lines[start:end])


def split_blocks(source: str) -> list[str]:
    """All blocks of a complete text."""
    splitter = BlockSplitter()
    return [*splitter.feed(source), *splitter.finish()]


def code_blocks(source: str) -> list[tuple[str, str]]:
    """(language, code) of every fenced or indented code block, nested ones included, in order."""
    tokens = markdown_parser().parse(clean(source))
    return [(token.info.split(" ", 1)[0], token.content) for token in tokens if token.type in ("fence", "code_block")]


def only_code(block: str) -> str | None:
    """The code of a block that is nothing but code; None for any other block."""
    if not block.startswith(("`", "~", " ", "\t")):
        return None
    tokens = markdown_parser().parse(clean(block))
    return tokens[0].content if len(tokens) == 1 and tokens[0].type in ("fence", "code_block") else None

"""The last gate before the terminal: no control code of a text passes, whichever widget draws it.

Names of files, messages of servers, prompts and titles of imported chats reach widgets that draw what they are given.
An escape sequence among them could set the clipboard or the title, or move the cursor.
"""

from __future__ import annotations

import re

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

_CODES = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class SafeLines(LineFilter):
    """Takes control codes out of lines. They have no cells, so the widths stay what they were counted as."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """The same segments where nothing has to be taken out."""
        if all(segment.text.isprintable() for segment in segments):
            return segments
        return [
            segment
            if segment.control or segment.text.isprintable()
            else Segment(_CODES.sub("", segment.text), segment.style)
            for segment in segments
        ]

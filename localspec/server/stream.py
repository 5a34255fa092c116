"""Splits the raw text of a model into thought, answer and tool calls while it arrives.

The result depends on the text alone: for every way to cut it into pieces the concatenation is the same, so a
streamed reply and a whole one agree. Knows the notations that models use; knows nothing of HTTP or tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from localspec.server.tool_calls import CallName, CallReader, JsonCall, XmlCall, tool_schemas

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
FUNCTION_OPEN, PYTHON_TAG = "<function=", "<|python_tag|>"


@dataclass(frozen=True)
class TextPiece:
    """Characters `start` to `end` of the raw text, shown as thought or answer."""

    kind: Literal["reasoning", "content"]
    text: str
    start: int
    end: int


@dataclass(frozen=True)
class CallStart:
    """Tool call number `index` begins."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """Call `index` is whole."""

    index: int


Piece = TextPiece | CallStart | CallArguments | CallEnd


@dataclass(frozen=True)
class SplitOptions:
    """What may be in the text. Without `tools` calls are plain text. `max_calls` ends the answer behind the last."""

    thought_is_open: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()
    max_calls: int | None = None


class Splitter:
    """Feed it text, then `finish`. `done` becomes true when nothing more can come of the answer."""

    def __init__(self, options: SplitOptions, make_id: Callable[[], str]) -> None:
        self.done = False
        self.n_calls = 0
        self._options = options
        self._make_id = make_id
        self._schemas = tool_schemas(options.tools)
        self._buffer = ""
        self._buffer_start = 0
        self._blanks: list[str] = []
        self._step: Callable[[list[Piece], bool], bool] = self._start
        self._skips_space = False
        self._content_began = False
        self._reader: CallReader | None = None
        self._reader_raw = ""
        self._call_began = False
        self._call_is_tagged = False

    def feed(self, text: str) -> list[Piece]:
        """Pieces that are certain after this text."""
        if self._reader is None and text.isspace() and self._buffer[-1:].isspace():
            # Space that is held is held whatever space follows; put together once, a long run costs no more than text.
            self._blanks.append(text)
            return []
        self._take(text)
        return self._pump(False)

    def finish(self) -> list[Piece]:
        """Pieces that were held back, at the end of the text."""
        self._take("")
        return self._pump(True)

    def _take(self, text: str) -> None:
        self._buffer += "".join(self._blanks) + text
        self._blanks.clear()

    def _pump(self, last: bool) -> list[Piece]:
        pieces: list[Piece] = []
        while not self.done and self._step(pieces, last):
            pass
        return pieces

    # Each step below reads the buffer and says whether another step may get on with what is left of it.

    def _start(self, pieces: list[Piece], last: bool) -> bool:
        text = self._buffer.lstrip()
        if text.startswith(THINK_OPEN):
            self._drop(len(self._buffer) - len(text) + len(THINK_OPEN))
            self._step, self._skips_space = self._thought, True
            return True
        if THINK_OPEN.startswith(text) and not last:
            return False
        opened = self._options.thought_is_open
        self._step, self._skips_space = (self._thought if opened else self._content), opened
        return True

    def _thought(self, pieces: list[Piece], last: bool) -> bool:
        self._skip_space()
        at = self._buffer.find(THINK_CLOSE)
        if at >= 0:
            self._give("reasoning", len(self._buffer[:at].rstrip()), pieces)
            self._drop(self._buffer.index(THINK_CLOSE) + len(THINK_CLOSE))
            self._step, self._skips_space = self._content, True
            return True
        n_sure = len(self._buffer) if last else _n_sure(self._buffer, (THINK_CLOSE,))
        self._give("reasoning", n_sure, pieces)
        return False

    def _content(self, pieces: list[Piece], last: bool) -> bool:
        self._skip_space()
        if not self._schemas:
            self._give("content", len(self._buffer), pieces)
            return False
        text = self._buffer.lstrip()
        if not self._content_began and not text and not last:
            return False
        if not self._content_began and text.startswith("{"):
            self._begin_call(JsonCall(frozenset(self._schemas)), len(self._buffer) - len(text))
            return True
        marker, at = _first_marker(self._buffer)
        if marker is None:
            n_sure = len(self._buffer) if last else _n_sure(self._buffer, (CALL_OPEN, FUNCTION_OPEN, PYTHON_TAG))
            self._give("content", n_sure, pieces)
            return False
        self._give("content", len(self._buffer[:at].rstrip()), pieces)
        return self._open_call(marker, pieces, last)

    def _open_call(self, marker: str, pieces: list[Piece], last: bool) -> bool:
        """Decide by what follows the marker whether a call begins here."""
        at = self._buffer.index(marker)
        behind = self._buffer[at + len(marker) :].lstrip()
        n_before = len(self._buffer) - len(behind)
        if marker == FUNCTION_OPEN:
            self._begin_call(XmlCall(self._schemas, only_known=True), at)
        elif behind.startswith("{"):
            self._begin_call(JsonCall(None), n_before, is_tagged=marker == CALL_OPEN)
        elif behind.startswith(FUNCTION_OPEN) and marker == CALL_OPEN:
            self._begin_call(XmlCall(self._schemas, only_known=False), n_before, is_tagged=True)
        elif FUNCTION_OPEN.startswith(behind):
            if not last:
                return False
            # The answer ended behind the tag: a call that never began.
            self._drop(len(self._buffer))
            return False
        else:
            self._give("content", at + len(marker), pieces)
        return True

    def _begin_call(self, reader: CallReader, n_before: int, is_tagged: bool = False) -> None:
        self._reader, self._call_is_tagged, self._call_began = reader, is_tagged, False
        # Kept until the call is certain, to be shown as text if it is none.
        self._reader_raw = self._buffer[:n_before]
        self._buffer = self._buffer[n_before:]
        self._step = self._call

    def _call(self, pieces: list[Piece], last: bool) -> bool:
        assert self._reader is not None
        raw = self._buffer
        events, rest = self._reader.feed(raw, last)
        if self._reader.failed:
            self._buffer = self._reader_raw + raw
            self._reader, self._reader_raw, self._step = None, "", self._content
            self._refuse_call(pieces)
            return True
        self._buffer = rest
        if self._call_began or events:
            self._buffer_start += len(self._reader_raw) + len(raw) - len(rest)
            self._reader_raw = ""
        else:
            self._reader_raw += raw
        for event in events:
            if isinstance(event, CallName):
                self._call_began = True
                pieces.append(CallStart(self.n_calls, self._make_id(), event.name))
            else:
                pieces.append(CallArguments(self.n_calls, event.text))
        if self._reader.closed:
            pieces.append(CallEnd(self.n_calls))
            self.n_calls += 1
            self.done = self._options.max_calls is not None and self.n_calls >= self._options.max_calls
            self._reader, self._step = None, self._behind_call
            return True
        return False

    def _refuse_call(self, pieces: list[Piece]) -> None:
        """Show the beginning of what looked like a call, so that it is not tried again."""
        lead = len(self._buffer) - len(self._buffer.lstrip())
        marker, at = _first_marker(self._buffer)
        n_shown = at + len(marker) if marker is not None and at == lead else lead + 1
        self._give("content", n_shown, pieces)

    def _behind_call(self, pieces: list[Piece], last: bool) -> bool:
        """Drop the closing tag, stray braces and the separator of Llama's notation."""
        self._drop(len(self._buffer) - len(self._buffer.lstrip(" \t\r\n}")))
        text = self._buffer
        if text.startswith(CALL_CLOSE) and self._call_is_tagged:
            self._drop(len(CALL_CLOSE))
        elif CALL_CLOSE.startswith(text) and not last:
            return False
        else:
            self._drop(text.startswith(";"))
            # Only a call may follow one without a tag; `{` counts as its beginning again.
            self._content_began = self._call_is_tagged
        self._step, self._skips_space = self._content, True
        return True

    def _give(self, kind: Literal["reasoning", "content"], n_chars: int, pieces: list[Piece]) -> None:
        if n_chars > 0:
            end = self._buffer_start + n_chars
            pieces.append(TextPiece(kind, self._buffer[:n_chars], self._buffer_start, end))
            self._content_began = self._content_began or kind == "content"
            self._drop(n_chars)

    def _drop(self, n_chars: int) -> None:
        self._buffer = self._buffer[n_chars:]
        self._buffer_start += n_chars

    def _skip_space(self) -> None:
        if self._skips_space:
            self._drop(len(self._buffer) - len(self._buffer.lstrip()))
            self._skips_space = not self._buffer


def _first_marker(text: str) -> tuple[str | None, int]:
    found = [(text.find(marker), marker) for marker in (CALL_OPEN, FUNCTION_OPEN, PYTHON_TAG) if marker in text]
    return (min(found)[1], min(found)[0]) if found else (None, -1)


def _n_sure(text: str, markers: tuple[str, ...]) -> int:
    """Characters before anything that may be space and the beginning of a marker."""
    n_sure = len(text)
    at = text.rfind("<")
    if at >= 0 and any(marker.startswith(text[at:]) for marker in markers):
        n_sure = at
    return len(text[:n_sure].rstrip())

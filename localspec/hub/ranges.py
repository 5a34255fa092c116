"""Which byte ranges of a file are already there. Pure arithmetic, no input or output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Span:
    """Bytes `start` up to but not including `end`."""

    start: int
    end: int


class SpanLedger:
    """The finished spans of a file, merged and sorted."""

    def __init__(self, size_bytes: int, done: Iterable[Span] = ()) -> None:
        """Raises ValueError for spans outside the file, so that a damaged record of them is not believed."""
        self.size_bytes = size_bytes
        self._done: list[Span] = []
        for span in sorted(done):
            self.add(span)

    @property
    def done(self) -> tuple[Span, ...]:
        """Finished spans, in order, with no two touching."""
        return tuple(self._done)

    @property
    def done_bytes(self) -> int:
        return sum(span.end - span.start for span in self._done)

    @property
    def front_bytes(self) -> int:
        """How many bytes from the beginning are there without a hole."""
        return self._done[0].end if self._done and self._done[0].start == 0 else 0

    def add(self, span: Span) -> None:
        """Marks a span as finished. Raises ValueError when it is reversed or outside the file."""
        if not 0 <= span.start <= span.end <= self.size_bytes:
            raise ValueError(f"span {span.start}..{span.end} does not lie in a file of {self.size_bytes} bytes")
        if span.start == span.end:
            return
        apart = [other for other in self._done if other.end < span.start or other.start > span.end]
        joined = [other for other in self._done if not (other.end < span.start or other.start > span.end)]
        start = min([span.start, *(other.start for other in joined)])
        end = max([span.end, *(other.end for other in joined)])
        self._done = sorted([*apart, Span(start, end)])

    def missing(self, most_bytes: int) -> list[Span]:
        """The holes, in order, cut into spans of at most `most_bytes`."""
        holes, position = [], 0
        for span in (*self._done, Span(self.size_bytes, self.size_bytes)):
            holes.append(Span(position, span.start))
            position = span.end
        return [
            Span(start, min(start + most_bytes, hole.end))
            for hole in holes
            for start in range(hole.start, hole.end, most_bytes)
        ]

"""Text of the engines without weights: stop strings held back, spans of pieces, made-up log-probabilities."""

from __future__ import annotations

from localspec.api import toy_text
from localspec.api.types import Phase, Span, TokenLogprob

Piece = tuple[str, str, Phase]


class StopHold:
    """Holds back text that may be the start of a stop string; the string itself is never shown."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held: list[Piece] = []

    def feed(self, pieces: list[Piece], last: bool) -> tuple[list[Piece], str | None]:
        """Pieces that may be shown now, and the stop string that ended the answer."""
        self._held += pieces
        text = "".join(piece[0] for piece in self._held)
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            cut, stop = min(found)
            return self._take(cut), stop
        hold = 0 if last else max((_overlap(text, stop) for stop in self._stops), default=0)
        return self._take(len(text) - hold), None

    def _take(self, n_chars: int) -> list[Piece]:
        shown: list[Piece] = []
        while self._held and n_chars >= len(self._held[0][0]):
            n_chars -= len(self._held[0][0])
            shown.append(self._held.pop(0))
        if self._held and n_chars:
            text, origin, phase = self._held[0]
            shown.append((text[:n_chars], origin, phase))
            self._held[0] = (text[n_chars:], origin, phase)
        return shown


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


def spans(pieces: list[Piece]) -> tuple[Span, ...]:
    """Spans of pieces, neighbours of one kind merged, empty ones left out."""
    found: list[Span] = []
    for text, origin, phase in pieces:
        if text and found and (found[-1].origin, found[-1].phase) == (origin, phase):
            found[-1] = Span(found[-1].n_chars + len(text), origin, phase)
        elif text:
            found.append(Span(len(text), origin, phase))
    return tuple(found)


def fake_logprobs(token_ids: tuple[int, ...], n_top: int | None) -> tuple[TokenLogprob, ...]:
    """The token itself first, then its neighbours by number; nothing for `n_top` None."""
    if n_top is None:
        return ()
    out = []
    for token_id in token_ids:
        ranked = [(token_id + offset) % toy_text.VOCAB_SIZE for offset in range(n_top)]
        top = tuple((other, toy_text.decode((other,)), -0.25 - rank) for rank, other in enumerate(ranked))
        out.append(TokenLogprob(token_id, toy_text.decode((token_id,)), -0.25, top))
    return tuple(out)

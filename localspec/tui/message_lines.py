"""One message of the transcript as strips: header, folded thought, Markdown or draft view, ending. Not a widget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localspec.chats import Stored
from localspec.tui.document import StreamedDocument
from localspec.tui.markdown import MarkdownRenderer
from localspec.tui.origins import REFUSED, REFUSED_COUNT, TARGET, style_of
from localspec.tui.text import clean, clean_line, percent, seconds_text, short_count
from localspec.tui.wrap import Run, wrap_runs, wrap_text

_LEAST = ("cached", "tokens", "accepted", "speedup")
_BLANK = Strip([], 0)
_DIM = Style(dim=True)
_THOUGHT = Style(dim=True, italic=True)
_NOTE = Style(italic=True)
_HEADER = {"user": Style(bold=True, color="#5c9df5"), "assistant": Style(bold=True, color="#4fc38a")}
_NAMES = {"user": "You", "system": "System", "tool": "Tool"}


@dataclass(frozen=True)
class Look:
    """How messages are shown. `thoughts_open` unfolds thoughts, `drafts` tints text by who drafted it."""

    width: int
    renderer: MarkdownRenderer
    thoughts_open: bool = False
    drafts: bool = False


class MessageLines:
    """Strips of one message, kept until the message or the look changes."""

    def __init__(self, message: Stored, siblings: tuple[int, int] = (1, 1)) -> None:
        self._message = message
        self._siblings = siblings
        self._note = ""
        self._document: StreamedDocument | None = None
        self._documented = ""
        self._look: Look | None = None
        self._strips: list[Strip] = []
        self.thought_header_line: int | None = None

    @property
    def siblings(self) -> tuple[int, int]:
        """(number, count) among the messages that share its parent."""
        return self._siblings

    @property
    def message(self) -> Stored:
        return self._message

    def update(self, message: Stored, note: str = "") -> None:
        """The message grew or ended. `note` says what is waited for."""
        if message is not self._message or note != self._note:
            self._message, self._note, self._look = message, note, None

    def strips(self, look: Look) -> list[Strip]:
        """All lines of the message, with a blank one after it."""
        if look != self._look:
            self._strips, self._look = list(self._build(look)), look
        return self._strips

    def _build(self, look: Look) -> Iterator[Strip]:
        message = self._message
        self.thought_header_line = None
        yield self._header(look.width)
        if message.role != "assistant":
            yield from wrap_text(clean(message.content), look.width)
        elif look.drafts:
            yield from wrap_text(draft_summary(message), look.width, _DIM)
            yield from wrap_runs(draft_runs(message), look.width)
        else:
            if message.reasoning:
                self.thought_header_line = 1
                yield from self._thought(look)
            yield from self._markdown(look)
        note = self._ending()
        if note:
            yield from wrap_text(clean(note), look.width, _NOTE)
        yield _BLANK

    def _header(self, width: int) -> Strip:
        message = self._message
        name = _NAMES.get(message.role) or clean_line(message.model_id) or "Assistant"
        segments = [Segment(name, _HEADER.get(message.role, Style(bold=True)))]
        number, count = self._siblings
        if count > 1:
            segments.append(Segment(f"  ‹{number}/{count}›", _DIM))
        figures = _figures(message)
        room = width - Strip(segments).cell_length - 2
        # Whole figures or none: the least telling one goes first.
        while figures and len(" · ".join(figures.values())) > room:
            figures.pop(next((name for name in _LEAST if name in figures), next(iter(figures))))
        if figures:
            segments.append(Segment(f"  {' · '.join(figures.values())}", _DIM))
        strip = Strip(segments)
        return strip if strip.cell_length <= width else strip.crop(0, width)

    def _thought(self, look: Look) -> Iterator[Strip]:
        stats = self._message.stats
        seconds, tokens = float(stats.get("reasoning_s", 0.0)), int(stats.get("reasoning_tokens", 0))
        is_thinking = self._message.state == "streaming" and not self._message.content
        verb = "Thinking" if is_thinking else "Thought"
        mark = "▾" if look.thoughts_open else "▸"
        yield from wrap_text(f"{mark} {verb} {seconds_text(seconds)} · {tokens} tokens", look.width, _DIM)[:1]
        if look.thoughts_open:
            yield from wrap_text(clean(self._message.reasoning).strip("\n"), look.width, _THOUGHT)
            yield _BLANK

    def _markdown(self, look: Look) -> list[Strip]:
        content = self._message.content
        if self._document is None or not content.startswith(self._documented):
            self._document, self._documented = StreamedDocument(look.renderer), ""
        elif self._look is not None and self._look.renderer is not look.renderer:
            self._document.restyle(look.renderer)
        if len(content) > len(self._documented):
            self._document.append(content[len(self._documented) :])
            self._documented = content
        if self._message.state != "streaming":
            self._document.finish()
        return self._document.strips(look.width)

    def _ending(self) -> str:
        message = self._message
        if message.state == "streaming":
            return f"({self._note})" if self._note else ""
        status = str(message.stats.get("status", ""))
        if message.state == "interrupted" and not status:
            status = "cut off when localspec ended; /retry answers again"
        return f"({status})" if status else ""


def answer_figures(message: Stored) -> str:
    """Tokens, speed and acceptance of a finished answer in a few words; empty while there are none."""
    return " · ".join(_figures(message).values())


def _figures(message: Stored) -> dict[str, str]:
    timings, usage = message.stats.get("timings"), message.stats.get("usage")
    if not isinstance(timings, dict) or not isinstance(usage, dict):
        return {}
    parts = {"tokens": f"{short_count(int(usage.get('completion_tokens', 0)))} tokens"}
    if usage.get("cached_tokens"):
        cached, total = short_count(int(usage["cached_tokens"])), short_count(int(usage["prompt_tokens"]))
        parts["cached"] = f"{cached}/{total} cached"
    if timings.get("tok_per_s"):
        parts["rate"] = f"{float(timings['tok_per_s']):.1f} tok/s"
    if timings.get("draft_n"):
        accepted = percent(int(timings.get("draft_n_accepted", 0)) / int(timings["draft_n"]))
        parts["accepted"] = f"{accepted} accepted"
    if timings.get("speedup_vs_plain"):
        parts["speedup"] = f"×{float(timings['speedup_vs_plain']):.2f}"
    return parts


def draft_runs(message: Stored) -> Iterator[Run]:
    """The generated text in runs: styled by origin, the character after a refusal marked, refusals counted by line."""
    refused_in_line = 0
    for text, style, refused in _pieces(message):
        refused_in_line += refused
        mark = 1 if refused else 0
        if mark and text:
            yield text[:1] if text[0] != "\n" else "", REFUSED
            mark = 0 if text[0] == "\n" else 1
        first, *others = text[mark:].split("\n")
        yield first, style
        for other in others:
            if refused_in_line:
                yield f"  ×{refused_in_line}", REFUSED_COUNT
            refused_in_line = 0
            yield "\n", None
            yield other, style
    if refused_in_line:
        yield f"  ×{refused_in_line}", REFUSED_COUNT


def draft_summary(message: Stored) -> str:
    """Who wrote which share of the characters, and how many drafts were refused."""
    total = sum(count for count, _, _ in message.spans)
    if not total or not any(origin for _, origin, _ in message.spans):
        return "This server does not say who drafted what." if message.content else ""
    shares: dict[str, int] = {}
    for count, origin, _ in message.spans:
        shares[origin] = shares.get(origin, 0) + count
    parts = [f"{'model' if o == TARGET else clean(o) or 'unknown'} {percent(n / total)}" for o, n in shares.items()]
    refused = sum(count for _, count in message.rejections)
    return f"Characters by: {', '.join(parts)} · {refused} drafts refused (×)"


def _pieces(message: Stored) -> Iterator[tuple[str, Style | None, int]]:
    # (text, style, drafts refused just before it); a span is cut where drafts were refused.
    texts = {"thinking": message.reasoning, "answer": message.content}
    at = {"thinking": 0, "answer": 0}
    refusals = list(message.rejections)
    position, before = 0, ""
    for count, origin, phase in message.spans:
        kind = "thinking" if phase == "thinking" else "answer"
        if before and kind != before:
            yield "\n\n", None, 0
        before = kind
        text, style = texts[kind][at[kind] : at[kind] + count], style_of(origin)
        at[kind] += count
        start, refused = 0, 0
        while refusals and refusals[0][0] < position + count:
            cut = max(start, refusals[0][0] - position)
            if cut > start:
                yield clean(text[start:cut]), style, refused
                start, refused = cut, 0
            refused += refusals.pop(0)[1]
        yield clean(text[start:]), style, refused
        position += count
    # Text without spans comes from a server or a version that did not say who drafted.
    rest = "".join(clean(texts[kind][at[kind] :]) for kind in texts)
    yield rest, None, sum(count for _, count in refusals)

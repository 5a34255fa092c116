"""One message of the transcript as strips: header, folded thought, Markdown, tool calls or draft view, ending.

Knows which lines belong to which part, so that parts can be marked, copied and folded. Not a widget.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from localspec.chats import Stored
from localspec.tui.blocks import only_code
from localspec.tui.calls import Call, pretty, read_calls, split_calls
from localspec.tui.document import StreamedDocument
from localspec.tui.draft_view import draft_runs, draft_summary
from localspec.tui.markdown import MarkdownRenderer
from localspec.tui.text import clean, clean_line, number_of, percent, seconds_text, short_count
from localspec.tui.wrap import wrap_runs, wrap_text

_LEAST = ("cached", "tokens", "accepted", "speedup")
_BLANK = Strip([], 0)
_DIM = Style(dim=True)
_THOUGHT = Style(dim=True, italic=True)
_NOTE = Style(italic=True)
_CALL = Style(color="#d9a64a", bold=True)
_HEADER = {"user": Style(bold=True, color="#5c9df5"), "assistant": Style(bold=True, color="#4fc38a")}
_NAMES = {"user": "You", "system": "System", "tool": "Tool result"}
# Longer messages of the user and longer results of tools are folded to their beginning.
FOLDED_LINES = {"user": 60, "system": 60, "tool": 8}
# Unfolded, a text of more lines than anybody reads is cut in view; copying gives all of it.
UNFOLDED_LINES = 5000

Part = Literal["message", "thought", "text", "code", "call", "rest"]


@dataclass(frozen=True)
class Look:
    """How messages are shown. `thoughts_open` unfolds thoughts and calls, `drafts` tints text by who drafted it."""

    width: int
    renderer: MarkdownRenderer
    thoughts_open: bool = False
    drafts: bool = False


@dataclass(frozen=True)
class Block:
    """A part of a message: its lines (counted from the header, `end` not included) and what copying it gives.

    `fold` names what unfolds it; empty if it has no folded form.
    """

    part: Part
    start: int
    end: int
    text: str
    fold: str = ""


class MessageLines:
    """Strips of one message, kept until the message or the look changes."""

    def __init__(self, message: Stored, siblings: tuple[int, int] = (1, 1)) -> None:
        self._message = message
        self._siblings = siblings
        self._note = ""
        self._documents: list[tuple[StreamedDocument, str]] = []
        self._places: list[Block | tuple[StreamedDocument, int]] = []
        self._folds: dict[str, bool] = {}
        self._look: Look | None = None
        self._strips: list[Strip] = []
        self._blocks: list[Block] | None = None
        self._spans_without_call = 0

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

    def toggle(self, fold: str, look: Look) -> None:
        """Fold what is unfolded, unfold what is folded."""
        self._folds[fold] = not self._is_open(fold, look)
        self._look = None

    def drop(self) -> None:
        """Keep nothing that can be rendered again: the message is out of view."""
        self._documents, self._strips, self._look = [], [], None

    def forget_folds(self) -> None:
        """Everything is as the look says again."""
        if self._folds:
            self._folds, self._look = {}, None

    def strips(self, look: Look) -> list[Strip]:
        """All lines of the message, with a blank one after it."""
        if look != self._look:
            self._strips, self._look, self._blocks = self._build(look), look, None
        return self._strips

    def blocks(self, look: Look) -> list[Block]:
        """The parts of the message, from the top."""
        self.strips(look)
        if self._blocks is None:
            self._blocks = self._find_blocks()
        return self._blocks

    def _find_blocks(self) -> list[Block]:
        found: list[Block] = []
        for place in self._places:
            if isinstance(place, Block):
                found.append(place)
                continue
            document, offset = place
            for start, end, source in document.ranges():
                code = only_code(source)
                part: Part = "text" if code is None else "code"
                found.append(Block(part, offset + start, offset + end, source if code is None else code))
        return found

    def _is_open(self, fold: str, look: Look) -> bool:
        return self._folds.get(fold, look.thoughts_open and fold != "rest")

    def _build(self, look: Look) -> list[Strip]:
        message = self._message
        self._places = []
        lines = [self._header(look.width)]
        if message.role != "assistant":
            lines += self._plain(look)
        elif look.drafts:
            drafted = [
                *wrap_text(draft_summary(message), look.width, _DIM),
                *wrap_runs(draft_runs(message), look.width),
            ]
            lines += self._placed("text", 1, drafted, message.content)
        else:
            if message.reasoning:
                lines += self._thought(look)
            self._add_answer(look, lines)
        note = self._ending()
        if note:
            lines += wrap_text(clean(note), look.width, _NOTE)
        lines.append(_BLANK)
        return lines

    def _placed(self, part: Part, start: int, lines: list[Strip], text: str, fold: str = "") -> list[Strip]:
        self._places.append(Block(part, start, start + len(lines), text, fold))
        return lines

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

    def _plain(self, look: Look) -> list[Strip]:
        message, text = self._message, self._message.content
        shown = pretty(text) if message.role == "tool" else clean(text)
        lines, most = shown.split("\n"), FOLDED_LINES.get(message.role, 60)
        if len(lines) <= most:
            return self._placed("text", 1, wrap_text(shown, look.width), text)
        is_open = self._is_open("rest", look)
        kept = min(len(lines), UNFOLDED_LINES) if is_open else most - 2
        strips = wrap_text("\n".join(lines[:kept]), look.width)
        mark = f"▾ {len(lines)} lines" if is_open else f"▸ {len(lines) - kept} more lines"
        if is_open and kept < len(lines):
            mark += f", the first {kept} of them shown; copying gives all"
        return self._placed("rest", 1, [*strips, *wrap_text(mark, look.width, _DIM)], text, "rest")

    def _thought(self, look: Look) -> list[Strip]:
        message, stats = self._message, self._message.stats
        seconds, tokens = number_of(stats.get("reasoning_s")), int(number_of(stats.get("reasoning_tokens")))
        is_thinking = message.state == "streaming" and not message.content
        verb = "Thinking" if is_thinking else "Thought"
        is_open = self._is_open("thought", look)
        mark = "▾" if is_open else "▸"
        count = f" · {tokens} tokens" if tokens else ""
        lines = list(wrap_text(f"{mark} {verb} {seconds_text(seconds)}{count}", look.width, _DIM)[:1])
        if is_open:
            lines += [*wrap_text(clean(message.reasoning).strip("\n"), look.width, _THOUGHT), _BLANK]
        return self._placed("thought", 1, lines, message.reasoning.strip("\n"), "thought")

    def _add_answer(self, look: Look, lines: list[Strip]) -> None:
        """Text and calls in turn, after the lines that are there."""
        number_of_text, number_of_call, first = 0, 0, len(lines)
        for is_call, text in self._parts():
            if len(lines) > first:
                lines.append(_BLANK)
            if not is_call:
                lines += self._markdown(look, number_of_text, text, len(lines))
                number_of_text += 1
                continue
            for call in read_calls(text):
                lines += self._call(look, call, f"call {number_of_call}", len(lines))
                number_of_call += 1

    def _parts(self) -> list[tuple[bool, str]]:
        """What `split_calls` finds. Spans only grow: those that held no call are not looked at again."""
        content, spans = self._message.content, self._message.spans
        if self._spans_without_call > len(spans):
            self._spans_without_call = 0
        if any(phase == "tool_call" for _, _, phase in spans[self._spans_without_call :]):
            return split_calls(content, spans)
        self._spans_without_call = len(spans)
        return [(False, content)] if content else []

    def _call(self, look: Look, call: Call, fold: str, line: int) -> list[Strip]:
        is_open = self._is_open(fold, look)
        verb = "Call" if call.is_whole or self._message.state != "streaming" else "Calling"
        brief = f"({call.brief})" if call.brief and not is_open else ""
        head = Strip([Segment("▾ " if is_open else "▸ ", _DIM), Segment(f"{verb} {call.name}", _CALL)])
        room = look.width - head.cell_length
        if brief and room > 3:
            rest = wrap_text(brief, max(2, room - 1))
            strip = rest[0] if len(rest) == 1 else Strip.join([rest[0], Strip([Segment("…")])])
            head = Strip.join([head, strip.apply_style(_DIM)])
        lines = [head.crop(0, look.width)]
        if is_open:
            indent = "  " if look.width > 8 else ""
            inner = wrap_text(call.arguments or "(no arguments)", look.width - len(indent))
            lines += [Strip.join([Strip([Segment(indent)]), strip]) for strip in inner]
        return self._placed("call", line, lines, call.source, fold)

    def _markdown(self, look: Look, number: int, text: str, line: int) -> list[Strip]:
        if number == len(self._documents):
            self._documents.append((StreamedDocument(look.renderer), ""))
        document, known = self._documents[number]
        if not text.startswith(known):
            document, known = StreamedDocument(look.renderer), ""
        document.restyle(look.renderer)
        if len(text) > len(known):
            document.append(text[len(known) :])
        if self._message.state != "streaming":
            document.finish()
        self._documents[number] = (document, text)
        self._places.append((document, line))
        return document.strips(look.width)

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
    completion, prompt = number_of(usage.get("completion_tokens")), number_of(usage.get("prompt_tokens"))
    cached, rate = number_of(usage.get("cached_tokens")), number_of(timings.get("tok_per_s"))
    drafted, speedup = number_of(timings.get("draft_n")), number_of(timings.get("speedup_vs_plain"))
    parts = {"tokens": f"{short_count(completion)} tokens"}
    if cached:
        parts["cached"] = f"{short_count(cached)}/{short_count(prompt)} cached"
    if rate:
        parts["rate"] = f"{rate:.1f} tok/s"
    if drafted:
        parts["accepted"] = f"{percent(number_of(timings.get('draft_n_accepted')) / drafted)} accepted"
    if speedup:
        parts["speedup"] = f"×{speedup:.2f}"
    return parts

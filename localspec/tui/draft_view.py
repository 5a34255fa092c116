"""The draft view of an answer: its generated text tinted by who drafted it, refusals marked and counted. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.style import Style

from localspec.chats import Stored
from localspec.tui.origins import REFUSED, REFUSED_COUNT, TARGET, style_of
from localspec.tui.text import clean, percent
from localspec.tui.wrap import Run


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

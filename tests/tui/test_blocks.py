"""Splitting and rendering of Markdown that arrives in pieces."""

from __future__ import annotations

import random
import re
import time
from functools import lru_cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.tui import document, wrap
from localspec.tui.blocks import BlockSplitter, code_blocks, markdown_parser, split_blocks
from localspec.tui.document import StreamedDocument
from localspec.tui.markdown import MarkdownRenderer

# Lines that decide where blocks begin and end; no link definitions, which act across blocks by design of Markdown.
_LINES = [
    "", "", "", "text", "more *text* here", "- item", "* other", "  - nested", "    deep", "1. one", "2) two",
    "# Head", "## Two", "===", "---", "> quote", "> > inner", "```", "```python", "~~~", "  ```", "````", "`x`",
    "x = 1", "    code", "\tcode", "| a | b |", "|---|---|", "| 1 | 2 |", "***", "<div>", "</div>", "<!-- c",
    "- ```", "  end", "   three", "-", "1.", "\\", "&amp;", "text  ", "> ```", "+ a", "Zwölf 🙂 中文", "12) x",
]  # fmt: skip

_documents = st.lists(st.sampled_from(_LINES), max_size=30).map("\n".join)


_words = st.integers(0, 9999).map(lambda number: f"w{number}")
_text = st.lists(
    st.one_of(_words, _words.map("*{}*".format), _words.map("`{}`".format), st.just("中文")), min_size=1, max_size=4
).map(" ".join)


@st.composite
def _tables(draw: st.DrawFn) -> str:
    columns = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(_text, min_size=columns, max_size=columns), min_size=1, max_size=4))
    marks = [draw(st.sampled_from(["---", ":--", "--:", ":-:"])) for _ in range(columns)]
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|" + "|".join(marks) + "|", *body])


@st.composite
def _fences(draw: st.DrawFn) -> str:
    mark = draw(st.sampled_from(["```", "~~~", "````"]))
    lines = draw(st.lists(st.sampled_from(["w1 = 2", "", "    w3", "- w4", "| w5 |", "# w6"]), max_size=5))
    end = [] if draw(st.integers(0, 9)) == 0 else [mark]
    return "\n".join([mark + draw(st.sampled_from(["", "python", "sh title=1"])), *lines, *end])


def _lists(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    """Lists of texts and of everything that can stand in an item, tight and loose."""

    @st.composite
    def build(draw: st.DrawFn) -> str:
        ordered, start = draw(st.booleans()), draw(st.integers(0, 98))
        items = []
        for number, item in enumerate(draw(st.lists(inner, min_size=1, max_size=3))):
            mark = f"{start + number}. " if ordered else "- "
            head = draw(_text) + "\n\n" if draw(st.booleans()) and not item.startswith("w") else ""
            items.append(mark + (head + item).replace("\n", "\n" + " " * len(mark)))
        return draw(st.sampled_from(["\n", "\n\n"])).join(items)

    return build()


_quotes = _text.map(lambda text: "> " + text.replace(" ", "\n> "))
_block = st.recursive(st.one_of(_text, _tables(), _fences(), _quotes), _lists, max_leaves=4)
_structured = st.lists(_block, max_size=4).map("\n\n".join)


def _joined(drawn: str) -> str:
    # A word that is broken between two lines of a list or quote is there all the same.
    return re.sub(r"[^\w]", "", drawn)


def _html(source: str) -> str:
    # Blank lines at the end of a code block that nothing closes are not kept.
    return re.sub(r"\s*</code>", "</code>", str(markdown_parser().render(source)))


@settings(max_examples=400, deadline=None)
@given(_documents)
def test_blocks_mean_what_the_whole_text_means(source: str) -> None:
    assert "".join(_html(block) for block in split_blocks(source)) == _html(source)


@settings(max_examples=60, deadline=None)
@given(_structured)
def test_blocks_of_tables_and_lists_mean_what_the_whole_text_means(source: str) -> None:
    assert "".join(_html(block) for block in split_blocks(source)) == _html(source)


@settings(max_examples=120, deadline=None)
@given(_documents | _structured, st.integers(0, 2**32), st.sampled_from([1, 3, 17]))
def test_streamed_rendering_equals_a_fresh_one(source: str, seed: int, longest: int) -> None:
    rng = random.Random(seed)
    renderer = MarkdownRenderer()
    streamed = StreamedDocument(renderer)
    position = 0
    while position < len(source):
        step = rng.randint(1, longest)
        streamed.append(source[position : position + step])
        position += step
        if rng.random() < 0.3:
            streamed.strips(rng.choice([20, 40]))
    streamed.finish()
    for width in (20, 40):
        assert streamed.strips(width) == StreamedDocument(renderer, source).strips(width)


@settings(max_examples=60, deadline=None)
@given(_structured, st.integers(50, 70))
def test_no_word_is_lost_in_drawing(source: str, width: int) -> None:
    drawn = "\n".join(strip.text for strip in StreamedDocument(MarkdownRenderer(), source).strips(width))
    growing = StreamedDocument(MarkdownRenderer())
    growing.append(source)
    streamed = "\n".join(strip.text for strip in growing.strips(width))
    for word in set(re.findall(r"w\d+", source)):
        assert word in _joined(drawn) and word in _joined(streamed)


@settings(max_examples=60, deadline=None)
@given(_documents | _structured, st.integers(1, 60))
def test_no_strip_is_wider_than_asked(source: str, width: int) -> None:
    growing = StreamedDocument(MarkdownRenderer())
    growing.append(source)
    for strip in [*growing.strips(width), *StreamedDocument(MarkdownRenderer(), source).strips(width)]:
        assert sum(segment.cell_length for segment in strip) <= max(width, 2)


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_is_split_without_loss_of_words(source: str) -> None:
    joined = "".join(split_blocks(source))
    wanted = "".join(c for c in source if c.isalnum())
    assert "".join(c for c in joined if c.isalnum()) == wanted


def test_closed_blocks_are_handed_out_early_and_once() -> None:
    splitter = BlockSplitter()
    assert splitter.feed("One\nparagraph\n\nTw") == []
    assert splitter.feed("o\n") == ["One\nparagraph"]
    assert splitter.feed("```py\na\n\nb\n") == ["Two"]
    assert splitter.open_text == "```py\na\n\nb\n"
    assert splitter.feed("```\nAfter") == []
    assert splitter.finish() == ["```py\na\n\nb\n```", "After"]


def test_control_codes_of_a_model_never_reach_the_terminal() -> None:
    shown = StreamedDocument(MarkdownRenderer(), "a\x1b]52;c;eA==\x07b\x9b2J\n\n```\n\x1b[31m\n```")
    text = "".join(strip.text for strip in shown.strips(40))
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in text)
    assert "a\ufffd]52" in text


@pytest.mark.parametrize(
    "source",
    [
        ">" * 60 + " deepest",
        "\n".join("  " * depth + f"- level{depth}" for depth in range(60)),
        "|" + " head |" * 40 + "\n|" + "---|" * 40 + "\n|" + " deepest |" * 40,
        "- item\n" * 3000 + "- deepest",
        "```py\n" + "x = 'a string' # and more\n" * 3000 + "deepest\n```",
    ],
    ids=["quotes", "lists", "columns", "items", "code"],
)
def test_what_cannot_be_drawn_whole_is_shown_as_written(source: str) -> None:
    drawn = "\n".join(strip.text for strip in StreamedDocument(MarkdownRenderer(), source).strips(60))
    assert "deepest" in drawn or "level59" in drawn
    assert drawn.count("deepest") == source.count("deepest")


@pytest.mark.parametrize("line", ["- item {}\n", "| a{} | b |\n", "x = {}\n"])
def test_lines_of_an_open_block_are_wrapped_once(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opening = "```py\n" if line.startswith("x") else "| a | b |\n|---|---|\n" if line.startswith("|") else ""
    wrapped: list[str] = []
    real = document.wrap_text
    monkeypatch.setattr(document, "wrap_text", lambda text, *more: (wrapped.append(text), real(text, *more))[1])
    growing, number_of_updates = StreamedDocument(MarkdownRenderer()), 0
    growing.append(opening)
    before: list[object] = []
    for number in range(400):
        for piece in (line.format(number)[:3], line.format(number)[3:]):
            growing.append(piece)
            strips = growing.strips(60)
            number_of_updates += 1
        # The same objects: whoever compares them to find what changed need not look inside.
        assert all(old is new for old, new in zip(before, strips, strict=False))
        before = list(strips)
    # Each whole line once, and the line that is being written at each update.
    assert len(wrapped) <= 400 + number_of_updates + 5


@pytest.mark.parametrize("word", ["some words ", "x" * 50])
def test_a_line_without_an_end_costs_its_end(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[int] = []
    real = wrap.wrap_line.__wrapped__

    @lru_cache(8192)
    def counted(runs: tuple[wrap.Run, ...], width: int) -> object:
        wrapped.append(len(runs[0][0]))
        return real(runs, width)

    monkeypatch.setattr(wrap, "wrap_line", counted)
    growing = StreamedDocument(MarkdownRenderer())
    for _ in range(400):
        growing.append(word * 5)
        strips = growing.strips(60)
    text = word * 2000
    assert "".join(strip.text for strip in strips).replace(" ", "") == text.replace(" ", "")
    # Each update wraps the two newest pieces at most; the rest of the line came from the cache.
    assert sum(wrapped) < 400 * 2.5 * document.BEGUN_PIECE_CHARS < 400 * len(text) / 2


def test_html_is_shown_as_written() -> None:
    text = "\n".join(s.text for s in StreamedDocument(MarkdownRenderer(), "<div>x</div>\n\na <b>b</b>").strips(40))
    assert "<div>x</div>" in text
    assert "<b>b</b>" in text


def test_open_code_shows_its_language_and_no_backticks() -> None:
    shown = StreamedDocument(MarkdownRenderer())
    shown.append("Text:\n```python\nx = 1\n")
    lines = [strip.text.rstrip("─ ") for strip in shown.strips(40)]
    assert lines == ["Text:", "", "── python", "x = 1"]


def test_code_blocks_in_order() -> None:
    source = "```py\na\n```\n- x\n  ```sh title=1\n  b\n  ```\n"
    assert code_blocks(source) == [("py", "a\n"), ("sh", "b\n")]


@pytest.mark.parametrize("line", ["- item number {}\n\n", "x = {}  # comment\n", "| {} | b |\n", "word{} "])
def test_work_does_not_grow_with_the_square_of_the_text(line: str) -> None:
    def seconds(count: int) -> float:
        opening = "```\n" if line.startswith("x") else "| a | b |\n|---|---|\n" if line.startswith("|") else ""
        pieces = [opening, *(line.format(n) for n in range(count))]
        best = float("inf")
        for _ in range(3):
            splitter = BlockSplitter()
            start = time.process_time()
            for piece in pieces:
                splitter.feed(piece)
            best = min(best, time.process_time() - start)
        return best

    # Eight times the text: linear work takes eight times as long, quadratic work 64 times.
    assert seconds(4000) < 24 * seconds(500) + 0.05

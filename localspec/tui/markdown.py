"""Renders one closed Markdown block into strips. Pure: the same block, width and look give the same strips."""

from __future__ import annotations

from functools import lru_cache
from io import StringIO

from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text
from rich.theme import Theme
from textual.strip import Strip

from localspec.tui.blocks import markdown_parser
from localspec.tui.text import drawable
from localspec.tui.wrap import wrap_text

LABEL_STYLE = Style(dim=True)
_STYLES = {
    "markdown.h1": "bold underline",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.h4": "bold italic",
    "markdown.h5": "italic",
    "markdown.h6": "italic",
    "markdown.code": "bold",
    "markdown.block_quote": "italic",
    "markdown.link": "underline",
    "markdown.link_url": "dim",
    "markdown.item.bullet": "bold",
    "markdown.item.number": "bold",
    "markdown.hr": "dim",
    "markdown.table.border": "dim",
    "markdown.table.header": "bold",
}
# Larger blocks are shown without syntax colours, or as they were written: rendering them would stall the interface
# (some 0.1 s at these limits).
HIGHLIGHT_LIMIT_CHARS = 16_000
RENDER_LIMIT_TOKENS = 4_000
RENDER_LIMIT_CHARS = 100_000
# The parser passes over what is nested deeper than 20.
NESTING_LIMIT = 16


def code_label(language: str, width: int) -> str:
    """The line above a code block that names its language."""
    name = f"── {language or 'code'} "
    return name[:width].ljust(min(width, max(len(name), 24)), "─")


class _Code(CodeBlock):
    """A code block under a line that names its language, without a background that would depend on the theme."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip("\n")
        language = "" if self.lexer_name == "text" else self.lexer_name
        yield Text(code_label(language, options.max_width), style=LABEL_STYLE)
        if len(code) > HIGHLIGHT_LIMIT_CHARS:
            yield Text(code)
        else:
            yield Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default")


class _LeftHeading(Heading):
    LEVEL_ALIGN = {f"h{level}": "left" for level in range(1, 7)}  # noqa: RUF012 - the base class declares it


class _Markdown(Markdown):
    elements = {  # noqa: RUF012 - the base class declares it
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _LeftHeading,
    }

    def __init__(self, tokens: list[Token], code_theme: str) -> None:
        # The base class would build a parser of its own for each block; these are all the fields that it renders from.
        self.parsed = tokens
        self.code_theme = self.inline_code_theme = code_theme
        self.inline_code_lexer = None
        self.justify = None
        self.style = "none"
        self.hyperlinks = False


class MarkdownRenderer:
    """Renders blocks for a dark or a light background."""

    def __init__(self, *, dark: bool = True) -> None:
        self.dark = dark
        self._parser = markdown_parser()
        self._console = Console(
            file=StringIO(),
            force_terminal=True,
            color_system="truecolor",
            legacy_windows=False,
            theme=Theme(_STYLES),
            width=80,
        )

    def render(self, block: str, width: int) -> list[Strip]:
        """Strips of a block, each at most `width` cells. One that cannot be drawn whole is shown as it was written."""
        if len(block) > RENDER_LIMIT_CHARS:
            return wrap_text(block, width)
        tokens = self._parser.parse(drawable(block))
        if len(tokens) > RENDER_LIMIT_TOKENS or any(token.level > NESTING_LIMIT for token in tokens):
            return wrap_text(block, width)
        markdown = _Markdown(tokens, "monokai" if self.dark else "friendly")
        options = self._console.options.update(width=max(1, width), height=None)
        lines = self._console.render_lines(markdown, options, pad=False, new_lines=False)
        strips = [
            Strip([Segment(s.text, _plain_ground(s.style)) for s in line if s.text and not s.control]) for line in lines
        ]
        # Lists and tables come with blank lines of their own; the space between blocks is the document's.
        start, end = 0, len(strips)
        while start < end and not strips[start].text.strip():
            start += 1
        while end > start and not strips[end - 1].text.strip():
            end -= 1
        strips = strips[start:end]
        if any(strip.cell_length > width for strip in strips) or _lacks("".join(s.text for s in strips), block, tokens):
            return wrap_text(block, width)
        return strips


def _lacks(drawn: str, block: str, tokens: list[Token]) -> bool:
    # Too many columns or too deep a list for the width: the renderer drops or cuts what does not fit. Letters, since
    # lists have digits of their own.
    parts = [token.content for token in tokens if token.type in ("fence", "code_block")]
    inline = (child for token in tokens for child in token.children or ())
    parts += [child.content for child in inline if child.type in ("text", "code_inline")]
    return drawn.count("…") > block.count("…") or _letters(drawn) < _letters("".join(parts))


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@lru_cache(maxsize=1024)
def _plain_ground(style: Style | None) -> Style | None:
    # The terminal's default background is not the theme's: without one, the widget's own shows.
    if style is None or style.bgcolor is None or not style.bgcolor.is_default:
        return style
    return style.without_color + Style(color=style.color)

"""How each drafter is shown: a colour and an attribute, so that the two can be told apart without colour."""

from __future__ import annotations

from rich.style import Style

TARGET = "target"

_KNOWN: dict[str, Style] = {
    TARGET: Style(),
    # Every set of bold, italic and underline is one drafter's: double underlines are not drawn everywhere.
    "ngram": Style(color="#4fc38a", underline=True),
    "ngram_disk": Style(color="#3fb6c6", italic=True, underline=True),
    "mtp": Style(color="#b48ef0", bold=True, underline=True),
    "eagle3": Style(color="#e0a64a", bold=True, italic=True, underline=True),
    "dflash": Style(color="#5c9df5", bold=True),
    "dspark": Style(color="#e37fb0", italic=True),
    "draft_model": Style(color="#d9c24a", bold=True, italic=True),
}
_OTHERS = (
    Style(color="#e07a5f", underline=True),
    Style(color="#81b29a", bold=True, underline=True),
    Style(color="#f2a65a", italic=True, underline=True),
)
REFUSED = Style(color="#e06c75", bold=True)
"""The character that the model wrote instead of a draft that it refused."""
REFUSED_COUNT = Style(color="#e06c75", dim=True)


def style_of(origin: str) -> Style:
    """Style of the characters that a drafter proposed; the model's own have none."""
    # A table on disk is an origin of its own, named by the table.
    known = _KNOWN.get("ngram_disk" if origin.startswith("table:") else origin)
    # A drafter of another server: the same name always gets the same style.
    return known if known is not None else _OTHERS[sum(origin.encode("utf-8", "replace")) % len(_OTHERS)]

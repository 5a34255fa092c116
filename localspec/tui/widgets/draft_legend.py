"""The line below the draft view that says whose mark is whose."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text
from textual.widgets import Static

from localspec.tui.origins import REFUSED, REFUSED_COUNT, TARGET, style_of
from localspec.tui.text import clean_line


class DraftLegend(Static):
    """Hidden while the draft view is off."""

    def __init__(self, id: str | None = None) -> None:
        super().__init__(id=id)
        self.display = False

    def show(self, drafters: Iterable[str], is_on: bool) -> None:
        """Name these drafters, each in its own style."""
        self.display = is_on
        if is_on:
            self.update(legend_text(drafters))


def legend_text(drafters: Iterable[str]) -> Text:
    """The model's own text is plain; a refused draft is a marked character and a count at the line's end."""
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("model", style_of(TARGET))
    # Text that a chain drafted is marked as that of the member it came from.
    for name in dict.fromkeys(part for drafter in drafters for part in drafter.split("+")):
        if name not in ("off", "auto"):
            text.append("  ")
            text.append(clean_line(name), style_of(name))
    text.append("  ")
    text.append("r", REFUSED)
    text.append("efused here  ")
    text.append("×2", REFUSED_COUNT)
    text.append(" refused in this line")
    return text

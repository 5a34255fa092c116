"""What the prompt offers while it is typed in: commands after /, files after @."""

from __future__ import annotations

import re

from localspec.api.types import ModelInfo
from localspec.tui.attachments import find_files
from localspec.tui.options import UiOptions
from localspec.tui.slash import complete

_AT = re.compile(r"(?:^|\s)@([^\s@]*)$")


def suggestions(text: str, model: ModelInfo | None, options: UiOptions) -> list[tuple[str, str]]:
    """(value, help) pairs for the end of the text; files are `@name`."""
    if text.startswith("/"):
        names = [name for name, _ in options.models]
        return complete(text, models=names, drafters=model.drafters if model else ())
    match = _AT.search(text)
    if match is None:
        return []
    return [(f"@{name}", name) for name in find_files(options.export_dir, match.group(1))]

"""Small text helpers: what may be printed, and how figures are written. Knows no widget."""

from __future__ import annotations

import re
from math import isnan

_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
# Signs whose cells no two terminals count alike: emoji joined to one picture, their forms and skin tones, signs that
# are not seen. Without them a line is as wide as the sum of its characters, everywhere.
_FICKLE = re.compile(
    "[\u00ad\u061c\u200b\u200d-\u200f\u2060\ufe00-\ufe0f\ufeff\U0001f3fb-\U0001f3ff\U000e0000-\U000e01ef]"
)
# These turn the order of a line about, so that it reads as something else.
_TURNING = re.compile("[\u202a-\u202e\u2066-\u2069]")
_BARS = "▏▎▍▌▋▊▉█"
_HEIGHTS = "▁▂▃▄▅▆▇█"


def clean(text: str) -> str:
    """Text of a model or a file made safe for a terminal: no control codes but newline and tab.

    An escape sequence in an answer could otherwise move the cursor or set the clipboard.
    """
    return _CONTROL.sub("\ufffd", text.replace("\r", "")) if not text.isprintable() else text


def clean_line(text: str) -> str:
    """The same for text that must stay on one line, ready to be drawn."""
    return drawable(" ".join(clean(text).split())) if not text.isprintable() else drawable(text)


def problem_text(error: Exception) -> str:
    """What went wrong, for the user: an error of the system as a sentence that names the file, others as they are."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename} cannot be used ({error.strerror.lower()}): check its name and its rights."
    return str(error) or type(error).__name__


def drawable(text: str) -> str:
    """Text of a line as every terminal draws it alike. For drawing only: what is copied and stored keeps all signs."""
    return text if text.isascii() else _TURNING.sub("\ufffd", _FICKLE.sub("", text))


def number_of(value: object) -> float:
    """A figure out of stored JSON, which may come from an imported file: 0 for everything that is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or (isinstance(value, float) and isnan(value)):
        return 0.0
    return float(max(0, min(10**15, value)))


def short_count(number: float) -> str:
    """`950`, `1.2k`, `32k`, `1.5M`."""
    if number < 1000:
        return str(round(number))
    for divisor, unit in ((1_000, "k"), (1_000_000, "M"), (1_000_000_000, "G")):
        value = number / divisor
        if value < 999.5 or unit == "G":
            return f"{value:.1f}{unit}" if value < 9.95 and round(value, 1) % 1 else f"{value:.0f}{unit}"
    raise AssertionError("the last unit always returns")


def bytes_text(size_bytes: float) -> str:
    """`512 B`, `1.4 MiB`, `22 GiB`."""
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1023.5 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.1f} {unit}" if value < 9.95 and unit != "B" else f"{value:.0f} {unit}"


def seconds_text(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def percent(part: float) -> str:
    """`61%` of a share between 0 and 1."""
    return f"{100 * part:.0f}%"


def fitting(parts: list[str], width: int, gap: int) -> list[str]:
    """The first parts that fit into `width` characters, each with `gap` before it; none is cut."""
    kept = []
    for part in parts:
        width -= gap + len(part)
        if width < 0:
            break
        kept.append(part)
    return kept


def bar(share: float, width: int) -> str:
    """A horizontal bar `width` cells wide, filled by eighths of a cell."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_BARS[rest - 1] if rest else "")).ljust(width)


def sparkline(values: tuple[float, ...], width: int) -> str:
    """The last `width` values as a row of bars, scaled to the largest of them."""
    shown = values[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return "▁" * len(shown)
    return "".join(_HEIGHTS[min(7, int(8 * max(0.0, value) / top))] for value in shown)

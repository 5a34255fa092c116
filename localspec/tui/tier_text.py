"""The caches below the device and the n-gram tables, as lines of the panel. Pure: figures in, styled text out.

Knows the names of the figures that the engine gives; others are shown by what their name says of their unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.style import Style
from rich.text import Text

from localspec.tui.text import bar, bytes_text, clean_line, percent, seconds_text, short_count

_DIM = Style(dim=True)
_BAR = Style(color="#5c9df5")
_TIERS = (("host", "memory"), ("ssd", "SSD"))
_NAME_CELLS = 7


def tier_lines(tiers: Mapping[str, float], storage: Mapping[str, float], width: int) -> Iterator[Text]:
    """Each cache with its fill, hits and rate; then the n-gram tables; then figures of other names."""
    shown: set[str] = set()
    for prefix, label in _TIERS:
        lines = list(_tier(prefix, label, tiers, width))
        if lines:
            shown |= {name for name in tiers if name.startswith(f"{prefix}_")}
            yield from lines
    if tiers.get("prefill_tok_per_s"):
        shown.add("prefill_tok_per_s")
        yield Text(f"reads prompts at {short_count(tiers['prefill_tok_per_s'])} tok/s", style=_DIM)
    if "ngram_lookups" in storage:
        shown |= {name for name in storage if name.startswith("ngram_")}
        yield from _tables(storage, width)
    for name, value in (*tiers.items(), *storage.items()):
        if name not in shown:
            yield Text(f"{clean_line(name).replace('_', ' ')}: {figure(name, value)}", style=_DIM)


def disk_rate(tiers: Mapping[str, float], storage: Mapping[str, float]) -> str:
    """`SSD 520 MB/s` of what is read now or was read last; empty where no disk is used."""
    now = storage.get("ngram_read_mb_per_s", 0.0)
    rate = now or tiers.get("ssd_restore_mb_per_s", 0.0)
    return f"SSD {short_count(rate)} MB/s" if rate >= 0.5 else ""


def figure(name: str, value: float) -> str:
    """A value with the unit that its name ends in."""
    if name.endswith("_bytes_per_s"):
        return f"{bytes_text(value)}/s"
    if name.endswith("_bytes"):
        return bytes_text(value)
    if name.endswith("_mb_per_s"):
        return f"{value:.4g} MB/s"
    if name.endswith(("_rate", "_share")):
        return percent(value)
    if name.endswith("_ms"):
        return f"{value:.3g} ms"
    if name.endswith("_per_s"):
        return f"{short_count(value)}/s"
    return seconds_text(value) if name.endswith("_s") else f"{value:.4g}"


def _tier(prefix: str, label: str, tiers: Mapping[str, float], width: int) -> Iterator[Text]:
    cap = tiers.get(f"{prefix}_cap_bytes", 0.0)
    if not cap:
        return
    used = tiers.get(f"{prefix}_bytes", 0.0)
    words = f" {bytes_text(used)}/{bytes_text(cap)}"
    filled = bar(used / cap, max(4, width - _NAME_CELLS - len(words)))
    rest = "·" * (len(filled) - len(filled.rstrip()))
    yield Text.assemble(f"{label:<{_NAME_CELLS}}", (filled.rstrip(), _BAR), (rest, _DIM), words)
    parts = [f"hits {percent(tiers.get(f'{prefix}_hit_rate', 0.0))}"]
    if tiers.get(f"{prefix}_restore_mb_per_s"):
        parts.append(f"back at {short_count(tiers[f'{prefix}_restore_mb_per_s'])} MB/s")
    if tiers.get(f"{prefix}_saved_s"):
        parts.append(f"saved {seconds_text(tiers[f'{prefix}_saved_s'])}")
    if tiers.get(f"{prefix}_written_today_bytes"):
        parts.append(f"{bytes_text(tiers[f'{prefix}_written_today_bytes'])} written today")
    if tiers.get(f"{prefix}_read_bytes_per_s"):
        parts.append(f"disk reads {bytes_text(tiers[f'{prefix}_read_bytes_per_s'])}/s")
    if f"{prefix}_writing" in tiers and not tiers[f"{prefix}_writing"]:
        parts.append("writing is off")
    yield from _joined(parts, width)


def _tables(storage: Mapping[str, float], width: int) -> Iterator[Text]:
    lookups, hits = storage["ngram_lookups"], storage.get("ngram_hits", 0.0)
    if not lookups:
        yield Text("n-gram tables: not asked yet", style=_DIM)
        return
    per_hit = storage.get("ngram_accepted_per_hit", 0.0)
    yield Text(f"n-gram {percent(hits / lookups)} of {short_count(lookups)} hit, {per_hit:.2f} kept")
    parts = [
        f"{storage.get('ngram_read_mb_per_s', 0.0):.3g} MB/s",
        f"{short_count(storage.get('ngram_reads_per_s', 0.0))} reads/s",
    ]
    if storage.get("ngram_read_p99_ms"):
        parts.append(f"p99 {storage['ngram_read_p99_ms']:.2g} ms")
    if storage.get("ngram_cache_share"):
        parts.append(f"{percent(storage['ngram_cache_share'])} cached")
    for name, words in (("ngram_late", "too late"), ("ngram_damaged_pages", "pages damaged")):
        if storage.get(name):
            parts.append(f"{short_count(storage[name])} {words}")
    yield from _joined(parts, width)


def _joined(parts: list[str], width: int) -> Iterator[Text]:
    """The parts in as many lines as they need; none is cut unless it alone is too long."""
    line = ""
    for part in parts:
        if line and len(line) + 3 + len(part) > width:
            yield Text(line, style=_DIM)
            line = ""
        line = f"{line} · {part}" if line else f"  {part}"
    yield Text(line, style=_DIM)

"""Caches and tables in the panel: fill, hits, rates in their units, unknown figures by their names' endings."""

from __future__ import annotations

import pytest

from localspec.tui.tier_text import disk_rate, figure, tier_lines
from localspec.tui.widgets.draft_legend import legend_text

TIERS = {
    "host_bytes": 2.0**30,
    "host_cap_bytes": 2.0**32,
    "host_hit_rate": 0.61,
    "host_restore_mb_per_s": 5200.0,
    "host_saved_s": 34.2,
    "ssd_bytes": 3.0 * 2**30,
    "ssd_cap_bytes": 2.0**35,
    "ssd_hit_rate": 0.125,
    "ssd_restore_mb_per_s": 0.0,
    "ssd_written_today_bytes": 2.0**31,
    "ssd_read_bytes_per_s": 3.0e9,
    "ssd_writing": 0.0,
    "prefill_tok_per_s": 1840.0,
}
TABLES = {
    "ngram_lookups": 400.0,
    "ngram_hits": 120.0,
    "ngram_accepted_per_hit": 2.314,
    "ngram_reads_per_s": 118.4,
    "ngram_read_mb_per_s": 4.12,
    "ngram_read_p50_ms": 0.1,
    "ngram_read_p99_ms": 0.81,
    "ngram_cache_share": 0.9,
    "ngram_late": 3.0,
    "ngram_damaged_pages": 0.0,
}


def text_of(tiers: dict[str, float], storage: dict[str, float], width: int = 40) -> list[str]:
    return [line.plain for line in tier_lines(tiers, storage, width)]


def test_tiers_and_tables_are_told_with_units() -> None:
    assert text_of(TIERS, TABLES) == [
        "memory ████▎············ 1.0 GiB/4.0 GiB",
        "  hits 61% · back at 5.2k MB/s",
        "  saved 34 s",
        "SSD    █▊················ 3.0 GiB/32 GiB",
        "  hits 12% · 2.0 GiB written today",
        "  disk reads 2.8 GiB/s · writing is off",
        "reads prompts at 1.8k tok/s",
        "n-gram 30% of 400 hit, 2.31 kept",
        "  4.12 MB/s · 118 reads/s · p99 0.81 ms",
        "  90% cached · 3 too late",
    ]


@pytest.mark.parametrize("width", [32, 34, 60])
def test_lines_fit_the_panel(width: int) -> None:
    assert all(len(line) <= width for line in text_of(TIERS, TABLES, width))


def test_nothing_is_said_of_what_is_not_there() -> None:
    assert text_of({}, {}) == []
    assert text_of({"host_bytes": 0.0, "host_cap_bytes": 0.0}, {}) == ["host bytes: 0 B", "host cap bytes: 0 B"]
    assert text_of({}, {"ngram_lookups": 0.0}) == ["n-gram tables: not asked yet"]


def test_figures_of_other_names_get_the_unit_of_their_ending() -> None:
    told = {"a_bytes": 1536, "b_bytes_per_s": 2**21, "c_mb_per_s": 5.25, "d_rate": 0.5, "e_share": 0.25,
            "f_ms": 1.234, "g_per_s": 1200, "h_s": 0.44, "i": 7}  # fmt: skip
    assert [figure(name, value) for name, value in told.items()] == [
        "1.5 KiB", "2.0 MiB/s", "5.25 MB/s", "50%", "25%", "1.23 ms", "1.2k/s", "0.4 s", "7",
    ]  # fmt: skip
    assert (
        text_of({"evil\x1b_bytes": 1.0}, {})[0].endswith("bytes: 1 B") and "\x1b" not in text_of({"e\x1b": 1.0}, {})[0]
    )


def test_disk_rate_prefers_what_is_read_now() -> None:
    assert disk_rate(TIERS, TABLES) == "SSD 4 MB/s"
    assert disk_rate({"ssd_restore_mb_per_s": 521.0}, {}) == "SSD 521 MB/s"
    assert disk_rate({}, {}) == ""


@pytest.mark.parametrize("names", [("off", "ngram", "mtp", "ngram+mtp"), ("auto", "x\x1b[2J")])
def test_the_legend_names_each_drafter_once_in_its_own_style(names: tuple[str, ...]) -> None:
    text = legend_text(names)
    assert text.plain.startswith("model  ") and "off" not in text.plain and "auto" not in text.plain
    assert "\x1b" not in text.plain and text.plain.count("ngram") <= 1
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert len({str(style) for style in styles.values()}) == len(styles)

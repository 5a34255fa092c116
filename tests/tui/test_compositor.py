"""Painting part of the chat gives the same cells as painting all of it, wherever the part lies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rich.console import Console
from rich.segment import Segment
from rich.style import Style
from textual._compositor import Compositor
from textual.geometry import Region
from textual.scrollbar import ScrollBar
from textual.strip import Strip
from textual.widgets import Static

from localspec.tui.app import LocalspecApp
from localspec.tui.compositor import CroppingCompositor, PiecesUpdate
from localspec.tui.widgets.quick_bar import QuickScrollBar
from tests.tui.fakes import FIXED_TEXT, NARROW, WIDE, ask, scripted, started


def painted(app: LocalspecApp, crop: Region) -> dict[int, Strip]:
    """The lines that a paint of this part would write."""
    chops = app.screen._compositor._render_chops(crop, lambda y: crop.y <= y < crop.bottom)
    return {y: Strip.join(chops[y].values()).simplify() for y in range(crop.y, crop.bottom)}


def cells(strip: Strip, crop: Region) -> Strip:
    return strip.crop(crop.x, crop.right).simplify()


@pytest.mark.parametrize("size", [WIDE, NARROW])
async def test_any_part_is_painted_as_in_the_whole(
    tmp_path: Path, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(7)
    async with started(scripted(FIXED_TEXT * 4), tmp_path, size) as (app, pilot):
        await ask(app, pilot, "q")
        app.chat.transcript.scroll_to(y=11, animate=False)
        await pilot.press("/")
        await pilot.pause()
        assert isinstance(app.screen._compositor, CroppingCompositor)
        with monkeypatch.context() as patch:
            patch.setattr(CroppingCompositor, "_get_renders", Compositor._get_renders)
            whole = app.screen._compositor.render_strips(app.screen.size)
        for _ in range(60):
            x, y = generator.randrange(size[0]), generator.randrange(size[1])
            crop = Region(x, y, generator.randint(1, size[0] - x), generator.randint(1, size[1] - y))
            for row, strip in painted(app, crop).items():
                assert cells(strip, crop) == cells(whole[row], crop), (crop, row)


@pytest.mark.parametrize("size", [WIDE, NARROW])
async def test_what_the_terminal_is_sent_is_the_picture(tmp_path: Path, size: tuple[int, int]) -> None:
    generator = random.Random(11)
    async with started(scripted(FIXED_TEXT * 4), tmp_path, size) as (app, pilot):
        await ask(app, pilot, "q")
        over = Static("A box that lies over transcript and panel")
        over.styles.overlay, over.styles.position, over.styles.offset = "screen", "absolute", (size[0] - 60, 3)
        over.styles.width, over.styles.height = 57, 4
        await app.chat.mount(over)
        await pilot.press("/")
        await pilot.pause()
        compositor = app.screen._compositor
        assert isinstance(compositor, CroppingCompositor)
        whole = Compositor.render_strips(compositor, app.screen.size)
        assert any("A box that lies" in strip.text for strip in whole)
        for _ in range(60):
            regions = set()
            for _ in range(generator.randint(1, 3)):
                x, y = generator.randrange(size[0]), generator.randrange(size[1])
                regions.add(Region(x, y, generator.randint(1, size[0]), generator.randint(1, size[1] - y)))
            sent = sent_cells(compositor, regions)
            wanted = {(x, y) for r in regions for y in range(r.y, r.bottom) for x in range(r.x, min(r.right, size[0]))}
            assert set(sent) >= wanted
            for (x, y), cell in sent.items():
                assert cell == whole[y].crop(x, x + 1).simplify(), (x, y, regions)


def sent_cells(compositor: CroppingCompositor, regions: set[Region]) -> dict[tuple[int, int], Strip]:
    """(column, row): what a paint of these parts writes there. Each cell at most once."""
    compositor._dirty_regions.update(regions)
    update = compositor.render_partial_update()
    assert isinstance(update, PiecesUpdate) and not compositor._dirty_regions
    sent: dict[tuple[int, int], Strip] = {}
    for left, y, strip in update._placed:
        for x in range(strip.cell_length):
            assert (left + x, y) not in sent
            sent[(left + x, y)] = strip.crop(x, x + 1).simplify()
    return sent


async def test_nothing_is_sent_where_nothing_changed(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, NARROW) as (app, pilot):
        await pilot.pause()
        compositor = app.screen._compositor
        compositor._dirty_regions.clear()
        assert compositor.render_partial_update() is None


def test_a_strip_is_sent_to_its_place() -> None:
    update = PiecesUpdate([(2, 0, Strip([Segment("ab")])), (0, 4, Strip([Segment("c", Style(bold=True))]))])
    assert update.render_segments(Console(color_system="truecolor")) == "\x1b[1;3Hab\x1b[5;1H\x1b[1mc\x1b[0m"


async def test_the_scroll_bar_is_textuals_own(tmp_path: Path) -> None:
    async with started(scripted(FIXED_TEXT * 4), tmp_path, NARROW) as (app, pilot):
        await ask(app, pilot, "q")
        bar = app.chat.transcript.vertical_scrollbar
        assert isinstance(bar, QuickScrollBar) and bar.size.height > 5
        region = bar.size.region
        for y in (0, 3, 8, 15):
            app.chat.transcript.scroll_to(y=y, animate=False)
            await pilot.pause()
            for over in (False, True):
                bar.mouse_over = over
                wanted = ScrollBar.render_lines(bar, region)
                assert [strip.simplify() for strip in bar.render_lines(region)] == [s.simplify() for s in wanted]


async def test_the_scroll_bar_repaints_only_its_rows_that_changed(tmp_path: Path) -> None:
    async with started(scripted(FIXED_TEXT * 4), tmp_path, NARROW) as (app, pilot):
        await ask(app, pilot, "q")
        transcript = app.chat.transcript
        bar = transcript.vertical_scrollbar
        transcript.scroll_to(y=4, animate=False)
        await pilot.pause()
        before = list(bar.render_lines(bar.size.region))
        bar._exchange_repaint_regions()
        bar.position = bar.position
        assert not bar._exchange_repaint_regions()
        bar.position = 6
        after = bar.render_lines(bar.size.region)
        changed = {y for y, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
        assert 0 < len(changed) < len(after)
        assert {row.y for row in bar._exchange_repaint_regions()} == changed


async def test_only_what_is_painted_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(scripted("one"), tmp_path, WIDE) as (app, pilot):
        await ask(app, pilot, "q")
        asked: list[tuple[str | None, int]] = []
        for widget in app.screen._compositor.visible_widgets:
            original = widget.render_lines

            def noted(crop: Region, widget=widget, original=original) -> list[Strip]:
                asked.append((widget.id, crop.height))
                return original(crop)

            monkeypatch.setattr(widget, "render_lines", noted)
        painted(app, Region(0, 2, 80, 3))
        assert {height for _, height in asked} == {3}
        assert "prompt" not in {name for name, _ in asked} and "transcript" in {name for name, _ in asked}

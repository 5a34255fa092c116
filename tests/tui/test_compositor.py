"""Painting part of the chat gives the same cells as painting all of it, wherever the part lies."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from textual._compositor import Compositor
from textual.geometry import Region
from textual.strip import Strip

from localspec.tui.app import LocalspecApp
from localspec.tui.compositor import CroppingCompositor
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

"""The bench screen: plans from its fields, the table that fills, cancelling, applying, exporting, small terminals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Label, Select

from localspec.chats import Stored
from localspec.matrix.bench import BenchPlan, Cell
from localspec.tui.app import LocalspecApp
from localspec.tui.bench_run import (
    BUILT_IN,
    THIS_CHAT,
    BenchForm,
    best_method,
    best_of_each,
    chat_prompts,
    keys_of,
    read_plan,
)
from localspec.tui.options import SettingError
from localspec.tui.screens.bench import BenchScreen
from tests.tui.fakes import ask, scripted, started, until

DRAFTERS = ("off", "ngram", "mtp")


def cell(drafter: str, depth: int, rate: float, workload: str = "a", plain: float = 10.0) -> Cell:
    gain = None if drafter == "off" else rate / plain
    return Cell(workload, drafter, depth, 1, 1, 9, rate, gain, 1.5, 0.5, (0.5,), 0.1, 0)


def plan_of(**changes: Any) -> BenchPlan:
    form = {"prompts": "code", "drafters": "ngram, mtp", "depths": "8,2", "active": "1", "max_tokens": "16", **changes}
    return read_plan(BenchForm(**form), chat_prompts([Stored("user", "q")], ""), DRAFTERS)


def test_a_plan_has_every_drafter_and_depth_and_always_off() -> None:
    keys = keys_of(plan_of(active="1, 2"), DRAFTERS)
    assert keys[0] == ("code", "off", 0, 1)
    assert {key[1:3] for key in keys} == {("off", 0), ("ngram", 2), ("ngram", 8), ("mtp", 2), ("mtp", 8)}
    assert len(keys) == 10
    assert len(keys_of(plan_of(prompts=BUILT_IN, drafters="auto"), DRAFTERS)) == 2 * 5
    assert keys_of(plan_of(), ("eagle3",)) == (("code", "server", 0, 1),)


def test_questions_of_a_chat_come_with_what_was_said_before() -> None:
    said = [Stored("user", "one"), Stored("assistant", "two"), Stored("assistant", ""), Stored("user", "three")]
    first, second = chat_prompts(said, "Be brief.")
    assert [m.content for m in first.messages] == ["Be brief.", "one"]
    assert [m.content for m in second.messages] == ["Be brief.", "one", "two", "three"]
    assert len(chat_prompts([Stored("user", str(n)) for n in range(30)], "")) == 8


@pytest.mark.parametrize(
    "changes",
    [{"drafters": "eagle3"}, {"drafters": "ngram+x"}, {"depths": "16"}, {"depths": ""}, {"active": "0"},
     {"max_tokens": "x"}, {"prompts": BUILT_IN, "depths": ",".join(map(str, range(1, 16))), "active": "1,2,3,4"}],
)  # fmt: skip
def test_a_plan_that_cannot_be_says_what_would_work(changes: dict[str, str]) -> None:
    with pytest.raises(SettingError, match=r"use|from|give"):
        plan_of(**changes)


def test_an_empty_chat_is_no_workload() -> None:
    with pytest.raises(SettingError, match="no question yet"):
        read_plan(BenchForm(THIS_CHAT, "ngram"), (), DRAFTERS)


def test_the_best_method_gains_everywhere_and_cells_left_out_do_not_win() -> None:
    cells = [cell("off", 0, 10), cell("ngram", 4, 20), cell("mtp", 4, 15)]
    assert best_method([]) is None
    assert best_method(cells)[:2] == ("ngram", 4)  # type: ignore[index]
    # Twice as fast in one kind of work and half as fast in the other is worse than half as fast again in both.
    cells += [cell("off", 0, 10, "b"), cell("ngram", 4, 5, "b"), cell("mtp", 4, 15, "b")]
    assert best_method(cells)[:2] == ("mtp", 4)  # type: ignore[index]
    assert best_method([*cells, cell("mtp", 8, 99)])[:2] == ("mtp", 4)  # type: ignore[index]
    assert best_of_each(cells) == {("a", "ngram", 4, 1), ("b", "mtp", 4, 1)}
    assert best_method([cell("off", 0, 10), cell("ngram", 4, 9)]) == ("off", 0, pytest.approx(1.0))


async def opened(app: LocalspecApp, pilot: Pilot[None]) -> BenchScreen:
    await pilot.press("f3")
    await until(lambda: isinstance(app.screen, BenchScreen))
    await pilot.pause()
    assert isinstance(app.screen, BenchScreen)
    return app.screen


def said(screen: BenchScreen) -> str:
    return str(screen.query_one("#said", Label).render())


def column(screen: BenchScreen, number: int) -> list[str]:
    table: DataTable[Any] = screen.query_one(DataTable)
    return [str(table.get_cell_at((row, number))) for row in range(table.row_count)]


async def test_measure_this_chat_apply_and_export(tmp_path: Path) -> None:
    async with started(scripted("one two three " * 9), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        screen = await opened(app, pilot)
        assert screen.query_one("#prompts", Select).value == THIS_CHAT
        screen.query_one("#depths", Input).value = "2, 4"
        await pilot.press("f5")
        await until(lambda: "Done." in said(screen))
        assert column(screen, 1) == ["off", "ngram", "ngram"]
        assert all(column(screen, 4)) and column(screen, 0).count("★") == 1
        assert "Best: " in said(screen)
        table: DataTable[Any] = screen.query_one(DataTable)
        table.move_cursor(row=2)
        await pilot.press("f6")
        await until(lambda: said(screen) == "From now on: ngram, depth 4.")
        assert (await app.chat.conversation.engine.explain()).by_hand
        assert app.chat.conversation.engine.metrics().depth == 4
        await pilot.press("f7", "f8", "f8")
        await until((tmp_path / "bench-2.json").exists)
        assert "ngram" in (tmp_path / "bench.txt").read_text()
        assert len(json.loads((tmp_path / "bench.json").read_text())["cells"]) == 3
        # The last table is there again when the screen is opened again.
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)
        again = await opened(app, pilot)
        assert all(column(again, 4)) and again.query_one("#depths", Input).value == "2, 4"
        assert len(app.chat.conversation.messages) == 2


async def test_esc_stops_the_measuring_and_keeps_what_is_done(tmp_path: Path) -> None:
    async with started(scripted("word " * 30, tok_per_s=40), tmp_path) as (app, pilot):
        screen = await opened(app, pilot)
        assert screen.query_one("#prompts", Select).value == BUILT_IN
        screen.query_one("#prompts", Select).value = "chat"
        screen.query_one("#prompts", Select).action_show_overlay()
        await pilot.press("escape")
        assert app.screen is screen and not screen.query_one("#prompts", Select).expanded
        screen.query_one("#tokens", Input).value = "8"
        screen.query_one("#active", Input).value = "4"
        await pilot.click("#start")
        await until(lambda: column(screen, 4)[0] != "")
        assert "▸" in column(screen, 0)
        await pilot.press("f5")
        assert "already" in said(screen)
        await pilot.press("escape")
        await until(lambda: "Stopped." in said(screen))
        await until(lambda: app.chat.conversation.engine.metrics().active_requests == 0)
        assert isinstance(app.screen, BenchScreen) and column(screen, 4)[0] != "" and column(screen, 4)[-1] == ""
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)


async def test_nothing_is_measured_while_an_answer_is_written_or_with_wrong_fields(tmp_path: Path) -> None:
    async with started(scripted("word " * 300, tok_per_s=100), tmp_path) as (app, pilot):
        app.chat.prompt.put("q")
        await pilot.press("enter")
        await until(lambda: app.chat.busy)
        screen = await opened(app, pilot)
        await pilot.press("f5")
        await until(lambda: "An answer is being written" in said(screen))
        await pilot.press("f6", "f7")
        assert "Nothing is measured" in said(screen)
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)
        await pilot.press("escape")
        await until(lambda: not app.chat.busy)
        screen = await opened(app, pilot)
        screen.query_one("#drafters", Input).value = "mtp"
        await pilot.press("f5")
        await until(lambda: "no drafter 'mtp'" in said(screen))


@pytest.mark.parametrize("size", [(80, 24), (60, 18)])
async def test_the_screen_fits_small_terminals(tmp_path: Path, size: tuple[int, int]) -> None:
    async with started(scripted("one two three"), tmp_path, size) as (app, pilot):
        screen = await opened(app, pilot)
        for name in ("#start", "#apply", "#txt", "#json", "#leave", "#prompts", "#drafters", "#tokens"):
            region = screen.query_one(name).region
            assert region.width > 0 and region.right <= size[0] and region.bottom <= size[1]
        assert screen.query_one(DataTable).size.height >= 5
        await pilot.click("#leave")
        await until(lambda: app.screen is app.chat)

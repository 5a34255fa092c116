"""The models screen: rows, budgets, fetching with progress and its end, loading, removing, and small terminals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Label, OptionList, Static

from localspec.api.library import Budget, LibraryModel, PullStep
from localspec.api.scripted_library import GIB, ScriptedLibrary
from localspec.tui.app import LocalspecApp
from localspec.tui.model_text import budget_lines, details_lines, fit_words, matching, progress_line, row_text
from localspec.tui.screens.ask import AskScreen
from localspec.tui.screens.models import ModelsScreen
from tests.tui.fakes import scripted, started, until

MODELS = (
    LibraryModel(
        "big-27b", "Big model", size_bytes=17 * GIB, weight_format="nvfp4", licence="apache-2.0", drafters=("mtp",)
    ),
    LibraryModel("huge-70b", "Huge model", size_bytes=40 * GIB, advice="Needs two cards."),
    LibraryModel("scripted", "Scripted engine", installed=True, size_bytes=1 * GIB, demo=True),
    LibraryModel("small", "Small model", installed=True, size_bytes=2 * GIB, drafters=("mtp", "eagle3")),
)


def test_rows_say_what_is_here_and_what_fits() -> None:
    big = row_text(MODELS[0], Budget("card", 24 * GIB, 65536, estimated=True), None, False).plain
    assert big.startswith("  big-27b") and "17 GiB" in big and "fits about 66k" in big
    assert "too large here" in row_text(MODELS[1], Budget("card", GIB, 0), None, False).plain
    assert row_text(MODELS[2], None, None, True).plain.startswith("● scripted")
    assert row_text(MODELS[3], None, None, False).plain.startswith("✓ small")
    assert "fetching 50%" in row_text(MODELS[0], None, PullStep("download", "", 1, 2), False).plain
    assert "fetching locate" in row_text(MODELS[0], None, PullStep("locate", ""), False).plain
    assert fit_words(None) == ""
    assert [model.id for model in matching(MODELS, "model Hu")] == ["huge-70b"]


def test_a_budget_is_a_bar_whose_parts_need_no_colour() -> None:
    budget = Budget("card", 24 * GIB, 65536, 65536, 12 * GIB, 2 * GIB, 2 * GIB, 4 * GIB, "fp8")
    words, line, legend = budget_lines(budget, 48)
    assert line.plain == "█" * 24 + "▓" * 4 + "▒" * 4 + "░" * 8 + "·" * 8
    assert words.plain == "66k tokens of context fit, all of it: 24 GiB free on card"
    assert legend.plain.split("  ")[0] == "█ weights 12 GiB"
    full = Budget("card", 8 * GIB, 0, 65536, 12 * GIB, 2 * GIB)
    words, line, _ = budget_lines(full, 28)
    assert line.plain == "█" * 24 + "▓" * 4 and "does not fit" in words.plain
    assert budget_lines(Budget("card", GIB, 0, estimated=True), 40)[0].plain.startswith("too large")


@pytest.mark.parametrize("width", [12, 52, 120])
def test_details_fit_and_texts_of_others_cannot_control_the_terminal(width: int) -> None:
    evil = LibraryModel("a\x1b[2J", "t\x1b]0;x\x07\n", licence="l\x1b", advice="a" * 300, weight_format="\x07")
    for budget in (None, Budget("c\x1b", GIB, 0), Budget("c\x1b", GIB, 9, 9, 5, 5, 5, 5)):
        for line in [*details_lines(evil, budget, None, width), row_text(evil, budget, None, False)]:
            assert "\x1b" not in line.plain and "\n" not in line.plain
        assert all(line.cell_len <= width for line in details_lines(evil, budget, None, width))


def test_progress_has_share_speed_and_time_left() -> None:
    step = PullStep("download", "m", GIB, 4 * GIB, 100 * (1 << 20), 31.0)
    assert progress_line(step, 80).plain.endswith(" 25% of 4.0 GiB · 100 MiB/s · 31 s left")
    assert progress_line(PullStep("locate", "asking the hub"), 80).plain == "asking the hub"


@asynccontextmanager
async def library_app(
    folder: Path, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[LocalspecApp, Pilot[None], ScriptedLibrary]]:
    library = ScriptedLibrary(MODELS, **options)
    async with started(scripted("one", models=("small",)), folder, size, library=library) as (app, pilot):
        await until(lambda: app.chat.conversation.engine.model() is not None)
        await pilot.press("ctrl+l")
        await until(lambda: isinstance(app.screen, ModelsScreen) and rows(app).option_count == len(MODELS))
        await until(lambda: "fits 66k" in row(app, "small"))
        yield app, pilot, library


def rows(app: LocalspecApp) -> OptionList:
    return app.screen.query_one(OptionList)


def row(app: LocalspecApp, name: str) -> str:
    return str(rows(app).get_option(name).prompt)


def said(app: LocalspecApp) -> str:
    return str(app.screen.query_one("#said", Label).render())


def details(app: LocalspecApp) -> str:
    return str(app.screen.query_one("#details", Static).render())


def mark(app: LocalspecApp, name: str) -> None:
    rows(app).highlighted = rows(app).get_option_index(name)


async def test_what_fits_is_shown_and_an_installed_model_is_loaded(tmp_path: Path) -> None:
    async with library_app(tmp_path) as (app, pilot, _):
        assert "● scripted" in row(app, "scripted") and "(demo)" in row(app, "scripted")
        assert "too large here" in row(app, "huge-70b")
        mark(app, "small")
        await until(lambda: "█" in details(app) and "free on scripted card" in details(app))
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat and app.chat.conversation.engine.metrics().model_id == "small")


async def test_filter_by_typing_and_address_of_a_repository(tmp_path: Path) -> None:
    async with library_app(tmp_path) as (app, pilot, _):
        await pilot.press(*"big")
        await until(lambda: rows(app).option_count == 1)
        assert "nvfp4 · apache-2.0 · drafters mtp" in details(app)
        app.screen.query_one("#typed", Input).value = "owner/name"
        await until(lambda: rows(app).option_count == 0 and "hub repository" in details(app))
        await pilot.press("f5")
        await until(lambda: any("no model 'owner/name'" in notice.message for notice in app._notifications))


async def test_fetch_with_progress_then_it_is_installed(tmp_path: Path) -> None:
    async with library_app(tmp_path, n_steps=10, step_s=0.1) as (app, pilot, _):
        mark(app, "big-27b")
        await pilot.press("enter")
        await until(lambda: "0%" in row(app, "big-27b") and "of 17 GiB" in details(app) and "/s" in details(app))
        await until(lambda: "✓ big-27b" in row(app, "big-27b") and "big-27b is ready" in said(app))
        assert any("big-27b is ready" in notice.message for notice in app._notifications)
        await until(lambda: "big-27b" in [name for name, _ in app.chat.options.models])
        mark(app, "big-27b")
        await pilot.press("f5")
        assert "installed already" in said(app)


async def test_a_drafter_is_fetched_by_its_name_and_taken_in_by_loading_again(tmp_path: Path) -> None:
    async with library_app(tmp_path, step_s=0.01) as (app, pilot, _):
        mark(app, "small")
        await until(lambda: "drafters mtp, eagle3 · type small.mtp to fetch one" in details(app))
        app.screen.query_one("#typed", Input).value = "small.nosuch"
        await until(lambda: "No model of that name" in details(app))
        app.screen.query_one("#typed", Input).value = "small.eagle3"
        await until(lambda: "(a drafter)" in details(app))
        await pilot.press("enter")
        await until(lambda: any("/model small loads it" in notice.message for notice in app._notifications))
        app.screen.query_one("#typed", Input).value = "small"
        await until(lambda: "drafters eagle3 ✓, mtp" in details(app))
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat and app.chat.conversation.engine.metrics().model_id == "small")
        await pilot.press("ctrl+l")
        await until(lambda: isinstance(app.screen, ModelsScreen) and rows(app).option_count == len(MODELS))
        mark(app, "small")
        # The scripted engine never has the drafter, so it is loaded anew and not refused as loaded already.
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat)


async def test_a_fetch_goes_on_behind_the_screen_and_can_be_stopped(tmp_path: Path) -> None:
    async with library_app(tmp_path, n_steps=400, step_s=0.05) as (app, pilot, _):
        mark(app, "big-27b")
        await pilot.press("f5", "escape")
        await until(lambda: app.screen is app.chat)
        await pilot.press("ctrl+l")
        await until(lambda: isinstance(app.screen, ModelsScreen) and rows(app).option_count == len(MODELS))
        await until(lambda: "fetching" in row(app, "big-27b"))
        await pilot.press("f6")
        await until(lambda: "fetching" not in row(app, "big-27b"))
        assert any("goes on from there" in notice.message for notice in app._notifications)
        await pilot.press("f6")
        assert "Nothing is being fetched" in said(app)


async def test_a_fetch_that_breaks_off_is_told(tmp_path: Path) -> None:
    async with library_app(tmp_path, step_s=0.01) as (app, pilot, library):
        library.failing.add("big-27b")
        mark(app, "big-27b")
        await pilot.click("#pull")
        await until(lambda: any("source went away" in notice.message for notice in app._notifications))
        await until(lambda: "source went away" in said(app))
        await until(lambda: "fetching" not in row(app, "big-27b"))


async def test_removal_asks_first_and_spares_the_loaded_model(tmp_path: Path) -> None:
    async with library_app(tmp_path) as (app, pilot, _):
        mark(app, "scripted")
        await pilot.press("f8")
        await until(lambda: "is loaded" in said(app))
        mark(app, "huge-70b")
        await pilot.press("f8")
        await until(lambda: "Only an installed model" in said(app))
        mark(app, "small")
        for word, is_removed in (("no", False), ("yes", True)):
            await pilot.press("f8")
            await until(lambda: isinstance(app.screen, AskScreen))
            await pilot.press(*word, "enter")
            await until(lambda: isinstance(app.screen, ModelsScreen))
            if is_removed:
                await until(lambda: "small is removed, 2.0 GiB" in said(app))
            else:
                await pilot.pause()
                assert "✓ small" in row(app, "small")
        await until(lambda: "✓" not in row(app, "small"))


@pytest.mark.parametrize("size", [(80, 24), (60, 18)])
async def test_the_screen_fits_small_terminals(tmp_path: Path, size: tuple[int, int]) -> None:
    async with library_app(tmp_path, size) as (app, pilot, _):
        for name in ("#load", "#pull", "#stop", "#remove", "#close", "#typed"):
            region = app.screen.query_one(name).region
            assert region.width > 0 and region.right <= size[0] and region.bottom <= size[1], name
        assert rows(app).size.height >= 4
        await pilot.click("#close")
        await until(lambda: app.screen is app.chat)


async def test_without_a_library_the_installed_models_are_listed(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, models=(("scripted", "x"),)) as (app, pilot):
        await pilot.press("ctrl+l")
        await until(lambda: app.screen is not app.chat and app.screen.query_one(OptionList).option_count == 1)
        assert not isinstance(app.screen, ModelsScreen)

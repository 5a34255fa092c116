"""The tuner screen: every choice with its candidates, age, words where nothing is known, and its two keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from textual.widgets import Static

from localspec.api.engine import DrafterChoice
from localspec.api.scripted import Script, ScriptedEngine
from localspec.api.tuning import Candidate, TunerChoice, TunerReport
from localspec.api.types import EngineError
from localspec.tui.app import LocalspecApp
from localspec.tui.screens.bench import BenchScreen
from localspec.tui.screens.tuner import TunerScreen
from localspec.tui.tuner_text import freshness, report_lines
from tests.tui.fakes import scripted, started, until

CANDIDATES = (
    Candidate("ngram+mtp", 6, 81.5, 3.1, 38.0, 410, 2),
    Candidate("ngram", 8, 50.25, 1.9, 37.8, 0, 77),
    Candidate("off", 0, 40.0, 1.0, 25.0, 120, None),
)
CHOICE = TunerChoice(
    "thinking", 2, 4096, "ngram+mtp", 6, "measured ×2.04 of plain", 511, "ngram in 40 steps", CANDIDATES
)
REPORT = TunerReport("ngram+mtp", 6, "measured ×2.04 of plain", False, (CHOICE,))


def lines_of(report: TunerReport, width: int = 100) -> str:
    return "\n".join(line.plain for line in report_lines(report, width))


def test_a_choice_is_told_with_reason_rates_and_age() -> None:
    text = lines_of(REPORT)
    for part in (
        "Now: ngram+mtp 6  measured ×2.04 of plain",
        "thinking, 2 at once, context from 4.1k",
        "511 decisions in this run · tries ngram in 40 steps",
        "● ngram+mtp 6             81.5 tok/s  3.10 tokens in 38.0 ms",
        "410 steps, 2 ago",
        "by its neighbours, 77 ago",
        "120 steps, earlier run",
    ):
        assert part in text, part
    assert text.count("●") == 1
    long = Candidate("ngram_disk+ngram+mtp", 12, 9.0)
    assert "ngram_disk+ngram 12" in lines_of(TunerReport(choices=(replace(CHOICE, candidates=(long,)),)))


def test_words_where_nothing_is_known_or_chosen_by_hand() -> None:
    assert "Nothing is measured yet" in lines_of(TunerReport())
    assert "by hand" in lines_of(TunerReport("off", 0, "chosen by hand", True))
    assert freshness(Candidate("off", 0, 1.0)) == "by its neighbours, earlier run"


@pytest.mark.parametrize("width", [20, 54, 74, 200])
def test_lines_fit_and_foreign_names_cannot_control_the_terminal(width: int) -> None:
    evil = TunerChoice(
        "\x1b[2J", 1, 0, "x\x1b]0;t\x07", 3, "because\n\x1b[0m", 1, "y\x07", (Candidate("x\x1b[m" * 9, 3, 1.0),)
    )
    for line in report_lines(TunerReport("x\x1b", 2, "r\x1b", False, (evil, CHOICE)), width):
        assert line.cell_len <= width and "\x1b" not in line.plain and "\n" not in line.plain


class Silent(ScriptedEngine):
    async def explain(self) -> TunerReport:
        raise EngineError("unsupported", "This server does not tell.")


async def opened(app: LocalspecApp) -> str:
    await until(lambda: isinstance(app.screen, TunerScreen) and bool(shown(app)))
    return shown(app)


def shown(app: LocalspecApp) -> str:
    return str(app.screen.query_one("#report", Static).render())


async def test_the_screen_follows_the_engine_and_gives_the_choice_back_to_the_tuner(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, (80, 24)) as (app, pilot):
        await app.chat.conversation.engine.choose_drafter(DrafterChoice("off"))
        await pilot.press("f4")
        assert "Chosen by hand" in await opened(app)
        await pilot.press("f5")
        await until(lambda: "Chosen by hand" not in shown(app))
        assert "answer, 1 at once" in shown(app)
        assert not (await app.chat.conversation.engine.explain()).by_hand
        await pilot.click("#bench")
        await until(lambda: isinstance(app.screen, BenchScreen))
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)
        app.chat.prompt.put("/tuner")
        await pilot.press("enter")
        await opened(app)
        await pilot.click("#close")
        await until(lambda: app.screen is app.chat)


async def test_a_server_that_does_not_tell_is_said_to(tmp_path: Path) -> None:
    async with started(Silent(Script()), tmp_path, (60, 18)) as (app, pilot):
        await pilot.press("f4")
        assert await opened(app) == "This server does not tell."

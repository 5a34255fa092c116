"""The settings screen: presets, drafter with depth, saved system prompts, theme, and what a restart brings back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import Input, Select, TextArea

from localspec.api.engine import DrafterChoice
from localspec.api.library import LibraryModel
from localspec.api.scripted import Script, ScriptedEngine
from localspec.api.scripted_library import ScriptedLibrary
from localspec.api.types import MetricsSnapshot
from localspec.tui.app import LocalspecApp
from localspec.tui.drafter_choice import read_choice
from localspec.tui.options import ChatSettings
from localspec.tui.saved import prompts_text, read_prompts, read_settings, settings_text, with_prompt
from localspec.tui.screens.parameters import ParametersScreen
from tests.tui.fakes import NARROW, scripted, started, until

PRESETS = {"default": {"temperature": 1.0, "top_p": 0.95}, "coding": {"temperature": 0.6, "top_k": 20}}


def library() -> ScriptedLibrary:
    return ScriptedLibrary((LibraryModel("scripted", "Scripted", installed=True, presets=PRESETS),))


async def opened(app: LocalspecApp, pilot: Pilot[None]) -> ParametersScreen:
    await pilot.press("f2")
    await until(lambda: isinstance(app.screen, ParametersScreen) and bool(app.screen.query("#theme")))
    await pilot.pause()
    assert isinstance(app.screen, ParametersScreen)
    return app.screen


async def applied(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await pilot.press("ctrl+s")
    await until(lambda: app.screen is app.chat)
    await pilot.pause(0.05)


async def test_a_preset_fills_the_fields_and_leaves_the_others(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, NARROW, library=library()) as (app, pilot):
        screen = await opened(app, pilot)
        screen.query_one("#set-top_p", Input).value = "0.5"
        screen.query_one("#set-max_tokens", Input).value = "99"
        screen.query_one("#preset", Select).value = "coding"
        await until(lambda: screen.query_one("#set-temperature", Input).value == "0.6")
        assert screen.query_one("#set-top_p", Input).value == ""
        await applied(app, pilot)
        talk = app.chat.conversation
        assert talk.settings.sampling == {"temperature": 0.6, "top_k": 20} and talk.settings.max_tokens == 99
        screen = await opened(app, pilot)
        screen.query_one("#preset", Select).value = "the model's own"
        await until(lambda: screen.query_one("#set-temperature", Input).value == "")
        await applied(app, pilot)
        assert talk.settings.sampling == {} and talk.settings.max_tokens == 99


async def test_drafter_and_depth_are_shown_chosen_and_given_again_after_a_restart(tmp_path: Path) -> None:
    engine = scripted("one")
    async with started(engine, tmp_path) as (app, pilot):
        screen = await opened(app, pilot)
        assert screen.query_one("#drafter", Select).value == "auto"
        screen.query_one("#drafter", Select).value = "ngram"
        screen.query_one("#set-depth", Input).value = "3"
        await applied(app, pilot)
        await until(lambda: engine.metrics().depth == 3)
        assert app.chat.conversation.settings.depth is None, "the engine keeps it"
        screen = await opened(app, pilot)
        assert screen.query_one("#drafter", Select).value == "ngram"
        assert screen.query_one("#set-depth", Input).value == "3"
        await pilot.press("escape")
        await until(lambda: app.screen is app.chat)
    fresh = scripted("one")
    async with started(fresh, tmp_path) as (app, pilot):
        await until(lambda: fresh.metrics().depth == 3)
        assert (await fresh.explain()).by_hand
    told = scripted("one")
    await told.choose_drafter(DrafterChoice("off"))
    async with started(told, tmp_path) as (app, pilot):
        await pilot.pause(0.2)
        assert told.metrics().drafter == "off", "an engine that was told already is left alone"
    asked = scripted("one")
    async with started(asked, tmp_path, settings=ChatSettings(drafter="off")) as (app, pilot):
        await pilot.pause(0.2)
        assert not (await asked.explain()).by_hand, "the command line wins"


class Restarting(ScriptedEngine):
    """Forgets its choice and is away for a while."""

    is_away = False

    def metrics(self) -> MetricsSnapshot:
        return MetricsSnapshot(stage="starting") if self.is_away else super().metrics()

    async def restart(self) -> None:
        self.is_away = True
        await self.choose_drafter(DrafterChoice("auto"))


async def test_an_engine_that_was_started_anew_gets_the_choice_again(tmp_path: Path) -> None:
    engine = Restarting(Script())
    async with started(engine, tmp_path) as (app, pilot):
        app.chat.sample()
        app.chat.prompt.put("/draft ngram 2")
        await pilot.press("enter")
        await until(lambda: engine.metrics().depth == 2)
        await engine.restart()
        app.chat.sample()
        engine.is_away = False
        assert not (await engine.explain()).by_hand
        app.chat.sample()
        await until(lambda: engine.metrics().depth == 2)


async def test_system_prompts_are_saved_by_name_used_and_removed(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path) as (app, pilot):
        screen = await opened(app, pilot)
        screen.query_one("#system", TextArea).load_text("Answer in verse.")
        screen.query_one("#save-as", Input).value = "poet"
        await applied(app, pilot)
        assert app.chat.conversation.system_prompt == "Answer in verse."
    async with started(scripted("one"), tmp_path) as (app, pilot):
        assert app.chat.conversation.system_prompt == ""
        app.chat.prompt.put("/system @poet")
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.system_prompt == "Answer in verse.")
        app.chat.prompt.put("/system @cook")
        await pilot.press("enter")
        await until(lambda: any("there are @poet" in notice.message for notice in app._notifications))
        screen = await opened(app, pilot)
        screen.query_one("#system", TextArea).load_text("")
        screen.query_one("#saved", Select).value = "poet"
        await until(lambda: screen.query_one("#system", TextArea).text == "Answer in verse.")
        assert screen.query_one("#save-as", Input).value == "poet"
        screen.query_one("#system", TextArea).load_text("")
        await applied(app, pilot)
        kept = await app.chat.conversation.durable.run(lambda s: s.note("system_prompts"))
        assert json.loads(kept) == {}


async def test_theme_is_previewed_taken_back_and_kept(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path) as (app, pilot):
        before = app.theme
        screen = await opened(app, pilot)
        screen.query_one("#theme", Select).value = "nord"
        await until(lambda: app.theme == "nord")
        await pilot.click("#leave")
        await until(lambda: app.screen is app.chat and app.theme == before)
        screen = await opened(app, pilot)
        screen.query_one("#theme", Select).value = "nord"
        await pilot.click("#apply")
        await until(lambda: app.screen is app.chat)
    async with started(scripted("one"), tmp_path) as (app, pilot):
        await until(lambda: app.theme == "nord")


async def test_settings_of_new_chats_survive_a_restart_but_not_those_of_private_ones(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path) as (app, pilot):
        app.chat.prompt.put("/set temperature 0.5")
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.settings.sampling == {"temperature": 0.5})
    async with started(scripted("one"), tmp_path, private=True) as (app, pilot):
        await until(lambda: app.chat.conversation.settings.sampling == {"temperature": 0.5})
        app.chat.prompt.put("/set temperature 2")
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.settings.sampling == {"temperature": 2.0})
    async with started(scripted("one"), tmp_path) as (app, pilot):
        await until(lambda: app.chat.conversation.settings.sampling == {"temperature": 0.5})


@pytest.mark.parametrize("size", [(80, 24), (60, 18)])
async def test_the_screen_fits_small_terminals(tmp_path: Path, size: tuple[int, int]) -> None:
    async with started(scripted("one"), tmp_path, size) as (app, pilot):
        screen = await opened(app, pilot)
        for name in ("#apply", "#leave", "#saved", "#thinking", "#drafter"):
            region = screen.query_one(name).region
            assert region.width > 0 and region.right <= size[0] and region.bottom <= size[1], name


def test_notes_of_another_form_are_left_out() -> None:
    settings = ChatSettings({"temperature": 0.5}, 100, "ngram", 4, True, 50)
    assert read_settings(settings_text(settings)) == ChatSettings({"temperature": 0.5}, 100, None, None, True, 50)
    for note in ("", "[]", "{", "[" * 5000, '{"sampling": 3, "depth": 5}'):
        assert read_settings(note) == ChatSettings()
        assert read_prompts(note) == {}
        assert read_choice(note) is None
    assert read_prompts('{"a": "x", "b": 3, "": "y", "c": ""}') == {"a": "x"}
    assert read_prompts(prompts_text({"é": "ß"})) == {"é": "ß"}
    assert with_prompt({"b": "2"}, " a\nb ", "1") == {"a b": "1", "b": "2"}
    assert with_prompt({"b": "2"}, "b", "") == {}
    assert read_choice('{"drafter": "ngram", "depth": null}') == DrafterChoice("ngram", None)
    for note in ('{"drafter": "auto", "depth": null}', '{"drafter": 3, "depth": 1}', '{"drafter": "x", "depth": true}'):
        assert read_choice(note) is None

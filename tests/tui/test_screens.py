"""Every screen is reached by key, by slash command and from the palette, and needs no colour."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.screen import Screen
from textual.widgets import Input

from localspec.api.library import LibraryModel
from localspec.api.scripted_library import ScriptedLibrary
from localspec.tui.app import LocalspecApp
from localspec.tui.plain import run_plain
from localspec.tui.screens.bench import BenchScreen
from localspec.tui.screens.chat_keys import KEYS
from localspec.tui.screens.help import KEYS as HELP_KEYS
from localspec.tui.screens.help import HelpScreen
from localspec.tui.screens.models import ModelsScreen
from localspec.tui.screens.parameters import ParametersScreen
from localspec.tui.screens.pick import PickScreen
from localspec.tui.screens.tuner import TunerScreen
from tests.tui.fakes import ask, scripted, started, until

SCREENS: tuple[tuple[str, str, str, type[Screen[object]]], ...] = (
    ("f1", "/help", "Help", HelpScreen),
    ("f2", "/settings", "Settings", ParametersScreen),
    ("f3", "/bench", "Bench", BenchScreen),
    ("f4", "/tuner", "Tuner", TunerScreen),
    ("ctrl+l", "/models", "Models", ModelsScreen),
)


def library() -> ScriptedLibrary:
    return ScriptedLibrary((LibraryModel("scripted", "Scripted", installed=True),))


async def test_keys_commands_and_palette_reach_every_screen(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, library=library()) as (app, pilot):
        offered = {command.title: command.callback for command in app.get_system_commands(app.screen)}
        for number, (key, command, title, screen) in enumerate(SCREENS):
            # Every way to every other screen: opening one costs a second on a slow machine.
            if number % 2:
                await pilot.press(key)
            else:
                offered[title]()
            await until(lambda screen=screen: isinstance(app.screen, screen))
            await pilot.press("escape")
            await until(lambda: app.screen is app.chat)
            app.chat.prompt.put(command)
            await pilot.press("enter")
            await until(lambda screen=screen: isinstance(app.screen, screen))
            await pilot.press("escape")
            await until(lambda: app.screen is app.chat)
            assert title in offered and f"{command}" in offered


async def test_a_list_says_what_the_store_cannot_read(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path) as (app, pilot):
        await pilot.press("ctrl+f")
        await until(lambda: isinstance(app.screen, PickScreen))
        app.screen.query_one(Input).post_message(events.Paste("a\x00b"))
        await until(lambda: "Nothing found." in drawn(app))
        await app.chat.conversation.durable.run(
            lambda s: s._connection.execute("ALTER TABLE chats RENAME TO c").close()
        )
        app.screen.query_one(Input).value = "word"
        await until(lambda: "could not be read" in drawn(app))
        await pilot.press("escape")
        await app.chat.conversation.durable.run(
            lambda s: s._connection.execute("ALTER TABLE notes RENAME TO n").close()
        )
        app.chat.show_screen("settings")
        await until(lambda: any("no such table: notes" in notice.message for notice in app._notifications))
        assert app.is_running


def test_every_key_of_the_chat_is_in_the_help() -> None:
    told = " ".join(f"{keys} {words}" for keys, words in HELP_KEYS).lower().replace("esc ", "escape ")
    assert [binding for binding in KEYS if getattr(binding, "key", "") not in told] == []


async def test_no_colour_is_needed_or_sent(tmp_path: Path) -> None:
    async with started(scripted("one two three"), tmp_path, (80, 24), library=library(), no_color=True) as (app, pilot):
        await ask(app, pilot, "q")
        for key, _, _, screen in SCREENS[1:]:
            await pilot.press(key)
            await until(lambda screen=screen: isinstance(app.screen, screen))
            if screen is BenchScreen:
                await pilot.press("f5")
                await until(lambda: "★" in drawn(app))
            await pilot.pause(0.1)
            for strip in app.screen._compositor.render_strips():
                for segment in strip:
                    style = segment.style
                    for colour in (style.color, style.bgcolor) if style is not None else ():
                        assert colour is None or colour.is_default, (key, segment)
            await pilot.press("escape")
            await until(lambda: app.screen is app.chat)


def drawn(app: LocalspecApp) -> str:
    return "\n".join(strip.text for strip in app.screen._compositor.render_strips())


@pytest.mark.parametrize("command", ["/models", "/settings", "/bench", "/tuner"])
async def test_plain_chats_say_what_stands_in_for_a_screen(command: str, tmp_path: Path) -> None:
    from io import StringIO

    from localspec.chats import StoreWorker, private_store
    from localspec.tui.options import ChatSettings

    said, store = StringIO(), StoreWorker(private_store)
    try:
        streams = (StringIO(f"{command}\n"), StringIO(), said)
        assert await run_plain(scripted("x"), store, ChatSettings(), streams=streams) == 0
    finally:
        store.close()
    assert f"{command} is a screen, which --plain does not have" in said.getvalue()

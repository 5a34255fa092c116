"""Keys, clicks, pastes and resizes in random order: nothing breaks the app, and nothing that was said is lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from textual import events
from textual.pilot import OutOfBounds, Pilot

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import EngineError
from localspec.chats import open_store
from localspec.tui.app import LocalspecApp
from tests.tui.fakes import NARROW, TINY, WIDE, ask, scripted, started, until

KEYS = """
enter enter enter escape escape ctrl+n ctrl+r ctrl+d ctrl+b f1 f2 f3 f4 ctrl+f ctrl+l ctrl+g ctrl+t ctrl+y ctrl+c ctrl+o
alt+up alt+up alt+down ctrl+home ctrl+end pageup pagedown up up down left right tab shift+tab space c y b e r e r delete
backspace a / @ ctrl+p ctrl+s home end ctrl+j
"""
TYPED = """
hello|why?|/set temperature 0.5|/think on|/draft off|/branch 1|/copy code|/export md|/stats|/export json|/private
|/save x|/clear|/retry|/system Be brief|/import no.json|//slash|中文 👩\u200d🚀
"""
SAID = (
    "short",
    "<think>plan</think>**ok**\n\n```py\nx\n```",
    "word " * 300,
    "| a | b |\n|--|--|\n| 1 | 2 |\n\n- a\n  - b\n",
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
)
PASTES = ("one", "a\nb", "x\n" * 60, "y" * 9000)
SIZES = (WIDE, NARROW, TINY, (200, 50), (20, 6), (1, 1))


async def _act(app: LocalspecApp, pilot: Pilot[None], rng: random.Random) -> None:
    kind = rng.random()
    if kind < 0.65:
        await pilot.press(rng.choice(KEYS.split()))
    elif kind < 0.8:
        if app.screen is app.chat:
            app.chat.prompt.put(rng.choice(TYPED.split("|")).strip())
    elif kind < 0.9:
        try:
            await pilot.click(offset=(int(rng.random() * app.size.width), int(rng.random() * app.size.height)))
        except OutOfBounds:
            return
    elif kind < 0.95:
        await pilot.resize_terminal(*rng.choice(SIZES))
    elif app.focused is not None:
        app.focused.post_message(events.Paste(rng.choice(PASTES)))


@pytest.mark.slow
async def test_nothing_breaks_the_app_and_no_message_is_lost(tmp_path: Path) -> None:
    rng = random.Random(5)
    replies = [Reply(text) for text in SAID] + [
        Reply(refuse=EngineError("overloaded", "Too many.")),
        Reply("x" * 80, fail_after_tokens=20),
    ]
    rng.shuffle(replies)
    engine = ScriptedEngine(Script(replies=tuple(replies), tok_per_s=300, thinks=True, seed=5))
    said: set[str] = set()
    async with started(engine, tmp_path, rng.choice(SIZES[:3])) as (app, pilot):
        await ask(app, pilot, "the first question")
        for _ in range(60):
            await _act(app, pilot, rng)
            assert app.is_running and app._exception is None
            if not app.chat.conversation.private:
                said |= {m.content for m in app.chat.conversation.messages if m.role == "user"}
    store = open_store(tmp_path / "chats.sqlite3")
    kept = {m.content for chat in store.chats() for m in store.all_messages(chat.id)}
    # Only the list of chats deletes, after the word yes, which nobody types here.
    assert "the first question" in said <= kept


async def test_lists_in_a_terminal_of_one_line(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await pilot.resize_terminal(1, 1)
        for key in ("ctrl+p", "ctrl+r"):
            await pilot.press(key)
            await until(lambda: app.screen is not app.chat)
            await pilot.press("pagedown", "down", "pageup", "up", "a", "escape", "escape")
            await until(lambda: app.screen is app.chat)
        assert app.is_running and app._exception is None

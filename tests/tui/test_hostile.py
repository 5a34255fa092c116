"""Texts of others in every widget: file names, servers' messages, imported chats. No code of theirs is obeyed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import TextArea

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import EngineError, MetricsSnapshot
from localspec.tui.app import LocalspecApp
from tests.tui.fakes import NARROW, WIDE, ask, scripted, started, until

EVIL = "ev\x1b]52;c;eA==\x07il\x9b2J\x1b[31m"


def drawn(app: LocalspecApp) -> str:
    """Everything on the screen, as it goes to the terminal."""
    strips: list[Strip] = app.screen._compositor.render_strips()
    return "".join(segment.text for strip in strips for segment in strip if not segment.control)


def safe(app: LocalspecApp) -> bool:
    return not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in drawn(app))


async def test_names_of_files(tmp_path: Path) -> None:
    (tmp_path / f"{EVIL}.txt").write_text("x\n")
    async with started(scripted("ok"), tmp_path, NARROW) as (app, pilot):
        await pilot.press(*"@ev")
        await until(lambda: bool(app.chat.query_one("#completions").display))
        await pilot.pause()
        assert "ev]52;c;eA==il2J[31m.txt" in drawn(app) and safe(app)
        await pilot.press("tab")
        await until(lambda: "[file " in app.chat.prompt.text)
        await pilot.pause()
        assert "[file ev" in drawn(app) and safe(app)
        await pilot.press("enter")
        await until(lambda: "ok" in app.chat.transcript.plain_text and not app.chat.busy)
        assert safe(app)


async def test_messages_and_figures_of_servers(tmp_path: Path) -> None:
    class EvilEngine(ScriptedEngine):
        def metrics(self) -> MetricsSnapshot:
            return MetricsSnapshot("loading", EVIL, EVIL, EVIL, drafter=EVIL, drafter_reason=EVIL, tiers={EVIL: 1.0})

    engine = EvilEngine(Script(replies=(Reply(refuse=EngineError("bad_request", EVIL)),)))
    async with started(engine, tmp_path, WIDE) as (app, pilot):
        await pilot.press("q", "enter")
        await until(lambda: len(app._notifications) > 0)
        app.chat.sample()
        await pilot.pause()
        assert drawn(app).count("]52;c;eA==") >= 3 and safe(app)


async def test_imported_chats(tmp_path: Path) -> None:
    message = {"id": 1, "role": "user", "content": EVIL, "parent_id": None}
    answer = {**message, "id": 2, "role": "assistant", "parent_id": 1, "reasoning": EVIL, "model_id": EVIL}
    answer["stats"] = {"status": EVIL, "reasoning_s": 1}
    document = {"format": "localspec-chat", "version": 1, "title": EVIL, "system_prompt": EVIL, "leaf_id": 2}
    (tmp_path / "evil.json").write_text(json.dumps({**document, "messages": [message, answer]}))

    async def check(pilot: Pilot[Any], *keys: str) -> None:
        await pilot.press(*keys)
        await pilot.pause(0.1)
        assert safe(pilot.app)  # type: ignore[arg-type]

    async with started(scripted("ok"), tmp_path, NARROW) as (app, pilot):
        app.chat.prompt.put("/import evil.json")
        await check(pilot, "enter")
        await until(lambda: len(app.chat.conversation.messages) == 2)
        await check(pilot, "ctrl+t")
        await check(pilot, "ctrl+d")
        await check(pilot, "ctrl+r")
        await check(pilot, "f2")
        await check(pilot, "escape", "delete")
        await check(pilot, "escape", "escape", "ctrl+f", "e", "v")
        await check(pilot, "escape", "f2")
        await until(lambda: bool(app.screen.query(TextArea)))
        await check(pilot, "escape")
        await until(lambda: app.screen is app.chat)
        await check(pilot, "alt+up", "e")
        await check(pilot, "escape", "up")


@pytest.mark.parametrize("text", [EVIL, f"{EVIL}\n" * 60], ids=["short", "long"])
async def test_pastes(text: str, tmp_path: Path) -> None:
    async with started(scripted("ok"), tmp_path, NARROW) as (app, pilot):
        app.chat.prompt.post_message(events.Paste(text))
        await pilot.pause()
        await pilot.press("ctrl+o")
        await pilot.pause()
        assert "eA==" in drawn(app) and safe(app)
        await ask(app, pilot, app.chat.prompt.text)
        await pilot.press("up")
        await pilot.pause()
        assert safe(app)

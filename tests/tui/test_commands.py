"""Every slash command, typed into the prompt, by what it changes."""

from __future__ import annotations

import json
from pathlib import Path

from localspec.tui.screens.help import HelpScreen
from tests.tui.fakes import ask, scripted, started, until


def said(app: object) -> str:
    return "\n".join(notice.message for notice in app._notifications)  # type: ignore[attr-defined]


async def command(app: object, pilot: object, line: str) -> None:
    app.chat.prompt.put(line)  # type: ignore[attr-defined]
    await pilot.press("enter")  # type: ignore[attr-defined]
    await pilot.pause()  # type: ignore[attr-defined]


async def test_export_and_import_keep_the_branches(tmp_path: Path) -> None:
    async with started(scripted("one", "two"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await command(app, pilot, "/retry")
        await until(lambda: app.chat.conversation.messages[-1].content == "two" and not app.chat.busy)
        await command(app, pilot, "/export json kept.json")
        await until((tmp_path / "kept.json").exists)
        assert len(json.loads((tmp_path / "kept.json").read_text())["messages"]) == 3
        await command(app, pilot, "/export md")
        await until((tmp_path / "q.md").exists)
        assert "## User\n\nq" in (tmp_path / "q.md").read_text()
        await command(app, pilot, "/export json kept.json")
        assert "exists: give another name" in said(app)
        before = app.chat.conversation.chat.id
        await command(app, pilot, "/import kept.json")
        await until(lambda: app.chat.conversation.chat is not None and app.chat.conversation.chat.id != before)
        talk = app.chat.conversation
        assert [m.content for m in talk.messages] == ["q", "two"] and talk.places[talk.messages[1].id] == (2, 2)


async def test_wrong_import_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{")
    async with started(scripted("one"), tmp_path) as (app, pilot):
        await command(app, pilot, "/import bad.json")
        await until(lambda: "not JSON" in said(app))
        await command(app, pilot, "/import none.json")
        await until(lambda: "none.json" in said(app))
        assert await app.chat.conversation.store.run(lambda s: s.chats()) == ()


async def test_settings_by_command(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path) as (app, pilot):
        for line in ("/set temperature 0.5", "/set max_tokens 7", "/think 100", "/system Be brief.", "/draft ngram 2"):
            await command(app, pilot, line)
        talk = app.chat.conversation
        assert talk.settings.sampling == {"temperature": 0.5} and talk.settings.max_tokens == 7
        assert (talk.settings.thinking, talk.settings.thinking_budget_tokens) == (True, 100)
        assert talk.system_prompt == "Be brief."
        assert (talk.engine.metrics().drafter, talk.engine.metrics().depth) == ("ngram", 2)
        for line in ("/set temperature default", "/think auto", "/system -", "/draft auto"):
            await command(app, pilot, line)
        assert talk.settings.sampling == {} and talk.settings.thinking is None and talk.system_prompt == ""
        for line, complaint in (
            ("/set heat 1", "no setting 'heat'"),
            ("/think maybe", "/think needs"),
            ("/draft mtp", "No drafter 'mtp'"),
            ("/draft ngram deep", "/draft needs"),
            ("/branch 9", "/branch needs"),
            ("/copy code", "no code block"),
            ("/retry", "no question"),
            ("/export txt", "/export needs"),
            ("/attach", "/attach needs"),
        ):
            await command(app, pilot, line)
            await until(lambda complaint=complaint: complaint in said(app))


async def test_branch_copy_stats_save_clear_help_quit(tmp_path: Path) -> None:
    async with started(scripted("one", "two"), tmp_path) as (app, pilot):
        await ask(app, pilot, "first")
        await ask(app, pilot, "second")
        await command(app, pilot, "/copy")
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text() == "two"
        await command(app, pilot, "/copy 4")
        await until(lambda: (tmp_path / "copied.txt").read_text() == "first")
        await command(app, pilot, "/stats")
        assert "Last answer: 3 tokens" in said(app) and "Requests 2" in said(app)
        await command(app, pilot, "/save My title")
        await until(lambda: app.chat.conversation.chat.title == "My title")
        await command(app, pilot, "/branch 2")
        await until(lambda: app.chat.prompt.text == "first")
        assert app.chat.conversation.messages == []
        await command(app, pilot, "/clear")
        await until(lambda: app.chat.conversation.chat is None)
        await command(app, pilot, "/help")
        assert isinstance(app.screen, HelpScreen)
        await pilot.press("escape")
        chats = await app.chat.conversation.store.run(lambda s: s.chats())
        assert [(c.title, c.message_count) for c in chats] == [("My title", 4)]
        await command(app, pilot, "/quit")
        await until(lambda: not app.is_running)


async def test_answer_is_named_after_its_model_also_when_asked_early(tmp_path: Path) -> None:
    async with started(scripted("one", load_s=1.5), tmp_path) as (app, pilot):
        await ask(app, pilot, "early")
        assert app.chat.conversation.messages[-1].model_id == "scripted"
        assert "\nscripted  3 tokens" in app.chat.transcript.plain_text

"""Commands that are typed while an answer is written: those that would break it off are refused, in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localspec.chats import StoreWorker, open_store
from localspec.tui.conversation import Conversation
from localspec.tui.options import ChatSettings
from tests.tui.fakes import ask, scripted, started, until
from tests.tui.test_commands import command, said

WORDS = "word " * 120


async def test_branch_is_refused_while_an_answer_is_written(tmp_path: Path) -> None:
    async with started(scripted("FIRST", WORDS, tok_per_s=100), tmp_path) as (app, pilot):
        talk = app.chat.conversation
        await ask(app, pilot, "one")
        app.chat.prompt.put("two")
        await pilot.press("enter")
        await until(lambda: talk.answer is not None and "word" in talk.answer.content)
        await command(app, pilot, "/branch")
        await until(lambda: "Esc stops it first" in said(app))
        assert app.chat.busy and len(talk.messages) == 4
        await pilot.press("escape")
        await until(lambda: not app.chat.busy)
        await command(app, pilot, "/branch")
        await until(lambda: app.chat.prompt.text == "two")
        assert [m.content for m in talk.messages] == ["one", "FIRST"]


@pytest.mark.parametrize("back", [1, 2])
async def test_an_answer_is_never_written_over_another_message(tmp_path: Path, back: int) -> None:
    store = StoreWorker(lambda: open_store(tmp_path / "c.sqlite3"))
    talk = Conversation(scripted("FIRST", "word " * 10, tok_per_s=200), store, ChatSettings())
    for text in ("one", "two"):
        await talk.say(text)
        await talk.start_answer()
        running = asyncio.create_task(talk.run_answer())
        if text == "one":
            await running
    await until(lambda: talk.answer is not None and "word" in talk.answer.content)
    talk.go_back([m for m in talk.messages if m.role == "user"][-back])
    await running
    assert [m.content for m in talk.messages] == ["one", "FIRST"][: 4 - 2 * back] and talk.answer is None
    await talk.restore()
    assert [m.content for m in talk.messages] == ["one", "FIRST", "two", "word " * 10]
    store.close()


async def test_a_private_chat_is_saved_only_between_answers(tmp_path: Path) -> None:
    async with started(scripted(WORDS, tok_per_s=100), tmp_path, private=True) as (app, pilot):
        talk = app.chat.conversation
        app.chat.prompt.put("one")
        await pilot.press("enter")
        await until(lambda: talk.answer is not None and "word" in talk.answer.content)
        await command(app, pilot, "/save Kept")
        await until(lambda: "Esc stops it first" in said(app))
        assert app.chat.busy and talk.private
        await pilot.press("escape")
        await until(lambda: not app.chat.busy)
        text = talk.messages[-1].content
        await command(app, pilot, "/save Kept")
        await until(lambda: not talk.private)
        assert [(m.content, m.state) for m in talk.messages] == [("one", "done"), (text, "cancelled")]


async def test_commands_that_leave_the_answer_alone_let_it_end(tmp_path: Path) -> None:
    async with started(scripted("word " * 60, tok_per_s=150), tmp_path) as (app, pilot):
        talk = app.chat.conversation
        app.chat.prompt.put("one")
        await pilot.press("enter")
        await until(lambda: talk.answer is not None and "word" in talk.answer.content)
        for line in ("/save Name", "/system Be brief.", "/set temperature 0.5", "/export json kept.json", "/stats"):
            await command(app, pilot, line)
        assert app.chat.busy
        await until(lambda: not app.chat.busy)
        assert talk.messages[-1].content == "word " * 60 and talk.messages[-1].state == "done"
        assert talk.chat is not None and talk.chat.title == "Name" and (tmp_path / "kept.json").exists()


@pytest.mark.parametrize("line", ["/clear", "/private", "/retry", "/import kept.json"])
async def test_commands_that_leave_the_chat_stop_the_answer_first(tmp_path: Path, line: str) -> None:
    async with started(scripted(WORDS, "second", tok_per_s=100), tmp_path) as (app, pilot):
        talk = app.chat.conversation
        app.chat.prompt.put("one")
        await pilot.press("enter")
        await until(lambda: talk.answer is not None and "word" in talk.answer.content)
        chat, message = talk.chat, talk.messages[-1]
        assert chat is not None
        if line.startswith("/import"):
            await command(app, pilot, "/export json kept.json")
            await until((tmp_path / "kept.json").exists)
        await command(app, pilot, line)
        await until(lambda: not talk.messages or talk.messages[-1].id != message.id)
        await until(lambda: not app.chat.busy)
        kept = await talk.durable.run(lambda s: s.message(message.id))
        assert kept.state == "cancelled" and kept.content.startswith("word")

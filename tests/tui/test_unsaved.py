"""Answers whose last save failed: their text is kept, saved when that works again, and never replaced by older text."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from localspec.chats import ChatError, ChatStore, StoreWorker, open_store
from localspec.tui.conversation import Conversation
from localspec.tui.options import ChatSettings
from tests.tui.fakes import ask, scripted, started, until

LONG = "A long paragraph. " * 3000


def fill(store: ChatStore) -> None:
    """No page more from now on, as on a full disk."""
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages + 1}").fetchall()


def free(store: ChatStore) -> None:
    store._connection.execute("PRAGMA max_page_count = 1000000").fetchall()


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_answer_that_could_not_be_saved_is_saved_with_the_next_message(
    tmp_path: Path, is_stopped: bool
) -> None:
    store = StoreWorker(lambda: open_store(tmp_path / "c.sqlite3"))
    talk = Conversation(scripted(LONG, tok_per_s=5000 if is_stopped else 0), store, ChatSettings())
    await talk.say("one")
    await talk.start_answer()
    await store.run(fill)
    running = asyncio.create_task(talk.run_answer())
    if is_stopped:
        await until(lambda: talk.answer is not None and len(talk.answer.content) > 5_000)
        running.cancel()
    with pytest.raises(ChatError, match="full"):
        await running
    shown = talk.messages[-1]
    assert shown.state == ("cancelled" if is_stopped else "done") and len(shown.content) > 5_000
    for refused in (talk.say("two"), talk.start_answer(), talk.open(shown.chat_id), talk.show_sibling(shown, 0)):
        with pytest.raises(ChatError, match="full"):
            await refused
    assert talk.messages[-1] == shown
    assert talk.newest(await store.run(lambda s: s.path(shown.chat_id)))[-1].content == shown.content
    await store.run(free)
    await talk.say("two")
    assert [(m.role, m.content, m.state) for m in talk.messages[1:]] == [
        ("assistant", shown.content, shown.state),
        ("user", "two", "done"),
    ]
    store.close()


async def test_leaving_is_held_back_once_and_then_saves_what_was_not(tmp_path: Path) -> None:
    async with started(scripted("short", LONG), tmp_path) as (app, pilot):
        await ask(app, pilot, "one")
        await app.chat.conversation.store.run(fill)
        await ask(app, pilot, "two")
        await pilot.press("ctrl+n")
        await pilot.press("ctrl+q")
        await until(lambda: any("Leaving again" in notice.message for notice in app._notifications))
        assert app.is_running and app.chat.conversation.messages[-1].content == LONG
        await app.chat.conversation.store.run(free)
        await pilot.press("ctrl+q")
        await until(lambda: not app.is_running)
    store = open_store(tmp_path / "chats.sqlite3")
    assert store.path(store.chats()[0].id)[-1].content == LONG
    store.close()

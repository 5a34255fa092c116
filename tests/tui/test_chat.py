"""The chat screen, driven by keys."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

import pytest
from textual.widgets import OptionList

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import EngineError, GenerateRequest
from localspec.chats import NewChat, Stored, open_store
from localspec.tui.screens.answering import UPDATES_PER_S
from localspec.tui.screens.ask import AskScreen
from localspec.tui.screens.browse import BEFORE_SEARCH
from localspec.tui.screens.pick import PickScreen
from tests.tui.fakes import NARROW, TINY, WIDE, DyingEngine, ask, listed, scripted, started, until

CODE = "Look:\n\n```python\nx = 1\n```\n\nand\n\n```sh\nls\n```\n"


def _notices(app: object) -> list[str]:
    return [notice.message for notice in app._notifications]  # type: ignore[attr-defined]


async def test_question_and_answer_are_shown_and_stored(tmp_path: Path) -> None:
    async with started(scripted("The **answer**."), tmp_path) as (app, pilot):
        await pilot.press(*"why", "ctrl+j", *"so", "enter")
        await until(lambda: "The answer." in app.chat.transcript.plain_text and not app.chat.busy)
        assert "why\nso" in app.chat.transcript.plain_text
        assert app.chat.prompt.text == ""
    store = open_store(tmp_path / "chats.sqlite3")
    (chat,) = store.chats()
    assert [(m.role, m.content, m.state) for m in store.path(chat.id)] == [
        ("user", "why\nso", "done"),
        ("assistant", "The **answer**.", "done"),
    ]
    answer = store.path(chat.id)[1]
    assert chat.title == "why so"
    assert len(answer.token_ids) == answer.stats["usage"]["completion_tokens"] > 0
    assert sum(count for count, _, _ in answer.spans) == len(answer.content)


async def test_usable_before_the_model_is_loaded(tmp_path: Path) -> None:
    async with started(scripted("Late answer.", load_s=2.5), tmp_path) as (app, pilot):
        assert "Loading scripted: waiting for the scripted load time" in app.chat.transcript.plain_text
        await pilot.press("h", "i", "enter")
        await until(lambda: "waits for the model: waiting for the scripted" in app.chat.transcript.plain_text)
        await until(lambda: "Late answer." in app.chat.transcript.plain_text)


async def test_model_that_cannot_load_is_said_and_the_question_kept(tmp_path: Path) -> None:
    async with started(scripted("x", load_error="The file is torn: pull it again."), tmp_path) as (app, pilot):
        app.chat.prompt.put("hello")
        await pilot.press("enter")
        await until(lambda: "The file is torn: pull it again." in app.chat.transcript.plain_text)
        assert not app.chat.busy
        assert app.chat.conversation.messages[0].content == "hello"


async def test_escape_stops_within_a_step_and_keeps_the_text(tmp_path: Path) -> None:
    engine = scripted("word " * 2000, "short", tok_per_s=100, max_run=2)
    async with started(engine, tmp_path) as (app, pilot):
        await pilot.press("a", "enter")
        await until(lambda: "word" in app.chat.transcript.plain_text)
        await pilot.press("escape")
        await until(lambda: not app.chat.busy, timeout_s=15.0)
        assert engine.metrics().active_requests == 0
        last = app.chat.conversation.messages[-1]
        assert last.state == "cancelled" and last.content.startswith("word")
        await until(lambda: "(stopped)" in app.chat.transcript.plain_text)
        await ask(app, pilot, "again")
    store = open_store(tmp_path / "chats.sqlite3")
    assert store.path(store.chats()[0].id)[1].content == last.content


@pytest.mark.parametrize(
    "error", [EngineError("internal", "The card fell off."), ConnectionResetError("reset"), None], ids=str
)
async def test_engine_that_dies_in_mid_answer(tmp_path: Path, error: BaseException | None) -> None:
    engine = DyingEngine(error)
    async with started(engine, tmp_path) as (app, pilot):
        await pilot.press("a", "enter")
        await until(lambda: engine.dead and not app.chat.busy)
        last = app.chat.conversation.messages[-1]
        assert last.state == "error" and last.content and "An answer".startswith(last.content[:9])
        app.chat.sample()
        await until(lambda: any("connection lost" in text for text in _notices(app)))
        await pilot.press("ctrl+g")
        await until(lambda: "waits for the model: connection lost" in app.chat.transcript.plain_text)
        engine.revive()
        await until(lambda: "A whole answer" in app.chat.transcript.plain_text)
        app.chat.sample()
        await until(lambda: "The engine is back." in _notices(app))
        assert app.chat.conversation.places[app.chat.conversation.messages[-1].id] == (2, 2)


async def test_regenerate_edit_and_branches(tmp_path: Path) -> None:
    async with started(scripted("first", "second", "third"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot.press("ctrl+g")
        await until(lambda: "second" in app.chat.transcript.plain_text and not app.chat.busy)
        assert "‹2/2›" in app.chat.transcript.plain_text
        await pilot.press("alt+up", "left")
        await until(lambda: "first" in app.chat.transcript.plain_text)
        assert "second" not in app.chat.transcript.plain_text
        await pilot.press("alt+up", "e")
        await until(lambda: app.chat.prompt.text == "q" and app.chat.prompt.has_focus)
        await pilot.press("2", "enter")
        await until(lambda: "third" in app.chat.transcript.plain_text and not app.chat.busy)
        talk = app.chat.conversation
        assert [m.content for m in talk.messages] == ["q2", "third"]
        assert talk.places[talk.messages[0].id] == (2, 2)


async def test_branch_keeps_what_was_before(tmp_path: Path) -> None:
    async with started(scripted("a1", "a2", "a3"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q1")
        await ask(app, pilot, "q2")
        await pilot.press("alt+up", "alt+up", "alt+up", "b")
        await until(lambda: len(app.chat.conversation.messages) == 2 and app.chat.prompt.has_focus)
        await ask(app, pilot, "other")
        assert [m.content for m in app.chat.conversation.messages] == ["q1", "a1", "other", "a3"]


async def test_thoughts_fold(tmp_path: Path) -> None:
    async with started(scripted("<think>Secret plan.</think>Done.", thinks=True), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        assert "▸ Thought" in app.chat.transcript.plain_text and "plan" not in app.chat.transcript.plain_text
        await pilot.press("ctrl+t")
        assert "▾ Thought" in app.chat.transcript.plain_text and "plan" in app.chat.transcript.plain_text


async def test_draft_view_names_who_wrote_and_counts_refusals(tmp_path: Path) -> None:
    async with started(scripted("Some *text* that is long enough to be drafted in runs."), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot.press("ctrl+d")
        text = app.chat.transcript.plain_text
        refused = sum(count for _, count in app.chat.conversation.messages[-1].rejections)
        assert "ngram" in text and "*text*" in text and refused > 0
        assert f"{refused} drafts refused" in text
        await pilot.press("ctrl+d")
        assert "drafts refused" not in app.chat.transcript.plain_text


async def test_copy_of_code_reaches_the_file(tmp_path: Path) -> None:
    async with started(scripted(CODE), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot.press("alt+up", "y")
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text() == "ls\n"
        assert app.clipboard == "ls\n"
        await pilot.press("c")
        await until(lambda: (tmp_path / "copied.txt").read_text() == CODE)
        assert (tmp_path / "copied.txt").stat().st_mode & 0o777 == 0o600


async def test_history_and_kept_draft(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await ask(app, pilot, "one")
        await ask(app, pilot, "two")
        await pilot.press("up", "up")
        assert app.chat.prompt.text == "one"
        await pilot.press("down", "down")
        assert app.chat.prompt.text == ""
        await pilot.press("ctrl+n", *"unsent")
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await until(lambda: app.chat.prompt.text == "unsent")


async def test_chats_list_opens_renames_and_deletes(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await ask(app, pilot, "apples")
        await pilot.press("ctrl+n")
        await ask(app, pilot, "pears")
        await pilot.press("ctrl+r")
        await listed(app, 2)
        app.screen.query_one("Input").value = "appl"
        await listed(app, 1)
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat and app.chat.conversation.messages[0].content == "apples")
        await pilot.press("ctrl+r")
        await listed(app, 2)
        await pilot.press("f2")
        await until(lambda: isinstance(app.screen, AskScreen))
        app.screen.query_one("Input").value = "Fruit"
        await pilot.press("enter")
        await listed(app, 2)
        titles = [c.title for c in await app.chat.conversation.store.run(lambda s: s.chats())]
        assert sorted(titles) == ["Fruit", "apples"]
        await pilot.press("delete")
        await until(lambda: isinstance(app.screen, AskScreen))
        await pilot.press("enter")
        await listed(app, 2)
        await pilot.press("delete")
        await until(lambda: isinstance(app.screen, AskScreen))
        app.screen.query_one("Input").value = "yes"
        await pilot.press("enter")
        await listed(app, 1)
        assert len(await app.chat.conversation.store.run(lambda s: s.chats())) == 1
        await pilot.press("escape")


async def test_search_goes_to_the_message(tmp_path: Path) -> None:
    async with started(scripted("zebra stripes", "other"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot.press("ctrl+n")
        await ask(app, pilot, "r")
        await pilot.press("ctrl+f")
        await until(lambda: isinstance(app.screen, PickScreen))
        app.screen.query_one("Input").value = "zeb"
        await until(lambda: any("zebra" in str(o.prompt) for o in app.screen.query_one(OptionList).options))
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat and app.chat.conversation.messages[-1].content == "zebra stripes")


async def test_lists_say_why_they_are_empty_and_rows_stay_on_one_line(tmp_path: Path) -> None:
    async with started(scripted("one"), tmp_path, (60, 20)) as (app, pilot):
        await ask(app, pilot, "a question with so many words that its title fills more than the width of the list")

        async def says(key: str, typed: str, text: str) -> None:
            await pilot.press(key)
            await until(lambda: isinstance(app.screen, PickScreen))
            await until(lambda: app.screen.query_one(OptionList).option_count > 0)
            app.screen.query_one("Input").value = typed
            await until(lambda: [str(o.prompt) for o in app.screen.query_one(OptionList).options] == [text])
            await pilot.press("escape")
            await until(lambda: app.screen is app.chat)

        await says("ctrl+f", "", BEFORE_SEARCH)
        await says("ctrl+f", "zebra", "Nothing found.")
        await says("ctrl+r", "zebra", "No title has these words.")
        await pilot.press("ctrl+r")
        await listed(app, 1)
        options = app.screen.query_one(OptionList)
        assert "2 messages" in options.render_line(0).text and options.virtual_size.height == 1


async def test_private_chat_leaves_no_trace(tmp_path: Path) -> None:
    engine = scripted("hidden answer")
    requests: list[GenerateRequest] = []
    original = engine._choose
    engine._choose = lambda request, index: (requests.append(request), original(request, index))[1]
    async with started(engine, tmp_path, private=True) as (app, pilot):
        await ask(app, pilot, "hidden question")
        await pilot.press(*"unsent secret")
        assert requests[0].private
    content = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"hidden" not in content and b"secret" not in content


async def test_private_chat_can_be_saved(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        app.chat.prompt.put("/private")
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.private)
        await ask(app, pilot, "keep me")
        app.chat.prompt.put("/save Kept")
        await pilot.press("enter")
        await until(lambda: not app.chat.conversation.private)
    assert [c.title for c in open_store(tmp_path / "chats.sqlite3").chats()] == ["Kept"]


@pytest.mark.parametrize(("size", "form"), [(WIDE, "full"), (NARROW, "strip"), (TINY, "off")], ids=str)
async def test_panel_follows_the_terminal(tmp_path: Path, size: tuple[int, int], form: str) -> None:
    async with started(scripted("text " * 40), tmp_path, size) as (app, pilot):
        await ask(app, pilot, "q")
        app.chat.sample()
        await pilot.pause()
        panel, strip = app.chat.query_one("#panel"), app.chat.query_one("#strip")
        assert (panel.display, strip.display) == (form == "full", form == "strip")
        if form == "full":
            assert "scripted (demo)" in panel.plain_text and "accepted" in panel.plain_text
        if form == "strip":
            assert "scripted (demo)" in strip.plain_text and "tok/s" in strip.plain_text


async def test_panel_form_can_be_chosen(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path, NARROW) as (app, pilot):
        seen = []
        for _ in range(4):
            await pilot.press("ctrl+b")
            seen.append((app.chat.panel_form, app.chat.query_one("#panel").display))
        assert seen == [("full", True), ("strip", False), ("off", False), ("auto", False)]


async def test_panel_form_and_theme_are_kept(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path, NARROW) as (app, pilot):
        await pilot.press("ctrl+b", "ctrl+b", "ctrl+b")
        app.theme = "textual-light"
        await pilot.pause()
        assert not app.chat.transcript.look.renderer.dark
    async with started(scripted("a"), tmp_path, NARROW) as (app, pilot):
        await until(lambda: app.chat.panel_form == "off" and app.theme == "textual-light")
        assert not app.chat.query_one("#strip").display


async def test_long_chat_is_pruned_from_view_only(tmp_path: Path) -> None:
    store = open_store(tmp_path / "chats.sqlite3")
    chat, parent = store.create(NewChat("Long")), None
    for number in range(40):
        for role, text in (("user", f"question {number}"), ("assistant", "line\n\n" * 60)):
            parent = store.add(chat.id, Stored(role, text, parent)).id
    store.close()
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await app.chat.open_chat(chat.id)
        transcript = app.chat.transcript
        assert "earlier messages" in transcript.plain_text and "question 0\n" not in transcript.plain_text
        assert transcript.virtual_size.height < 2000
        for _ in range(6):
            transcript.scroll_home(animate=False)
            await pilot.pause()
            transcript.scroll_to(y=5, animate=False)
            await pilot.pause()
        assert "question 0\n" in transcript.plain_text


async def test_reader_who_scrolled_up_is_left_alone(tmp_path: Path) -> None:
    async with started(scripted("line\n\n" * 4000, tok_per_s=800), tmp_path, NARROW) as (app, pilot):
        await pilot.press("q", "enter")
        await until(lambda: app.chat.transcript.max_scroll_y > 30)
        app.chat.transcript.scroll_to(y=5, animate=False)
        height = app.chat.transcript.virtual_size.height
        await until(lambda: app.chat.transcript.virtual_size.height > height + 20)
        assert app.chat.transcript.scroll_y == 5
        await pilot.press("escape")


async def test_view_follows_an_answer_that_outgrows_it(tmp_path: Path) -> None:
    async with started(scripted("line\n\n" * 4000, tok_per_s=800), tmp_path, NARROW) as (app, pilot):
        await pilot.press("q", "enter")
        transcript = app.chat.transcript
        for height in (25, 60):
            await until(lambda wanted=height: transcript.virtual_size.height > wanted)
            await pilot.pause()
            assert transcript.scroll_y == transcript.max_scroll_y > 0
        await pilot.press("escape")
        await until(lambda: not app.chat.busy)
        await pilot.pause()
        assert "(stopped)" in "\n".join(s.text for s in transcript.render_lines(transcript.size.region))


async def test_a_fast_answer_is_shown_a_few_times_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(Script((Reply("word " * 120),), tok_per_s=150.0))
    async with started(engine, tmp_path) as (app, pilot):
        shown: list[float] = []
        update = app.chat.transcript.update_last

        def noted(message: Stored, note: str = "") -> None:
            if message.state == "streaming":
                shown.append(time.monotonic())
            update(message, note)

        monkeypatch.setattr(app.chat.transcript, "update_last", noted)
        await ask(app, pilot, "q")
        assert len(shown) > 3
        assert min(later - sooner for sooner, later in pairwise(shown)) > 0.9 / UPDATES_PER_S
        assert app.chat.transcript.plain_text.count("word") == 120


async def test_second_prompt_waits_for_the_first_answer(tmp_path: Path) -> None:
    async with started(scripted("word " * 500, tok_per_s=50), tmp_path) as (app, pilot):
        await pilot.press("a", "enter")
        await until(lambda: app.chat.busy)
        await pilot.press("b", "enter")
        await asyncio.sleep(0.05)
        assert app.chat.prompt.text == "b" and len(app.chat.conversation.messages) == 2


async def test_quit_in_mid_answer_loses_nothing(tmp_path: Path) -> None:
    async with started(scripted("word " * 500, tok_per_s=100), tmp_path) as (app, pilot):
        await pilot.press("a", "enter")
        await until(lambda: "word" in app.chat.transcript.plain_text)
        shown = app.chat.conversation.answer
        assert shown is not None
        text = shown.content
    store = open_store(tmp_path / "chats.sqlite3")
    message = store.path(store.chats()[0].id)[1]
    assert message.content.startswith(text) and message.state == "cancelled"

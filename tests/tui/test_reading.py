"""Reading a chat: the cursor of blocks, folding, copying to every place, branching, editing and answering again."""

from __future__ import annotations

import base64
import os
import time
import tracemalloc
from pathlib import Path

import pytest
from textual import events

from localspec.chats import NewChat, Stored, open_store
from localspec.tui.clipboard import TERMINAL_LIMIT_BYTES, copy_with_desktop
from tests.tui.fakes import NARROW, ask, scripted, started, until

RICH = "Intro words.\n\n```python\nx = 1\n```\n\n- a\n- b\n\nOutro."


def notices(app: object) -> list[str]:
    return [notice.message for notice in app._notifications]  # type: ignore[attr-defined]


async def test_block_cursor_walks_through_all_messages_and_copies(tmp_path: Path) -> None:
    async with started(scripted(f"<think>Plan it.</think>{RICH}", thinks=True), tmp_path) as (app, pilot):
        await ask(app, pilot, "the question")
        transcript = app.chat.transcript
        await pilot.press("alt+up")
        assert transcript.marked_block is None
        seen = []
        for _ in range(7):
            await pilot.press("down")
            block = transcript.marked_block
            assert block is not None
            seen.append((block.part, block.text.strip()))
        assert seen[:5] == [
            ("thought", "Plan it."),
            ("text", "Intro words."),
            ("code", "x = 1"),
            ("text", "- a\n- b"),
            ("text", "Outro."),
        ]
        assert seen[5:] == [seen[4], seen[4]]
        await pilot.press("up", "up", "c")
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text() == "x = 1\n"
        await pilot.press("up", "up", "up")
        block = transcript.marked_block
        assert block is not None and block.text == "the question"
        await pilot.press("c")
        await until(lambda: (tmp_path / "copied.txt").read_text() == "the question")
        marked = [y for y in range(transcript._line_count) if transcript._finished(y).text.startswith("▌")]
        assert [transcript._line(y).text for y in marked] == ["the question"]
        await pilot.press("escape")
        assert app.chat.prompt.has_focus and transcript.marked_block is None


async def test_a_thought_folds_by_itself_with_its_seconds_and_tokens(tmp_path: Path) -> None:
    engine = scripted("<think>Plan A.</think>One.", "<think>Plan B.</think>Two.", thinks=True)
    async with started(engine, tmp_path) as (app, pilot):
        await ask(app, pilot, "q1")
        await ask(app, pilot, "q2")
        await pilot.press("alt+up", "enter")
        text = app.chat.transcript.plain_text
        assert "Plan B." in text and "Plan A." not in text
        tokens = app.chat.conversation.messages[-1].stats["reasoning_tokens"]
        assert tokens > 5 and f" s · {tokens} tokens" in text
        await pilot.press("down", "space")
        assert "Plan B." not in app.chat.transcript.plain_text
        await pilot.press("enter", "ctrl+t")
        assert "Plan A." in app.chat.transcript.plain_text and "Plan B." in app.chat.transcript.plain_text


async def test_the_mouse_marks_folds_and_the_footer_acts(tmp_path: Path) -> None:
    async with started(scripted(f"<think>Plan it.</think>{RICH}", thinks=True), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        # Below "You", "q", a blank line and the header of the answer.
        await pilot.click("#transcript", offset=(3, 4))
        assert "Plan it." in app.chat.transcript.plain_text
        await pilot.click("#transcript", offset=(3, 4))
        assert "Plan it." not in app.chat.transcript.plain_text
        await pilot.click("#transcript", offset=(3, 8))
        block = app.chat.transcript.marked_block
        assert block is not None and block.part == "code"
        await pilot.pause()
        keys = {key.description: key for key in app.screen.query("FooterKey").results()}  # type: ignore[attr-defined]
        assert {"Fold", "Copy", "Edit and resend", "Answer again", "Branch here"} <= set(keys)
        await pilot.click(keys["Copy"])
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text() == "x = 1\n"


async def test_dragging_selects_and_does_not_fold(tmp_path: Path) -> None:
    async with started(scripted("<think>Plan it.</think>Done.", thinks=True), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot._post_mouse_events([events.MouseDown], "#transcript", offset=(3, 4), button=1)
        await pilot._post_mouse_events([events.MouseMove], "#transcript", offset=(10, 4), button=1)
        await pilot._post_mouse_events([events.MouseUp, events.Click], "#transcript", offset=(10, 4), button=1)
        await pilot.pause()
        assert "Plan it." not in app.chat.transcript.plain_text
        assert app.chat.get_selected_text().strip() == "Thought"


async def test_an_edit_that_is_given_up_costs_nothing(tmp_path: Path) -> None:
    async with started(scripted("a1", "a2", "a3"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q1")
        await ask(app, pilot, "q2")
        app.chat.prompt.put("half a thought")
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+up", "e")
        await until(lambda: app.chat.prompt.text == "q1" and app.chat.prompt.has_focus)
        assert app.chat.conversation.messages == []
        await pilot.press("escape")
        await until(lambda: len(app.chat.conversation.messages) == 4)
        await pilot.press("up")
        assert app.chat.prompt.text == "q1"
        await pilot.press("up")
        assert app.chat.prompt.text == "half a thought"
        app.chat.prompt.put("")
        await pilot.press("alt+up", "alt+up", "alt+up", "alt+up", "e")
        await until(lambda: app.chat.prompt.text == "q1")
    # Left in mid-edit: the chat opens whole.
    store = open_store(tmp_path / "chats.sqlite3")
    (chat,) = store.chats()
    assert [message.content for message in store.path(chat.id)] == ["q1", "a1", "q2", "a2"]
    assert chat.draft == "q1"


async def test_edit_of_an_answer_edits_its_question(tmp_path: Path) -> None:
    async with started(scripted("a1", "a2", "a3"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q1")
        await ask(app, pilot, "q2")
        await pilot.press("alt+up", "e")
        await until(lambda: app.chat.prompt.text == "q2")
        await pilot.press("!", "enter")
        await until(lambda: "a3" in app.chat.transcript.plain_text and not app.chat.busy)
        assert [m.content for m in app.chat.conversation.messages] == ["q1", "a1", "q2!", "a3"]


@pytest.mark.parametrize("marks", [4, 3], ids=["the question", "its answer"])
async def test_any_message_can_be_answered_again(tmp_path: Path, marks: int) -> None:
    async with started(scripted("a1", "a2", "a3"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q1")
        await ask(app, pilot, "q2")
        await pilot.press(*["alt+up"] * marks, "r")
        await until(lambda: "a3" in app.chat.transcript.plain_text and not app.chat.busy)
        talk = app.chat.conversation
        assert [m.content for m in talk.messages] == ["q1", "a3"] and talk.places[talk.messages[1].id] == (2, 2)
        await pilot.press("alt+up", "left")
        await until(lambda: [m.content for m in talk.messages] == ["q1", "a1", "q2", "a2"])


async def test_keys_without_a_mark_and_during_an_answer_say_why_not(tmp_path: Path) -> None:
    async with started(scripted("word " * 2000, tok_per_s=100), tmp_path) as (app, pilot):
        await pilot.press("q", "enter")
        await until(lambda: "word" in app.chat.transcript.plain_text)
        app.chat.transcript.focus()
        await pilot.press("b")
        assert any("Nothing is marked" in text for text in notices(app))
        await pilot.press("up", "r")
        await until(lambda: any("Esc stops it first" in text for text in notices(app)))
        await pilot.press("down", "enter", "c", "y")
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text().startswith("word")
        await pilot.press("escape")


async def test_cursor_brings_earlier_messages_into_view(tmp_path: Path) -> None:
    store = open_store(tmp_path / "chats.sqlite3")
    chat, parent = store.create(NewChat("Long")), None
    for number in range(60):
        role = "assistant" if number % 2 else "user"
        parent = store.add(chat.id, Stored(role, f"message {number}\n\n" + "line\n\n" * 20, parent)).id
    store.close()
    async with started(scripted("a"), tmp_path, NARROW) as (app, pilot):
        await app.chat.open_chat(chat.id)
        transcript = app.chat.transcript
        transcript.focus()
        for _ in range(60):
            transcript.move_cursor(-1)
        await pilot.pause()
        for _ in range(3):
            transcript.move_block(1)
        block = transcript.marked_block
        assert block is not None and transcript._mark is not None and transcript._mark.item < 2
        shown = range(int(transcript.scroll_y), int(transcript.scroll_y) + transcript.size.height)
        assert transcript._marked_lines()[0] in shown


async def test_long_messages_of_the_user_are_folded_and_copied_whole(tmp_path: Path) -> None:
    text = "\n".join(f"row {n} {'x' * 20}" for n in range(6_000))
    async with started(scripted("ok"), tmp_path) as (app, pilot):
        await ask(app, pilot, text)
        shown = app.chat.transcript.plain_text
        assert f"row 57 {'x' * 20}\n▸ 5942 more lines" in shown and "row 58 " not in shown
        await pilot.press("alt+up", "alt+up", "enter")
        shown = app.chat.transcript.plain_text
        assert f"row 4999 {'x' * 20}\n▾ 6000 lines, the first 5000" in shown and "row 5000 " not in shown
        await pilot.press("c")
        await until((tmp_path / "copied.txt").exists)
        await until(lambda: any("too long for a terminal's clipboard" in notice for notice in notices(app)))
        assert (tmp_path / "copied.txt").read_text() == text and app.clipboard == ""


async def test_a_copy_goes_out_as_osc_52(tmp_path: Path) -> None:
    async with started(scripted("Wörter"), tmp_path) as (app, _):
        written: list[str] = []
        app._driver.write = written.append  # type: ignore[union-attr, method-assign]
        app.chat.copy_out("Wörter\n" * 3, "message")
        await until(lambda: any("Copied the message to the terminal" in text for text in notices(app)))
        code = next(text for text in written if text.startswith("\x1b]52;c;"))
        assert base64.b64decode(code[7:-1]).decode() == "Wörter\n" * 3
        app.chat.copy_out("", "message")
        await until(lambda: any("nothing was copied" in text for text in notices(app)))
        assert len(base64.b64encode(b"x" * TERMINAL_LIMIT_BYTES)) < 100_000


async def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, _):
        (tmp_path / "copied.txt").mkdir()
        app.chat.copy_out("text", "message")
        await until(lambda: any("no file (" in text for text in notices(app)))


def program(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


def test_desktop_programs_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/bin{os.pathsep}/usr/bin")
    assert copy_with_desktop("x") == ""
    program(tmp_path, "clip.exe", f"cat > {tmp_path}/windows")
    assert copy_with_desktop("é") == "clip.exe" and (tmp_path / "windows").read_text("utf-16") == "é"
    program(tmp_path, "xclip", f'echo "$@" > {tmp_path}/how; cat > {tmp_path}/x11')
    assert copy_with_desktop("é\n") == "xclip" and (tmp_path / "x11").read_text("utf-8") == "é\n"
    assert (tmp_path / "how").read_text() == "-selection clipboard\n"
    program(tmp_path, "wl-copy", "exit 1")
    assert copy_with_desktop("no Wayland here") == "xclip"
    program(tmp_path, "wl-copy", f"cat > {tmp_path}/wayland")
    assert copy_with_desktop("there it is") == "wl-copy" and (tmp_path / "wayland").read_text() == "there it is"


async def test_two_thousand_messages_are_pruned_from_view_only(tmp_path: Path) -> None:
    spans = tuple((5, "ngram" if n % 2 else "target", "answer") for n in range(60))
    text = "A **passage** of an answer.\n\n- with\n- a list\n\n" * 6
    messages = [
        (n, Stored("assistant" if n % 2 else "user", f"message {n}\n\n{text}", n - 1 if n else None, spans=spans))
        for n in range(2000)
    ]
    store = open_store(tmp_path / "chats.sqlite3")
    chat = store.insert_tree(NewChat("Long"), messages, 1999)
    store.close()
    async with started(scripted("the newest answer", context_limit_tokens=10**7), tmp_path) as (app, pilot):
        transcript = app.chat.transcript

        def rendered() -> int:
            return sum(bool(item._strips) for item in transcript._items)

        tracemalloc.start()
        before_s = time.process_time()
        await app.chat.open_chat(chat.id)
        seconds = time.process_time() - before_s
        held_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        # A page of Markdown costs some 20 ms, traced some 100; all of 2,000 messages would cost minutes.
        assert seconds < 4 and held_bytes < 48 << 20
        assert rendered() < 40 and "1985 earlier messages" in transcript.plain_text
        await ask(app, pilot, "go on")
        assert "the newest answer" in transcript.plain_text and rendered() < 40
        for _ in range(3):
            transcript.scroll_home(animate=False)
            await pilot.pause()
            transcript.scroll_to(y=5, animate=False)
            await pilot.pause()
        assert rendered() > 100
        # The next turn begins at the end again and lets go of what is far above it.
        await ask(app, pilot, "and on")
        assert rendered() < 40
        assert len(app.chat.conversation.messages) == 2004

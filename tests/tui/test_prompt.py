"""What can be typed into the prompt and set for a chat: commands, chips, files, parameters, models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from textual import events
from textual.widgets import Input, Select, TextArea

from localspec.api.types import GenerateRequest
from localspec.tui.attachments import Attachments
from localspec.tui.draft_owner import has_gone, new_owner
from localspec.tui.screens.parameters import ParametersScreen
from tests.tui.fakes import NARROW, ask, listed, scripted, started, until


def listening(*texts: str, **script: object) -> tuple[object, list[GenerateRequest]]:
    """An engine and the requests that it got."""
    engine, requests = scripted(*texts, **script), []
    choose = engine._choose
    engine._choose = lambda request, index: (requests.append(request), choose(request, index))[1]
    return engine, requests


async def test_completion_by_tab_and_arrows(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await pilot.press(*"/dr", "tab")
        assert app.chat.prompt.text == "/draft "
        await pilot.press("down", "tab")
        assert app.chat.prompt.text == "/draft off"
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.engine.metrics().drafter == "off")
        await pilot.press("/")
        assert app.chat.query_one("#completions").display
        await pilot.press("escape")
        assert not app.chat.query_one("#completions").display


async def test_unknown_command_is_kept_to_be_mended(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await pilot.press(*"/nonsense", "enter")
        assert app.chat.prompt.text == "/nonsense"
        assert app.chat.conversation.messages == []


async def test_long_paste_becomes_a_chip_that_is_sent_whole(tmp_path: Path) -> None:
    engine, requests = listening("ok")
    text = "\n".join(f"line {n}" for n in range(60))
    async with started(engine, tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste(text))
        await pilot.pause()
        assert app.chat.prompt.text == "[pasted 60 lines]"
        await pilot.press(*" why", "enter")
        await until(lambda: len(requests) == 1)
        assert requests[0].messages[-1].content == text + " why"


@pytest.mark.parametrize("line_break", ["\r", "\r\n"])
async def test_line_breaks_of_any_terminal_survive_a_paste(tmp_path: Path, line_break: str) -> None:
    async with started(scripted("ok"), tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste(f"a{line_break}b{line_break}{line_break}c"))
        await pilot.pause()
        assert app.chat.prompt.text == "a\nb\n\nc"
        app.chat.prompt.put("")
        app.chat.prompt.post_message(events.Paste(line_break.join("x" * 60)))
        await pilot.pause()
        assert app.chat.prompt.text == "[pasted 60 lines]"


async def test_a_long_line_is_a_chip_too(tmp_path: Path) -> None:
    engine, requests = listening("ok")
    async with started(engine, tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste("x" * 20_000))
        await pilot.pause()
        assert app.chat.prompt.text == "[pasted 20000 characters]"
        await pilot.press("enter")
        await until(lambda: len(requests) == 1)
        assert requests[0].messages[-1].content == "x" * 20_000


async def test_a_kept_draft_has_the_texts_of_its_chips(tmp_path: Path) -> None:
    engine, requests = listening("ok")
    text = "\n".join(f"line {n}" for n in range(60))
    async with started(scripted("a"), tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste(text))
        await pilot.pause()
        await pilot.press(*" why")
    async with started(engine, tmp_path) as (app, pilot):
        await until(lambda: app.chat.prompt.text == "[pasted 60 lines] why")
        await pilot.press("enter")
        await until(lambda: len(requests) == 1)
        assert requests[0].messages[-1].content == text + " why"
        await pilot.press("ctrl+n")
        await pilot.pause()
    async with started(engine, tmp_path) as (app, pilot):
        await pilot.pause(0.2)
        assert app.chat.prompt.text == ""


@pytest.mark.parametrize("kept", ["\x01", "\x01[]", "\x01{", '\x01["p", [1]]', '\x01["p", 3]'])
def test_a_kept_draft_of_another_form_is_text(kept: str) -> None:
    assert Attachments().unpack(kept) == kept[1:]


def test_chips_are_put_in_once_and_clean() -> None:
    chips = Attachments()
    first = chips.add("file a\x1b[31m\n.txt", "see [file b.txt] and [file b.txt #2]")
    second, third = chips.add("file b.txt", "B \\1"), chips.add("file b.txt", "C")
    assert (first, second, third) == ("[file a\ufffd[31m .txt]", "[file b.txt]", "[file b.txt #2]")
    assert chips.expand(f"{first}|{third}|{second}") == "see [file b.txt] and [file b.txt #2]|C|B \\1"


async def test_what_is_written_is_kept_while_it_is_written(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (app, pilot):
        await pilot.press(*"half a question")

        def note() -> str:
            return "".join(app.chat.conversation.durable.submit(lambda s: s.notes_like("draft")).result().values())

        await until(lambda: note().startswith("half"))
        await until(lambda: note() == "half a question")
        await pilot.press("enter")
        await until(lambda: len(app.chat.conversation.messages) == 2 and not app.chat.busy)
        # It is the first message now, and no draft of the next chat.
        assert note() == ""


async def test_two_apps_keep_their_unsent_prompts_apart(tmp_path: Path) -> None:
    async with started(scripted("a"), tmp_path) as (one, _):
        one.chat.prompt.put("unsent in the first")
        await one.chat._drafts.keep()
        async with started(scripted("b"), tmp_path) as (two, pilot):
            assert two.chat.prompt.text == ""
            await ask(two, pilot, "hi")
    async with started(scripted("c"), tmp_path) as (again, _):
        await until(lambda: again.chat.prompt.text == "unsent in the first")


def test_an_owner_has_gone_with_its_process() -> None:
    own = new_owner()
    number, began, name = own.split(":")
    assert not has_gone(own) and new_owner() != own
    assert has_gone(f"{number}:{int(began) - 1000}:{name}")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for gone in (f"{ended.pid}:{began}:{name}", f"left by {own}", "", ":", "x:y:z", "9" * 30 + ":1:a"):
        assert has_gone(gone), gone


async def test_chip_can_be_opened(tmp_path: Path) -> None:
    async with started(scripted("ok"), tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste("x\n" * 50))
        await pilot.pause()
        await pilot.press("ctrl+o")
        assert app.chat.prompt.text == "x\n" * 50


async def test_a_chip_is_taken_back_as_a_whole(tmp_path: Path) -> None:
    async with started(scripted("ok"), tmp_path) as (app, pilot):
        await pilot.press("a", "space")
        app.chat.prompt.post_message(events.Paste("x\n" * 50))
        await pilot.pause()
        await pilot.press("b", "backspace")
        assert app.chat.prompt.text == "a [pasted 51 lines]"
        await pilot.press("backspace")
        assert app.chat.prompt.text == "a "
        await pilot.press("ctrl+z")
        assert app.chat.prompt.text.startswith("a [pasted 51 lines]")


async def test_short_paste_is_text_without_control_codes(tmp_path: Path) -> None:
    async with started(scripted("ok"), tmp_path) as (app, pilot):
        app.chat.prompt.post_message(events.Paste("a\x1b[2Jb\nc"))
        await pilot.pause()
        assert app.chat.prompt.text == "a\ufffd[2Jb\nc"


async def test_file_is_picked_counted_and_sent(tmp_path: Path) -> None:
    engine, requests = listening("ok")
    (tmp_path / "notes.md").write_text("remember the milk\n")
    (tmp_path / "blob.bin").write_bytes(b"\x00\x01\x02")
    async with started(engine, tmp_path) as (app, pilot):
        await pilot.press(*"read @not", "tab")
        await until(lambda: "[file notes.md · 18 tokens]" in app.chat.prompt.text)
        await pilot.press("enter")
        await until(lambda: len(requests) == 1)
        assert "File `notes.md`:\n```md\nremember the milk\n```" in requests[0].messages[-1].content
        await until(lambda: not app.chat.busy)
        await pilot.press(*"@blob", "tab")
        await until(lambda: any("binary file" in notice.message for notice in app._notifications))
        assert app.chat.prompt.text == ""


async def test_file_past_half_the_context_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "big.txt").write_text("x" * 900)
    async with started(scripted("ok", context_limit_tokens=1000), tmp_path) as (app, pilot):
        app.chat.prompt.put("/attach big.txt")
        await pilot.press("enter")
        await until(lambda: "[file big.txt" in app.chat.prompt.text)
        assert any("900 of the 1000 tokens" in notice.message for notice in app._notifications)


async def test_parameters_reach_the_engine_and_the_store(tmp_path: Path) -> None:
    engine, requests = listening("ok")
    async with started(engine, tmp_path, NARROW) as (app, pilot):
        await pilot.press("f2")
        await until(lambda: isinstance(app.screen, ParametersScreen))
        screen = app.screen
        screen.query_one("#system", TextArea).load_text("Be brief.")
        screen.query_one("#set-temperature", Input).value = "hot"
        screen.query_one("#thinking", Select).value = "off"
        screen.query_one("#drafter", Select).value = "off"
        await pilot.press("ctrl+s")
        assert app.screen is screen and "temperature must be a number" in str(screen.query_one("#problem").render())
        screen.query_one("#set-temperature", Input).value = "0.25"
        await pilot.press("enter")
        await until(lambda: app.screen is app.chat)
        await ask(app, pilot, "q")
        (request,) = requests
        assert request.messages[0].content == "Be brief." and request.sampling.temperature == 0.25
        assert request.template_options == {"enable_thinking": False}
        assert engine.metrics().drafter == "off"
        chat_id = app.chat.conversation.chat.id
        await pilot.press("ctrl+n")
        await app.chat.open_chat(chat_id)
        assert app.chat.conversation.settings.sampling == {"temperature": 0.25}
        assert app.chat.conversation.system_prompt == "Be brief."


async def test_models_can_be_switched_from_the_list(tmp_path: Path) -> None:
    models = (("scripted", "here"), ("other", "larger"))
    async with started(scripted("ok", models=("other",)), tmp_path, models=models) as (app, pilot):
        await pilot.press("ctrl+l")
        await listed(app, 2)
        app.screen.query_one("Input").value = "oth"
        await listed(app, 1)
        await pilot.press("enter")
        await until(lambda: app.chat.conversation.engine.model().id == "other")
        app.chat.prompt.put("/model nothing")
        await pilot.press("enter")
        await until(lambda: any("No model 'nothing'" in notice.message for notice in app._notifications))


async def test_selection_by_mouse_is_copied(tmp_path: Path) -> None:
    async with started(scripted("One **two** three"), tmp_path) as (app, pilot):
        await ask(app, pilot, "q")
        # Below "You", "q", a blank line and the header of the answer.
        await pilot._post_mouse_events([events.MouseDown], "#transcript", offset=(5, 4), button=1)
        await pilot._post_mouse_events([events.MouseMove], "#transcript", offset=(7, 4), button=1)
        await pilot._post_mouse_events([events.MouseUp], "#transcript", offset=(7, 4), button=1)
        await pilot.pause()
        await pilot.press("ctrl+c")
        await until((tmp_path / "copied.txt").exists)
        assert (tmp_path / "copied.txt").read_text() == "two"


async def test_no_color_leaves_no_colour_and_says_all_in_words(tmp_path: Path) -> None:
    async with started(scripted("text " * 30), tmp_path, no_color=True) as (app, pilot):
        await ask(app, pilot, "q")
        await pilot.press("ctrl+d")
        await pilot.pause()
        strips = app.chat.transcript.render_lines(app.chat.transcript.size.region)
        colours = {style.color.name for strip in strips for _, style, _ in strip if style and style.color}
        assert colours <= {"default"}
        assert any(style.underline for strip in strips for _, style, _ in strip if style)

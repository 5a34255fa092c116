"""The line mode: what goes to which stream, commands, stopping, errors."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import pytest

from localspec.api.types import EngineError
from localspec.chats import StoreWorker, open_store
from localspec.tui.conversation import Conversation
from localspec.tui.options import ChatSettings, UiOptions
from localspec.tui.plain import PlainChat, run_plain
from tests.tui.fakes import DyingEngine, scripted, until


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


async def talk(engine: Any, folder: Path, typed: str, out: io.StringIO | None = None) -> tuple[str, str, int]:
    output, messages = out or io.StringIO(), io.StringIO()
    store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
    options = UiOptions(export_dir=folder, copy_file=folder / "copied.txt")
    try:
        failed = await run_plain(
            engine, store, ChatSettings(), options=options, streams=(io.StringIO(typed), output, messages)
        )
    finally:
        store.close()
    return output.getvalue(), messages.getvalue(), failed


async def test_pipe_gets_the_exact_answers_and_nothing_else(tmp_path: Path) -> None:
    output, messages, failed = await talk(scripted("One\x1b[1m.", "**Two**\n"), tmp_path, "a\n\nb\n")
    assert (output, messages, failed) == ("One\x1b[1m.\n**Two**\n", "", 0)
    store = open_store(tmp_path / "chats.sqlite3")
    assert [m.content for m in store.path(store.chats()[0].id)] == ["a", "One\x1b[1m.", "b", "**Two**\n"]


async def test_terminal_never_gets_control_codes(tmp_path: Path) -> None:
    output, _, _ = await talk(scripted("a\x1b]52;c;eA==\x07b"), tmp_path, "q\n", Terminal())
    assert output == "a\ufffd]52;c;eA==\ufffdb\n"


async def test_lines_in_a_block_are_one_prompt_and_commands_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("remember")
    typed = '"""\nfirst\nsecond\n"""\n/system Be brief.\n/attach notes.txt\nand this\n/nonsense\n'
    typed += "/export md out.md\n/quit\nno"
    output, messages, failed = await talk(scripted("A.", "B."), tmp_path, typed)
    assert output == "A.\nB.\n"
    assert "System prompt: Be brief." in messages and "There is no command /nonsense" in messages
    exported = (tmp_path / "out.md").read_text()
    assert "first\nsecond" in exported and "File `notes.txt`:\n```txt\nremember\n```\nand this" in exported
    assert "## System\n\nBe brief." in exported
    assert failed == 0


async def test_errors_of_the_system_are_sentences(tmp_path: Path) -> None:
    _, messages, _ = await talk(scripted("A."), tmp_path, "/import nothing.json\n/attach nothing.txt\n")
    first, second = messages.strip().split("\n")
    assert (
        first
        == f"{tmp_path / 'nothing.json'} cannot be used (no such file or directory): check its name and its rights."
    )
    assert "is not a file" in second


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
async def test_input_that_is_not_utf_8_ends_the_chat_or_is_marked(tmp_path: Path, errors: str) -> None:
    typed = io.TextIOWrapper(io.BytesIO(b"/system Be br\xefef\ncaf\xe9\nhello\n"), "utf-8", errors)
    output, messages = io.StringIO(), io.StringIO()
    store = StoreWorker(lambda: open_store(tmp_path / "chats.sqlite3"))
    running = run_plain(scripted("A.", "B."), store, ChatSettings(), streams=(typed, output, messages))
    failed = await asyncio.wait_for(running, 20)
    store.close()
    if errors == "strict":
        assert failed == 1 and "since the input is not UTF-8" in messages.getvalue() and output.getvalue() == ""
    else:
        assert failed == 0 and output.getvalue() == "A.\nB.\n"
        kept = open_store(tmp_path / "chats.sqlite3")
        (chat,) = kept.chats()
        assert (chat.title, chat.system_prompt) == ("caf?", "Be br?ef")
        assert [m.content for m in kept.path(chat.id)] == ["caf?", "A.", "hello", "B."]


async def test_a_block_without_its_end_is_sent_at_the_end_of_the_input(tmp_path: Path) -> None:
    output, _, failed = await asyncio.wait_for(talk(scripted("A."), tmp_path, '"""\nfirst\nsecond\n'), 20)
    assert (output, failed) == ("A.\n", 0)


async def test_thought_is_announced_not_printed(tmp_path: Path) -> None:
    output, _, _ = await talk(scripted("<think>hm hm</think>So."), tmp_path, "q\n")
    assert output.startswith("(thinking)\n(thought 0.0 s, ") and output.endswith(" tokens)\nSo.\n")
    assert "hm" not in output


async def test_dead_engine_is_reported_and_the_text_kept(tmp_path: Path) -> None:
    engine = DyingEngine(EngineError("internal", "The card fell off."))
    output, messages, failed = await talk(engine, tmp_path, "q\n")
    assert "The card fell off." in messages and failed == 1
    assert output.strip() and "An answer".startswith(output.strip()[:9])


async def test_model_that_cannot_load_raises(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="torn"):
        await talk(scripted("x", load_error="The file is torn."), tmp_path, "q\n")


async def test_interrupt_stops_the_answer_then_the_chat(tmp_path: Path) -> None:
    store = StoreWorker(lambda: open_store(tmp_path / "chats.sqlite3"))
    conversation = Conversation(scripted("word " * 500, tok_per_s=200), store, ChatSettings())
    options = UiOptions(export_dir=tmp_path, copy_file=tmp_path / "copied.txt")
    output, messages = io.StringIO(), io.StringIO()
    chat = PlainChat(conversation, options, (io.StringIO(), output, messages))
    chat._lines.put_nowait("q")
    chat._read_lines = lambda loop: None  # type: ignore[method-assign]
    running = asyncio.create_task(chat.run())
    await until(lambda: "word" in output.getvalue())
    chat._interrupt()
    await until(lambda: "(stopped)" in messages.getvalue())
    assert not running.done()
    chat._interrupt()
    assert await asyncio.wait_for(running, 2) == 0
    store.close()

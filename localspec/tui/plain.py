"""The chat as lines in and lines out: no cursor movement, no colour. For screen readers, pipes and dumb terminals."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from localspec.api.engine import Engine
from localspec.api.types import EngineError
from localspec.chats import ChatError, StoreWorker
from localspec.tui.answer import Answer
from localspec.tui.attachments import AttachmentError, fenced, read_file
from localspec.tui.conversation import Conversation
from localspec.tui.message_lines import answer_figures
from localspec.tui.options import ChatSettings, SettingError, UiOptions
from localspec.tui.slash import SLASHES, SlashError, read_slash
from localspec.tui.slash_runner import SlashRunner
from localspec.tui.text import clean, problem_text, seconds_text

POLL_S = 0.05
STAGE_S = 2.0
BLOCK_MARK = '"""'
_EXPECTED = (ChatError, EngineError, SlashError, SettingError, AttachmentError, OSError)


async def run_plain(
    engine: Engine,
    store: StoreWorker,
    settings: ChatSettings,
    *,
    private: bool = False,
    options: UiOptions | None = None,
    streams: tuple[TextIO, TextIO, TextIO] | None = None,
) -> int:
    """Chat until the input ends; returns the number of answers that failed. `streams` are input, output and messages.

    Raises EngineError if the model cannot be loaded. Ctrl+C stops an answer; without one it ends the chat.
    """
    ui = options or UiOptions(export_dir=Path.cwd(), copy_file=Path.cwd() / "copied.txt")
    chat = PlainChat(Conversation(engine, store, settings, private=private), ui, streams or _standard_streams())
    try:
        return await chat.run()
    finally:
        chat.conversation.close()


class PlainChat:
    """One chat on three text streams. Meets `slash_runner.Host`."""

    def __init__(self, conversation: Conversation, options: UiOptions, streams: tuple[TextIO, TextIO, TextIO]) -> None:
        self.conversation = conversation
        self.options = options
        self._input, self._output, self._messages = streams
        self._slash = SlashRunner(self)
        self._lines: asyncio.Queue[str | None] = asyncio.Queue()
        self._attached: list[str] = []
        self._failed = 0
        self._over = False
        self._interrupted = False
        self._unread = ""
        """Why the input could not be read to its end."""
        self._answering: asyncio.Task[None] | None = None

    async def run(self) -> int:
        """Read and answer until the input ends."""
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_lines, args=(loop,), daemon=True, name="input").start()
        # Only the main thread can take signals; elsewhere Ctrl+C keeps its usual meaning.
        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(signal.SIGINT, self._interrupt)
        await self._wait_ready()
        notice = await self.conversation.store.run(lambda s: s.notice)
        if notice:
            self.tell(notice, error=True)
        while not self._over:
            text = await self._next_prompt()
            if text is None:
                if self._unread:
                    self._failed += 1
                    self.tell(f"The chat ends here, since the input {self._unread}.", error=True)
                break
            if text.strip():
                await self._take(text)
        await self._settle()
        return self._failed

    # Host

    def tell(self, text: str, *, error: bool = False) -> None:
        print(clean(text), file=self._messages, flush=True)

    def copy_out(self, text: str, what: str) -> None:
        print(self._shown(text), file=self._output, flush=True)

    def show_help(self) -> None:
        lines = [f"{slash.usage}: {slash.help}" for slash in SLASHES]
        lines.append(f"Lines between two lines of {BLOCK_MARK} are sent together. Ctrl+C stops an answer.")
        self.tell("\n".join(lines))

    def show_screen(self, kind: str) -> None:
        words = {
            "models": "localspec ls, pull and rm manage models; /model NAME loads one",
            "settings": "/set, /think, /draft and /system change settings",
            "bench": "localspec bench measures drafters",
            "tuner": "localspec tune says what was measured",
        }
        raise SlashError(f"/{kind} is a screen, which --plain does not have: {words[kind]}.")

    async def shown(self) -> None:
        title = self.conversation.chat.title if self.conversation.chat else ""
        self.tell(f"Chat: {title}, {len(self.conversation.messages)} messages.")

    async def new_chat(self, *, private: bool = False) -> None:
        await self.conversation.settle()
        self.conversation.new(private=private)
        self.tell("New private chat: nothing of it is written." if private else "New chat.")

    async def retry(self) -> None:
        self.conversation.drop_last_answer()
        await self._answer()

    async def switch_model(self, name: str) -> None:
        model = await self.conversation.engine.load(name)
        self.tell(f"{model.title} is loaded.")

    async def attach(self, path: Path) -> None:
        text = await asyncio.to_thread(read_file, path)
        self._attached.append(fenced(path.name, text))
        self.tell(f"{path.name} goes with the next message.")

    def put_prompt(self, text: str) -> None:
        self.tell(f"The next message takes the place of: {text}")

    async def leave(self) -> None:
        self._over = True

    # Inside

    async def _settle(self) -> None:
        try:
            await self.conversation.settle()
        except ChatError as error:
            self.tell(str(error), error=True)

    async def _take(self, text: str) -> None:
        try:
            slash = read_slash(text.strip())
            if slash is not None:
                await self._slash.run(*slash)
                return
            await self.conversation.say("".join([*self._attached, text[1:] if text.startswith("//") else text]))
            self._attached.clear()
            await self._answer()
        except _EXPECTED as error:
            self._failed += 0 if isinstance(error, (SlashError, SettingError)) else 1
            self.tell(problem_text(error), error=True)

    async def _answer(self) -> None:
        await self.conversation.start_answer()
        answer = self.conversation.answer
        assert answer is not None, "start_answer makes one"
        self._answering = asyncio.create_task(self.conversation.run_answer())
        printed = _Printed(answer, self._write)
        try:
            while not self._answering.done():
                await asyncio.wait({self._answering}, timeout=POLL_S)
                printed.go_on()
            with contextlib.suppress(asyncio.CancelledError):
                await self._answering
        finally:
            self._answering = None
            printed.end()
        if answer.state == "error":
            self._failed += 1
        figures = answer_figures(self.conversation.messages[-1])
        if answer.status:
            self.tell(f"({answer.status})", error=True)
        elif figures and self._is_terminal():
            self.tell(f"({figures})")

    async def _wait_ready(self) -> None:
        engine = self.conversation.engine
        waiting = asyncio.ensure_future(engine.wait_ready())
        stage = ""
        try:
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=STAGE_S)
                now = engine.metrics()
                if not waiting.done() and now.stage != stage:
                    stage = now.stage
                    self.tell(f"Loading: {stage}")
            model = await waiting
        finally:
            waiting.cancel()
        if self._is_terminal():
            demo = " (demo)" if model.demo else ""
            self.tell(f"{model.title}{demo}. {model.note}".strip())
            self.tell("Enter sends a line, /help lists commands, Ctrl+D ends.")

    async def _next_prompt(self) -> str | None:
        line = await self._next_line("> ")
        if line is None or line.strip() != BLOCK_MARK:
            return line
        block: list[str] = []
        while (line := await self._next_line("… ")) is not None and line.strip() != BLOCK_MARK:
            block.append(line)
        # Half a message is sent where the input ends behind it, but not where it was broken off.
        return None if line is None and (self._interrupted or self._unread) else "\n".join(block)

    async def _next_line(self, mark: str) -> str | None:
        if self._is_terminal():
            self._write(mark)
        line = await self._lines.get()
        if line is None:
            # The end stays the end: a block that it cuts off is sent, and then it is met again.
            self._lines.put_nowait(None)
        return line

    def _read_lines(self, loop: asyncio.AbstractEventLoop) -> None:
        # A thread of its own: a blocked read cannot be cancelled, and must not keep the program from ending.
        # A loop that is closed (RuntimeError) takes nothing any more: the chat has ended.
        with contextlib.suppress(RuntimeError):
            try:
                for line in self._input:
                    # What is not UTF-8 may come as lone surrogates, which neither engine nor store can take.
                    text = line.rstrip("\n").encode("utf-8", "replace").decode("utf-8")
                    loop.call_soon_threadsafe(self._lines.put_nowait, text)
            except (OSError, ValueError) as error:
                is_text = not isinstance(error, UnicodeDecodeError)
                self._unread = f"cannot be read ({error})" if is_text else "is not UTF-8: convert it, with iconv say"
            finally:
                loop.call_soon_threadsafe(self._lines.put_nowait, None)

    def _interrupt(self) -> None:
        if self._answering is not None:
            self._answering.cancel()
        else:
            self._interrupted = True
            self._lines.put_nowait(None)

    def _write(self, text: str) -> None:
        print(self._shown(text), end="", file=self._output, flush=True)

    def _shown(self, text: str) -> str:
        # A pipe gets the exact text; a terminal must not obey control codes of a model.
        return clean(text) if self._output.isatty() else text

    def _is_terminal(self) -> bool:
        return self._input.isatty() and self._output.isatty()


class _Printed:
    """How much of a growing answer has been written out."""

    def __init__(self, answer: Answer, write: Callable[[str], None]) -> None:
        self._answer = answer
        self._write = write
        self._chars = 0
        self._says_thinking = False

    def go_on(self) -> None:
        answer = self._answer
        if answer.reasoning and not self._says_thinking:
            self._says_thinking = True
            self._write("(thinking)\n")
        if len(answer.content) > self._chars:
            if self._says_thinking and self._chars == 0:
                self._write(f"(thought {seconds_text(answer.reasoning_s)}, {answer.reasoning_tokens} tokens)\n")
            self._write(answer.content[self._chars :])
            self._chars = len(answer.content)

    def end(self) -> None:
        self.go_on()
        if not self._answer.content.endswith("\n"):
            self._write("\n")


def _standard_streams() -> tuple[TextIO, TextIO, TextIO]:
    return sys.stdin, sys.stdout, sys.stderr

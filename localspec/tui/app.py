"""The terminal app: holds engine, store and options together and shows the chat. The caller owns engine and store."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from textual.app import App, SystemCommand
from textual.binding import Binding
from textual.command import CommandList, CommandPalette
from textual.filter import LineFilter, NoColor
from textual.screen import Screen

from localspec.api.engine import Engine
from localspec.api.library import ModelLibrary
from localspec.chats import StoreWorker
from localspec.tui.conversation import Conversation
from localspec.tui.options import ChatSettings, UiOptions
from localspec.tui.safe_lines import SafeLines
from localspec.tui.screens.chat import ChatScreen
from localspec.tui.slash import SLASHES

END_S = 5.0
"""From a signal to the end, whatever still waits."""


class Palette(CommandPalette):
    """The command palette. Its list has no pages to turn in a terminal of a line or two, where it has no height."""

    def _action_command_list(self, action: str) -> None:
        if self.query_one(CommandList).size.height > 0:
            super()._action_command_list(action)


class LocalspecApp(App[None]):
    """`LocalspecApp(engine, StoreWorker(...), UiOptions(...)).run()`.

    The engine may still be loading. After `run` returns everything is handed to the store; the caller closes it.
    """

    CSS_PATH = "localspec.tcss"
    TITLE = "localspec"
    BINDINGS = [Binding("ctrl+q", "leave", "Quit", priority=True)]  # noqa: RUF012 - the base class declares it

    def __init__(
        self,
        engine: Engine,
        store: StoreWorker,
        options: UiOptions,
        settings: ChatSettings | None = None,
        library: ModelLibrary | None = None,
    ) -> None:
        super().__init__()
        self._options = options
        conversation = Conversation(engine, store, settings or ChatSettings(), private=options.private)
        self.chat = ChatScreen(conversation, options, library)
        if options.still or options.over_ssh:
            self.animation_level = "none"
        if options.no_color:
            # Textual's own answer to NO_COLOR is shades of grey, which are colour codes as well.
            self.no_color = True
            self._filters: list[LineFilter] = [NoColor()]
        self._filters.insert(0, SafeLines())

    def on_mount(self) -> None:
        self.push_screen(self.chat)
        # Ended from outside, or by a terminal that goes: as Ctrl+Q does, so that the terminal is as it was before.
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(NotImplementedError, RuntimeError, ValueError):  # only the main thread can take signals
                asyncio.get_running_loop().add_signal_handler(number, self._end, number)

    def _end(self, number: signal.Signals) -> None:
        self.run_worker(self.chat.leave(at_once=True), group="end", exclusive=True)
        # Textual may wait for ever to write to a terminal that is gone; everything is saved long before this.
        last = threading.Timer(END_S, os._exit, (128 + number,))
        last.daemon = True
        last.start()

    async def run_async(self, **options: Any) -> None:
        """Run until the user leaves. Options are those of Textual's App."""
        # A long chat is some hundred thousand live objects; walking them all would stop typing for 0.1 s at a time.
        before = gc.get_threshold()
        gc.set_threshold(20_000, 20, 200)
        try:
            return await super().run_async(**options)
        finally:
            gc.set_threshold(*before)

    def action_command_palette(self) -> None:
        if not isinstance(self.screen, CommandPalette):
            self.push_screen(Palette(id="--command-palette"))

    async def action_leave(self) -> None:
        await self.chat.leave()

    async def action_quit(self) -> None:
        await self.chat.leave()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Keys and slash commands, as the palette lists them."""
        yield SystemCommand("Theme", "Change the colours", self.action_change_theme)
        for binding in ChatScreen.BINDINGS:
            if isinstance(binding, Binding) and binding.description:
                yield SystemCommand(
                    binding.description,
                    binding.key,
                    lambda action=binding.action: self.call_later(self.chat.run_action, action),
                )
        for slash in SLASHES:
            text = f"/{slash.name} " if " " in slash.usage else f"/{slash.name}"
            yield SystemCommand(
                slash.usage.replace("[", "\\["), slash.help, lambda text=text: self.chat.put_prompt(text)
            )
        yield SystemCommand("Quit", "Everything is saved", self.action_leave)

"""Runs an answer beside the interface and shows what came, a few times a second and never once a token."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from textual.worker import Worker, WorkerCancelled

from localspec.chats import ChatError, Stored
from localspec.tui.widgets.transcript import Transcript

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen

# Each update repaints the terminal below it: at 8 a second that took 5 to 6% of a core.
UPDATES_PER_S = 6


class Answering:
    """The answer that is being written in a chat screen, if any."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen
        self._worker: Worker[None] | None = None
        self._message_id = 0
        self._seen_version = -1
        self._shown_s = 0.0
        self._next: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Answer the last message. Raises ChatError if there is none or the store refuses."""
        await self._screen.conversation.start_answer()
        self._message_id = self._screen.conversation.messages[-1].id
        await self._screen.shown()
        self._seen_version = -1
        if self._screen.conversation.answer is not None:
            self._screen.conversation.answer.on_change = self._changed
        self._worker = self._screen.run_worker(self._run(), group="answer")

    def cancel(self) -> None:
        """Stop the engine; the text so far stays."""
        if self._worker is not None:
            self._worker.cancel()

    async def stop(self) -> None:
        """End a running answer and wait until it is handed to the store."""
        if self._worker is not None and self._screen.busy:
            self._worker.cancel()
            with suppress(WorkerCancelled):
                await self._worker.wait()

    def flush(self) -> None:
        """Show what came since the last time."""
        answer, last = self._screen.conversation.answer, self._shown_last()
        if answer is not None and last is not None and answer.version != self._seen_version:
            self._seen_version, self._shown_s = answer.version, time.monotonic()
            self._screen.transcript.update_last(answer.stored(last), answer.status)

    def _shown_last(self) -> Stored | None:
        """The message of the answer; None where it is not the last that is shown, so nothing may be drawn over that."""
        messages = self._screen.conversation.messages
        return messages[-1] if messages and messages[-1].id == self._message_id else None

    def _changed(self) -> None:
        """Show it as soon as the last update is long enough ago: with what comes, no timer wakes the app as well."""
        if self._next is None:
            wait_s = max(0.0, self._shown_s + 1 / UPDATES_PER_S - time.monotonic())
            self._next = asyncio.get_running_loop().call_later(wait_s, self._show)

    def _show(self) -> None:
        self._next = None
        if self._screen.is_attached:
            self.flush()
            self._screen.transcript.paint_now()

    async def _run(self) -> None:
        screen, talk = self._screen, self._screen.conversation
        try:
            await talk.run_answer()
        except ChatError as error:
            screen.tell(str(error), error=True)
        finally:
            if self._next is not None:
                self._next.cancel()
                self._next = None
            # The widgets are gone when the app ends in mid-answer.
            for transcript in screen.query(Transcript):
                last = self._shown_last()
                if last is not None:
                    transcript.update_last(last)
                if last is not None and last.state == "error":
                    screen.tell(str(last.stats.get("status", "The answer failed.")), error=True)

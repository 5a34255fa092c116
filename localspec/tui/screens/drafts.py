"""Keeps what is being written: every few seconds, when the chat is left, and with the texts behind its chips."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from localspec.api.types import EngineError
from localspec.chats import ChatError
from localspec.tui.attachments import Attachments, fenced, read_file
from localspec.tui.text import short_count

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen

KEEP_INTERVAL_S = 2.0
# A draft with large files in it is written less often.
KEPT_CHARS_PER_S = 200_000


class Drafts:
    """The unsent prompt of a chat screen and its chips."""

    def __init__(self, screen: ChatScreen, clock: Callable[[], float] = time.monotonic) -> None:
        self.chips = Attachments()
        self._screen = screen
        self._clock = clock
        self._kept = ""
        self._next_s = 0.0
        self._is_keeping = False

    def sometimes(self) -> None:
        """Called a few times a second: a killed terminal must not take the prompt with it."""
        if not self._is_keeping and self._screen.prompt.text != self._kept and self._clock() >= self._next_s:
            self._is_keeping = True
            self._screen.run_worker(self._keep_quietly(), group="draft")

    async def keep(self) -> None:
        """Keep the prompt of the chat that is shown. Raises ChatError."""
        text = self._screen.prompt.text
        packed = self.chips.pack(text)
        await self._screen.conversation.keep_draft(packed)
        self._kept = text
        self._next_s = self._clock() + max(KEEP_INTERVAL_S, len(packed) / KEPT_CHARS_PER_S)

    async def recall(self) -> None:
        """Put the kept prompt of the chat that is shown into the box. Raises ChatError."""
        self._screen.prompt.chips = self.chips.names
        text = self.chips.unpack(await self._screen.conversation.draft())
        self._screen.prompt.put(text)
        self._kept = text

    async def sent(self) -> None:
        """The prompt was sent: nothing is kept any more. Raises ChatError."""
        self._screen.prompt.put("")
        self.chips.clear()
        await self.keep()

    async def attach(self, path: Path) -> None:
        """Put a chip for a text file at the cursor. Raises AttachmentError and OSError."""
        screen = self._screen
        text = await asyncio.to_thread(read_file, path)
        engine = screen.conversation.engine
        model, tokens = engine.model(), None
        # A foreign server may have no tokenizer to ask; the file can be sent all the same.
        with suppress(EngineError):
            tokens = len(await engine.tokenize(text)) if model is not None else None
        size = f"{short_count(tokens)} tokens" if tokens is not None else f"{short_count(len(text))} characters"
        if model is not None and tokens is not None and tokens > model.context_limit_tokens / 2:
            screen.tell(
                f"{path.name} takes {tokens} of the {model.context_limit_tokens} tokens of the context.", error=True
            )
        screen.prompt.insert(self.chips.add(f"file {path.name} · {size}", fenced(path.name, text)) + " ")
        screen.prompt.focus()

    def pasted(self, text: str) -> None:
        """Put a chip for a long text at the cursor."""
        lines = text.count("\n") + 1
        size = f"{lines} lines" if lines > 1 else f"{len(text)} characters"
        self._screen.prompt.insert(self.chips.add(f"pasted {size}", text))

    async def _keep_quietly(self) -> None:
        try:
            await self.keep()
        except ChatError:
            # A full disk is said when something is sent; here it would be said at every key.
            self._next_s = self._clock() + 10 * KEEP_INTERVAL_S
        finally:
            self._is_keeping = False

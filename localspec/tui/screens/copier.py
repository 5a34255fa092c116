"""Copies text to everywhere it can go, and says where that was."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from localspec.tui.clipboard import TERMINAL_LIMIT_BYTES, copy_with_desktop, write_private

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen


class Copier:
    """The terminal takes text by OSC 52, but not every terminal does, and none of them says so."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    def copy(self, text: str, what: str) -> None:
        """Copy, and tell the user; the slow ways run beside the interface."""
        if not text:
            self._screen.tell(f"The {what} is empty: nothing was copied.", error=True)
            return
        fits = len(text.encode("utf-8", "replace")) <= TERMINAL_LIMIT_BYTES
        if fits:
            self._screen.app.copy_to_clipboard(text)
        self._screen.run_worker(self._copy_elsewhere(text, what, fits), group="copy")

    async def _copy_elsewhere(self, text: str, what: str, in_terminal: bool) -> None:
        options = self._screen.options
        places = ["the terminal"] if in_terminal else []
        program = "" if options.over_ssh else await asyncio.to_thread(copy_with_desktop, text)
        if program:
            places.append(program)
        try:
            await asyncio.to_thread(write_private, options.copy_file, text)
            places.append(str(options.copy_file))
        except OSError as error:
            places.append(f"no file ({error.strerror})")
        note = "" if in_terminal else " It is too long for a terminal's clipboard."
        self._screen.tell(f"Copied the {what} to {', '.join(places)}.{note}")

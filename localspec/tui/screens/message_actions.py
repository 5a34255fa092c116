"""What can be done with the marked message: copy, branch, edit, go to another branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.chats import Stored
from localspec.tui.blocks import code_blocks

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen


class MessageActions:
    """Acts on the chat of a screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    async def run(self, action: str, message: Stored | None) -> None:
        """`action` is one of the transcript's; without a marked message only code can be copied. Raises ChatError."""
        screen, talk = self._screen, self._screen.conversation
        if message is None:
            if action == "copy_code":
                screen.action_copy_code()
        elif action == "copy":
            screen.copy_out(message.content, "message")
        elif action == "copy_code":
            blocks = code_blocks(message.content)
            if blocks:
                screen.copy_out(blocks[-1][1], "code block")
        elif screen.busy:
            screen.tell("An answer is being written: Esc stops it first.", error=True)
        elif action == "branch":
            await talk.show_until(message)
            await screen.shown()
            screen.prompt.focus()
        elif action == "edit" and message.role == "user":
            screen.put_prompt(await talk.go_back(message))
            await screen.shown()
        elif action in ("previous", "next"):
            await talk.show_sibling(message, 1 if action == "next" else -1)
            await screen.shown()
            screen.transcript.go_near(message)

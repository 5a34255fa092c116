"""What can be done with the marked message or block: copy, branch, edit, answer again, go to another branch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.chats import ChatError, Stored
from localspec.tui.blocks import code_blocks
from localspec.tui.message_lines import Block
from localspec.tui.slash_runner import STOP_FIRST

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen

_NAMES = {"thought": "thought", "code": "code block", "call": "tool call", "rest": "message"}


class MessageActions:
    """Acts on the chat of a screen."""

    def __init__(self, screen: ChatScreen) -> None:
        self._screen = screen

    async def run(self, action: str, message: Stored | None, block: Block | None = None) -> None:
        """`action` is one of the transcript's; without a marked message only code can be copied. Raises ChatError."""
        screen = self._screen
        if message is None:
            if action == "copy_code":
                screen.action_copy_code()
            else:
                screen.tell("Nothing is marked: Alt+Up marks a message, Up and Down a block.", error=True)
        elif action == "copy":
            what = "message" if block is None else _NAMES.get(block.part, "block")
            screen.copy_out(message.content if block is None else block.text, what)
        elif action == "copy_code":
            self._copy_code(message, block)
        elif screen.busy:
            screen.tell(f"An answer is being written: {STOP_FIRST}", error=True)
        else:
            await self._change(action, message)

    def _copy_code(self, message: Stored, block: Block | None) -> None:
        blocks = code_blocks(block.text if block is not None and block.part == "text" else message.content)
        if block is not None and block.part == "code":
            self._screen.copy_out(block.text, "code block")
        elif blocks:
            self._screen.copy_out(blocks[-1][1], "code block")
        else:
            self._screen.tell("There is no code block in what is marked.", error=True)

    async def _change(self, action: str, message: Stored) -> None:
        screen, talk = self._screen, self._screen.conversation
        if action == "branch":
            talk.show_until(message)
            await screen.shown()
            screen.prompt.focus()
            screen.tell("The next message starts a branch here; Esc in an empty prompt goes back.")
        elif action == "edit":
            question = self._question(message)
            screen.put_prompt(talk.go_back(question))
            screen.tell("Enter sends it as a new branch; Esc shows the chat as it was.")
            await screen.shown()
        elif action == "regenerate":
            talk.show_until(self._question(message))
            await screen.answering.start()
        elif action in ("previous", "next"):
            await talk.show_sibling(message, 1 if action == "next" else -1)
            await screen.shown()
            screen.transcript.go_near(message)

    def _question(self, message: Stored) -> Stored:
        """The message itself if the user wrote it, else the question that it follows. Raises ChatError."""
        messages = self._screen.conversation.messages
        ids = [other.id for other in messages]
        asked = [other for other in messages[: ids.index(message.id) + 1] if other.role == "user"]
        if not asked:
            raise ChatError("No question of yours comes before this message: mark another one.")
        return asked[-1]

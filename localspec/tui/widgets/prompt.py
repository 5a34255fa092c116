"""The box that prompts are written in: Enter sends, Ctrl+J or Alt+Enter breaks the line, Up recalls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual import events
from textual.message import Message
from textual.widgets import TextArea

from localspec.tui.attachments import PASTE_CHIP_CHARS, PASTE_CHIP_LINES
from localspec.tui.text import clean

_BREAKS = ("ctrl+j", "alt+enter", "shift+enter")


class Prompt(TextArea):
    """A multi-line input that grows with its text."""

    class Submitted(Message):
        """Enter was pressed."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    class Completion(Message):
        """Up, Down or Tab was pressed while completions are shown: move by `step`, or take the marked one (0)."""

        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

    class Pasted(Message):
        """Many lines were pasted; the screen may put a chip in their place."""

        def __init__(self, text: str) -> None:
            super().__init__()
            self.text = text

    def __init__(self, *, blink: bool = True, id: str | None = None) -> None:
        super().__init__(
            soft_wrap=True,
            tab_behavior="focus",
            show_line_numbers=False,
            highlight_cursor_line=False,
            placeholder="Ask something, or / for commands",
            id=id,
        )
        self.cursor_blink = blink
        self.completing = False
        """Set by the screen while completions are shown."""
        self.chips: Callable[[], Sequence[str]] = tuple
        """Set by the screen: texts that stand for others and go as a whole, since half of one stands for nothing."""
        self._history: Sequence[str] = ()
        self._stashed: list[str] = []
        self._recalled = -1
        self._unsent = ""

    def set_history(self, prompts: Sequence[str]) -> None:
        """What Up recalls, newest first."""
        self._history, self._recalled = (*self._stashed, *prompts), -1

    def stash(self) -> None:
        """Something else is put into the prompt: what was being written comes back by Up."""
        if self.text.strip():
            self._stashed.insert(0, self.text)
            self._history = (self.text, *self._history)

    def put(self, text: str) -> None:
        """Replace the text; the cursor goes to its end."""
        self.load_text(text)
        self.move_cursor(self.document.end)

    async def _on_key(self, event: events.Key) -> None:
        key = event.key
        if self.completing and key in ("up", "down", "tab"):
            self._take(event)
            self.post_message(self.Completion({"up": -1, "down": 1, "tab": 0}[key]))
        elif key == "enter":
            self._take(event)
            self.post_message(self.Submitted(self.text))
        elif key in _BREAKS:
            self._take(event)
            self.insert("\n")
        elif key == "backspace" and (chip := self._chip_before_cursor()):
            self._take(event)
            row, column = self.cursor_location
            self.delete((row, column - len(chip)), (row, column))
        elif key == "up" and self.cursor_location[0] == 0 and self._may_recall():
            self._take(event)
            self._recall(1)
        elif key == "down" and self._recalled >= 0 and self.cursor_at_last_line:
            self._take(event)
            self._recall(-1)
        else:
            await super()._on_key(event)

    async def _on_paste(self, event: events.Paste) -> None:
        event.stop()
        event.prevent_default()
        # Terminals and tmux send a pasted line break as the key Enter sends it.
        text = event.text.replace("\r\n", "\n").replace("\r", "\n")
        if text.count("\n") >= PASTE_CHIP_LINES or len(text) >= PASTE_CHIP_CHARS:
            self.post_message(self.Pasted(text))
        else:
            self.replace(clean(text), *self.selection)

    def _chip_before_cursor(self) -> str:
        row, column = self.cursor_location
        before = "" if self.selected_text else self.document.get_line(row)[:column]
        return next((chip for chip in self.chips() if before.endswith(chip)), "")

    def _may_recall(self) -> bool:
        return bool(self._history) and (not self.text or self._recalled >= 0)

    def _recall(self, step: int) -> None:
        if self._recalled < 0:
            self._unsent = self.text
        self._recalled = max(-1, min(len(self._history) - 1, self._recalled + step))
        self.put(self._unsent if self._recalled < 0 else self._history[self._recalled])

    @staticmethod
    def _take(event: events.Key) -> None:
        event.stop()
        event.prevent_default()

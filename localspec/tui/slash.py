"""The slash commands: their table, how a line is read, and completion. What they do is the screen's matter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.tui.options import SETTING_NAMES


@dataclass(frozen=True)
class Slash:
    """A command, how it is written, what it does."""

    name: str
    usage: str
    help: str


SLASHES: tuple[Slash, ...] = (
    Slash("help", "/help", "keys and commands"),
    Slash("model", "/model [NAME]", "switch to another installed model, or say what is loaded"),
    Slash("models", "/models", "what is there and what fits; fetch, load and remove models"),
    Slash("settings", "/settings", "sampling presets, thinking, drafter, system prompts, theme"),
    Slash("bench", "/bench", "measure drafters and depths against plain decoding"),
    Slash("tuner", "/tuner", "which drafter is used for which work, and why"),
    Slash(
        "system", "/system [TEXT|@NAME]", "show or set the system prompt, a saved one by @NAME; /system - removes it"
    ),
    Slash("set", "/set [NAME VALUE]", "show or set sampling: temperature, top_p, seed, max_tokens, ..."),
    Slash("think", "/think on|off|auto|N", "let the model think, not think, or think at most N tokens"),
    Slash("draft", "/draft off|auto|NAME [DEPTH]", "which drafter guesses ahead, and how far"),
    Slash("retry", "/retry", "answer the last question again, as a new branch"),
    Slash("branch", "/branch [N]", "go back to your N-th last question; the next message starts a branch"),
    Slash("export", "/export md|json [FILE]", "write the chat to a file"),
    Slash("import", "/import FILE", "read a chat that /export json wrote"),
    Slash("copy", "/copy [code|N]", "copy the last answer, its last code block, or the N-th last message"),
    Slash("attach", "/attach FILE", "put a text file into the message"),
    Slash("clear", "/clear", "start a new chat; this one stays in the list"),
    Slash("private", "/private", "start a private chat that is never written to disk"),
    Slash("save", "/save [TITLE]", "name the chat; a private chat is written to disk from then on"),
    Slash("stats", "/stats", "figures of the last answer and of the engine"),
    Slash("quit", "/quit", "leave; everything is saved"),
)
_BY_NAME = {slash.name: slash for slash in SLASHES}


class SlashError(Exception):
    """A line that is no command; the message says what would work."""


def read_slash(line: str) -> tuple[str, str] | None:
    """(name, argument) of a command line; None for text that is not one, such as a path or a code line.

    Raises SlashError for an unknown command.
    """
    if not line.startswith("/") or line.startswith("//") or "\n" in line:
        return None
    name, _, argument = line[1:].partition(" ")
    if "/" in name:
        return None
    if name in _BY_NAME:
        return name, argument.strip()
    started = [slash.name for slash in SLASHES if slash.name.startswith(name)] if name else []
    if len(started) == 1:
        return started[0], argument.strip()
    near = ", ".join(f"/{other}" for other in (started or _BY_NAME))
    raise SlashError(f"There is no command /{name}: use {near}. Start with // to send a line that begins with /.")


def complete(line: str, *, models: Sequence[str] = (), drafters: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(completed line, help) for a command line that is being typed; empty for other text."""
    if not line.startswith("/") or "\n" in line:
        return []
    name, space, argument = line[1:].partition(" ")
    if not space:
        return [
            (f"/{slash.name}" + (" " if " " in slash.usage else ""), f"{slash.usage}  {slash.help}")
            for slash in SLASHES
            if slash.name.startswith(name)
        ]
    choices: dict[str, Sequence[str]] = {
        "model": models,
        "draft": tuple(dict.fromkeys(("auto", *drafters))),
        "export": ("md", "json"),
        "think": ("on", "off", "auto"),
        "set": SETTING_NAMES,
        "copy": ("code",),
    }
    return [
        (f"/{name} {choice}" + (" " if name == "set" else ""), "")
        for choice in choices.get(name, ())
        if choice.startswith(argument) and choice != argument
    ]

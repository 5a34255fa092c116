"""What the slash commands do. Uses the conversation and a few calls of the screen, never a widget."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from localspec.api.engine import DrafterChoice
from localspec.chats.export import IMPORT_LIMIT_BYTES, from_json, to_json, to_markdown
from localspec.tui.blocks import code_blocks
from localspec.tui.clipboard import write_private
from localspec.tui.conversation import Conversation
from localspec.tui.drafter_choice import choose_drafter
from localspec.tui.message_lines import answer_figures
from localspec.tui.options import ChatSettings, UiOptions, with_setting
from localspec.tui.panel_text import acceptance, speedup_text
from localspec.tui.saved import PROMPTS_NOTE, read_prompts
from localspec.tui.slash import SlashError
from localspec.tui.text import percent

STOP_FIRST = "Esc stops it first."


class Host(Protocol):
    """What a command may ask of the interface it was typed in."""

    conversation: Conversation
    options: UiOptions

    def tell(self, text: str, *, error: bool = False) -> None:
        """Say something to the user."""
        ...

    def copy_out(self, text: str, what: str) -> None:
        """Copy text to wherever the interface can."""
        ...

    def show_help(self) -> None: ...

    def show_screen(self, kind: str) -> None:
        """Open `models`, `settings`, `bench` or `tuner`. Raises SlashError where there are no screens."""
        ...

    async def shown(self) -> None:
        """The conversation changed: show it."""
        ...

    async def new_chat(self, *, private: bool = False) -> None: ...

    async def retry(self) -> None: ...

    async def switch_model(self, name: str) -> None: ...

    async def attach(self, path: Path) -> None: ...

    def put_prompt(self, text: str) -> None: ...

    async def leave(self) -> None: ...


class SlashRunner:
    """Runs one command after another. Raises SlashError, SettingError, ChatError, EngineError and OSError."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._table: dict[str, Callable[[str], Awaitable[None]]] = {
            "help": self._help,
            "model": self._model,
            "models": self._screen("models"),
            "settings": self._screen("settings"),
            "bench": self._screen("bench"),
            "tuner": self._screen("tuner"),
            "system": self._system,
            "set": self._set,
            "think": self._think,
            "draft": self._draft,
            "retry": self._retry,
            "branch": self._branch,
            "export": self._export,
            "import": self._import,
            "copy": self._copy,
            "attach": self._attach,
            "clear": self._clear,
            "private": self._private,
            "save": self._save,
            "stats": self._stats,
            "quit": self._quit,
        }

    @property
    def names(self) -> frozenset[str]:
        """Commands that can be run."""
        return frozenset(self._table)

    async def run(self, name: str, argument: str) -> None:
        """Run one command."""
        await self._table[name](argument)

    async def _help(self, argument: str) -> None:
        self._host.show_help()

    def _screen(self, kind: str) -> Callable[[str], Awaitable[None]]:
        async def show(argument: str) -> None:
            self._host.show_screen(kind)

        return show

    async def _model(self, argument: str) -> None:
        if argument:
            await self._host.switch_model(argument)
            return
        names = ", ".join(name for name, _ in self._host.options.models)
        model = self._host.conversation.engine.model()
        self._host.tell(f"Loaded: {model.id if model else 'none yet'}. Installed: {names or 'not known here'}.")

    async def _system(self, argument: str) -> None:
        talk = self._host.conversation
        if argument.startswith("@"):
            saved = read_prompts(await talk.durable.run(lambda s: s.note(PROMPTS_NOTE)))
            if argument[1:] not in saved:
                known = ", ".join(f"@{name}" for name in saved) or "none; F2 saves one"
                raise SlashError(f"There is no saved prompt {argument}: there are {known}.")
            argument = saved[argument[1:]]
        if argument:
            await talk.configure(talk.settings, "" if argument == "-" else argument)
        self._host.tell(f"System prompt: {talk.system_prompt}" if talk.system_prompt else "There is no system prompt.")

    async def _set(self, argument: str) -> None:
        talk = self._host.conversation
        if argument:
            name, _, value = argument.partition(" ")
            await talk.configure(with_setting(talk.settings, name, value.strip()))
        self._host.tell(settings_text(talk.settings))

    async def _think(self, argument: str) -> None:
        talk = self._host.conversation
        choices: dict[str, bool | None] = {"on": True, "off": False, "auto": None}
        if argument in choices:
            settings = replace(talk.settings, thinking=choices[argument], thinking_budget_tokens=None)
        elif argument.isdecimal():
            settings = with_setting(replace(talk.settings, thinking=True), "thinking_budget_tokens", argument)
        else:
            raise SlashError("/think needs on, off, auto or a number of tokens.")
        await talk.configure(settings)
        self._host.tell(settings_text(settings))

    async def _draft(self, argument: str) -> None:
        words = argument.split()
        depth_is_number = len(words) < 2 or words[1].isdecimal()
        if not 1 <= len(words) <= 2 or not depth_is_number:
            model = self._host.conversation.engine.model()
            known = ", ".join(dict.fromkeys(("auto", *(model.drafters if model else ("off",)))))
            raise SlashError(f"/draft needs one of {known}, and may be followed by a depth.")
        talk = self._host.conversation
        depth = int(words[1]) if len(words) == 2 else None
        await choose_drafter(talk, DrafterChoice(words[0], depth))
        self._host.tell(f"Drafter: {words[0]}" + (f", depth {depth}." if depth is not None else "."))

    async def _retry(self, argument: str) -> None:
        await self._host.retry()

    async def _branch(self, argument: str) -> None:
        talk = self._host.conversation
        if talk.answer is not None:
            raise SlashError(f"/branch cannot cut an answer that is being written: {STOP_FIRST}")
        questions = [message for message in talk.messages if message.role == "user"]
        back = int(argument) if argument.isdecimal() else 1
        if (argument and not argument.isdecimal()) or not 1 <= back <= len(questions):
            raise SlashError(f"/branch needs a number from 1 to {len(questions)}, counted from the last question.")
        self._host.put_prompt(talk.go_back(questions[-back]))
        await self._host.shown()

    async def _export(self, argument: str) -> None:
        kind, _, name = argument.partition(" ")
        talk = self._host.conversation
        if kind not in ("md", "json") or talk.chat is None:
            raise SlashError("/export needs md or json, and a chat with a message in it.")
        chat_id = talk.chat.id
        chat = await talk.store.run(lambda s: s.chat(chat_id))
        if kind == "md":
            text = to_markdown(chat, talk.newest(await talk.store.run(lambda s: s.path(chat_id))))
        else:
            text = to_json(chat, talk.newest(await talk.store.run(lambda s: s.all_messages(chat_id))))
        path = self._path(name) if name else free_path(self._host.options.export_dir, chat.title, kind)
        if name and path.exists():
            raise SlashError(f"{path} exists: give another name.")
        write_private(path, text)
        self._host.tell(f"Written to {path}.")

    async def _import(self, argument: str) -> None:
        if not argument:
            raise SlashError("/import needs the name of a file that /export json wrote.")
        path = self._path(argument)
        if path.stat().st_size > IMPORT_LIMIT_BYTES:
            raise SlashError(f"{path} is larger than {IMPORT_LIMIT_BYTES >> 20} MiB.")
        text = path.read_text("utf-8", "replace")
        talk = self._host.conversation
        await self._host.new_chat()
        chat = await talk.store.run(lambda s: from_json(s, text))
        await talk.open(chat.id)
        await self._host.shown()

    async def _copy(self, argument: str) -> None:
        messages = self._host.conversation.messages
        if argument == "code":
            code = last_code(self._host.conversation)
            if code is None:
                raise SlashError("There is no code block in this chat.")
            self._host.copy_out(code, "code block")
            return
        answers = [m for m in messages if m.role == "assistant"] if not argument else messages
        back = int(argument) if argument.isdecimal() else 1
        if (argument and not argument.isdecimal()) or not 1 <= back <= len(answers):
            raise SlashError("/copy needs nothing, `code`, or the number of a message counted from the last.")
        self._host.copy_out(answers[-back].content, "message")

    async def _attach(self, argument: str) -> None:
        if not argument:
            raise SlashError("/attach needs the name of a text file.")
        await self._host.attach(self._path(argument))

    async def _clear(self, argument: str) -> None:
        await self._host.new_chat()

    async def _private(self, argument: str) -> None:
        await self._host.new_chat(private=True)

    async def _save(self, argument: str) -> None:
        talk = self._host.conversation
        if talk.private and talk.answer is not None:
            raise SlashError(f"/save cannot move a private chat while its answer is being written: {STOP_FIRST}")
        title = argument or (talk.chat.title if talk.chat else "")
        await talk.rename(title)
        await self._host.shown()
        self._host.tell(f"Saved as “{title}”.")

    async def _stats(self, argument: str) -> None:
        talk = self._host.conversation
        now = talk.engine.metrics()
        answers = [m for m in talk.messages if m.role == "assistant"]
        rate = acceptance(now.drafters)
        lines = [f"Last answer: {answer_figures(answers[-1]) or 'no figures'}" if answers else "No answer yet."]
        if answers and answers[-1].stats.get("cache_miss_reason"):
            lines.append(f"Read anew because: {answers[-1].stats['cache_miss_reason']}")
        lines.append(f"Drafts accepted since the start: {percent(rate) if rate is not None else 'none drafted'}.")
        lines.append(f"Speed: {now.tok_per_s:.1f} tok/s, {speedup_text(now)}.")
        lines.append(f"Requests {now.requests_total}, tokens {now.completion_tokens_total}.")
        self._host.tell("\n".join(lines))

    async def _quit(self, argument: str) -> None:
        await self._host.leave()

    def _path(self, name: str) -> Path:
        return self._host.options.export_dir / Path(name).expanduser()


def last_code(talk: Conversation) -> str | None:
    """The last code block of the shown branch."""
    for message in reversed(talk.messages):
        blocks = code_blocks(message.content) if message.role == "assistant" else []
        if blocks:
            return blocks[-1][1]
    return None


def settings_text(settings: ChatSettings) -> str:
    """What the chat sets itself, in one line."""
    values = {**settings.sampling}
    parts = [f"{name} {value:g}" for name, value in values.items()]
    for name in ("max_tokens", "depth", "thinking_budget_tokens", "drafter", "thinking"):
        value = getattr(settings, name)
        if value is not None:
            parts.append(f"{name} {value}")
    return "Set here: " + ", ".join(parts) + "." if parts else "Nothing is set here: the model's own settings hold."


def free_path(folder: Path, title: str, kind: str) -> Path:
    """A file name from a title that does not exist yet."""
    stem = "".join(c if c.isalnum() else "-" for c in title.lower()).strip("-")[:40] or "chat"
    path, number = folder / f"{stem}.{kind}", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.{kind}"
    return path

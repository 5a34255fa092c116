"""The lists that the chat screen opens: chats, search, models, and what is done with the thing picked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localspec.api.engine import DrafterChoice
from localspec.api.types import EngineError
from localspec.chats import ChatError
from localspec.chats.export import to_markdown
from localspec.tui.clipboard import write_private
from localspec.tui.lists import chat_rows, hit_rows, model_rows
from localspec.tui.screens.ask import AskScreen
from localspec.tui.screens.parameters import ParametersScreen
from localspec.tui.screens.pick import Picked, PickScreen, Row
from localspec.tui.slash_runner import free_path

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen

CHAT_ACTIONS = (("f2", "rename", "rename"), ("f3", "export", "export"), ("delete", "delete", "delete"))


class Browser:
    """Opens a list over the chat and acts on the choice."""

    def __init__(self, screen: ChatScreen, clock: Callable[[], float] = time.time) -> None:
        self._screen = screen
        self._clock = clock

    def show(self, kind: str) -> None:
        """Open `chats`, `search` or `models`."""
        screens = {
            "chats": lambda: PickScreen("Chats", self._chats, CHAT_ACTIONS, "No chat yet."),
            "search": lambda: PickScreen("Search in all chats", self._hits, (), "Nothing found."),
            "models": lambda: PickScreen("Installed models", self._models, (), "localspec pull NAME installs one."),
        }
        self._screen.run_worker(self._browse(kind, screens[kind]()), group="browse", exclusive=True)

    def show_parameters(self) -> None:
        """Open the parameters of the chat."""
        self._screen.run_worker(self._parameters(), group="browse", exclusive=True)

    async def _parameters(self) -> None:
        screen, talk = self._screen, self._screen.conversation
        asked = ParametersScreen(talk.settings, talk.system_prompt, talk.engine.model())
        chosen = await screen.app.push_screen_wait(asked)
        if chosen is None:
            return
        try:
            if chosen.drafter is not None:
                await talk.engine.choose_drafter(DrafterChoice(chosen.drafter, chosen.settings.depth))
            await talk.configure(chosen.settings, chosen.system_prompt)
        except (ChatError, EngineError, OSError) as error:
            screen.tell(str(error), error=True)

    async def _browse(self, kind: str, screen: PickScreen) -> None:
        picked = await self._screen.app.push_screen_wait(screen)
        if picked is None:
            return
        try:
            if kind == "models":
                await self._screen.switch_model(picked.key)
            elif kind == "search":
                chat_id, _, message_id = picked.key.partition(":")
                await self._screen.open_chat(chat_id, int(message_id))
            else:
                await self._on_chat(picked)
        except (ChatError, EngineError, OSError) as error:
            self._screen.tell(str(error), error=True)

    async def _on_chat(self, picked: Picked) -> None:
        screen, chat_id = self._screen, picked.key
        talk = screen.conversation
        if picked.action == "open":
            await screen.open_chat(chat_id)
            return
        chat = await talk.durable.run(lambda s: s.chat(chat_id))
        if picked.action == "rename":
            title = await screen.app.push_screen_wait(AskScreen("Title of the chat", chat.title))
            if title:
                await talk.durable.run(lambda s: s.update_chat(chat_id, title=title))
        elif picked.action == "export":
            path = free_path(screen.options.export_dir, chat.title, "md")
            write_private(path, to_markdown(chat, await talk.durable.run(lambda s: s.path(chat_id))))
            screen.tell(f"Written to {path}.")
        elif picked.action == "delete":
            answer = await screen.app.push_screen_wait(
                AskScreen(f"Delete “{chat.title}” with {chat.message_count} messages for good? Type yes.")
            )
            if answer is not None and answer.strip().lower() == "yes":
                await self._delete(chat_id)
        self.show("chats")

    async def _delete(self, chat_id: str) -> None:
        talk = self._screen.conversation
        if talk.chat is not None and talk.chat.id == chat_id:
            await self._screen.new_chat()
        await talk.durable.run(lambda s: s.delete(chat_id))
        try:
            await talk.engine.forget(chat_id)
        except (EngineError, OSError) as error:
            self._screen.tell(f"The chat is deleted; its cache could not be dropped ({error}).", error=True)

    async def _chats(self, typed: str) -> Sequence[Row]:
        chats = await self._screen.conversation.durable.run(lambda s: s.chats())
        return chat_rows(chats, typed, self._clock())

    async def _hits(self, typed: str) -> Sequence[Row]:
        return hit_rows(await self._screen.conversation.durable.run(lambda s: s.search(typed)))

    async def _models(self, typed: str) -> Sequence[Row]:
        model = self._screen.conversation.engine.model()
        return model_rows(self._screen.options.models, model.id if model else "", typed)

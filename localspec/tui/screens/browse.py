"""The screens that the chat opens over itself: lists, models, bench, tuner, settings, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from localspec.api.engine import DrafterChoice
from localspec.api.library import LibraryError, ModelLibrary
from localspec.api.types import EngineError
from localspec.chats import ChatError
from localspec.chats.export import to_markdown
from localspec.tui.clipboard import write_private
from localspec.tui.drafter_choice import NOTE, choose_drafter, read_choice
from localspec.tui.lists import chat_rows, hit_rows, model_rows
from localspec.tui.pulls import Pulls
from localspec.tui.saved import PROMPTS_NOTE, prompts_text, read_prompts
from localspec.tui.screens.ask import AskScreen
from localspec.tui.screens.bench import BenchScreen, BenchState
from localspec.tui.screens.models import ModelsScreen
from localspec.tui.screens.parameters import Parameters, ParametersScreen
from localspec.tui.screens.pick import Picked, PickScreen, Row
from localspec.tui.screens.tuner import TunerScreen
from localspec.tui.slash_runner import free_path
from localspec.tui.text import problem_text

if TYPE_CHECKING:
    from localspec.tui.screens.chat import ChatScreen

BEFORE_SEARCH = "Type words that a message holds; of the last one its beginning is enough."
CHAT_ACTIONS = (("f2", "rename", "rename"), ("f3", "export", "export"), ("delete", "delete", "delete"))


class Browser:
    """Opens a screen over the chat and acts on the choice. `library` None: models are not this program's to manage."""

    def __init__(
        self, screen: ChatScreen, library: ModelLibrary | None, clock: Callable[[], float] = time.time
    ) -> None:
        self._screen = screen
        self._library = library
        self._clock = clock
        self._pulls = None if library is None else Pulls(library, self._pull_ended)
        self._bench = BenchState()

    def show(self, kind: str) -> None:
        """Open `chats`, `search`, `models`, `bench`, `tuner` or `settings`."""
        lists = {
            "chats": lambda: PickScreen(
                "Chats", self._chats, CHAT_ACTIONS, "No title has these words.", "No chat yet."
            ),
            "search": lambda: PickScreen("Search in all chats", self._hits, (), "Nothing found.", BEFORE_SEARCH),
            "models": lambda: PickScreen("Installed models", self._models, (), "localspec pull NAME installs one."),
        }
        screens = {"bench": self._show_bench, "tuner": self._show_tuner, "settings": self._parameters}
        if self._library is not None:
            screens["models"] = self._show_models
        work = screens[kind]() if kind in screens else self._browse(kind, lists[kind]())
        self._screen.run_worker(self._told(work), group="browse", exclusive=True)

    async def close(self) -> None:
        """End what goes on behind the screens."""
        if self._pulls is not None:
            await self._pulls.close()

    async def _told(self, work: Coroutine[Any, Any, None]) -> None:
        # What a screen reads before it is open can fail as well; an error of a worker would end the app.
        try:
            await work
        except ChatError as error:
            self._screen.tell(str(error), error=True)

    async def _show_bench(self) -> None:
        screen = self._screen
        await screen.app.push_screen_wait(BenchScreen(screen.conversation, screen.options.export_dir, self._bench))

    async def _show_tuner(self) -> None:
        if await self._screen.app.push_screen_wait(TunerScreen(self._screen.conversation)) == "bench":
            await self._show_bench()

    async def _show_models(self) -> None:
        assert self._library is not None and self._pulls is not None, "show() asks for models only with a library"
        engine = self._screen.conversation.engine
        model, now = engine.model(), engine.metrics()
        held_bytes = sum(now.memory_bytes.values()) if model is not None else 0
        asked = ModelsScreen(self._library, self._pulls, model, held_bytes, self._library_changed)
        name = await self._screen.app.push_screen_wait(asked)
        if name is not None:
            await self._screen.switch_model(name)

    def _library_changed(self) -> None:
        self._screen.run_worker(self._read_library(), group="library", exclusive=True)

    async def _read_library(self) -> None:
        """Completion of /model knows what is installed now."""
        if self._library is None:
            return
        try:
            models = await self._library.models()
        except LibraryError:
            return
        installed = tuple((model.id, model.title) for model in models if model.installed)
        self._screen.options = replace(self._screen.options, models=installed)

    def _pull_ended(self, name: str, problem: str) -> None:
        if not self._screen.is_running:
            return
        # A drafter is taken in when its model is loaded.
        base = name.rpartition(".")[0]
        model = base if base in [known for known, _ in self._screen.options.models] else name
        self._screen.tell(problem or f"{name} is ready: /model {model} loads it.", error=bool(problem))
        self._library_changed()

    async def _parameters(self) -> None:
        screen, talk = self._screen, self._screen.conversation
        now = await self._choice_now()
        prompts = read_prompts(await talk.durable.run(lambda s: s.note(PROMPTS_NOTE)))
        settings = replace(talk.settings, depth=now.depth if now is not None else talk.settings.depth)
        given = Parameters(
            settings, talk.system_prompt, now.drafter if now is not None else None, prompts, screen.app.theme
        )
        themes = sorted(screen.app.available_themes)
        model = talk.engine.model()
        asked = ParametersScreen(given, model, await self._presets(model.id if model else ""), themes)
        chosen = await screen.app.push_screen_wait(asked)
        if chosen is None:
            return
        try:
            await self._take(chosen, given, now)
        except (ChatError, EngineError, OSError) as error:
            screen.tell(problem_text(error), error=True)

    async def _take(self, chosen: Parameters, given: Parameters, now: DrafterChoice | None) -> None:
        """Do what the settings screen asked for. Raises ChatError, EngineError and OSError."""
        talk, settings = self._screen.conversation, chosen.settings
        if chosen.drafter is not None:
            choice = DrafterChoice(chosen.drafter, settings.depth)
            if choice != now:
                await choose_drafter(talk, choice)
            # The engine has both now.
            settings = replace(settings, drafter=None, depth=None)
        await talk.configure(settings, chosen.system_prompt)
        if chosen.saved_prompts != given.saved_prompts and not talk.private:
            text = prompts_text(chosen.saved_prompts)
            await talk.durable.run(lambda s: s.remember(PROMPTS_NOTE, text))

    async def _choice_now(self) -> DrafterChoice | None:
        """What the engine was told last; None where it does not tell."""
        talk = self._screen.conversation
        try:
            report = await talk.engine.explain()
        except EngineError:
            return None
        if not report.by_hand:
            return DrafterChoice("auto", None)
        said = read_choice(await talk.durable.run(lambda s: s.note(NOTE)))
        same = said is not None and said.drafter == report.drafter
        return said if same else DrafterChoice(report.drafter, report.depth or None)

    async def _presets(self, model_id: str) -> Mapping[str, Mapping[str, float]]:
        if self._library is None:
            return {}
        try:
            models = await self._library.models()
        except LibraryError:
            return {}
        return next((model.presets for model in models if model.id == model_id), {})

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
            self._screen.tell(problem_text(error), error=True)

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
            talk.give_up_unsaved()
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

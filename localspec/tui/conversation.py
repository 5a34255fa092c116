"""The conversation that is shown: its branch, its settings, and the answer that is being written.

Puts store and engine together. Knows no widget: a screen, the plain mode and the tests use it alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from localspec.api.engine import Engine
from localspec.api.types import EngineError, Event, GenerateRequest, Sampling
from localspec.chats import Chat, ChatError, NewChat, Stored, StoreWorker, private_store
from localspec.chats.drafts import keep_draft, leave_draft, take_draft
from localspec.chats.export import from_json, to_json
from localspec.chats.store import title_from
from localspec.tui.answer import Answer
from localspec.tui.draft_owner import has_gone, new_owner
from localspec.tui.options import ChatSettings
from localspec.tui.saved import SETTINGS_NOTE, read_settings, settings_text

SAVE_INTERVAL_S = 0.5
WHOLE_SAVES = 8
"""One save in so many of a growing answer also says who drafted what."""
STAGE_INTERVAL_S = 0.3


class Conversation:
    """One conversation at a time. All calls belong to one event loop."""

    def __init__(self, engine: Engine, store: StoreWorker, settings: ChatSettings, *, private: bool = False) -> None:
        self.engine = engine
        self.settings = settings
        self.system_prompt = ""
        self.chat: Chat | None = None
        self.messages: list[Stored] = []
        self.places: dict[int, tuple[int, int]] = {}
        self.is_cut = False
        """Whether less of the branch is shown than the store has, until a message is sent there."""
        self.answer: Answer | None = None
        """The answer being written; None while nothing runs."""
        self.durable = store
        self._private: StoreWorker | None = None
        self._store = store
        self._owner = new_owner()
        self._unsaved: dict[tuple[StoreWorker, int], Stored] = {}
        """Messages whose last save is under way or has failed: what the store has of them is older."""
        if private:
            self._use_private()

    @property
    def private(self) -> bool:
        return self._store is not self.durable

    @property
    def store(self) -> StoreWorker:
        """Where this conversation is kept."""
        return self._store

    def new(self, *, private: bool = False) -> None:
        """Begin an empty conversation; it is stored with its first message. A private one that is left is forgotten."""
        self._drop_private()
        if private:
            self._use_private()
        self.chat, self.messages, self.places, self.system_prompt, self.is_cut = None, [], {}, "", False

    async def settle(self) -> None:
        """Save what could not be saved when it was due. Raises ChatError while that fails; nothing is dropped then."""
        for (store, _), message in list(self._unsaved.items()):
            await self._save(store, message)

    def give_up_unsaved(self) -> None:
        """The shown conversation is to go, with what could not be saved of it."""
        self._unsaved = {key: message for key, message in self._unsaved.items() if key[0] is not self._store}

    def newest(self, messages: Iterable[Stored]) -> tuple[Stored, ...]:
        """Messages of the shown conversation as read from its store, with the text that could not be saved yet."""
        return tuple(self._unsaved.get((self._store, message.id), message) for message in messages)

    async def open(self, chat_id: str, message_id: int | None = None) -> None:
        """Show a stored conversation, at the branch of `message_id` if given. Raises ChatError."""
        await self.settle()
        if message_id is not None:
            leaf = await self.durable.run(lambda s: s.latest_leaf(message_id))
            await self.durable.run(lambda s: s.show_branch(chat_id, leaf))
        chat = await self.durable.run(lambda s: s.chat(chat_id))
        self.new()
        self.chat, self.system_prompt = chat, chat.system_prompt
        self.settings = ChatSettings.from_json(chat.settings)
        await self._reload()

    async def say(self, text: str) -> None:
        """Add a message of the user at the end of the branch. Raises ChatError; nothing is added then."""
        await self.settle()
        is_first = self.chat is None and not self.private
        chat = await self._ensure_chat(text)
        parent = self.messages[-1].id if self.messages else None
        await self._store.run(lambda s: s.add(chat.id, Stored("user", text, parent)))
        if is_first:
            # What was being written before there was a chat is its first message now.
            await self.durable.run(lambda s: keep_draft(s, self._owner, ""))
        await self._reload()

    async def start_answer(self) -> None:
        """Add an empty answer after the last message. Raises ChatError; nothing is added then."""
        if self.chat is None or not self.messages:
            raise ChatError("There is no question to answer yet: write one first.")
        await self.settle()
        chat_id, model = self.chat.id, self.engine.model()
        base = Stored(
            "assistant",
            "",
            self.messages[-1].id,
            state="streaming",
            model_id=model.id if model else self.engine.metrics().model_id,
        )
        await self._store.run(lambda s: s.add(chat_id, base))
        await self._reload()
        self.answer = Answer()

    async def run_answer(self) -> None:
        """Fill the answer that `start_answer` added. Cancelling this call stops the engine; the text so far is kept.

        Whatever happens to the engine ends up in the answer's state and status. Raises ChatError if the end could not
        be saved, also when it was cancelled; `settle` tries that again.
        """
        answer, base = self.answer, self.messages[-1]
        if answer is None:
            raise ChatError("No answer was started: write a question first.")
        store = self._store
        saving = _Saving(store, answer, base)
        try:
            await self._wait_ready(answer)
            base = saving.base = self._with_model(base)
            self._show_last(base)
            async with aclosing(cast("AsyncGenerator[Event, None]", self.engine.generate(self.request()))) as events:
                async for event in events:
                    answer.take(event)
                    saving.sometimes()
            if answer.state == "streaming":
                answer.stop("error", "the engine went away before the answer was complete; /retry answers again")
        except asyncio.CancelledError:
            answer.stop("cancelled", "stopped")
            raise
        except EngineError as error:
            answer.stop("error", error.message)
        except Exception as error:
            # A dead engine can fail in any way (connection, JSON, its own fault): the chat must survive all of them.
            answer.stop("error", f"the engine failed ({error or type(error).__name__}); /retry answers again")
        finally:
            self.answer = None
            self._show_last(answer.stored(base))
            await self._save(store, answer.stored(base))

    def request(self) -> GenerateRequest:
        """The request that answers the shown branch (without an answer that is being written)."""
        model = self.engine.model()
        messages = self.messages[:-1] if self.answer is not None else self.messages
        return self.settings.request(
            tuple(messages),
            self.system_prompt,
            model.sampling if model else Sampling(),
            chat_id=self.chat.id if self.chat else "",
            private=self.private,
        )

    def go_back(self, message: Stored) -> str:
        """Cut the shown branch before a message and return its text, so that it can be sent anew. Not in mid-answer.

        The store keeps the whole branch until a message is added in its place; `restore` shows it again.
        """
        ids = [other.id for other in self.messages]
        self.messages = self.messages[: ids.index(message.id) if message.id in ids else None]
        self.is_cut = True
        return message.content

    def show_until(self, message: Stored) -> None:
        """Cut the shown branch after a message; the next one starts a branch there. Not while an answer is written.

        See `go_back`.
        """
        ids = [other.id for other in self.messages]
        self.messages = self.messages[: ids.index(message.id) + 1 if message.id in ids else None]
        self.is_cut = True

    async def restore(self) -> None:
        """Show the branch again that was cut, when nothing was sent in its place."""
        if self.is_cut:
            await self._reload()

    def drop_last_answer(self) -> None:
        """Cut the shown branch after the last message of the user; its answers stay as siblings. Raises ChatError."""
        questions = [message for message in self.messages if message.role == "user"]
        if not questions:
            raise ChatError("There is no question to answer again: write one first.")
        self.show_until(questions[-1])

    async def show_sibling(self, message: Stored, step: int) -> None:
        """Show the branch of the next (1) or previous (-1) sibling of a message."""
        chat_id = message.chat_id
        ids = await self._store.run(lambda s: s.siblings(message))
        position = ids.index(message.id) + step
        if 0 <= position < len(ids):
            leaf = await self._store.run(lambda s: s.latest_leaf(ids[position]))
            await self._store.run(lambda s: s.show_branch(chat_id, leaf))
            await self._reload()

    async def configure(self, settings: ChatSettings, system_prompt: str | None = None) -> None:
        """Change what the chat asks of the engine, from the next answer on."""
        self.settings = settings
        self.system_prompt = self.system_prompt if system_prompt is None else system_prompt
        if self.chat is not None:
            chat_id, values, prompt = self.chat.id, settings.to_json(), self.system_prompt
            await self._store.run(lambda s: s.update_chat(chat_id, settings=values, system_prompt=prompt))
        if not self.private:
            kept = settings_text(settings)
            await self.durable.run(lambda s: s.remember(SETTINGS_NOTE, kept))

    async def recall_settings(self) -> None:
        """Take the settings of an earlier run for new chats, unless this one was started with some."""
        if self.settings == ChatSettings(drafter=self.settings.drafter, depth=self.settings.depth):
            kept = read_settings(await self.durable.run(lambda s: s.note(SETTINGS_NOTE)))
            self.settings = replace(kept, drafter=self.settings.drafter, depth=self.settings.depth)

    async def rename(self, title: str) -> None:
        """Name the chat; a private one is written to disk by this, with all its branches."""
        if self.chat is None:
            raise ChatError("An empty chat has no name: write a message first.")
        chat_id = self.chat.id
        await self._store.run(lambda s: s.update_chat(chat_id, title=title))
        if self.private:
            if await self.durable.run(lambda s: s.private):
                raise ChatError("This run keeps nothing: start localspec chat without --private to save chats.")
            text = await self._store.run(lambda s: to_json(s.chat(chat_id), s.all_messages(chat_id)))
            saved = await self.durable.run(lambda s: from_json(s, text))
            await self.open(saved.id)
        else:
            self.chat = replace(self.chat, title=title)

    async def keep_draft(self, text: str) -> None:
        """Keep an unsent prompt; of a private chat nothing is kept."""
        if self.private:
            return
        if self.chat is None:
            await self.durable.run(lambda s: keep_draft(s, self._owner, text))
        else:
            chat_id = self.chat.id
            await self.durable.run(lambda s: s.update_chat(chat_id, draft=text))

    async def draft(self) -> str:
        """The unsent prompt of this chat; for a new one, that of an interface that has ended is taken over."""
        if self.private:
            return ""
        if self.chat is None:
            return await self.durable.run(lambda s: take_draft(s, self._owner, has_gone))
        chat_id = self.chat.id
        return (await self.durable.run(lambda s: s.chat(chat_id))).draft

    async def warm(self) -> None:
        """Bring the engine's cache of this chat near while the user reads; failing is no harm."""
        if self.chat is not None and self.messages and self.engine.model() is not None:
            try:
                await self.engine.warm(self.request())
            except (EngineError, OSError):
                return

    def close(self) -> None:
        """Forget a private chat; what is unsent may be shown elsewhere. Before the store is closed."""
        self._drop_private()
        self.durable.submit(lambda s: leave_draft(s, self._owner))

    async def _save(self, store: StoreWorker, message: Stored) -> None:
        # Noted before it is tried: whoever waits here may be cancelled, and would not learn that it failed.
        key = (store, message.id)
        self._unsaved[key] = message
        await store.run(lambda s: s.save(message))
        if self._unsaved.get(key) is message:
            del self._unsaved[key]

    async def _wait_ready(self, answer: Answer) -> None:
        if self.engine.model() is not None:
            return
        waiting = asyncio.ensure_future(self.engine.wait_ready())
        try:
            while not waiting.done():
                stage = self.engine.metrics().stage
                answer.wait(f"waits for the model: {stage}" if stage else "waits for the model")
                await asyncio.wait({waiting}, timeout=STAGE_INTERVAL_S)
            await waiting
        finally:
            waiting.cancel()

    def _show_last(self, message: Stored) -> None:
        """Show the newer text of the last message, unless the branch was cut before it meanwhile."""
        if self.messages and self.messages[-1].id == message.id:
            self.messages[-1] = message

    def _with_model(self, base: Stored) -> Stored:
        model = self.engine.model()
        return base if model is None else replace(base, model_id=model.id)

    async def _ensure_chat(self, text: str) -> Chat:
        if self.chat is None:
            model = self.engine.model()
            new = NewChat(title_from(text), model.id if model else "", self.system_prompt, self.settings.to_json())
            self.chat = await self._store.run(lambda s: s.create(new))
        return self.chat

    async def _reload(self) -> None:
        # What the store has must not take the place of newer text that is only here.
        await self.settle()
        self.is_cut = False
        if self.chat is None:
            return
        chat_id = self.chat.id
        self.chat = await self._store.run(lambda s: s.chat(chat_id))
        self.messages = list(await self._store.run(lambda s: s.path(chat_id))) if self.chat.leaf_id else []
        self.places = await self._store.run(lambda s: s.places(chat_id))

    def _use_private(self) -> None:
        self._private = self._store = StoreWorker(private_store)

    def _drop_private(self) -> None:
        if self._private is not None:
            self._private.close()
            self._unsaved = {key: message for key, message in self._unsaved.items() if key[0] is self.durable}
        self._private, self._store = None, self.durable


class _Saving:
    """Saves a growing answer, at most once in half a second and never twice at once, so a slow disk stalls nothing."""

    def __init__(
        self, store: StoreWorker, answer: Answer, base: Stored, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.base = base
        self._store, self._answer, self._clock = store, answer, clock
        self._saved_s = clock()
        self._count = 0
        self._running: Future[None] | None = None

    def sometimes(self) -> None:
        now = self._clock()
        if now - self._saved_s < SAVE_INTERVAL_S or (self._running is not None and not self._running.done()):
            return
        self._saved_s, message = now, self._answer.stored(self.base)
        self._count += 1
        is_whole = self._count % WHOLE_SAVES == 1
        self._running = self._store.submit(lambda s: s.save(message) if is_whole else s.save_text(message))

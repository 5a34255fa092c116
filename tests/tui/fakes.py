"""What the tests of the interface share: a started app on the scripted engine, waiting, an engine that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import Event, GenerateRequest, MetricsSnapshot, ModelInfo
from localspec.chats import StoreWorker, open_store
from localspec.tui.app import LocalspecApp
from localspec.tui.options import ChatSettings, UiOptions

WIDE, NARROW, TINY = (120, 36), (80, 24), (50, 14)


def scripted(*texts: str, **script: Any) -> ScriptedEngine:
    """An engine that says these texts in turn, as fast as it goes unless `tok_per_s` is given."""
    return ScriptedEngine(Script(replies=tuple(Reply(text) for text in texts), **script))


class DyingEngine(ScriptedEngine):
    """Breaks the connection after a few events of its first request, then says it is gone until `revive`."""

    def __init__(self, error: BaseException | None, after_events: int = 6) -> None:
        super().__init__(Script(replies=(Reply("An answer that breaks off"), Reply("A whole answer"))))
        self._error = error
        self._after_events = after_events
        self.dead = False
        self._alive = asyncio.Event()

    def metrics(self) -> MetricsSnapshot:
        return MetricsSnapshot(state="stopped", stage="connection lost") if self.dead else super().metrics()

    def model(self) -> ModelInfo | None:
        return None if self.dead else super().model()

    async def wait_ready(self) -> ModelInfo:
        if self.dead:
            await self._alive.wait()
        return await super().wait_ready()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        is_first = self._n_requests == 0
        number = 0
        async for event in super().generate(request):
            yield event
            number += 1
            if is_first and number == self._after_events:
                self.dead = True
                if self._error is not None:
                    raise self._error
                return

    def revive(self) -> None:
        self.dead = False
        self._alive.set()


@asynccontextmanager
async def started(
    engine: Any,
    folder: Path,
    size: tuple[int, int] = WIDE,
    settings: ChatSettings | None = None,
    **options: Any,
) -> AsyncIterator[tuple[LocalspecApp, Pilot[None]]]:
    """A running app whose chats lie in `folder`; it is left as Ctrl+Q leaves it."""
    store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
    ui = UiOptions(export_dir=folder, copy_file=folder / "copied.txt", still=True, over_ssh=True, **options)
    app = LocalspecApp(engine, store, ui, settings)
    try:
        async with app.run_test(size=size) as pilot:
            await until(lambda: app.screen is app.chat and app.chat.transcript.look.width > 0)
            yield app, pilot
            await app.chat.leave()
    finally:
        store.close()


async def until(predicate: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Wait for a state instead of for a time."""
    end_s = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end_s, "the state that the test waits for did not come"
        await asyncio.sleep(0.01)


async def ask(app: LocalspecApp, pilot: Pilot[None], text: str) -> None:
    """Send a prompt and wait for the end of the answer."""
    count = len(app.chat.conversation.messages)
    app.chat.prompt.put(text)
    await pilot.press("enter")
    await until(lambda: len(app.chat.conversation.messages) == count + 2 and not app.chat.busy)
    await pilot.pause()

"""What the tests of the interface share: a started app on the scripted engine, waiting, an engine that dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from textual.pilot import Pilot
from textual.widgets import OptionList

from localspec.api.library import ModelLibrary
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import (
    ClientMetrics,
    Delta,
    Done,
    DrafterMetrics,
    Event,
    GenerateRequest,
    MetricsSnapshot,
    ModelInfo,
    Phase,
    Span,
    Timings,
    Usage,
)
from localspec.chats import StoreWorker, open_store
from localspec.tui.app import LocalspecApp
from localspec.tui.options import ChatSettings, UiOptions
from localspec.tui.screens.pick import PickScreen

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
    library: ModelLibrary | None = None,
    **options: Any,
) -> AsyncIterator[tuple[LocalspecApp, Pilot[None]]]:
    """A running app whose chats lie in `folder`; it is left as Ctrl+Q leaves it."""
    store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
    ui = UiOptions(export_dir=folder, copy_file=folder / "copied.txt", still=True, over_ssh=True, **options)
    app = LocalspecApp(engine, store, ui, settings, library)
    try:
        async with app.run_test(size=size) as pilot:
            await until(lambda: app.screen is app.chat and app.chat.transcript.look.width > 0)
            yield app, pilot
            await app.chat.leave()
    finally:
        store.close()


async def until(predicate: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait for a state instead of for a time."""
    end_s = time.monotonic() + timeout_s
    while not predicate():
        assert time.monotonic() < end_s, "the state that the test waits for did not come"
        await asyncio.sleep(0.01)


async def listed(app: LocalspecApp, count: int) -> None:
    """Wait until a list is open and shows that many rows."""
    await until(lambda: isinstance(app.screen, PickScreen) and app.screen.query_one(OptionList).option_count == count)


async def ask(app: LocalspecApp, pilot: Pilot[None], text: str) -> None:
    """Send a prompt and wait for the end of the answer."""
    count = len(app.chat.conversation.messages)
    app.chat.prompt.put(text)
    await pilot.press("enter")
    await until(lambda: len(app.chat.conversation.messages) == count + 2 and not app.chat.busy)
    await pilot.pause()


FIXED_TEXT = """Two numbers decide how much drafting gains:

1. how many drafts are **accepted**, and
2. what a step costs.

```python
def speedup(run: float, draft_ms: float, verify_ms: float, plain_ms: float) -> float:
    return run * plain_ms / (draft_ms + verify_ms)
```

| drafter | run  |
|---------|------|
| ngram   | 1.84 |
| mtp     | 3.10 |
"""


HALF_WAY_CHARS = 260


class FixedEngine(ScriptedEngine):
    """Says one text in even pieces with fixed figures, and may stop half way, for pictures that never change."""

    def __init__(self, *, half_way: bool = False, loading: bool = False) -> None:
        super().__init__(Script())
        self._half_way = half_way
        self._loading = loading

    def model(self) -> ModelInfo | None:
        if self._loading:
            return None
        note = "For real work: localspec pull qwen3.6-27b"
        return ModelInfo("smollm2-135m", "SmolLM2 135M", 8192, 49152, True, note, ("off", "ngram", "mtp"), thinks=True)

    async def wait_ready(self) -> ModelInfo:
        if self._loading:
            await asyncio.Event().wait()
        model = self.model()
        assert model is not None
        return model

    def metrics(self) -> MetricsSnapshot:
        if self._loading:
            return MetricsSnapshot(model_id="smollm2-135m", stage="reading weights, 41%")
        return MetricsSnapshot(
            state="ready",
            model_id="smollm2-135m",
            device="cpu, 2 threads",
            drafter="ngram+mtp",
            depth=4,
            drafter_reason="best of 5 measured here for answers",
            context_limit_tokens=8192,
            context_used_tokens=2300,
            active_requests=1,
            tok_per_s=41.3,
            plain_tok_per_s=22.0,
            speedup_vs_plain=1.88,
            mean_accepted_run=2.31,
            verify_steps=400,
            verify_ms=400 * 41.5,
            draft_ms=400 * 1.9,
            prefill_done_tokens=1024 if self._half_way else 2048,
            prefill_total_tokens=2048,
            memory_bytes={"weights": 272_000_000, "kv": 96_000_000, "other": 11_000_000},
            drafters=(
                DrafterMetrics("ngram", 210, 700, 290, (210, 190, 170, 130), (130, 80, 50, 30), 30.0),
                DrafterMetrics("mtp", 190, 700, 560, (190, 180, 170, 160), (180, 150, 130, 100), 700.0),
            ),
            clients=(ClientMetrics("chat", 3, 812, 1400, 850), ClientMetrics("editor", 1, 90, 0, 0)),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        thought = "The user wants the short form."
        yield Delta(thought, (1,) * 7, (Span(len(thought), "target", Phase.THINKING),))
        origins = ("target", "ngram", "mtp", "mtp")
        pieces = [FIXED_TEXT[at : at + 5] for at in range(0, len(FIXED_TEXT), 5)]
        for number, piece in enumerate(pieces):
            if self._half_way and number * 5 >= HALF_WAY_CHARS:
                await asyncio.Event().wait()
            origin = origins[number * 7 % 4]
            yield Delta(piece, (number,), (Span(len(piece), origin, Phase.ANSWER),), 2 if number % 9 == 4 else 0)
        timings = Timings(50.0, 1640.0, 41.3, 40, 160, 98, (38, 30, 20, 10), 76.0, 1550.0, 1.88)
        yield Done("stop", Usage(31, len(pieces) + 7, 16, 7), timings)

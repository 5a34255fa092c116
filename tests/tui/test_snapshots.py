"""Pictures of the screens at two sizes. After a wanted change: pytest tests/tui/test_snapshots.py --snapshot-update."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import OptionList

from localspec.api.types import (
    Delta,
    Done,
    EngineError,
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
from localspec.tui.options import UiOptions
from tests.tui.fakes import NARROW, TINY, WIDE, FixedEngine, listed, until

Steps = Callable[[LocalspecApp, Pilot[None]], Awaitable[None]]


async def _ask(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await until(lambda: app.screen is app.chat and app.chat.transcript.look.width > 0)
    app.chat.prompt.put("What decides the gain?")
    await pilot.press("enter")


async def _answered(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _ask(app, pilot)
    await until(lambda: len(app.chat.conversation.messages) == 2 and not app.chat.busy)
    message = app.chat.conversation.messages[-1]
    # The one figure that a clock makes.
    fixed = {**message.stats, "reasoning_s": 1.2}
    app.chat.transcript.update_last(type(message)(**{**message.__dict__, "stats": fixed}))
    await _settle(app, pilot)


async def _half_way(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _ask(app, pilot)
    await until(
        lambda: app.chat.conversation.answer is not None and "return run" in app.chat.conversation.answer.content
    )
    app.chat.conversation.answer.reasoning_s = 1.2  # type: ignore[union-attr]
    app.chat.conversation.answer.version += 1  # type: ignore[union-attr]
    app.chat.answering.flush()
    await _settle(app, pilot)


async def _loading(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await until(lambda: app.screen is app.chat and app.chat.transcript.look.width > 0)
    app.chat.prompt.put("/dr")
    await _settle(app, pilot)


async def _settle(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await pilot.pause(0.1)
    # A sparkline of as many samples as it is wide does not depend on how long the steps took.
    for _ in range(40):
        app.chat.sample()
    await pilot.pause()


async def _drafts(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await pilot.press("ctrl+d")
    await pilot.pause()


async def _chats(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await pilot.press("ctrl+r")
    await listed(app, 1)
    await pilot.pause()


async def _idle(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await until(lambda: app.screen is app.chat and app.chat.transcript.look.width > 0)
    await _settle(app, pilot)


async def _thoughts(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await pilot.press("ctrl+t")
    app.chat.transcript.scroll_home(animate=False)
    await pilot.pause()


async def _calls(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    # Two blocks above the text behind the calls: the first call, unfolded by the cursor.
    await pilot.press("alt+up", "down", "down", "down", "enter")
    await pilot.pause()


async def _help(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await pilot.press("f1")
    await until(lambda: app.screen is not app.chat)
    await pilot.pause()


async def _palette(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await pilot.press("ctrl+p")
    await until(lambda: app.screen is not app.chat)
    await pilot.press(*"th")
    await until(lambda: app.screen.query_one(OptionList).option_count > 0)
    app.screen.query_one("Input").cursor_blink = False  # type: ignore[attr-defined]
    await pilot.pause(0.2)


async def _broken(app: LocalspecApp, pilot: Pilot[None]) -> None:
    await _answered(app, pilot)
    await until(lambda: len(app._notifications) == 1)
    assert isinstance(app.chat.conversation.engine, BreakingEngine)
    app.chat.conversation.engine.gone = True
    await _settle(app, pilot)
    await until(lambda: len(app._notifications) == 2)
    await pilot.pause()


class CallingEngine(FixedEngine):
    """Calls two tools between two sentences."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        one = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": [1, 2]}}\n</tool_call>\n'
        two = "<tool_call>\n<function=run>\n<parameter=code>\nx = 1\nprint(x)\n</parameter>\n</function>\n</tool_call>"
        parts = (("I hurry.", Phase.THINKING), ("I look it up.\n\n", Phase.ANSWER), (one + two, Phase.TOOL_CALL))
        for text, phase in (*parts, ("\n\nThat is all.", Phase.ANSWER)):
            yield Delta(text, (1, 2), (Span(len(text), "target", phase),))
        yield Done("tool_calls", Usage(31, 60, 16, 2), Timings(50.0, 1640.0, 41.3, 40, 160, 98))


class BreakingEngine(FixedEngine):
    """Goes away in mid-answer and is being started again."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False

    def model(self) -> ModelInfo | None:
        return None if self.gone else super().model()

    def metrics(self) -> MetricsSnapshot:
        now = super().metrics()
        return replace(now, state="loading", stage="starting the engine", active_requests=0) if self.gone else now

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        for text, phase in (("Hm.", Phase.THINKING), ("The first words of an answer", Phase.ANSWER)):
            yield Delta(text, (1, 2), (Span(len(text), "target", phase),))
        raise EngineError("internal", "The engine stopped in mid-answer; the text so far is kept.")


HALF, LOADING = partial(FixedEngine, half_way=True), partial(FixedEngine, loading=True)
CASES: list[tuple[str, tuple[int, int], Callable[[], FixedEngine], Steps]] = [
    ("idle", WIDE, FixedEngine, _idle),
    ("answered", WIDE, FixedEngine, _answered),
    ("answered", NARROW, FixedEngine, _answered),
    ("thoughts", NARROW, FixedEngine, _thoughts),
    ("half_way", WIDE, HALF, _half_way),
    ("half_way", TINY, HALF, _half_way),
    ("calls", NARROW, CallingEngine, _calls),
    ("drafts", WIDE, FixedEngine, _drafts),
    ("drafts", NARROW, FixedEngine, _drafts),
    ("loading", NARROW, LOADING, _loading),
    ("broken", WIDE, BreakingEngine, _broken),
    ("chats", NARROW, FixedEngine, _chats),
    ("help", WIDE, FixedEngine, _help),
    ("palette", NARROW, FixedEngine, _palette),
    ("no_color", NARROW, FixedEngine, _drafts),
]


@pytest.mark.parametrize(("name", "size", "engine", "steps"), CASES, ids=[f"{c[0]}-{c[1][0]}x{c[1][1]}" for c in CASES])
def test_screen(
    name: str,
    size: tuple[int, int],
    engine: Callable[[], FixedEngine],
    steps: Steps,
    tmp_path: Path,
    snap_compare: Any,
) -> None:
    store = StoreWorker(lambda: open_store(tmp_path / "chats.sqlite3"))
    options = UiOptions(
        export_dir=tmp_path,
        copy_file=tmp_path / "c",
        still=True,
        over_ssh=True,
        address="127.0.0.1:8177",
        no_color=name == "no_color",
    )
    app = LocalspecApp(engine(), store, options)
    try:
        assert snap_compare(app, terminal_size=size, run_before=lambda pilot: steps(app, pilot))
    finally:
        store.close()

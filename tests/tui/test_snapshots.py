"""Pictures of the screens at two sizes. After a wanted change: pytest tests/tui/test_snapshots.py --snapshot-update."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

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


CASES: list[tuple[str, tuple[int, int], dict[str, Any], Steps]] = [
    ("answered", WIDE, {}, _answered),
    ("answered", NARROW, {}, _answered),
    ("half_way", WIDE, {"half_way": True}, _half_way),
    ("half_way", TINY, {"half_way": True}, _half_way),
    ("drafts", NARROW, {}, _drafts),
    ("loading", NARROW, {"loading": True}, _loading),
    ("chats", NARROW, {}, _chats),
]


@pytest.mark.parametrize(("name", "size", "engine", "steps"), CASES, ids=[f"{c[0]}-{c[1][0]}x{c[1][1]}" for c in CASES])
def test_screen(
    name: str, size: tuple[int, int], engine: dict[str, Any], steps: Steps, tmp_path: Path, snap_compare: Any
) -> None:
    store = StoreWorker(lambda: open_store(tmp_path / "chats.sqlite3"))
    options = UiOptions(
        export_dir=tmp_path, copy_file=tmp_path / "c", still=True, over_ssh=True, address="127.0.0.1:8177"
    )
    app = LocalspecApp(FixedEngine(**engine), store, options)
    try:
        assert snap_compare(app, terminal_size=size, run_before=lambda pilot: steps(app, pilot))
    finally:
        store.close()

"""Takes the pictures of the terminal app for the README: chat, panel, draft view, matrix, tuner, settings, lists.

With --url or --recording the pictures show a real run, and the caption says of which model and machine. Without
either they show the scripted engine, and the caption says that its figures are made up. --record keeps a real run,
so that the pictures can be made again without the model. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from textual.pilot import Pilot
from textual.widgets import Input, Label, Select

from localspec.api.engine import Engine
from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.replay import ReplayEngine, record
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.chats import StoreWorker, open_store
from localspec.tui.app import LocalspecApp
from localspec.tui.options import ChatSettings, UiOptions

QUESTIONS = (
    "Write a short Python function that adds two numbers, and show an example of its use.",
    "Write the same function again for three numbers.",
)
ANSWERS = (
    "A function takes its **arguments** and returns their sum:\n\n```python\n"
    "def add(a: int, b: int) -> int:\n    return a + b\n\n\nprint(add(2, 3))  # 5\n```\n",
    "The same with three arguments:\n\n```python\n"
    "def add(a: int, b: int, c: int) -> int:\n    return a + b + c\n\n\nprint(add(2, 3, 4))  # 9\n```\n",
)
MADE_UP = "A scripted engine, no model: every figure in this picture is made up."
WIDE, LOW, NARROW = (130, 40), (120, 26), (80, 24)
MEASURED_WORK, MEASURED_DEPTHS, MEASURED_TOKENS = "editing", "4, 8", "48"

Steps = Callable[[LocalspecApp, Pilot[None]], Awaitable[None]]


async def _wait(app: LocalspecApp, ready: Callable[[], bool], timeout_s: float) -> None:
    loop = asyncio.get_running_loop()
    end = loop.time() + timeout_s
    while not ready():
        if loop.time() > end:
            raise SystemExit(
                f"The app did not get that far within {timeout_s:g} s: {app.chat.transcript.plain_text[-500:]}"
            )
        await asyncio.sleep(0.05)


async def _ask(app: LocalspecApp, pilot: Pilot[None], question: str, *, until_chars: int | None = None) -> None:
    app.chat.prompt.put(question)
    await pilot.press("enter")
    await _wait(app, lambda: app.chat.busy, 60)
    talk = app.chat.conversation
    if until_chars is not None:
        await _wait(
            app, lambda: not app.chat.busy or len(talk.answer.content if talk.answer else "") > until_chars, 600
        )
    else:
        await _wait(app, lambda: not app.chat.busy, 600)
    app.chat.answering.flush()
    app.chat.sample()
    await pilot.pause(0.2)


async def _take(app: LocalspecApp, out: Path, name: str) -> Path:
    path = out / f"{name}.svg"
    path.write_text(app.export_screenshot(title="localspec chat"), encoding="utf-8")
    return path


def _say_caption(app: LocalspecApp, caption: str) -> None:
    """A screen over the chat hides the chat's own caption: its title says the same."""
    title = app.screen.query_one(".title", Label)
    title.update(f"{str(title.render()).partition(':')[0]} · {caption}")


async def _measure(app: LocalspecApp, pilot: Pilot[None]) -> None:
    """The matrix of one kind of work, filled to the end. A table may have learnt the answers of the chat itself."""
    await pilot.press("f3")
    await pilot.pause(0.3)
    screen = app.screen
    screen.query_one("#prompts", Select).value = MEASURED_WORK
    screen.query_one("#depths", Input).value = MEASURED_DEPTHS
    screen.query_one("#tokens", Input).value = MEASURED_TOKENS
    await pilot.press("f5")
    await _wait(app, lambda: str(screen.query_one("#said", Label).render()).startswith(("Done", "Stopped")), 900)
    await pilot.pause(0.3)


async def take_pictures(engine: Engine, out: Path, caption: str, settings: ChatSettings) -> list[Path]:
    """All pictures of one run; the questions are asked once."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    with tempfile.TemporaryDirectory() as folder:
        store = StoreWorker(lambda: open_store(Path(folder) / "chats.sqlite3"))
        options = UiOptions(Path.cwd(), Path(folder) / "copied.txt", still=True, over_ssh=True, caption=caption)
        app = LocalspecApp(engine, store, options, settings)
        async with app.run_test(size=WIDE) as pilot:
            await pilot.pause(0.5)
            await _ask(app, pilot, QUESTIONS[0])
            await _ask(app, pilot, QUESTIONS[1], until_chars=90)
            made.append(await _take(app, out, "chat"))
            await _wait(app, lambda: not app.chat.busy, 600)
            # The engine's figures come twice a second.
            await pilot.pause(1.2)
            made.append(await _take(app, out, "panel"))
            await pilot.press("ctrl+d")
            await pilot.pause(0.2)
            app.chat.transcript.follow()
            await pilot.pause(0.2)
            made.append(await _take(app, out, "drafts"))
            await pilot.press("ctrl+d")
            await pilot.resize_terminal(*LOW)
            await _measure(app, pilot)
            _say_caption(app, caption)
            await pilot.pause(0.2)
            made.append(await _take(app, out, "matrix"))
            await pilot.press("escape", "f4")
            await pilot.pause(0.7)
            _say_caption(app, caption)
            await pilot.pause(0.2)
            made.append(await _take(app, out, "tuner"))
            await pilot.press("escape")
            await pilot.resize_terminal(*WIDE)
            await pilot.press("ctrl+r")
            await pilot.pause(0.5)
            made.append(await _take(app, out, "chats"))
            await pilot.press("escape", "/")
            await pilot.pause(0.3)
            made.append(await _take(app, out, "commands"))
            await pilot.press("escape", "escape")
            await pilot.resize_terminal(*NARROW)
            await pilot.pause(0.5)
            made.append(await _take(app, out, "narrow"))
            await app.chat.leave()
        store.close()
    return made


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="the port of a running engine")
    parser.add_argument("--control-key-file", type=Path, help="key file of our own port, for metrics and draft spans")
    parser.add_argument("--recording", type=Path, help="a run that --record kept")
    parser.add_argument("--record", type=Path, help="keep the run of --url in this file")
    parser.add_argument("--caption", help="line in the pictures; needed with --url and --recording")
    parser.add_argument("--max-tokens", type=int, default=220)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "docs" / "pictures")
    arguments = parser.parse_args()
    engine: Engine
    if arguments.url or arguments.recording:
        if not arguments.caption:
            parser.error("--caption must say which model and machine the pictures show")
        caption = arguments.caption
    else:
        caption = MADE_UP
    if arguments.url:
        key = arguments.control_key_file.read_text("utf-8").strip() if arguments.control_key_file else None
        engine = RemoteEngine(RemoteSettings(arguments.url, control_key=key))
        if arguments.record:
            engine = record(engine, arguments.record)
    elif arguments.recording:
        engine = ReplayEngine(arguments.recording)
    else:
        replies = tuple(Reply(text) for text in ANSWERS)
        engine = ScriptedEngine(Script(replies=replies, tok_per_s=150, model_id="scripted", seed=7))
    try:
        made = await take_pictures(engine, arguments.out, caption, ChatSettings(max_tokens=arguments.max_tokens))
    finally:
        await engine.aclose()
    for path in made:
        print(f"{path}  {path.stat().st_size} bytes")
    print(json.dumps({"pictures": [str(path) for path in made], "caption": caption}))


if __name__ == "__main__":
    asyncio.run(main())

"""What the terminal interface costs: CPU while an answer streams into a long chat, and the time from key to paint.

The app runs as a child in a pseudo terminal, with its real driver; this process reads what it paints. The engine is
a fake in the same child that sends one event a token, four characters each, so its cost is measured alone too and
stated beside the total. Prints a table and ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path

import psutil
from textual.pilot import Pilot

from localspec.api.scripted import Script, ScriptedEngine
from localspec.api.types import Delta, Done, Event, GenerateRequest, Phase, Span, Timings, Usage
from localspec.chats import NewChat, Stored, StoreWorker, open_store
from localspec.tui.app import LocalspecApp
from localspec.tui.options import UiOptions

PASSAGE = """## A heading of the answer

Plain prose with **bold words** and `code` that goes on for a while, as answers do, until the paragraph is long enough
to be wrapped into several lines of the terminal, whatever its width may be today.

- a first point with some words
- a second point
- a third point that is longer than the other two points were

```python
def accept(drafts: list[int], tokens: list[int]) -> int:
    for count, (draft, token) in enumerate(zip(drafts, tokens)):
        if draft != token:
            return count
    return len(drafts)
```

| drafter | accepted |
|---------|----------|
| ngram   | 0.61     |
| mtp     | 0.78     |

"""
# Letters that appear nowhere else on the screen, so that seeing one means that the key was painted.
KEYS = "ЖЩЮЯФЦЧШЪЫЭБДЛПИЙГЗУ"


class SteadyEngine(ScriptedEngine):
    """Sends `tok_per_s` tokens of four characters, one event each, without end."""

    def __init__(self, tok_per_s: float) -> None:
        super().__init__(Script(model_id="steady"))
        self._tok_per_s = tok_per_s

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        start, number = time.monotonic(), 0
        while True:
            at = number * 4 % len(PASSAGE)
            text = (PASSAGE + PASSAGE)[at : at + 4]
            origin = "ngram" if number % 3 else "target"
            yield Delta(text, (number % 50_000,), (Span(len(text), origin, Phase.ANSWER),), int(number % 5 == 0))
            number += 1
            await asyncio.sleep(max(0.0, start + number / self._tok_per_s - time.monotonic()))
        yield Done("stop", Usage(0, number), Timings())


def fill(path: Path, messages: int) -> str:
    """A chat with that many messages; returns its id."""
    store = open_store(path)
    chat = store.create(NewChat("Long chat"))
    parent: int | None = None
    for number in range(messages):
        role = "assistant" if number % 2 else "user"
        text = PASSAGE if number % 2 else f"Question {number}?"
        parent = store.add(chat.id, Stored(role, text, parent, model_id="steady")).id
    store.close()
    return chat.id


def run_app(folder: Path, chat_id: str, tok_per_s: float) -> None:
    """In the child: open the long chat and ask, then run until killed."""
    store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
    options = UiOptions(export_dir=folder, copy_file=folder / "copied.txt", over_ssh=True)
    app = LocalspecApp(SteadyEngine(tok_per_s), store, options)

    async def drive(pilot: Pilot[None]) -> None:
        await pilot.pause(0.5)
        await app.chat.open_chat(chat_id)
        if tok_per_s > 0:
            await app.chat.conversation.say("Go on.")
            await app.chat.answering.start()

    app.run(auto_pilot=drive)
    store.close()


def run_engine(tok_per_s: float) -> None:
    """In the child: the engine alone, its events thrown away."""

    async def main() -> None:
        async with aclosing(SteadyEngine(tok_per_s).generate(GenerateRequest())) as events:
            async for _ in events:
                pass

    asyncio.run(main())


class Child:
    """A child in a pseudo terminal whose output is read and kept short."""

    def __init__(self, arguments: list[str], size: tuple[int, int]) -> None:
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execve(sys.executable, [sys.executable, str(Path(__file__).resolve()), *arguments], environment)
        fcntl.ioctl(self.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.output = bytearray()
        self.bytes_read = 0

    def read_for(self, seconds: float, needle: bytes | None = None) -> float | None:
        """Read what is painted; the time until `needle` came, None if it did not."""
        start = time.monotonic()
        while (left := start + seconds - time.monotonic()) > 0:
            if select.select([self.terminal], [], [], min(left, 0.2))[0]:
                data = os.read(self.terminal, 1 << 16)
                self.bytes_read += len(data)
                self.output = (self.output + data)[-(1 << 17) :]
                if needle is not None and needle in self.output:
                    return time.monotonic() - start
        return None

    def cpu_share(self, seconds: float) -> float:
        """CPU seconds a second over a while."""
        process = psutil.Process(self.pid)
        before, start = process.cpu_times(), time.monotonic()
        self.read_for(seconds)
        after = process.cpu_times()
        return (after.user + after.system - before.user - before.system) / (time.monotonic() - start)

    def key_to_paint_ms(self, count: int) -> list[float]:
        """Milliseconds from a key to its letter on the screen."""
        times = []
        for number in range(count):
            letter = KEYS[number % len(KEYS)].encode()
            self.output.clear()
            os.write(self.terminal, letter)
            seconds = self.read_for(3.0, letter)
            times.append((seconds if seconds is not None else 3.0) * 1e3)
            os.write(self.terminal, b"\x7f")
            self.read_for(0.23)
        return times

    def kill(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


def measure(size: tuple[int, int], messages: int, tok_per_s: float, seconds: float) -> dict[str, float]:
    """All figures of one terminal size."""
    with tempfile.TemporaryDirectory() as name:
        chat_id = fill(Path(name) / "chats.sqlite3", messages)
        idle = Child(["--child", name, chat_id, "0"], size)
        idle.read_for(6.0)
        idle_share = idle.cpu_share(seconds / 2)
        idle.kill()
        engine = Child(["--child", "", "", str(tok_per_s)], size)
        engine.read_for(3.0)
        engine_share = engine.cpu_share(seconds / 2)
        engine.kill()
        app = Child(["--child", name, chat_id, str(tok_per_s)], size)
        app.read_for(8.0)
        app.bytes_read = 0
        share = app.cpu_share(seconds)
        painted = app.bytes_read / seconds
        times = sorted(app.key_to_paint_ms(40))
        app.kill()
    return {
        "columns": size[0],
        "rows": size[1],
        "idle_cpu_share": round(idle_share, 4),
        "engine_cpu_share": round(engine_share, 4),
        "total_cpu_share": round(share, 4),
        "ui_cpu_share": round(share - engine_share, 4),
        "painted_bytes_per_s": round(painted),
        "key_to_paint_ms_p50": round(times[len(times) // 2], 1),
        "key_to_paint_ms_p95": round(times[int(len(times) * 0.95)], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument("--tok-per-s", type=float, default=200.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--out", type=Path, help="file for the JSON, such as scripts/results/measure_tui.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, chat_id, rate = arguments.child
        if folder:
            run_app(Path(folder), chat_id, float(rate))
        else:
            run_engine(float(rate))
        return
    load_before = os.getloadavg()[0]
    rows = [measure(size, arguments.messages, arguments.tok_per_s, arguments.seconds) for size in ((80, 24), (160, 50))]
    print(
        f"{arguments.messages} messages, {arguments.tok_per_s:g} tokens/s of a fake engine, "
        f"{psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'size':>8} {'idle':>7} {'engine':>7} {'ui':>7} {'p50 ms':>7} {'p95 ms':>7} {'kB/s':>6}")
    for row in rows:
        print(
            f"{row['columns']:>4}x{row['rows']:<3} {row['idle_cpu_share']:>7.1%} {row['engine_cpu_share']:>7.1%} "
            f"{row['ui_cpu_share']:>7.1%} {row['key_to_paint_ms_p50']:>7.1f} {row['key_to_paint_ms_p95']:>7.1f} "
            f"{row['painted_bytes_per_s'] / 1e3:>6.1f}"
        )
    document = {
        "measure": "tui",
        "messages": arguments.messages,
        "tok_per_s": arguments.tok_per_s,
        "engine": "a fake in the same process, its own CPU taken off",
        "cores": psutil.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        # Wall times of a box whose cores are shared by others say what the interface does there, not what it could.
        "busy": load_before > (psutil.cpu_count() or 1),
        "bars": {"ui_cpu_share": 0.05, "key_to_paint_ms_p95": 50},
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()

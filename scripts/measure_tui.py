"""What the terminal interface costs: CPU while an answer streams into a long chat, and the time from key to paint.

Everything is as `localspec chat` has it: a fake engine that makes one event a token, four characters each, behind its
port in a process of its own, and the app in another, in a pseudo terminal with its real driver; this process reads what
it paints. The figure is the CPU time of the whole process of the app, its side of the port included, while the panel's
figures change all the time. Prints a table and ends with one line of JSON.
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
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import psutil
from textual.pilot import Pilot

sys.path.insert(0, str(Path(__file__).parent.parent))
from localspec.api.remote import RemoteEngine, RemoteSettings
from localspec.api.scripted import Script, ScriptedEngine
from localspec.api.types import (
    Delta,
    Done,
    DrafterMetrics,
    Event,
    GenerateRequest,
    MetricsSnapshot,
    Phase,
    Span,
    Timings,
    Usage,
)
from localspec.chats import NewChat, Stored, StoreWorker, open_store
from localspec.commands.chat import GROUP_S
from localspec.server.serve import run_server
from localspec.server.settings import ServerSettings
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
CONTROL_KEY = "k" * 32


class SteadyEngine(ScriptedEngine):
    """Sends `tok_per_s` tokens of four characters, one event each, without end."""

    def __init__(self, tok_per_s: float) -> None:
        super().__init__(Script(model_id="steady"))
        self._tok_per_s = tok_per_s
        self._made = 0

    def metrics(self) -> MetricsSnapshot:
        """Figures that change with every look at them while an answer is made."""
        made = self._made
        steps = tuple(made * share // 10 for share in (9, 7, 5, 3))
        return replace(
            super().metrics(),
            active_requests=int(made > 0),
            tok_per_s=self._tok_per_s + made % 7 if made else 0.0,
            mean_accepted_run=2 + made % 10 / 10,
            context_used_tokens=20_000 + made,
            context_limit_tokens=131_072,
            drafters=(DrafterMetrics("ngram", made, 4 * made, 2 * made, (made,) * 4, steps),) if made else (),
            memory_bytes={"weights": 15 << 30, "kv": (2 << 30) + made, "other": 1 << 30},
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        start, number = time.monotonic(), 0
        while True:
            at = number * 4 % len(PASSAGE)
            text = (PASSAGE + PASSAGE)[at : at + 4]
            origin = "ngram" if number % 3 else "target"
            yield Delta(text, (number % 50_000,), (Span(len(text), origin, Phase.ANSWER),), int(number % 5 == 0))
            number += 1
            self._made = number
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


def run_engine(tok_per_s: float) -> None:
    """In a child: the engine behind its port; says its address."""
    settings = ServerSettings(port=0, control_key=CONTROL_KEY)
    run_server(SteadyEngine(tok_per_s), settings, on_listening=lambda address: print(address, flush=True))


def run_app(folder: Path, chat_id: str, address: str, *, asks: bool) -> None:
    """In a child: open the long chat and ask, then run until killed."""
    store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
    options = UiOptions(export_dir=folder, copy_file=folder / "copied.txt", over_ssh=True)
    engine = RemoteEngine(RemoteSettings(address, control_key=CONTROL_KEY, group_s=GROUP_S))
    app = LocalspecApp(engine, store, options)

    async def drive(pilot: Pilot[None]) -> None:
        await engine.wait_ready()
        await pilot.pause(0.5)
        await app.chat.open_chat(chat_id)
        if asks:
            await app.chat.conversation.say("Go on.")
            await app.chat.answering.start()

    app.run(auto_pilot=drive)
    store.close()


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
    command = [sys.executable, str(Path(__file__).resolve()), "--child", "", "", str(tok_per_s)]
    with tempfile.TemporaryDirectory() as name, subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        address = engine.stdout.readline().strip()
        chat_id = fill(Path(name) / "chats.sqlite3", messages)
        idle = Child(["--child", name, chat_id, address], size)
        idle.read_for(6.0)
        idle_share = idle.cpu_share(seconds / 2)
        idle.kill()
        app = Child(["--child", name, chat_id, address, "--asks"], size)
        app.read_for(8.0)
        app.bytes_read = 0
        shares = [app.cpu_share(seconds / 3) for _ in range(3)]
        painted = app.bytes_read / seconds
        times = sorted(app.key_to_paint_ms(40))
        app.kill()
        engine.kill()
    return {
        "columns": size[0],
        "rows": size[1],
        "idle_cpu_share": round(idle_share, 4),
        "ui_cpu_share": round(sum(shares) / len(shares), 4),
        "ui_cpu_share_highest_third": round(max(shares), 4),
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
    parser.add_argument("--asks", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        folder, chat_id, where = arguments.child
        if folder:
            run_app(Path(folder), chat_id, where, asks=arguments.asks)
        else:
            run_engine(float(where))
        return
    load_before = os.getloadavg()[0]
    rows = [measure(size, arguments.messages, arguments.tok_per_s, arguments.seconds) for size in ((80, 24), (160, 50))]
    print(
        f"{arguments.messages} messages, {arguments.tok_per_s:g} tokens/s of a fake engine, "
        f"{psutil.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    )
    print(f"{'size':>8} {'idle':>7} {'ui':>7} {'p50 ms':>7} {'p95 ms':>7} {'kB/s':>6}")
    for row in rows:
        print(
            f"{row['columns']:>4}x{row['rows']:<3} {row['idle_cpu_share']:>7.1%} "
            f"{row['ui_cpu_share']:>7.1%} {row['key_to_paint_ms_p50']:>7.1f} {row['key_to_paint_ms_p95']:>7.1f} "
            f"{row['painted_bytes_per_s'] / 1e3:>6.1f}"
        )
    document = {
        "measure": "tui",
        "messages": arguments.messages,
        "tok_per_s": arguments.tok_per_s,
        "engine": "a fake behind its port in another process; the CPU is all of the app's process",
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

#!/usr/bin/env python3
"""Whether the terminal app slows the engine on a card: tokens per second with it attached against without, in one run.

    python scripts/device_ui.py [--tokens 1500] [--rounds 4] [--limit 95] [--out FILE] [--tiny]

One process has the engine (the 27B's shapes, random weights, MTP drafts accepted at Qwen's published rates whatever the
model says) and its port, as `localspec serve` for a chat has. Three ways take turns: `alone`, the events thrown away in
the engine's own process; `client`, a bare program at the port; `app`, the terminal app in a process and a pseudo
terminal of its own, as `localspec chat` has it, which asks the question itself. Every way makes the same number of
tokens at the same seed; times are taken in the engine's process, from the first token to the last. Bar: app at least
0.99 of both others, in the median of the rounds. `--tiny` takes the same way with a tiny model on a CPU, where no bar
means anything.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pty
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
KEY = "k" * 32
QUESTION = "Tell me everything."
PUBLISHED_MTP = (0.917, 0.837, 0.648, 0.538, 0.451, 0.348)
DEPTH = 3
CONTEXT_TOKENS = 16384
DRAFT_HEAD_ROWS = 32768
COLUMNS, ROWS = 160, 50
WAYS = ("alone", "client", "app")
BAR = 0.99
START_LIMIT_S, ROUND_LIMIT_S = 90.0, 60.0
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[a]"


def settings(tokens: int) -> Any:
    """What every way asks for, as a chat's settings."""
    from localspec.tui.options import ChatSettings

    law: dict[str, float | int] = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "seed": 7}
    return ChatSettings(sampling=law, max_tokens=tokens, drafter="mtp", depth=DEPTH)


def question(tokens: int) -> Any:
    """The request that the app sends, for the other two ways."""
    from localspec.api.types import Sampling
    from localspec.chats import Stored

    asked = (Stored("user", QUESTION, None),)
    return settings(tokens).request(asked, "", Sampling(), chat_id="bench", private=False)


# The engine and its port, in a process of their own


def make_text_folder(folder: Path, vocab_size: int) -> None:
    """A tokenizer in which every id of a full vocabulary is a word, some with Markdown before it."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    vocab = {piece: index for index, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for number in range(len(vocab), vocab_size - 1):
        letters, rest = "", number
        for _ in range(4):
            rest, letter = divmod(rest, 26)
            letters += chr(97 + letter)
        before = {0: "ĊĊ##", 200: "ĊĊ", 400: "Ċ-", 600: "Ċ-"}.get(number % 800, "")
        vocab[f"{before}Ġ{letters}"] = number
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|end|>")}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))


def build(folder: Path, tiny: bool) -> Any:
    """A loaded engine with random weights, its loop not yet running."""
    import torch

    from localspec.api.types import ModelInfo
    from localspec.core.records import MAX_SLOTS
    from localspec.drafters import DrafterSetup, drafter_module
    from localspec.engine.build import Built, EngineOptions, assemble, cache_dtype
    from localspec.engine.text import TextStage
    from localspec.engine.warm_up import warm_up
    from localspec.kernels.table import choose
    from localspec.models import architecture
    from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint
    from tests.engine.test_step_bench import small_hybrid

    config = small_hybrid() if tiny else json.loads(json.dumps(QWEN3_5_27B))
    ops, _ = choose("cpu" if tiny else "cuda:0")
    ops.cache_dtype = cache_dtype(ops, "auto")
    if tiny:
        torch.set_num_threads(1)
        # Words for every id need room beside the 256 bytes.
        config["text_config"] |= {"vocab_size": 2048, "num_token_ids": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    with torch.inference_mode():
        model = architecture(config["model_type"]).load(config, SyntheticCheckpoint(config, ops.device), ops)
        limit = min(CONTEXT_TOKENS, model.max_context_tokens)
        heads = SyntheticCheckpoint(
            config, ops.device, seed=1, draft_head_rows=min(DRAFT_HEAD_ROWS, model.vocab_size // 2)
        )
        setup = DrafterSetup(
            ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=limit, folder=folder, checkpoint=heads
        )
        drafters = {"mtp": drafter_module("mtp").build(setup), "ngram": drafter_module("ngram").build(setup)}
    make_text_folder(folder, model.vocab_size)
    options = EngineOptions(device=str(ops.device), synthetic_acceptance=PUBLISHED_MTP)
    parts = assemble(model, ops, limit, drafters, options)
    if not tiny:
        warm_up(parts.loop.stages, limit, parts.scheduler.limits.chunk_tokens)
    note = "random weights, synthetic acceptance"
    drafter_names = ("auto", "off", *drafters)
    info = ModelInfo("random", "random", limit, model.vocab_size, note=note, drafters=drafter_names)
    return Built(info, TextStage(folder, limit), parts)


def run_engine(tiny: bool) -> None:
    """Serve; a number on stdin makes so many tokens here. One line of JSON for the address and for each answer."""
    import torch

    from localspec.api.types import Delta, Done, Event, GenerateRequest
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine
    from localspec.server.serve import run_server
    from localspec.server.settings import ServerSettings

    class Timed(LocalEngine):
        """Says of each answer how many tokens came in how many seconds after the first ones, and in how many steps."""

        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
            first_s, count, first_count, cpu_s = 0.0, 0, 0, 0.0
            async for event in super().generate(request):
                if isinstance(event, Delta) and event.token_ids:
                    count += len(event.token_ids)
                    if not first_s:
                        first_s, first_count, cpu_s = time.perf_counter(), count, time.process_time()
                elif isinstance(event, Done):
                    seconds, steps = time.perf_counter() - first_s, event.timings.verify_steps
                    say(tokens=count - first_count, seconds=seconds, steps=steps, cpu_s=time.process_time() - cpu_s)
                yield event

    def say(**values: Any) -> None:
        print(json.dumps(values), flush=True)

    async def consume(tokens: int) -> None:
        async with aclosing(engine.generate(question(tokens))) as events:
            async for _ in events:
                pass

    def listen(loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            asyncio.run_coroutine_threadsafe(consume(int(line)), loop)

    def listening(address: str) -> None:
        threading.Thread(target=listen, args=(asyncio.get_running_loop(),), daemon=True).start()
        device = built.parts.runner.ops.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        say(address=address, device=name)

    with tempfile.TemporaryDirectory() as name:
        engine = Timed(lambda model_id, report: None, EngineOptions())  # type: ignore[arg-type,return-value]
        built = build(Path(name), tiny)
        built.parts.loop.start()
        engine._built = built
        engine._loaded.set()
        run_server(engine, ServerSettings(port=0, control_key=KEY), on_listening=listening)


# The two that come from outside


def run_client(address: str, tokens: int) -> None:
    """A bare program at the port that throws the answer away."""
    from localspec.api.remote import RemoteEngine, RemoteSettings

    async def main() -> None:
        remote = RemoteEngine(RemoteSettings(address))
        await remote.wait_ready()
        async with aclosing(remote.generate(question(tokens))) as events:
            async for _ in events:
                pass
        await remote.aclose()

    asyncio.run(main())


def run_app(address: str, tokens: int) -> None:
    """The terminal app, which asks the question when it has settled; runs until it is killed."""
    from textual.pilot import Pilot

    from localspec.api.remote import RemoteEngine, RemoteSettings
    from localspec.chats import StoreWorker, open_store
    from localspec.tui.app import LocalspecApp
    from localspec.tui.options import UiOptions

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
        engine = RemoteEngine(RemoteSettings(address, control_key=KEY))
        app = LocalspecApp(engine, store, UiOptions(folder, folder / "copied.txt"), settings(tokens))

        async def drive(pilot: Pilot[None]) -> None:
            await engine.wait_ready()
            await pilot.pause(1.0)
            app.chat.prompt.put(QUESTION)
            await pilot.press("enter")

        app.run(auto_pilot=drive)
        store.close()


# What takes the times


class Engine:
    """The engine's process, as its parent sees it."""

    def __init__(self, tiny: bool) -> None:
        command = [sys.executable, __file__, "--role", "engine", *(["--tiny"] if tiny else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        begun = self.next_line(START_LIMIT_S)
        self.address, self.device = str(begun["address"]), str(begun["device"])

    def next_line(self, limit_s: float) -> dict[str, Any]:
        """What the engine says next. Raises TimeoutError, RuntimeError if it ended."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], limit_s)[0]:
            raise TimeoutError(f"the engine said nothing for {limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the engine ended with code {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def consume(self, tokens: int) -> None:
        """Have it make tokens for nobody."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{tokens}\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def attached_app(address: str, tokens: int) -> Iterator[list[int]]:
    """The app in a pseudo terminal that is read all the time; yields a list whose sum is the bytes it painted."""
    pid, terminal = pty.fork()
    if pid == 0:
        environment = {**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"}
        arguments = [sys.executable, __file__, "--role", "app", address, "--tokens", str(tokens)]
        os.execve(sys.executable, arguments, environment)
    ioctl(terminal, TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    painted: list[int] = []
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            if select.select([terminal], [], [], 0.2)[0]:
                try:
                    painted.append(len(os.read(terminal, 1 << 16)))
                except OSError:
                    return

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield painted
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        over.set()
        reader.join()
        os.close(terminal)


def measure_one(engine: Engine, way: str, tokens: int) -> dict[str, Any]:
    """One answer in one way."""
    if way == "alone":
        engine.consume(tokens)
        return engine.next_line(ROUND_LIMIT_S)
    if way == "client":
        command = [sys.executable, __file__, "--role", "client", engine.address, "--tokens", str(tokens)]
        with subprocess.Popen(command, cwd=ROOT) as client:
            found = engine.next_line(ROUND_LIMIT_S)
            client.wait(10.0)
        return found
    with attached_app(engine.address, tokens) as painted:
        found = engine.next_line(ROUND_LIMIT_S)
        time.sleep(0.5)
    return {**found, "painted_bytes": sum(painted)}


def summary(rounds: list[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Rates of each way, and the app's share of the others: median, lowest and highest of the rounds."""
    rates = [{way: each["tokens"] / each["seconds"] for way, each in row.items()} for row in rounds]
    found: dict[str, Any] = {
        "tok_per_s": {way: round(statistics.median(rate[way] for rate in rates), 1) for way in WAYS},
        "engine_cpu_s_per_s": {
            way: round(statistics.median(row[way]["cpu_s"] / row[way]["seconds"] for row in rounds), 3) for way in WAYS
        },
    }
    for other in WAYS[:-1]:
        ratios = sorted(rate["app"] / rate[other] for rate in rates)
        found[f"app_over_{other}"] = {
            "median": round(statistics.median(ratios), 4),
            "lowest": round(ratios[0], 4),
            "highest": round(ratios[-1], 4),
        }
    found["within_bar"] = all(found[f"app_over_{other}"]["median"] >= BAR for other in WAYS[:-1])
    return found


def run(tokens: int, count: int, limit_s: float, tiny: bool, out: Path | None) -> dict[str, Any]:
    """All rounds that the limit leaves time for."""
    started = time.perf_counter()
    engine = Engine(tiny)
    document: dict[str, Any] = {
        "measure": "ui",
        "model": "tiny" if tiny else "shapes of the 27B",
        "device": engine.device,
        "weights": "random",
        "acceptance": "synthetic, Qwen's published MTP rates",
        "drafter": f"mtp, depth {DEPTH}",
        "terminal": f"{COLUMNS}x{ROWS}",
        "tokens": tokens,
        "bar": BAR,
        "start_s": round(time.perf_counter() - started, 1),
        "rounds": [],
    }
    print(f"engine ready after {document['start_s']} s at {engine.address}", flush=True)
    try:
        for way in ("alone", "app"):  # graphs are captured by the first answers
            print(f"before the rounds, {way}: {measure_one(engine, way, min(tokens, 400))}", flush=True)
        longest_s = 0.0
        for number in range(count):
            began = time.perf_counter()
            if began - started + longest_s > limit_s:
                break
            order = WAYS if number % 2 == 0 else WAYS[::-1]
            document["rounds"].append({way: measure_one(engine, way, tokens) for way in order})
            document["summary"] = summary(document["rounds"])
            longest_s = max(longest_s, time.perf_counter() - began)
            print(f"round {number + 1}, {longest_s:.1f} s: {json.dumps(document['summary'])}", flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(document, indent=1) + "\n")
    finally:
        engine.kill()
    document["wall_s"] = round(time.perf_counter() - started, 1)
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", nargs="?", default="", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=("engine", "client", "app"), help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit", type=float, default=95.0, help="seconds; no round begins that would pass it")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.role == "engine":
        run_engine(arguments.tiny)
    elif arguments.role == "client":
        run_client(arguments.address, arguments.tokens)
    elif arguments.role == "app":
        run_app(arguments.address, arguments.tokens)
    else:
        document = run(arguments.tokens, arguments.rounds, arguments.limit, arguments.tiny, arguments.out)
        print(json.dumps(document), flush=True)


if __name__ == "__main__":
    main()

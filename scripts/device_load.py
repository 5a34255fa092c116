#!/usr/bin/env python3
"""Starts of the engine on a card from packed weights of the 27B's size: times, load rate, memory of card and host.

    python scripts/device_load.py [--folder DIR] [--out FILE] [--tiny]

Random weights are packed once into --folder (about 17 GB, taken away at the end). Then three processes start the engine
one after the other as `localspec serve` does: the first with empty caches (kernels compile, the card is tested), the
second and third with what the first left; the first and the third are also used. Before each the page cache is asked
to forget the file; the disk's rate is measured with the same reader. Bars: load at 70% of that rate; first start within
90 s and second within 10 s beside reading; 17.5 GiB by the driver's count with 32k of FP8 keys and values, 20.5 GiB
with 128k, after answers of four sequences with and without drafts and a prompt of up to 60,000 tokens; host memory
below 4 GiB beside pinned parts, at its highest. An answer is also timed through the port, alone and, with 32k, beside
four clients that post bodies of 70 kB (more tokens than that context holds, so that the card is left alone); bar: idle
at most 3%. `--tiny` takes the same way with a tiny model on a CPU, where no bar means anything.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
GIB = 2**30
STARTS = (("first", 32768, 17.5), ("second", 32768, 17.5), ("long", 131072, 20.5))
START_LIMIT_S = 150
DRAFT_HEAD_ROWS = 32768
RATE_BYTES = 6 << 30
LONGEST_PROMPT = 60_000
BODY_TOKENS = 70_800
"""Of what `POSTING_CLIENT` posts: a token a byte."""
ANSWER_CLIENT = """
import json, sys, urllib.request
body = {"model": "random", "messages": [{"role": "user", "content": "abc " * 300}], "max_tokens": int(sys.argv[2])}
request = urllib.request.Request(sys.argv[1] + "/v1/chat/completions", json.dumps(body).encode())
request.add_header("content-type", "application/json")
times = json.load(urllib.request.urlopen(request))["timings"]
found = {name: times[name] for name in ("decode_ms", "draft_ms", "verify_ms", "verify_steps", "tok_per_s")}
found["idle"] = 1 - (times["draft_ms"] + times["verify_ms"]) / times["decode_ms"]
print(json.dumps(found))
"""
POSTING_CLIENT = """
import http.client, json, signal, sys, time
counts, started = {}, time.perf_counter()
def end(*_):
    print(json.dumps({"posts": counts, "seconds": time.perf_counter() - started}), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
said = {"role": "user", "content": "lorem ipsum " * 5900}
body = json.dumps({"model": "random", "messages": [said], "max_tokens": 1})
host = http.client.HTTPConnection(sys.argv[1].removeprefix("http://"))
while True:
    host.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = host.getresponse()
    answer.read()
    counts[answer.status] = counts.get(answer.status, 0) + 1
"""


def make_folder(folder: Path, tiny: bool) -> None:
    """A model folder with nothing but settings, a small tokenizer and packed weights."""
    import torch

    from localspec.engine import packed_weights
    from localspec.engine.token_count import with_token_count
    from localspec.formats._packed_file import PackedWriter
    from localspec.hub.layout import PACKED_NAME
    from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint
    from tests.helpers.tiny_text import TEMPLATE, byte_tokenizer, tiny_text_model

    folder.mkdir(parents=True, exist_ok=True)
    if tiny:
        tiny_text_model("qwen3_5", 1, folder)
        return
    config = json.loads(json.dumps(QWEN3_5_27B))
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|end|>")}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    config = with_token_count(config, folder)
    device = torch.device("cuda")
    source: Any = SyntheticCheckpoint(config, device, draft_head_rows=DRAFT_HEAD_ROWS)
    with PackedWriter(folder / PACKED_NAME) as writer, torch.inference_mode():
        recording = packed_weights._Recording(source)
        facts = packed_weights._write_all(folder, config, recording, writer, device, lambda text: None)
        writer.finish({**facts, "fingerprint": source.fingerprint, **packed_weights._wanted_facts(folder)})


def forget(path: Path) -> None:
    """Ask the page cache to drop a file."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def disk_rate(path: Path) -> dict[str, Any]:
    """Bytes a second of reading the file in order as the loader does, with nothing done to the bytes."""
    from localspec.formats._packed_file import PIECE_BYTES
    from localspec.formats._packed_ring import READ_THREADS, RING_BUFFERS
    from localspec.storage.aio import AsyncReader, OpenFile, Priority
    from localspec.storage.buffers import aligned_memory

    file = OpenFile(path)
    total = min(RATE_BYTES, file.size_bytes // PIECE_BYTES * PIECE_BYTES)
    places = [aligned_memory(PIECE_BYTES).data for _ in range(RING_BUFFERS)]
    waiting: deque[Any] = deque()
    started = time.perf_counter()
    with AsyncReader(threads=READ_THREADS, buffer_cap_bytes=4 * PIECE_BYTES) as reader:
        for index, offset in enumerate(range(0, total, PIECE_BYTES)):
            if len(waiting) == len(places):
                waiting.popleft().result()
            into = places[index % len(places)]
            waiting.append(reader.submit(file, offset, PIECE_BYTES, priority=Priority.BULK, into=into))
        for ticket in waiting:
            ticket.result()
    seconds = time.perf_counter() - started
    return {"gb_per_s": total / seconds / 1e9, "bytes": total, "direct": file.direct}


def _status_gib(key: str) -> float:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) * 1024 / GIB if found else float("nan")


def start(arguments: argparse.Namespace, device: str) -> None:
    """In a process of its own: the engine behind its port, as `localspec serve` runs it; prints what was found."""
    import psutil

    began = psutil.Process().create_time()
    from localspec.engine.build import EngineOptions, ModelPlace
    from localspec.engine.engine import LocalEngine
    from localspec.server.serve import run_server
    from localspec.server.settings import ServerSettings

    on_card, folder = device == "cuda", arguments.folder
    if arguments.untested:
        from localspec.engine import build

        build.check_kernels = lambda *_: None  # type: ignore[assignment]
    options = EngineOptions(
        device=device,
        drafter="off",
        context_tokens=arguments.context if on_card else None,
        kv_cache="fp8" if on_card else "auto",
        checks_dir=arguments.start,
        memory_limit_bytes=int(arguments.limit_gib * GIB) if on_card else None,
    )
    engine = LocalEngine(lambda model_id, report: ModelPlace(model_id, folder, model_id), options)
    found: dict[str, Any] = {"marks": [(round(time.time() - began, 2), "imported")], "bar_gib": arguments.limit_gib}
    found["kernels_tested"] = not arguments.untested

    def measure_all(address: str) -> None:
        try:
            _wait_until_ready(engine, began, found["marks"])
            if arguments.answer:
                _use(engine, address, device, found)
        except Exception as error:
            found["failed"] = f"{type(error).__name__}: {error}"[:1500]
            if on_card:
                found["pools_mib"] = _pools()
                found["memory_failed"] = _memory(engine._built.parts, device) if engine._built else {}
        print(json.dumps(found), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    def listening(address: str) -> None:
        threading.Thread(target=measure_all, args=(address,), daemon=True).start()

    engine.start("random")
    run_server(engine, ServerSettings(port=0), on_listening=listening)


def _wait_until_ready(engine: Any, began: float, marks: list[tuple[float, str]]) -> None:
    """Note when each stage of loading began."""
    while engine.model() is None:
        reading = engine.metrics()
        if reading.state == "failed":
            raise RuntimeError(reading.stage)
        if reading.stage and reading.stage != marks[-1][1]:
            marks.append((round(time.time() - began, 2), reading.stage))
        time.sleep(0.01)
    marks.append((round(time.time() - began, 2), "ready"))


def _use(engine: Any, address: str, device: str, found: dict[str, Any]) -> None:
    """Idle share alone and beside four clients that post long bodies, other answers, and memory between them."""
    on_card, parts = device == "cuda", engine._built.parts
    found["memory_ready"] = _memory(parts, device)
    answers = 400 if on_card else 60
    # The same answer first, so that what the measured ones need is captured.
    _client(ANSWER_CLIENT, address, answers)
    found["alone"] = _client(ANSWER_CLIENT, address, answers)
    found["memory_alone"] = _memory(parts, device)
    if parts.scheduler.limits.context_tokens < BODY_TOKENS:
        _beside_posts(address, answers, found)
    known = engine._built.info.drafters
    _answer_many(parts, known, found, on_card)
    found["memory"] = _memory(parts, device)
    found["parts_gib"] = {name: size / GIB for name, size in parts.metrics.snapshot().memory_bytes.items()}
    if on_card:
        found["pools_mib"] = _pools()


def _beside_posts(address: str, answers: int, found: dict[str, Any]) -> None:
    """The answer again, beside four clients that post."""
    posting = [
        subprocess.Popen([sys.executable, "-c", POSTING_CLIENT, address], stdout=subprocess.PIPE) for _ in "1234"
    ]
    try:
        time.sleep(1.0)
        found["beside_posts"] = _client(ANSWER_CLIENT, address, answers)
    finally:
        for each in posting:
            each.terminate()
    found["posts"] = [json.loads(each.communicate()[0].splitlines()[-1]) for each in posting]


def _answer_many(parts: Any, known: tuple[str, ...], found: dict[str, Any], on_card: bool) -> None:
    """Four sequences without and with drafts, a prompt that fills most of the context, then four sequences again."""
    from localspec.api.types import Sampling
    from localspec.core.records import Request
    from localspec.engine.synthetic_decode import decode_all, made_up_prompt

    longest = min(parts.scheduler.limits.context_tokens - 200, LONGEST_PROMPT)
    rounds = [("off", None, 4, 3000), ("mtp", 7, 4, 2900), ("mtp", 3, 1, longest), ("ngram", 15, 4, 3100)]
    for number, (drafter, depth, count, tokens) in enumerate(rounds):
        prompts = [made_up_prompt(parts, tokens + 37 * seed if on_card else 40, seed) for seed in range(count)]
        requests = [
            Request("", tuple((i + number) % 200 for i in prompt), Sampling(temperature=0.8, top_k=20, top_p=0.95),
                    seed, 24, (), drafter=drafter if drafter in known else "off",
                    depth=depth if drafter in known else None)
            for seed, prompt in enumerate(prompts)
        ]  # fmt: skip
        started = time.perf_counter()
        decode_all(parts, requests)
        found.setdefault("rounds_s", []).append(round(time.perf_counter() - started, 2))


def _memory(parts: Any, device: str) -> dict[str, float]:
    """GiB of the card by the driver and by PyTorch, captured steps, and GiB of the host: resident, shared among
    processes, page-locked, and the embedding, which is page-locked beside the ring."""
    import torch

    from localspec.engine.synthetic_bench import driver_bytes

    found = {key: _status_gib(key) for key in ("VmHWM", "VmRSS", "RssAnon", "RssFile", "RssShmem", "VmPin", "VmLck")}
    shares = Path("/proc/self/smaps_rollup")
    rolled = re.search(r"^Pss:\s+(\d+) kB", shares.read_text() if shares.exists() else "", re.MULTILINE)
    found["Pss"] = int(rolled.group(1)) * 1024 / GIB if rolled else float("nan")
    table = parts.runner.model.vocabulary.table
    found["table"] = 0.0 if table.is_cuda else table.nbytes / GIB
    if device != "cuda":
        return found
    found["driver"] = driver_bytes(torch.device(device)) / GIB
    found["reserved"] = torch.cuda.memory_reserved() / GIB
    found["allocated"] = torch.cuda.memory_allocated() / GIB
    found["peak_reserved"] = torch.cuda.max_memory_reserved() / GIB
    found["peak_allocated"] = torch.cuda.max_memory_allocated() / GIB
    found["torch_pinned"] = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / GIB
    return found | {"graphs": float(parts.loop.stages.device.captured.num_graphs)}


def _pools() -> dict[str, tuple[int, int]]:
    """MiB that PyTorch holds and that are in use, by pool: the general one (0, 0) and those of captured steps."""
    import torch

    found: dict[str, tuple[int, int]] = {}
    for segment in torch.cuda.memory_snapshot():  # type: ignore[no-untyped-call]
        held, used = found.get(name := str(segment["segment_pool_id"]), (0, 0))
        found[name] = held + (segment["total_size"] >> 20), used + (segment["allocated_size"] >> 20)
    return found


def _client(program: str, *arguments: Any) -> Any:
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return json.loads(done.stdout)


def _begin(arguments: argparse.Namespace, state: Path, name: str, context: int, limit_gib: float) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(state / "triton"), "HOME": str(state)}
    command = [sys.executable, __file__, "--folder", str(arguments.folder), "--start", str(state)]
    command += ["--context", str(context), "--limit-gib", str(limit_gib), *(["--tiny"] if arguments.tiny else [])]
    command += ["--answer"] if name in arguments.use else []
    command += ["--untested"] if arguments.untested else []
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=START_LIMIT_S
        )
    except subprocess.TimeoutExpired as cut:
        return {"failed": "time", "stderr": (cut.stderr or b"")[-1500:].decode(errors="replace")}
    if not done.stdout.strip():
        return {"failed": done.returncode, "stderr": done.stderr[-3000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | ({"stderr": done.stderr[-3000:]} if "failed" in found else {})


def load_rate(marks: list[tuple[float, str]], num_bytes: int) -> dict[str, float]:
    """From the report of a start: seconds of reading weights, their rate, and everything else."""
    times = {text: at for at, text in marks}
    reading = times.get("reading packed weights")
    if reading is None or "ready" not in times:
        return {}
    ended = times["laying out memory"]
    seconds = ended - reading
    return {
        "ready_s": times["ready"],
        "reading_s": seconds,
        "beside_reading_s": times["ready"] - seconds,
        "imports_s": times["imported"],
        "load_gb_per_s": num_bytes / seconds / 1e9,
    }


def _within(name: str, found: dict[str, Any], disk_gb_per_s: float) -> dict[str, bool]:
    """Which bars a start holds, as far as it got."""
    held = {"answered": "failed" not in found}
    if "load_gb_per_s" in found:
        held["load"] = found["load_gb_per_s"] >= 0.7 * disk_gb_per_s
        held["start"] = found["beside_reading_s"] <= (90 if name == "first" else 10)
    if "memory" in found and "driver" in found["memory"]:
        held["card"] = max(found[key]["driver"] for key in ("memory_alone", "memory")) <= found["bar_gib"]
        held["host"] = found["memory"]["VmHWM"] - found["memory"]["table"] < 4
        held["idle"] = max(found[key]["idle"] for key in ("alone", "beside_posts") if key in found) <= 0.03
    return held


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """All of it; what is found is written as it comes."""
    from localspec.hub.layout import PACKED_NAME

    document: dict[str, Any] = {"weights": "random", "model": "tiny" if arguments.tiny else "27B"}
    path = arguments.folder / PACKED_NAME
    started = time.perf_counter()
    command = [sys.executable, __file__, "--folder", str(arguments.folder), "--make"]
    command += ["--tiny"] if arguments.tiny else []
    if not (arguments.keep and path.exists()):
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
        if made.returncode:
            sys.exit(f"the packed weights could not be written: {made.stderr[-2000:]}")
    document["write_s"] = time.perf_counter() - started
    num_bytes = path.stat().st_size if path.exists() else 0
    document["packed_gb"] = num_bytes / 1e9
    with tempfile.TemporaryDirectory() as temporary:
        state = arguments.state or temporary
        for name, context, limit_gib in STARTS:
            if name not in arguments.starts:
                continue
            if path.exists():
                forget(path)
                document[f"disk_{name}"] = disk_rate(path)
                forget(path)
            found = _begin(arguments, Path(state), name, context, limit_gib)
            document[name] = found | load_rate(found.get("marks", []), num_bytes)
            disk = document.get(f"disk_{name}", {"gb_per_s": 0.0})["gb_per_s"]
            document[name]["within"] = _within(name, document[name], disk)
            print(name, json.dumps(document[name]), json.dumps(document.get(f"disk_{name}", {})), flush=True)
            arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "localspec-random-27b")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_load.json"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--state", type=Path, help="where kernels and checks are kept; left there")
    parser.add_argument("--starts", nargs="+", default=[name for name, *_ in STARTS], help="which of the three")
    parser.add_argument("--use", nargs="*", default=["first", "long"], help="which of them also answer")
    parser.add_argument("--keep", action="store_true", help="leave the folder, and use one that is there")
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--start", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit-gib", type=float, help=argparse.SUPPRESS)
    parser.add_argument(
        "--untested", action="store_true", help="leave the test of the kernels out: memory is all that counts"
    )
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.make:
        make_folder(arguments.folder, arguments.tiny)
    elif arguments.start:
        device = "cpu" if arguments.tiny else "cuda"
        start(arguments, device)
    else:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        try:
            measure(arguments)
        finally:
            if not arguments.keep:
                shutil.rmtree(arguments.folder, ignore_errors=True)


if __name__ == "__main__":
    main()

"""Hours of bad clients in minutes: does the port keep its memory, its slots and its other streams?

Starts a server over the scripted engine in a process of its own, then holds steady streams against it while other
clients vanish, read nothing, and send torn or huge bodies. Measures the server's memory all the time, requests that are
still running when all clients have gone, and the gaps between frames of the steady streams. Prints a table and one line
of JSON; exit code 1 when memory was not flat, a slot is stuck, or a stream broke. Nothing here depends on the speed of
the machine but the gaps, which are reported and not judged.

Memory is flat when, after a warm-up under the same load, the medians of eight equal stretches of time differ by at most
5%: (largest - smallest) / first. A sample holds the bodies of 10 MB that are being read at that moment too, hence
medians; the peak is reported beside them.

    python scripts/soak_port.py --seconds 600 --streams 64
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

MAX_SPREAD = 0.05
WARM_UP_SHARE = 0.2
N_STRETCHES = 8
SAMPLE_S = 0.1
ASK = {"messages": [{"role": "user", "content": "hello"}], "stream": True}
GARBAGE = [b"{", b"[" * 50_000, b"\xff" * 999, b'{"messages": 7}', b'{"messages":[{"role":"user","content":3}]}']


@dataclass
class Counts:
    """What the clients saw."""

    whole_streams: int = 0
    broken_streams: int = 0
    vanished: int = 0
    slow: int = 0
    refused: int = 0
    wrong_status: int = 0
    gaps_s: list[float] = field(default_factory=list)


def serve_scripted() -> None:
    """The server process: prints its address."""
    from localspec.api.scripted import Reply, Script, ScriptedEngine
    from localspec.server.serve import run_server
    from localspec.server.settings import ServerSettings

    paced = Reply("<think>hm</think>" + "word and more " * 12)
    endless = Reply("x" * 400_000)

    def choose(request: Any, index: int) -> Reply:
        return endless if request.messages and request.messages[-1].content == "endless" else paced

    engine = ScriptedEngine(Script(tok_per_s=40, slots=1024, context_limit_tokens=1 << 30), choose)
    settings = ServerSettings(port=0, max_requests=1024, send_timeout_s=3.0, keep_alive_s=2.0)
    run_server(engine, settings, on_listening=lambda address: print(address, flush=True))


async def post(address: tuple[str, int], body: bytes, path: str = "/v1/chat/completions") -> Any:
    """Send a request over a plain socket; gives reader and writer."""
    reader, writer = await asyncio.open_connection(*address, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        writer.write(head.encode() + body)
        await writer.drain()
    return reader, writer


async def steady(address: tuple[str, int], counts: Counts, end_s: float) -> None:
    """Whole streams, one after the other."""
    while time.monotonic() < end_s:
        reader, writer = await post(address, json.dumps(ASK).encode())
        last_s, whole = time.monotonic(), False
        async for line in reader:
            if line.startswith(b"data:"):
                now_s = time.monotonic()
                counts.gaps_s.append(now_s - last_s)
                last_s, whole = now_s, whole or b"[DONE]" in line
        counts.whole_streams += whole
        counts.broken_streams += not whole
        writer.close()


async def bad(address: tuple[str, int], counts: Counts, end_s: float, rng: random.Random) -> None:
    """One bad client after the other."""
    endless = json.dumps({"messages": [{"role": "user", "content": "endless"}], "stream": True}).encode()
    while time.monotonic() < end_s:
        kind = rng.choice(("vanish", "vanish", "slow", "garbage", "garbage", "huge"))
        if kind == "vanish":
            reader, writer = await post(address, endless if rng.random() < 0.5 else json.dumps(ASK).encode())
            with contextlib.suppress(ConnectionError):
                await reader.read(rng.randint(1, 4000))
            writer.transport.abort()
            counts.vanished += 1
        elif kind == "slow":
            _, writer = await post(address, endless)
            await asyncio.sleep(rng.uniform(0.5, 5))
            writer.transport.abort()
            counts.slow += 1
        else:
            body = rng.choice(GARBAGE) if kind == "garbage" else huge_body(rng)
            reader, writer = await post(address, body)
            with contextlib.suppress(ConnectionError):
                status = (await reader.readline()).split(b" ")
                counts.refused += status[1:2] in ([b"400"], [b"413"])
                counts.wrong_status += status[1:2] not in ([b"400"], [b"413"], [])
            writer.transport.abort()
        await asyncio.sleep(rng.uniform(0, 0.2))


def huge_body(rng: random.Random) -> bytes:
    """Ten million bytes of JSON that is refused late, or twice the limit."""
    if rng.random() < 0.5:
        return b'{"messages": [{"role": "user", "content": "' + b"x" * 10_000_000 + b'"}], "temperature": "hot"}'
    return b" " * 33_000_000


async def soak(seconds: float, n_streams: int, n_bad: int, process: Any, address: tuple[str, int]) -> dict[str, Any]:
    """Run the clients; gives the figures."""
    server, counts = psutil.Process(process.pid), Counts()
    end_s, rng = time.monotonic() + seconds, random.Random(0)
    tasks = [asyncio.create_task(steady(address, counts, end_s)) for _ in range(n_streams)]
    tasks += [asyncio.create_task(bad(address, counts, end_s, random.Random(rng.random()))) for _ in range(n_bad)]
    samples: list[tuple[float, int]] = []
    began_s, cpu_s = time.monotonic(), sum(server.cpu_times()[:2])
    while time.monotonic() < end_s:
        await asyncio.sleep(SAMPLE_S)
        samples.append((time.monotonic() - began_s, server.memory_info().rss))
    cpu_share = (sum(server.cpu_times()[:2]) - cpu_s) / (time.monotonic() - began_s)
    await asyncio.gather(*tasks)
    stuck = await still_running(address)
    warm = [rss for at_s, rss in samples if at_s >= seconds * WARM_UP_SHARE]
    medians = stretch_medians(warm)
    gaps = sorted(counts.gaps_s)
    return {
        "seconds": seconds,
        "streams": n_streams,
        "bad_clients": n_bad,
        "rss_stretch_median_bytes": medians,
        "rss_spread": round((max(medians) - min(medians)) / medians[0], 4),
        "rss_peak_bytes": max(warm),
        "server_cpu_share": round(cpu_share, 3),
        "stuck_requests": stuck,
        "gap_p50_ms": round(gaps[len(gaps) // 2] * 1e3, 1) if gaps else None,
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1) if gaps else None,
        **{name: value for name, value in vars(counts).items() if name != "gaps_s"},
    }


def stretch_medians(warm: list[int]) -> list[int]:
    """Median of each of eight equal stretches of samples, fewer where there are fewer samples."""
    n_stretches = min(N_STRETCHES, len(warm))
    cuts = [len(warm) * number // n_stretches for number in range(n_stretches + 1)]
    return [int(statistics.median(warm[begin:end])) for begin, end in itertools.pairwise(cuts)]


async def still_running(address: tuple[str, int]) -> int:
    """Requests that the engine still runs once every client has gone; waits a little for them."""
    n_running = -1
    for _ in range(40):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        n_running = next(
            int(line.split()[1]) for line in text.splitlines() if line.startswith("localspec_requests_running")
        )
        if n_running == 0:
            break
        await asyncio.sleep(0.25)
    return n_running


def main() -> int:
    """Parse, run, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--bad", type=int, default=16)
    parser.add_argument("--max-spread", type=float, default=MAX_SPREAD)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve_scripted()
        return 0
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            host, _, port = process.stdout.readline().strip().removeprefix("http://").rpartition(":")
            figures = asyncio.run(soak(options.seconds, options.streams, options.bad, process, (host, int(port))))
        finally:
            process.terminate()
    for name, value in figures.items():
        print(f"{name:>24}  {value}", file=sys.stderr)
    print(json.dumps({"benchmark": "soak_port", **figures}))
    broken = figures["stuck_requests"] or figures["broken_streams"] or figures["wrong_status"]
    return 1 if broken or figures["rss_spread"] > options.max_spread else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the port costs a stream of 500 tokens a second: share of a core, and time added to a token.

One token a frame, which is the worst case (accepted drafts share a frame). The scripted engine runs once without a
port and once behind it, in processes of their own; the difference in processor time is the port's. The time added to
a token is from the engine's step to the client's read, both on one clock. Prints a table and one line of JSON.

    python scripts/measure_port.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from typing import Any

N_TOKENS = 5000
TOK_PER_S = 500.0


def engine() -> Any:
    """A scripted engine without drafts; its text carries nothing, its clock is the monotonic one of the machine."""
    from localspec.api.scripted import Reply, Script, ScriptedEngine

    return ScriptedEngine(Script((Reply("abcdefghi " * (N_TOKENS // 10)),), tok_per_s=TOK_PER_S, drafters=("off",)))


async def alone() -> None:
    """The engine without a port: processor seconds of the run on stdout."""
    from localspec.api.types import GenerateRequest, Prefill

    began_s = time.process_time()
    async for event in engine().generate(GenerateRequest(prompt="x")):
        assert isinstance(event, Prefill) or event
    print(json.dumps({"cpu_s": time.process_time() - began_s}), flush=True)


def behind_port() -> None:
    """The engine behind the port. Stamps each delta, and prints processor seconds and stamps when stdin closes."""
    from localspec.api.types import Delta
    from localspec.server.serve import run_server
    from localspec.server.settings import ServerSettings

    stamps: list[float] = []
    made = engine()
    generate = made.generate

    async def stamped(request: Any) -> Any:
        async for event in generate(request):
            if isinstance(event, Delta):
                stamps.append(time.monotonic())
            yield event

    made.generate = stamped
    began: list[float] = []

    def listening(address: str) -> None:
        print(address, flush=True)
        began.append(time.process_time())

    run_server(made, ServerSettings(port=0), on_listening=listening)
    print(json.dumps({"cpu_s": time.process_time() - began[0], "stamps": stamps}), flush=True)


async def read_stream(host: str, port: int) -> list[float]:
    """Times at which the frames of one streamed chat arrive."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    reader, writer = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    seen = []
    async for line in reader:
        if b'"delta":{"content":"' in line and b'"role"' not in line:
            seen.append(time.monotonic())
        if b"[DONE]" in line:
            break
    writer.close()
    return seen


def main() -> int:
    """Run both processes and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=("alone", "port"), help=argparse.SUPPRESS)
    role = parser.parse_args().role
    if role == "alone":
        asyncio.run(alone())
        return 0
    if role == "port":
        behind_port()
        return 0
    base = subprocess.run([sys.executable, __file__, "--role", "alone"], capture_output=True, text=True, check=True)
    alone_cpu_s = json.loads(base.stdout)["cpu_s"]
    with subprocess.Popen([sys.executable, __file__, "--role", "port"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        host, _, port = process.stdout.readline().strip().removeprefix("http://").rpartition(":")
        seen = asyncio.run(read_stream(host, int(port)))
        process.terminate()
        said = json.loads(process.stdout.readline())
    added_ms = sorted((there - here) * 1e3 for here, there in zip(said["stamps"], seen, strict=True))
    seconds = N_TOKENS / TOK_PER_S
    figures = {
        "tokens": len(seen),
        "port_core_share": round((said["cpu_s"] - alone_cpu_s) / seconds, 4),
        "engine_core_share": round(alone_cpu_s / seconds, 4),
        "added_p50_ms": round(statistics.median(added_ms), 3),
        "added_p99_ms": round(added_ms[int(len(added_ms) * 0.99)], 3),
    }
    for name, value in figures.items():
        print(f"{name:>18}  {value}", file=sys.stderr)
    print(json.dumps({"benchmark": "measure_port", **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Do the clients that people use get through a chat with a tool call, and a plain chat with a real model, on our port?

Each client runs in an empty home, with the configuration that `localspec connect` writes where it can. To show that
none needs the internet, run it where there is only loopback (below).

tool: against the scripted engine, which answers the first request with a call to a tool that the client offers (one
that reads a file or runs a command); the file holds a secret word; the engine's second answer repeats what the tool
gave. A client passes when it prints the word, which it can only do after the call, the tool and the second request
have all worked. aider has no tools: it passes when the edit that the engine answers with is in the file.
plain: against the demo model on the CPU; a client passes when it prints what the model said and ends well.

Command-line clients from npm are looked for in --npm, a folder in which `npm install` was run, aider in --aider, a
virtual environment of its own (it pins its packages); those that are not there are skipped and said to be. Prints a
table and one line of JSON, kept under scripts/results.

    npm install --prefix /tmp/clients openai ai @ai-sdk/openai-compatible zod @qwen-code/qwen-code @continuedev/cli \
        opencode-ai @openai/codex @anthropic-ai/claude-code
    python3.12 -m venv /tmp/aider && /tmp/aider/bin/pip install aider-chat
    unshare -rn sh -c 'ip link set lo up; exec python scripts/real_clients.py --npm /tmp/clients --aider /tmp/aider'
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from client_kit import CLIENTS, NEW_WORD, WORD, Client

from localspec.config import DEMO_MODEL_ID, load_settings, prepare_process

prepare_process()

from localspec.api.scripted import Reply, Script, ScriptedEngine  # noqa: E402
from localspec.api.types import Delta, Event, GenerateRequest  # noqa: E402
from localspec.server.serve import serve  # noqa: E402
from localspec.server.settings import ServerSettings  # noqa: E402

TOOLS = ("read_file", "Read", "read", "shell", "shell_command", "exec_command", "local_shell", "bash", "Bash")
TIMEOUT_S = 240
PLAIN_TOKENS = 200
SCRIPTED_CONTEXT_TOKENS, DEMO_CONTEXT_TOKENS = 1 << 20, 8192


@dataclass(frozen=True)
class Places:
    """Where clients from elsewhere are."""

    npm: Path
    aider: Path

    @property
    def search_path(self) -> str:
        bins = (Path(sys.executable).parent, self.npm / "node_modules/.bin", self.aider / "bin")
        return ":".join([*map(str, bins), os.environ["PATH"]])


class CallThenRepeat:
    """Calls a tool first, repeats its result then; notes what it was asked."""

    def __init__(self) -> None:
        self.note = Path("note.txt")
        self.results = 0

    def __call__(self, request: GenerateRequest, index: int) -> Reply:
        results = [message for message in request.messages if message.role == "tool"]
        if results:
            self.results += 1
            return Reply("The note says: " + results[-1].content[:400])
        if "SEARCH/REPLACE" in request.messages[0].content:
            edit = f"<<<<<<< SEARCH\n{WORD}\n=======\n{NEW_WORD}\n>>>>>>> REPLACE"
            return Reply(f"I change it.\n\nnote.txt\n```\n{edit}\n```\n")
        tools = {tool["function"]["name"]: tool["function"] for tool in request.tools}
        name = next((name for name in TOOLS if name in tools), None)
        if name is None:
            return Reply("A title")
        call = {"name": name, "arguments": self._arguments(tools[name].get("parameters", {}))}
        return Reply(f"I read it.\n<tool_call>\n{json.dumps(call)}\n</tool_call>")

    def _arguments(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        properties = schema.get("properties", {})
        wanted = schema.get("required") or list(properties)[:1]
        return {name: self._value(name, properties.get(name, {})) for name in wanted}

    def _value(self, name: str, schema: Mapping[str, Any]) -> Any:
        kind = schema.get("type")
        if kind == "array":
            return ["cat", str(self.note)]
        if kind in ("integer", "number"):
            return 1
        if kind == "boolean":
            return False
        return f"cat {self.note}" if name in ("command", "cmd") else str(self.note) if "ath" in name else "reading"


class Recorder:
    """An engine that notes what it said; short greedy answers, the same each time."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.answers: list[list[str]] = []
        self.prompt_chars: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        sampling = replace(request.sampling, temperature=0.0)
        wanted = min(request.max_tokens or PLAIN_TOKENS, PLAIN_TOKENS)
        answer: list[str] = []
        self.answers.append(answer)
        self.prompt_chars.append(sum(len(message.content) for message in request.messages))
        async with aclosing(self._engine.generate(replace(request, sampling=sampling, max_tokens=wanted))) as events:
            async for event in events:
                answer += [event.text] if isinstance(event, Delta) else []
                yield event


def version_of(client: Client, places: Places) -> str:
    """Version of the package behind a client, empty if unknown."""
    if client.package == "aider-chat":
        found = sorted(places.aider.glob("lib/python*/site-packages/aider_chat-*.dist-info"))
        return found[0].name.removeprefix("aider_chat-").removesuffix(".dist-info") if found else ""
    if client.tool[0] in ("python", "llm"):
        return importlib.metadata.version(client.package)
    try:
        return str(json.loads((places.npm / "node_modules" / client.package / "package.json").read_text())["version"])
    except (OSError, ValueError, KeyError):
        return ""


def make_home(client: Client, address: str, model: str, context_tokens: int, places: Places) -> Path:
    """An empty home with the client's files, the note, and what `localspec connect` writes."""
    home = Path(tempfile.mkdtemp(prefix="client-"))
    for name, text in {"note.txt": WORD + "\n", **client.files}.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        filled = text if name.endswith((".mjs", ".py")) else text.replace("BASE", address).replace("MODEL", model)
        path.write_text(filled)
    if (places.npm / "node_modules").is_dir():
        (home / "node_modules").symlink_to(places.npm / "node_modules")
    if client.connect:
        connect(home, client.connect, "--write", "--url", address, "--model", model, "--context", str(context_tokens))
    return home


def connect(home: Path, *arguments: str) -> None:
    """`localspec connect` for this home."""
    env = {**os.environ, "HOME": str(home), "LOCALSPEC_HOME": str(home / ".localspec")}
    command = [sys.executable, "-m", "localspec.cli", "connect", *arguments]
    subprocess.run(command, env=env, check=True, capture_output=True, cwd=Path(__file__).parent.parent)


async def run_client(client: Client, kind: str, address: str, model: str, home: Path, places: Places) -> dict[str, Any]:
    """Run the client's command of this kind; the caller judges `output` and what is in the home."""
    command = [part.replace("MODEL", model) for part in (client.tool if kind == "tool" else client.plain)]
    program = shutil.which(command[0], path=places.search_path)
    if program is None:
        return {"result": "not installed"}
    env = {
        "PATH": places.search_path,
        "HOME": str(home),
        "XDG_CONFIG_HOME": str(home / ".config"),
        "XDG_DATA_HOME": str(home / ".data"),
        "BASE": address,
        "MODEL": model,
        "OPENAI_BASE_URL": address + "/v1",
        "OPENAI_API_KEY": "x",
        "OPENAI_MODEL": model,
        "LLM_USER_PATH": str(home / "llm"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CI": "1",
        # Its own list of prices is enough for aider; it would wait for a newer one first.
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    began_s = time.monotonic()
    code, output = await run_program([program, *command[1:]], home, env)
    return {"exit_code": code, "output": output, "seconds": round(time.monotonic() - began_s, 1)}


async def run_program(command: list[str], home: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code and output; a program that takes too long is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        return None, f"no end after {TIMEOUT_S} s"
    return process.returncode, output.decode(errors="replace")


class Serving:
    """A server over an engine, in this event loop."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def __aenter__(self) -> str:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(serve(self._engine, ServerSettings(port=0), None, address.set_result))
        return await address

    async def __aexit__(self, *_: object) -> None:
        await self._engine.aclose()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def try_tool(client: Client, places: Places) -> dict[str, Any]:
    """Against the scripted engine."""
    script = CallThenRepeat()
    engine = ScriptedEngine(Script(tok_per_s=2000, slots=8, context_limit_tokens=SCRIPTED_CONTEXT_TOKENS), script)
    async with Serving(engine) as address:
        home = await asyncio.to_thread(make_home, client, address, "scripted", SCRIPTED_CONTEXT_TOKENS, places)
        script.note = home / "note.txt"
        found = await run_client(client, "tool", address, "scripted", home, places)
        metrics = engine.metrics()
    passed = WORD in found.get("output", "") and script.results > 0
    if client.package == "aider-chat":
        passed = script.note.read_text() == NEW_WORD + "\n"
    shutil.rmtree(home, ignore_errors=True)
    return _judged(found, passed, requests=metrics.requests_total)


async def try_plain(client: Client, places: Places, recorder: Recorder, address: str) -> dict[str, Any]:
    """Against the demo model."""
    recorder.answers, recorder.prompt_chars = [], []
    home = await asyncio.to_thread(make_home, client, address, DEMO_MODEL_ID, DEMO_CONTEXT_TOKENS, places)
    found = await run_client(client, "plain", address, DEMO_MODEL_ID, home, places)
    shutil.rmtree(home, ignore_errors=True)
    shown = "".join(found.get("output", "").split())
    said = ["".join("".join(answer).split())[:40] for answer in recorder.answers]
    passed = found.get("exit_code") == 0 and any(answer and answer in shown for answer in said)
    return _judged(found, passed, requests=len(said), prompt_chars=max(recorder.prompt_chars, default=0))


def _judged(found: dict[str, Any], passed: bool, **figures: int) -> dict[str, Any]:
    if "result" in found:
        return found
    output = found.pop("output")
    shown = {} if passed else {"output": output[-1500:]}
    return {"result": "passed" if passed else "failed", **found, **figures, **shown}


async def main_async(places: Places, names: list[str], kinds: list[str]) -> list[dict[str, Any]]:
    """All clients, one after the other."""
    results: dict[str, dict[str, Any]] = {
        name: {"client": name, "version": version_of(CLIENTS[name], places)} for name in names
    }
    if "tool" in kinds:
        for name in names:
            results[name]["tool"] = await try_tool(CLIENTS[name], places)
            report(name, "tool", results[name]["tool"])
    if "plain" in kinds:
        recorder = Recorder(await demo_engine())
        async with Serving(recorder) as address:
            for name in names:
                results[name]["plain"] = await try_plain(CLIENTS[name], places, recorder, address)
                report(name, "plain", results[name]["plain"])
    return list(results.values())


async def demo_engine() -> Any:
    """The demo model on the CPU, as `localspec serve` starts it."""
    from localspec.commands.common import make_locator
    from localspec.engine.build import EngineOptions
    from localspec.engine.engine import LocalEngine

    engine = LocalEngine(make_locator(load_settings(), offline=True), EngineOptions(device="cpu"))
    engine.start(DEMO_MODEL_ID)
    await engine.wait_ready()
    return engine


def network() -> str:
    """Whether anything but this machine could have been reached."""
    import psutil

    return "loopback only" if set(psutil.net_if_addrs()) <= {"lo"} else "open"


def report(name: str, kind: str, result: dict[str, Any]) -> None:
    """One line of the table, and what a client said that failed."""
    print(f"{name:>16} {kind:<5} {result['result']:<14} {result.get('seconds', '')} s", file=sys.stderr, flush=True)
    if "output" in result:
        print(result["output"], file=sys.stderr)


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npm", type=Path, default=Path("/tmp/clients"), help="folder with node_modules")
    parser.add_argument("--aider", type=Path, default=Path("/tmp/aider"), help="virtual environment with aider")
    parser.add_argument("--only", action="append", choices=list(CLIENTS), help="may be given several times")
    parser.add_argument("--kind", action="append", choices=["tool", "plain"], help="may be given several times")
    parser.add_argument("--out", type=Path, help="write the line of JSON here too")
    options = parser.parse_args()
    places = Places(options.npm.resolve(), options.aider.resolve())
    results = asyncio.run(main_async(places, options.only or list(CLIENTS), options.kind or ["tool", "plain"]))
    document = json.dumps({"check": "real_clients", "network": network(), "results": results})
    print(document)
    if options.out:
        options.out.write_text(document + "\n")
    return (
        1
        if any(entry.get(kind, {}).get("result") == "failed" for entry in results for kind in ("tool", "plain"))
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())

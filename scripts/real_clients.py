"""Do the clients that people use get through a chat with a tool call on our port?

Each client runs in an empty home against the scripted engine. To show that none needs the internet, run it where there
is only loopback (below). The engine answers the first
request with a call to a tool that the client offers (one that reads a file or runs a command); the file holds a secret
word; the engine's second answer repeats what the tool gave. A client passes when it prints the word, which it can only
do after the call, the tool and the second request have all worked.

Command-line clients come from npm (see CLIENTS) and are looked for in --npm, a folder in which `npm install` was run;
those that are not there are skipped and said to be. Prints a table and one line of JSON, kept under scripts/results.

    npm install --prefix /tmp/clients openai ai @ai-sdk/openai-compatible zod @qwen-code/qwen-code @continuedev/cli \
        opencode-ai @openai/codex
    unshare -rn sh -c 'ip link set lo up; exec python scripts/real_clients.py --npm /tmp/clients'
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.api.types import GenerateRequest
from localspec.server.serve import serve
from localspec.server.settings import ServerSettings

WORD = "blue-heron-7"
TOOLS = ("read_file", "Read", "read", "shell", "shell_command", "exec_command", "local_shell", "bash", "Bash")
ASK = "Read the file note.txt and tell me what it says."
TIMEOUT_S = 120

OPENAI_JS = """
import OpenAI from "openai"
const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "x" })
const runner = client.chat.completions.runTools({
  model: "scripted", stream: true, messages: [{ role: "user", content: "read note.txt" }],
  tools: [{ type: "function", function: { name: "read", parse: JSON.parse, function: (a) => "WORD for " + a.path,
    parameters: { type: "object", properties: { path: { type: "string" } }, required: ["path"] } } }],
})
console.log(await runner.finalContent())
"""

AI_SDK_JS = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { streamText, tool, stepCountIs } from "ai"
import { z } from "zod"
const provider = createOpenAICompatible({ name: "local", baseURL: process.env.BASE + "/v1" })
const result = streamText({
  model: provider("scripted"), prompt: "read note.txt", stopWhen: stepCountIs(4),
  tools: { read: tool({ description: "reads", inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => "WORD for " + path }) },
})
for await (const part of result.textStream) process.stdout.write(part)
"""

CONTINUE_YAML = """
name: local
version: 1.0.0
schema: v1
models:
  - name: local
    provider: openai
    model: scripted
    apiBase: BASE/v1
    apiKey: x
    capabilities: [tool_use]
"""

CODEX_TOML = """
model = "scripted"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "BASE/v1"
wire_api = "responses"
"""

OPENCODE_JSON = {
    "model": "local/scripted",
    "permission": {"edit": "allow", "bash": "allow"},
    "provider": {
        "local": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "local",
            "options": {"baseURL": "BASE/v1"},
            "models": {"scripted": {"name": "scripted", "tool_call": True}},
        }
    },
}

LLM_YAML = "- model_id: local\n  model_name: scripted\n  api_base: BASE/v1\n  supports_tools: true\n"
LLM_FUNCTION = "def read(path: str) -> str:\n    'reads'\n    return 'WORD for ' + path\n"

CLIENTS: dict[str, list[str]] = {
    "openai (npm)": ["node", "openai.mjs"],
    "AI SDK": ["node", "ai.mjs"],
    "llm": ["llm", "-m", "local", "--functions", LLM_FUNCTION, ASK],
    "Qwen Code": ["qwen", "-p", ASK, "--yolo"],
    "Continue CLI": ["cn", "-p", ASK, "--config", "continue.yaml", "--allow", "Read"],
    "opencode": ["opencode", "run", ASK],
    "Codex": ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", ASK],
}

PACKAGES = {
    "openai (npm)": "openai",
    "AI SDK": "ai",
    "Qwen Code": "@qwen-code/qwen-code",
    "Continue CLI": "@continuedev/cli",
    "opencode": "opencode-ai",
    "Codex": "@openai/codex",
}


def version_of(client: str, npm: Path) -> str:
    """Version of the package behind a client, empty if unknown."""
    if client == "llm":
        return importlib.metadata.version("llm")
    try:
        return str(json.loads((npm / "node_modules" / PACKAGES[client] / "package.json").read_text())["version"])
    except (OSError, ValueError, KeyError):
        return ""


class CallThenRepeat:
    """Calls a tool first, repeats its result then; notes what it was asked."""

    def __init__(self, note: Path) -> None:
        self.note = note
        self.requests = 0
        self.results = 0

    def __call__(self, request: GenerateRequest, index: int) -> Reply:
        self.requests += 1
        results = [message for message in request.messages if message.role == "tool"]
        if results:
            self.results += 1
            return Reply("The note says: " + results[-1].content[:400])
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


def write_files(home: Path, address: str) -> None:
    """Configuration of every client, and the note."""
    files = {
        "note.txt": WORD + "\n",
        "openai.mjs": OPENAI_JS,
        "ai.mjs": AI_SDK_JS,
        "continue.yaml": CONTINUE_YAML,
        "opencode.json": json.dumps(OPENCODE_JSON),
        ".codex/config.toml": CODEX_TOML,
        "llm/extra-openai-models.yaml": LLM_YAML,
    }
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("BASE", address if "mjs" not in name else "BASE").replace("WORD", WORD))


async def try_client(name: str, npm: Path) -> dict[str, Any]:
    """Run one client in a home of its own against a server of its own."""
    home = Path(tempfile.mkdtemp(prefix="client-"))
    script = CallThenRepeat(home / "note.txt")
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    engine = ScriptedEngine(Script(tok_per_s=2000, slots=8, context_limit_tokens=1 << 20), script)
    server = asyncio.create_task(serve(engine, ServerSettings(port=0), None, listening.set_result))
    try:
        address = await listening
        write_files(home, address)
        if (npm / "node_modules").is_dir():
            (home / "node_modules").symlink_to(npm / "node_modules")
        search = f"{npm / 'node_modules/.bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        command = [part.replace("WORD", WORD) for part in CLIENTS[name]]
        program = shutil.which(command[0], path=search)
        if program is None:
            return {"client": name, "result": "not installed"}
        env = {
            "PATH": search,
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".data"),
            "BASE": address,
            "OPENAI_BASE_URL": address + "/v1",
            "OPENAI_API_KEY": "x",
            "OPENAI_MODEL": "scripted",
            "LLM_USER_PATH": str(home / "llm"),
            "CI": "1",
        }
        began_s = time.monotonic()
        code, output = await run_program([program, *command[1:]], home, env)
        passed = WORD in output and script.results > 0
        return {
            "client": name,
            "version": version_of(name, npm),
            "result": "passed" if passed else "failed",
            "exit_code": code,
            "requests": script.requests,
            "seconds": round(time.monotonic() - began_s, 1),
            **({} if passed else {"output": output[-1500:]}),
        }
    finally:
        await engine.aclose()
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        shutil.rmtree(home, ignore_errors=True)


async def run_program(command: list[str], home: Path, env: dict[str, str]) -> tuple[int | None, str]:
    """Exit code and output; a program that takes too long is killed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=home,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        return None, f"no end after {TIMEOUT_S} s"
    return process.returncode, output.decode(errors="replace")


async def main_async(npm: Path, names: list[str]) -> int:
    """All clients, one after the other."""
    results = [await try_client(name, npm) for name in names]
    for result in results:
        print(f"{result['client']:>16}  {result['result']:<14} {result.get('seconds', '')} s", file=sys.stderr)
        if "output" in result:
            print(result["output"], file=sys.stderr)
    print(json.dumps({"check": "real_clients", "results": results}))
    return 1 if any(result["result"] == "failed" for result in results) else 0


def main() -> int:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--npm", type=Path, default=Path("/tmp/clients"), help="folder with node_modules")
    parser.add_argument("--only", action="append", choices=list(CLIENTS), help="may be given several times")
    options = parser.parse_args()
    return asyncio.run(main_async(options.npm.resolve(), options.only or list(CLIENTS)))


if __name__ == "__main__":
    sys.exit(main())

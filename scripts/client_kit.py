"""The clients that `real_clients.py` runs: their programs, the files they need, and what they are asked.

Where `localspec connect` can write a client's configuration, that is what the client runs with. Knows nothing of how
a client is judged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

WORD, NEW_WORD = "blue-heron-7", "red-kite-9"
ASK = "Read the file note.txt and tell me what it says."
PLAIN = "Say hello in one short sentence."

OPENAI_PY = """
import os, sys, json, openai
client = openai.OpenAI(base_url=os.environ["BASE"] + "/v1", api_key="x")
schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
tools = [{"type": "function", "function": {"name": "read", "parameters": schema}}]
said = [{"role": "user", "content": sys.argv[1]}]
with_tools = {"tools": tools} if "note" in sys.argv[1] else {}
while True:
    with client.chat.completions.stream(model=os.environ["MODEL"], messages=said, **with_tools) as stream:
        for event in stream:
            if event.type == "content.delta":
                print(event.delta, end="", flush=True)
    message = stream.get_final_completion().choices[0].message
    if not message.tool_calls:
        break
    said.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        text = open(json.loads(call.function.arguments)["path"]).read()
        said.append({"role": "tool", "tool_call_id": call.id, "content": text})
"""

ANTHROPIC_PY = """
import os, sys, anthropic
client = anthropic.Anthropic(base_url=os.environ["BASE"], api_key="x")
schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
tools = [{"name": "read", "input_schema": schema}]
said = [{"role": "user", "content": sys.argv[1]}]
with_tools = {"tools": tools} if "note" in sys.argv[1] else {}
while True:
    with client.messages.stream(model="claude-x", max_tokens=500, messages=said, **with_tools) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        message = stream.get_final_message()
    if message.stop_reason != "tool_use":
        break
    said.append({"role": "assistant", "content": message.content})
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": open(block.input["path"]).read()}
               for block in message.content if block.type == "tool_use"]
    said.append({"role": "user", "content": results})
"""

OLLAMA_PY = """
import os, sys, ollama
client = ollama.Client(os.environ["BASE"])
def read(path: str) -> str:
    "Reads a file."
    return open(path).read()
said = [{"role": "user", "content": sys.argv[1]}]
while True:
    calls, text = [], ""
    for part in client.chat(os.environ["MODEL"], said, tools=[read] if "note" in sys.argv[1] else [], stream=True):
        print(part.message.content or "", end="", flush=True)
        text += part.message.content or ""
        calls += part.message.tool_calls or []
    if not calls:
        break
    said.append({"role": "assistant", "content": text, "tool_calls": calls})
    said += [{"role": "tool", "tool_name": call.function.name, "content": read(**call.function.arguments)}
             for call in calls]
"""

OPENAI_JS = """
import OpenAI from "openai"
import { readFileSync } from "fs"
const client = new OpenAI({ baseURL: process.env.BASE + "/v1", apiKey: "x" })
const ask = process.argv[2], model = process.env.MODEL, messages = [{ role: "user", content: ask }]
const tools = [{ type: "function", function: { name: "read", parse: JSON.parse,
  function: (a) => readFileSync(a.path, "utf8"),
  parameters: { type: "object", properties: { path: { type: "string" } }, required: ["path"] } } }]
const runner = ask.includes("note") ? client.chat.completions.runTools({ model, stream: true, messages, tools })
  : client.chat.completions.stream({ model, messages })
console.log(await runner.finalContent())
"""

AI_SDK_JS = """
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import { streamText, tool, stepCountIs } from "ai"
import { readFileSync } from "fs"
import { z } from "zod"
const provider = createOpenAICompatible({ name: "local", baseURL: process.env.BASE + "/v1" })
const read = tool({ description: "reads", inputSchema: z.object({ path: z.string() }),
  execute: async ({ path }) => readFileSync(path, "utf8") })
const result = streamText({ model: provider(process.env.MODEL), prompt: process.argv[2], stopWhen: stepCountIs(4),
  ...(process.argv[2].includes("note") ? { tools: { read } } : {}) })
for await (const part of result.textStream) process.stdout.write(part)
"""

LLM_YAML = "- model_id: local\n  model_name: MODEL\n  api_base: BASE/v1\n  supports_tools: true\n"
LLM_FUNCTION = "def read(path: str) -> str:\n    'reads'\n    return open(path).read()\n"
SHORT = "You are a helpful assistant."
OPENCODE_AGENT = {"agent": {"brief": {"mode": "primary", "prompt": SHORT, "tools": {"*": False}}}}


@dataclass(frozen=True)
class Client:
    """tool: command of a chat with a tool call; plain: of a chat without. BASE and MODEL in files are filled in.

    package: its name on npm or PyPI; connect: its name for `localspec connect`, which writes its configuration.
    Agents bring thousands of tokens of instructions, more than the demo model can hold; their plain chats give shorter
    ones, by each agent's own means.
    """

    tool: tuple[str, ...]
    plain: tuple[str, ...]
    package: str
    files: Mapping[str, str] = field(default_factory=dict)
    connect: str = ""


def _both(*command: str) -> dict[str, tuple[str, ...]]:
    return {"tool": (*command, ASK), "plain": (*command, PLAIN)}


_AIDER = ("aider", "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-pretty",
          "--analytics-disable", "--no-show-release-notes")  # fmt: skip
_CODEX = ("codex", "exec", "--profile", "localspec", "--skip-git-repo-check",
          "--dangerously-bypass-approvals-and-sandbox")  # fmt: skip
_CN = ("cn", "--config", ".continue/config.yaml", "-p")

CLIENTS: dict[str, Client] = {
    "openai (PyPI)": Client(**_both("python", "openai_chat.py"), package="openai", files={"openai_chat.py": OPENAI_PY}),
    "anthropic (PyPI)": Client(
        **_both("python", "anthropic_chat.py"), package="anthropic", files={"anthropic_chat.py": ANTHROPIC_PY}
    ),
    "ollama (PyPI)": Client(**_both("python", "ollama_chat.py"), package="ollama", files={"ollama_chat.py": OLLAMA_PY}),
    "llm": Client(
        tool=("llm", "-m", "local", "--functions", LLM_FUNCTION, ASK),
        plain=("llm", "-m", "local", PLAIN),
        package="llm",
        files={"llm/extra-openai-models.yaml": LLM_YAML},
    ),
    "aider": Client(
        tool=(*_AIDER, "--edit-format", "diff", "--message", f"Put {NEW_WORD} into note.txt instead.", "note.txt"),
        plain=(*_AIDER, "--edit-format", "ask", "--message", PLAIN),
        package="aider-chat",
        connect="aider",
    ),
    "openai (npm)": Client(**_both("node", "openai.mjs"), package="openai", files={"openai.mjs": OPENAI_JS}),
    "AI SDK": Client(**_both("node", "ai.mjs"), package="ai", files={"ai.mjs": AI_SDK_JS}),
    "Continue CLI": Client(
        tool=(*_CN, ASK, "--allow", "Read"),
        plain=(*_CN, PLAIN, "--exclude", "*"),
        package="@continuedev/cli",
        connect="continue",
    ),
    "opencode": Client(
        tool=("opencode", "run", "--model", "localspec/MODEL", ASK),
        plain=("opencode", "run", "--model", "localspec/MODEL", "--agent", "brief", PLAIN),
        package="opencode-ai",
        files={"opencode.json": json.dumps({"permission": {"edit": "allow", "bash": "allow"}, **OPENCODE_AGENT})},
        connect="opencode",
    ),
    "Codex": Client(
        tool=(*_CODEX, ASK),
        plain=(*_CODEX, "-c", 'model_instructions_file="short.md"', PLAIN),
        package="@openai/codex",
        files={"short.md": SHORT},
        connect="codex",
    ),
    "Qwen Code": Client(
        tool=("qwen", "-p", ASK, "--yolo"),
        plain=("qwen", "-p", PLAIN, "--bare", "--system-prompt", SHORT),
        package="@qwen-code/qwen-code",
    ),
    "Claude Code": Client(
        tool=("claude", "-p", ASK, "--allowedTools", "Read"),
        plain=("claude", "-p", PLAIN, "--system-prompt", SHORT, "--tools", ""),
        package="@anthropic-ai/claude-code",
        connect="claude-code",
    ),
}

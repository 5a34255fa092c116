"""What each editor and agent must be told to use the port: the words to show, the file to change, the piece to insert.

Data only; the pieces follow the clients' own documentation. Knows nothing of how files are changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localspec.commands.connect_files import Insertion, append_block, json_members, yaml_item


@dataclass(frozen=True)
class Address:
    """The port as a client sees it. `base` has no path; `key` is any word where the port asks for none."""

    base: str
    model: str
    key: str
    context_tokens: int

    @property
    def v1(self) -> str:
        return f"{self.base}/v1"


@dataclass(frozen=True)
class Client:
    """steps: what to do, a line each. path: where the file lies under a home folder, None if there is none to change.

    piece: (content, address) -> what to insert; raises CannotWrite where the content does not allow it.
    """

    name: str
    title: str
    steps: Callable[[Address], tuple[str, ...]]
    path: Callable[[Path], Path] | None = None
    piece: Callable[[str, Address], Insertion] | None = None


def _continue_item(address: Address) -> str:
    return (
        f"name: localspec\nprovider: openai\nmodel: {_plain(address.model)}\napiBase: {address.v1}\n"
        f"apiKey: {_plain(address.key)}\nroles: [chat, edit, apply]\ncapabilities: [tool_use]\n"
    )


def _continue_piece(content: str, address: Address) -> Insertion:
    if content.strip():
        return yaml_item(content, "models", _continue_item(address))
    lines = _continue_item(address).splitlines()
    items = "\n".join(f"  {'- ' if index == 0 else '  '}{line}" for index, line in enumerate(lines))
    return append_block(content, f"name: localspec\nversion: 0.0.1\nschema: v1\nmodels:\n{items}", "#", ())


def _zed_piece(content: str, address: Address) -> Insertion:
    model = {
        "name": address.model,
        "display_name": f"{address.model} (localspec)",
        "max_tokens": address.context_tokens,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"localspec": {"api_url": address.v1, "available_models": [model]}}
    return json_members(content or "{}\n", ("language_models", "openai_compatible"), provider)


def _opencode_piece(content: str, address: Address) -> Insertion:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "localspec",
        "options": {"baseURL": address.v1, "apiKey": address.key},
        "models": {
            address.model: {
                "name": address.model,
                "tool_call": True,
                "limit": {"context": address.context_tokens, "output": address.context_tokens // 4},
            }
        },
    }
    return json_members(content or "{}\n", ("provider",), {"localspec": provider})


def _codex_piece(content: str, address: Address) -> Insertion:
    """A profile in a file of its own, which Codex lays over config.toml when it is named."""
    body = (
        f'model = {_quoted(address.model)}\nmodel_provider = "localspec"\n'
        f"model_context_window = {address.context_tokens}\n\n"
        f'[model_providers.localspec]\nname = "localspec"\nbase_url = {_quoted(address.v1)}\nwire_api = "responses"'
    )
    # Behind a table these lines would belong to it.
    return append_block(content, body, "#", ("^model *=", "^model_provider *=", "^model_context_window *=", r"^ *\["))


def _claude_settings(address: Address) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": address.base,
        "ANTHROPIC_AUTH_TOKEN": address.key,
        "ANTHROPIC_MODEL": address.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": address.model,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
    }


def _claude_piece(content: str, address: Address) -> Insertion:
    return json_members(content or "{}\n", ("env",), _claude_settings(address))


def _aider_settings(address: Address) -> str:
    return (
        f"openai-api-base: {address.v1}\nopenai-api-key: {_plain(address.key)}\n"
        f"model: {_plain(f'openai/{address.model}')}"
    )


def _aider_piece(content: str, address: Address) -> Insertion:
    return append_block(content, _aider_settings(address), "#", ("^openai-api-base:", "^openai-api-key:", "^model:"))


def _vim_setting(address: Address) -> str:
    return f"let g:llama_config = {{ 'endpoint_fim': '{address.base}/infill', 'endpoint': '{address.base}/infill' }}"


def _vim_piece(content: str, address: Address) -> Insertion:
    return append_block(content, _vim_setting(address), '"', ("g:llama_config",))


_COPILOT_KEY = "github.copilot.chat.byok.ollamaEndpoint"


def _copilot_piece(content: str, address: Address) -> Insertion:
    return json_members(content or "{}\n", (), {_COPILOT_KEY: address.base})


def _vscode_settings(home: Path) -> Path:
    if sys.platform == "darwin":
        return home / "Library/Application Support/Code/User/settings.json"
    if sys.platform == "win32":
        return home / "AppData/Roaming/Code/User/settings.json"
    return home / ".config/Code/User/settings.json"


def _opencode_path(home: Path) -> Path:
    with_comments = home / ".config/opencode/opencode.jsonc"
    return with_comments if with_comments.exists() else home / ".config/opencode/opencode.json"


def _plain(text: str) -> str:
    """A YAML scalar; JSON's quotes are YAML's too."""
    return _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


CLIENTS: dict[str, Client] = {
    client.name: client
    for client in (
        Client(
            "continue",
            "Continue",
            lambda a: ("In ~/.continue/config.yaml, under models:", *_continue_item(a).splitlines()),
            lambda home: home / ".continue/config.yaml",
            _continue_piece,
        ),
        Client(
            "zed",
            "Zed",
            lambda a: (
                f'In settings.json: language_models > openai_compatible > localspec, api_url "{a.v1}".',
                "Zed asks for a key: start it with LOCALSPEC_API_KEY=" + a.key + " or type that word once.",
            ),
            lambda home: home / ".config/zed/settings.json",
            _zed_piece,
        ),
        Client(
            "cline",
            "Cline",
            lambda a: (
                "Cline keeps its settings where only it can write. In its settings choose:",
                "API Provider: OpenAI Compatible",
                f"Base URL: {a.v1}",
                f"API Key: {a.key}",
                f"Model ID: {a.model}",
                f"Context Window Size: {a.context_tokens}",
            ),
        ),
        Client(
            "cursor",
            "Cursor",
            lambda a: (
                "Cursor sends requests from its own servers, which cannot reach this machine: without a tunnel of",
                "yours that has an https address, it cannot use a local port. With one, in Settings > Models:",
                f"OpenAI API Key: {a.key}",
                "Override OpenAI Base URL: https://YOUR-TUNNEL/v1",
                f"Add model: {a.model}",
            ),
        ),
        Client(
            "aider",
            "aider",
            lambda a: ("In ~/.aider.conf.yml:", *_aider_settings(a).splitlines()),
            lambda home: home / ".aider.conf.yml",
            _aider_piece,
        ),
        Client(
            "opencode",
            "opencode",
            lambda a: (
                f"In ~/.config/opencode/opencode.json: a provider localspec of @ai-sdk/openai-compatible at {a.v1}.",
                f"Then: opencode --model localspec/{a.model}",
            ),
            _opencode_path,
            _opencode_piece,
        ),
        Client(
            "codex",
            "Codex",
            lambda a: (
                f'In ~/.codex/localspec.config.toml: model_providers.localspec with base_url "{a.v1}" and wire_api',
                f'"responses", model_provider "localspec", model "{a.model}". Then: codex --profile localspec',
            ),
            lambda home: home / ".codex/localspec.config.toml",
            _codex_piece,
        ),
        Client(
            "claude-code",
            "Claude Code",
            lambda a: (
                "For one run:",
                " ".join(f"{key}={value}" for key, value in _claude_settings(a).items()) + " claude",
                "--write sets them for every run, in ~/.claude/settings.json.",
            ),
            lambda home: home / ".claude/settings.json",
            _claude_piece,
        ),
        Client(
            "llama.vim",
            "llama.vim",
            lambda a: ("On port 8012 nothing needs to be set. Otherwise, in your vimrc:", _vim_setting(a)),
            lambda home: home / ".vimrc",
            _vim_piece,
        ),
        Client(
            "copilot",
            "GitHub Copilot",
            lambda a: (
                f'VS Code: set "{_COPILOT_KEY}": "{a.base}", then Manage Models > Ollama.',
                f"Copilot CLI: COPILOT_PROVIDER_BASE_URL={a.v1} COPILOT_PROVIDER_WIRE_API=responses copilot",
            ),
            _vscode_settings,
            _copilot_piece,
        ),
    )
}

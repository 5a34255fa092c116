"""`localspec connect`: what is written parses, leaves every other byte alone, and can be taken back exactly."""

from __future__ import annotations

import http.server
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from localspec.commands.connect import connect
from localspec.commands.connect_clients import CLIENTS, Address
from localspec.commands.connect_files import CannotWrite, json_members

ADDRESS = Address("http://127.0.0.1:8012", "m", "localspec", 32768)
WITH_FILE = [name for name, client in CLIENTS.items() if client.path is not None]
EXISTING = {
    "continue": "name: mine\nversion: 1.0.0\nmodels:\n    - name: other\n      provider: ollama\n# end, no newline",
    "zed": '// my settings\n{\n  "theme": "One", /* { */\n  "language_models": {"ollama": {"api_url": "x"}},\n}\n',
    "aider": "dark-mode: true",
    "opencode": '{"$schema": "https://opencode.ai/config.json", "provider": {"a\\"b": {"x": [1, {"y": "}"}]}}}',
    "codex": 'approval_policy = "never"',
    "claude-code": '{\r\n  "permissions": {"allow": []},\r\n  "env": {"A": "1"}\r\n}\r\n',
    "llama.vim": "set number\n",
    "copilot": '{\n    "editor.fontSize": 13,\n    // comment\n}',
}
TAKEN = {
    "continue": "models: [a, b]\n",
    "zed": '{"language_models": {"openai_compatible": {"localspec": 1}}}',
    "aider": "model: gpt\n",
    "opencode": '{"provider": {"localspec": {}}}',
    "codex": "[tools]\nweb_search = true\n",
    "claude-code": '{"env": {"ANTHROPIC_MODEL": "x"}}',
    "llama.vim": "let g:llama_config = {}\n",
    "copilot": '{"github.copilot.chat.byok.ollamaEndpoint": "x"}',
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path / "data"))
    return tmp_path / "home"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(connect, ["--model", "m", "--context", "32768", *arguments])
    assert result.exception is None or isinstance(result.exception, (SystemExit, click.ClickException)), (
        result.exception
    )
    return result.exit_code, result.output


def config_file(home: Path, name: str) -> Path:
    path = CLIENTS[name].path
    assert path is not None
    return path(home)


def parsed(name: str, text: str) -> Any:
    """The file as its client reads it; comments and trailing commas are allowed in editors' JSON."""
    if name in ("continue", "aider"):
        return yaml.safe_load(text)
    if name == "codex":
        return tomllib.loads(text)
    if name == "llama.vim":
        return text
    bare = re.sub(r"(?m)^\s*//[^\n]*|/\*.*?\*/", "", text)
    return json.loads(re.sub(r",(\s*[}\]])", r"\1", bare))


@pytest.mark.parametrize("name", WITH_FILE)
def test_a_new_file_comes_and_goes(home: Path, name: str) -> None:
    path = config_file(home, name)
    code, said = invoke(name)
    assert code == 0 and "8012" in said and not path.exists(), "without --write nothing is written"
    assert invoke(name, "--write")[0] == 0
    assert "8012" in json.dumps(parsed(name, path.read_text()))
    assert path.stat().st_mode & 0o077 == 0
    assert invoke(name, "--write")[0] == 1, "twice is once"
    assert invoke(name, "--undo")[0] == 0
    assert not path.exists()
    assert invoke(name, "--undo")[0] == 1


@pytest.mark.parametrize("name", WITH_FILE)
def test_an_existing_file_keeps_every_byte(home: Path, name: str) -> None:
    path = config_file(home, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    before = EXISTING[name].encode()
    path.write_bytes(before)
    path.chmod(0o640)
    code, said = invoke(name, "--write", "--json")
    assert code == 0, said
    after = path.read_bytes().decode()
    assert "8012" in json.dumps(parsed(name, after))
    old = parsed(name, EXISTING[name])
    if isinstance(old, dict):
        new = parsed(name, after)
        assert all(key in new for key in old)
    assert Path(json.loads(said)["backup"]).read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o640
    assert invoke(name, "--undo")[0] == 0
    assert path.read_bytes() == before
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", WITH_FILE)
def test_what_the_user_set_is_never_replaced(home: Path, name: str) -> None:
    path = config_file(home, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TAKEN[name])
    code, said = invoke(name, "--write")
    assert code == 1 and "by hand" in said
    assert path.read_text() == TAKEN[name]


def test_codex_reads_a_whole_profile(home: Path) -> None:
    """Its current releases refuse profiles inside config.toml; a profile is a file of that name beside it."""
    assert invoke("codex", "--write")[0] == 0
    profile = tomllib.loads((home / ".codex/localspec.config.toml").read_text())
    assert profile["model"] == "m" and profile["model_context_window"] == 32768
    provider = profile["model_providers"][profile["model_provider"]]
    assert provider["base_url"] == ADDRESS.v1 and provider["wire_api"] == "responses"
    assert not (home / ".codex/config.toml").exists()


def test_later_edits_stay_and_damage_is_said(home: Path) -> None:
    path = config_file(home, "codex")
    path.parent.mkdir(parents=True)
    path.write_text('sandbox_mode = "read-only"\n')
    assert invoke("codex", "--write")[0] == 0
    path.write_text("# new\n" + path.read_text() + "# more\n")
    assert invoke("codex", "--undo")[0] == 0
    assert path.read_text() == '# new\nsandbox_mode = "read-only"\n# more\n'
    assert invoke("codex", "--write")[0] == 0
    damaged = path.read_text().replace("wire_api", "wire")
    path.write_text(damaged)
    code, said = invoke("codex", "--undo")
    assert code == 1 and "by hand" in said and path.read_text() == damaged


def test_a_link_stays_a_link(home: Path) -> None:
    path, real = config_file(home, "aider"), home / "dotfiles/aider.yml"
    real.parent.mkdir(parents=True)
    real.write_text("dark-mode: true\n")
    path.symlink_to(real)
    assert invoke("aider", "--write")[0] == 0
    assert path.is_symlink() and "8012" in real.read_text()
    assert invoke("aider", "--undo")[0] == 0
    assert path.is_symlink() and real.read_text() == "dark-mode: true\n"


@pytest.mark.parametrize("name", ["cline", "cursor"])
def test_clients_without_a_file_are_told_by_hand(name: str) -> None:
    assert "m" in invoke(name)[1]
    assert invoke(name, "--write")[0] == 1


def test_list_json_and_wrong_use() -> None:
    assert {entry["client"] for entry in json.loads(invoke("--json")[1])} == set(CLIENTS)
    assert json.loads(invoke("zed", "--json")[1])["insert"]
    assert invoke("zed", "--write", "--undo")[0] == 2
    assert invoke("--write")[0] == 2
    assert invoke("zed", "--url", "nonsense")[0] == 2
    assert invoke("emacs")[0] == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["env", "a", "b{", '"', "é"]), JSON, max_size=4), st.sampled_from([None, 1, "\t"])
)
def test_any_object_takes_members(document: dict[str, Any], indent: int | str | None) -> None:
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    old = document.get("env", {})
    try:
        piece = json_members(text, ("env",), {"KEY": [1]})
    except CannotWrite:
        assert not isinstance(old, dict)
        return
    new = json.loads(text[: piece.offset] + piece.text + text[piece.offset :])
    assert new == {**document, "env": {**old, "KEY": [1]}}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a"}', '{"a": }', '{"a": "\n"}', "null", '{"env": {"a": [}'])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(CannotWrite):
        json_members(text, ("env",), {"KEY": 1})


@pytest.fixture
def port(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port that answers /v1/models with the parameter."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v1/models" else 404)
            self.end_headers()
            self.wfile.write(request.param)

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def said_by(*arguments: str) -> str:
    result = CliRunner().invoke(connect, ["opencode", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return str(json.loads(result.output)["insert"])


@pytest.mark.parametrize(
    "port", [b'{"data": [{"id": "served", "context_length": 9000}, {"id": "x"}]}'], indirect=True, ids=["served"]
)
def test_the_running_port_says_what_it_serves(port: str) -> None:
    found = said_by("--url", port)
    assert '"served"' in found and "9000" in found
    chosen = said_by("--url", port, "--model", "mine", "--context", "2048")
    assert '"mine"' in chosen and "2048" in chosen and "9000" not in chosen


@pytest.mark.parametrize(
    "port",
    [b"", b"[]", b'{"data": []}', b'{"data": [{"id": 3, "context_length": 9}]}', b'{"data": [{"id": "served"}]}'],
    indirect=True,
    ids=["empty", "list", "none", "number", "half"],
)
def test_a_port_that_talks_nonsense_is_not_believed(port: str) -> None:
    found = said_by("--url", port, "--model", "mine")
    assert '"mine"' in found and "32768" in found

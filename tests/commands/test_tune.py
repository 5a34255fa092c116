"""`localspec tune` over saved state and over a running port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import click
import pytest
import uvicorn
from click.testing import CliRunner

from localspec.api.scripted import ScriptedEngine
from localspec.commands.tune import tune
from localspec.engine.tuner_store import TunerStore, to_json
from localspec.server.app import create_app
from localspec.server.context import ControlHooks
from localspec.server.settings import ServerSettings
from tests.engine.test_tuner_store import KEY, busy_tuner


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr("localspec.commands.tune.DEFAULT_PORT", 1)
    (tmp_path / "control.key").write_text("secret")
    return tmp_path


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(tune, arguments)
    assert result.exception is None or isinstance(result.exception, (SystemExit, click.ClickException))
    return result.exit_code, result.output


def test_saved_state_is_explained_and_forgotten(home: Path) -> None:
    assert "nothing is measured yet" in invoke("--explain")[1]
    TunerStore(home / "cache/tuner", KEY).write(to_json(busy_tuner()))
    (home / "cache/tuner/damaged.json").write_text("{")
    _, text = invoke()
    assert "m on cpu (build 1)" in text and "tok/s" in text and "thinking, 1 active" in text
    document = json.loads(invoke("--json")[1])
    assert document["running"] is None and len(document["saved"]) == 1
    assert "on disk" in invoke("--reset")[1]
    assert not list((home / "cache/tuner").glob("*.json"))


def test_wrong_use() -> None:
    assert invoke("--explain", "--reset")[0] == 2
    code, text = invoke("--url", "http://127.0.0.1:1")
    assert code == 1 and "does not answer" in text


@pytest.fixture
def port() -> Iterator[tuple[str, list[str]]]:
    """A port whose hooks write down what was asked of them."""
    asked: list[str] = []

    async def explain() -> list[str]:
        asked.append("explain")
        return ["answer, 1 active: ngram 3"]

    async def reset() -> None:
        asked.append("reset")

    hooks = ControlHooks(explain_tuner=explain, reset_tuner=reset)
    app = create_app(ScriptedEngine(), ServerSettings(control_key="secret"), hooks)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", asked
    server.should_exit = True
    thread.join()


def test_a_running_engine_is_asked(port: tuple[str, list[str]], home: Path) -> None:
    url, asked = port
    assert "ngram 3" in invoke("--url", url)[1]
    assert "in the running engine" in invoke("--url", url, "--reset")[1]
    assert asked == ["explain", "reset", "explain"]
    (home / "control.key").write_text("another")
    assert invoke("--url", url)[0] == 1

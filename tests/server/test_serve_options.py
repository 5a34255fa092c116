"""What a user says to `localspec serve` reaches the port."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from localspec.commands.serve import serve
from localspec.engine.build import EngineOptions
from localspec.server.settings import ServerSettings

pytestmark = pytest.mark.torch


class Idle:
    """An engine that is never asked anything."""

    def __init__(self, *arguments: Any) -> None:
        self.explain_tuner = self.reset_tuner = None

    def start(self, model_id: str) -> None:
        pass


@pytest.mark.parametrize("wanted", [False, True])
def test_options_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    seen: list[EngineOptions] = []

    class Listening(Idle):
        def __init__(self, locate: Any, options: EngineOptions) -> None:
            super().__init__()
            seen.append(options)

    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr("localspec.engine.engine.LocalEngine", Listening)
    monkeypatch.setattr("localspec.server.serve.run_server", lambda *_: None)
    words = ["--port", "0", "--kv-cache", "bf16", *(["--experimental-fp4-prompts"] if wanted else [])]
    assert CliRunner().invoke(serve, words, catch_exceptions=False).exit_code == 0
    assert [(each.kv_cache, each.fp4_prompts) for each in seen] == [("bf16", wanted)]


def test_options_of_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServerSettings] = []
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    monkeypatch.setattr("localspec.engine.engine.LocalEngine", Idle)
    monkeypatch.setattr("localspec.server.serve.run_server", lambda engine, settings, *rest: seen.append(settings))
    words = ["--port", "0", "--allow-host", "box.local", "--allow-host", "box", "--max-requests", "3", "--strict-model"]
    for arguments in ([], [*words, "--emit-reasoning", "--cors-origins", "https://a.b,https://c.d", "--api-key", "k"]):
        result = CliRunner().invoke(serve, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    plain, told = seen
    assert (plain.max_requests, plain.strict_model, plain.emit_reasoning) == (128, False, False)
    assert (plain.allowed_hosts, plain.cors_origins, plain.api_key) == ((), (), None)
    assert (told.max_requests, told.strict_model, told.emit_reasoning) == (3, True, True)
    assert told.allowed_hosts == ("box.local", "box")
    assert told.cors_origins == ("https://a.b", "https://c.d")
    assert told.api_key == "k"

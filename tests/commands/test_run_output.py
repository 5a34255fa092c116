"""`localspec run`: what a terminal and a pipe get of an answer."""

from __future__ import annotations

import io
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from localspec.api.types import Delta, Done, Event, GenerateRequest, ModelInfo, Timings, Usage
from localspec.commands.run import _answer

OPTIONS: dict[str, Any] = dict.fromkeys(("seed", "temperature", "max_tokens", "depth", "system"))
OPTIONS |= {"as_json": False, "drafter": "off", "raw": False}


class HostileEngine:
    """Sets the clipboard and the title and clears the screen, each code cut in two."""

    def start(self, model_id: str) -> None:
        pass

    async def wait_ready(self) -> ModelInfo:
        return ModelInfo("m", "M", 100, 10)

    async def aclose(self) -> None:
        pass

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        for text in ("a\x1b", "]52;c;eA==\x07b", "\x1b]0;t\x07", "\x1b", "[2J\x9b2J\n\tc"):
            yield Delta(text, (1,), ())
        yield Done("stop", Usage(1, 5), Timings())


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [False, True])
async def test_a_terminal_gets_no_control_codes_and_a_pipe_all(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr("sys.stdout", stream)
    document = await _answer(HostileEngine(), "m", "p", OPTIONS)
    exact = "a\x1b]52;c;eA==\x07b\x1b]0;t\x07\x1b[2J\x9b2J\n\tc"
    shown = "a\ufffd]52;c;eA==\ufffdb\ufffd]0;t\ufffd\ufffd[2J\ufffd2J\n\tc"
    assert document["text"] == exact
    assert stream.getvalue() == (shown if is_terminal else exact) + "\n"

"""The engine of several chats: started once, started anew when it goes, given up when it cannot stay."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from localspec.api.types import EngineError
from localspec.commands import engine_process
from localspec.commands.chat import _make_room, _serve_arguments
from localspec.commands.common import settings
from localspec.commands.engine_process import EngineProcess, FoundEngine, engine_state, find_engine, stop_engine
from localspec.commands.engine_wanted import differences
from localspec.config import NetworkSettings, Paths, Settings

KEY = "control-key-of-the-tests"
# The real announcement and port over a scripted engine: argv is the file, the key, then options.
SERVER = """
import sys
import time
from pathlib import Path
from localspec.api.scripted import Script, ScriptedEngine
from localspec.commands.serve import _announcer, _withdraw
from localspec.server.serve import run_server
from localspec.server.settings import ServerSettings
file = Path(sys.argv[1])
if "crash" in sys.argv:
    sys.exit(1)
time.sleep(0.3)
port = int(sys.argv[sys.argv.index("--port") + 1])
models = [value for name, value in zip(sys.argv, sys.argv[1:]) if name == "--model"] or ["scripted"]
script = Script(model_id=models[-1], models=("scripted", "second"))
run_server(ScriptedEngine(script), ServerSettings(port=port, control_key=sys.argv[2]), None, _announcer(file))
_withdraw(file)
"""


Chat = Callable[..., EngineProcess]


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(tmp_path, tmp_path / "cache")


@pytest.fixture
def chat(paths: Paths, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chat]:
    """Opens the engine side of a chat; all engines end with the test."""
    opened: list[EngineProcess] = []
    monkeypatch.setattr(engine_process, "POLL_S", 0.05)

    def open_chat(*more: str) -> EngineProcess:
        program = (sys.executable, "-c", SERVER, str(paths.engine_file), KEY, *more)
        opened.append(EngineProcess(paths, KEY, [], keep=True, program=program))
        return opened[-1]

    yield open_chat
    for one in opened:
        one.leave()
    for pid in {one.pid for one in opened}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def until(holds: Callable[[], bool], seconds: float = 60) -> None:
    end_s = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end_s, "the state that the test waits for did not come"
        time.sleep(0.02)


def answers(paths: Paths, one: EngineProcess) -> bool:
    """Whether the engine that this chat uses runs and listens."""
    found = find_engine(paths, KEY)
    return found is not None and not found.is_starting and found.url == one.address()


def test_chats_opened_at_the_same_moment_share_one_engine(paths: Paths, chat: Chat) -> None:
    with ThreadPoolExecutor(3) as threads:
        chats = list(threads.map(lambda _: chat(), range(3)))
    assert len({one.pid for one in chats}) == 1 and [one.started_here for one in chats].count(True) == 1
    until(lambda: all(answers(paths, one) for one in chats))
    assert (paths.data_dir / "engine.json").stat().st_mode & 0o777 == 0o600


def test_killed_engine_is_replaced_once_for_all_chats(paths: Paths, chat: Chat) -> None:
    first, second = chat(), chat()
    until(lambda: answers(paths, first))
    before = first.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: first.pid == second.pid != before)
    until(lambda: answers(paths, first) and answers(paths, second))


def test_an_engine_comes_back_with_the_model_that_was_chosen_last(paths: Paths, chat: Chat) -> None:
    one = chat("--model", "scripted")
    until(lambda: answers(paths, one))

    def model() -> object:
        state = engine_state(FoundEngine(one.address(), one.pid), KEY) or {}
        return (state.get("model") or {}).get("id")

    assert model() == "scripted"
    headers = {"x-localspec-key": KEY}
    httpx.post(f"{one.address()}/localspec/v1/load", json={"model": "second"}, headers=headers, trust_env=False)
    until(lambda: one._model_id == "second")
    for _ in range(2):
        before = one.pid
        os.kill(before, signal.SIGKILL)
        until(lambda: one.pid != before and answers(paths, one))  # noqa: B023 - called at once
        assert model() == "second"


def test_chat_that_joined_an_engine_that_ends_starts_its_own(paths: Paths, chat: Chat) -> None:
    first = chat()
    until(lambda: answers(paths, first))
    first.leave()
    second = chat()
    before = second.pid
    assert not second.started_here and before == first.pid
    os.kill(before, signal.SIGTERM)
    # Its parent of old times is this process, which must not leave a zombie.
    until(lambda: first._process is not None and first._process.poll() is not None)
    until(lambda: second.started_here and answers(paths, second))
    assert second.pid != before and second._restarts == 0


def test_clean_ends_and_a_minute_of_health_are_not_counted(
    paths: Paths, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = chat()
    for number in range(engine_process.MAX_RESTARTS + 1):
        until(lambda: answers(paths, one))
        before = one.pid
        os.kill(before, signal.SIGTERM)
        until(lambda: one.pid != before)  # noqa: B023 - called at once
        assert one._restarts == 0, number
    until(lambda: answers(paths, one))
    before = one.pid
    os.kill(before, signal.SIGKILL)
    until(lambda: one.pid != before and answers(paths, one))
    assert one._restarts == 1
    monkeypatch.setattr(engine_process, "HEALTHY_S", 0.0)
    until(lambda: one._restarts == 0)


def test_an_engine_that_cannot_stay_is_given_up_with_words(paths: Paths, chat: Chat) -> None:
    one = chat("crash")

    def given_up() -> bool:
        try:
            one.address()
        except EngineError as error:
            return "ended 4 times in a row" in error.message and str(paths.cache_dir / "engine.log") in error.message
        return False

    until(given_up)


def test_foreign_announcements_are_not_believed(paths: Paths, chat: Chat) -> None:
    for text in (
        "",
        "[]",
        '{"url": "http://127.0.0.1:9", "pid": "1"}',
        f'{{"url": "http://127.0.0.1:9", "pid": {os.getpid()}}}',
        f'{{"url": "http://evil.example", "pid": {os.getpid()}, "starting": true}}',
        '{"url": "http://127.0.0.1:9", "pid": 1e99}',
        '{"url": "http://127.0.0.1:9", "pid": 99999999999999999999999}',
    ):
        paths.engine_file.write_text(text)
        assert find_engine(paths, KEY) is None


def test_an_engine_can_be_ended_to_make_room(paths: Paths, chat: Chat) -> None:
    one = chat()
    until(lambda: answers(paths, one))
    one.leave()
    found = find_engine(paths, KEY)
    assert found is not None
    state = engine_state(found, KEY)
    assert state is not None and state["holders"] == 0 and state["pid"] == one.pid
    stop_engine(paths, found, KEY)
    assert find_engine(paths, KEY) is None


def test_another_model_asked_ends_an_engine_that_nobody_uses_and_no_other(paths: Paths, chat: Chat) -> None:
    config = Settings(paths, NetworkSettings())
    asked = {"model": "smollm2-135m", "context": None, "device": "auto", "kv_cache": "auto", "fp4_prompts": False}
    one = chat()
    until(lambda: answers(paths, one))
    headers = {"x-localspec-key": KEY}
    with httpx.stream("GET", f"{one.address()}/localspec/v1/metrics", headers=headers, trust_env=False) as held:
        pieces = held.iter_bytes()
        next(pieces)
        with pytest.raises(EngineError, match=r"another chat uses has the model scripted: leave"):
            _make_room(config, asked, KEY)
        _make_room(config, {**asked, "model": None}, KEY)
        assert answers(paths, one)
    one.leave()
    until(lambda: (engine_state(FoundEngine(one.address(), one.pid), KEY) or {}).get("holders") == 0)
    _make_room(config, asked, KEY)
    assert find_engine(paths, KEY) is None


READY = {"model": {"id": "a"}, "metrics": {"context_limit_tokens": 8192, "device": "cpu, 2 threads"}}


@pytest.mark.parametrize(
    ("asked", "arguments", "state", "said"),
    [
        ((None, None, "auto"), [], {}, []),
        (("a", 8192, "cpu"), [], READY, []),
        (("b", None, "auto"), ["--model", "b"], READY, ["the model a"]),
        (("b", None, "auto"), ["--model", "a"], {}, ["the model a"]),
        (("a", 100_000, "auto"), ["--context", "100000"], READY, []),
        ((None, 4096, "auto"), [], READY, ["a context of 8192 tokens"]),
        ((None, 4096, "auto"), [], {}, ["a context of its own"]),
        ((None, None, "cuda"), [], READY, ["the device cpu, 2 threads"]),
        ((None, None, "cuda:1"), ["--device", "cuda:1"], {}, []),
        ((None, None, "cuda:1"), [], {"metrics": {"device": "A card"}}, ["the device A card"]),
        ((None, None, "cuda"), [], {"metrics": {"device": "A card"}}, []),
        ((None, None, "cpu"), [], {}, ["the device auto"]),
    ],
)
def test_what_a_running_engine_has_otherwise(
    asked: tuple[str | None, int | None, str], arguments: list[str], state: dict[str, object], said: list[str]
) -> None:
    assert differences(*asked, arguments, state) == said


def test_another_cache_type_is_another_engine() -> None:
    nothing_else = (None, None, "auto")
    assert differences(*nothing_else, ["--kv-cache", "fp8"], READY, "bf16") == ["the cache type fp8"]
    assert differences(*nothing_else, [], {}, "fp8") == ["the cache type auto"]
    assert not differences(*nothing_else, ["--kv-cache", "fp8"], {}, "fp8")
    assert not differences(*nothing_else, ["--kv-cache", "bf16"], READY, "auto")


def test_prompts_in_fp4_are_asked_of_an_engine_that_was_started_so() -> None:
    flag, asked = "--experimental-fp4-prompts", (None, None, "auto")
    words = {"model": "m", "device": "auto", "drafter": "auto", "kv_cache": "auto", "depth": None, "context": None}
    words |= {"learn": True, "offline": False}
    for wanted in (False, True):
        assert (flag in _serve_arguments(settings(), words | {"fp4_prompts": wanted})) == wanted
    assert differences(*asked, [], READY, fp4_prompts=True) == ["prompts that are not read in FP4"]
    assert differences(*asked, [flag], READY) == ["prompts that are read in FP4"]
    assert not differences(*asked, [flag], READY, fp4_prompts=True) and not differences(*asked, [], READY)

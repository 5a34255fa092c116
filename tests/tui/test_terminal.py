"""The app in a real terminal: keys through tmux, and a kill in mid-answer."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from localspec.chats import open_store

ROOT = Path(__file__).parent.parent.parent
APP = """
import sys
from pathlib import Path
from localspec.api.scripted import Reply, Script, ScriptedEngine
from localspec.chats import StoreWorker, open_store
from localspec.tui.app import LocalspecApp
from localspec.tui.options import UiOptions
folder, text, rate = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
(folder / "pid").write_text(str(__import__("os").getpid()))
store = StoreWorker(lambda: open_store(folder / "chats.sqlite3"))
engine = ScriptedEngine(Script(replies=(Reply(text),), tok_per_s=rate))
no_color = "NO_COLOR" in __import__("os").environ
LocalspecApp(engine, store, UiOptions(export_dir=folder, copy_file=folder / "copied.txt", no_color=no_color)).run()
store.close()
print("left in good order")
"""

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Tmux:
    """A terminal of 100 x 30 with its own server, so that nobody's sessions are touched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._base = ["tmux", "-S", str(folder / "tmux")]

    def start(self, text: str, rate: float, **environment: str) -> None:
        (self.folder / "app.py").write_text(APP)
        self.run([sys.executable, str(self.folder / "app.py"), str(self.folder), text, str(rate)], **environment)

    def run(self, command: list[str], **environment: str) -> None:
        """Start a program in the terminal."""
        quoted = " ".join("'" + part.replace("'", "'\\''") + "'" for part in command)
        subprocess.run(
            [*self._base, "-f", "/dev/null", "new-session", "-d", "-x", "100", "-y", "30", f"{quoted}; sleep 30"],
            check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **environment},
            cwd=ROOT,
        )

    def keys(self, *keys: str) -> None:
        subprocess.run([*self._base, "send-keys", *keys], check=True)

    def screen(self) -> str:
        return subprocess.run([*self._base, "capture-pane", "-p"], check=True, capture_output=True, text=True).stdout

    def codes(self) -> set[str]:
        """What the screen is drawn with: all parameters of its style sequences."""
        command = [*self._base, "capture-pane", "-p", "-e"]
        drawn = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return {code for codes in re.findall(r"\x1b\[([0-9;:]*)m", drawn) for code in re.split("[;:]", codes) if code}

    def title(self) -> str:
        """What the terminal is called; a program may set it."""
        command = [*self._base, "display-message", "-p", "#{pane_title}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def wait(self, ready: Callable[[str], bool], timeout_s: float = 30.0) -> str:
        end_s = time.monotonic() + timeout_s
        while not ready(screen := self.screen()):
            assert time.monotonic() < end_s, f"the terminal shows:\n{screen}"
            time.sleep(0.1)
        return screen

    def stop(self) -> None:
        subprocess.run([*self._base, "kill-server"], check=False, capture_output=True)


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    terminal = Tmux(tmp_path)
    yield terminal
    terminal.stop()


def test_chat_by_keys_in_tmux(tmux: Tmux) -> None:
    tmux.start("Yes, **there** is.\n\n```sh\nls\n```\n", 0)
    tmux.wait(lambda screen: "Ask something" in screen and "scripted (demo)" in screen)
    tmux.keys("Is there", "C-j", "an answer?", "Enter")
    screen = tmux.wait(lambda screen: "── sh" in screen and "tok/s" in screen)
    assert "Is there\n" in screen.replace(" \n", "\n") and "an answer?" in screen and "Yes, there is." in screen
    tmux.keys("C-d")
    tmux.wait(lambda screen: "drafts refused" in screen)
    tmux.keys("M-Up")
    tmux.keys("Escape")
    tmux.wait(lambda screen: "drafts refused" in screen)
    tmux.keys("C-q")
    tmux.wait(lambda screen: "left in good order" in screen)


def test_no_color_sends_no_colour_and_shows_the_cursor(tmux: Tmux) -> None:
    tmux.start("Yes, **there** is.\n\n```sh\nls\n```\n", 0, NO_COLOR="1")
    tmux.wait(lambda screen: "Ask something" in screen and "scripted (demo)" in screen)
    tmux.keys("q", "Enter")
    tmux.wait(lambda screen: "── sh" in screen and "tok/s" in screen)
    allowed = {"0", "1", "2", "3", "4", "7", "39", "49"}
    assert "1" in tmux.codes() <= allowed
    tmux.keys("abc", "Left")
    tmux.wait(lambda screen: "abc" in screen and "7" in tmux.codes())
    for keys in (("C-d",), ("C-r",), ("Escape",), ("F1",)):
        tmux.keys(*keys)
        time.sleep(0.3)
        assert tmux.codes() <= allowed


def test_kill_in_mid_answer_loses_at_most_a_second(tmux: Tmux, tmp_path: Path) -> None:
    tmux.start("word " * 2000, 200)
    tmux.wait(lambda screen: "Ask something" in screen)
    tmux.keys("go", "Enter")
    tmux.wait(lambda screen: screen.count("word") > 60)
    tmux.keys("an unsent question")
    time.sleep(3.0)
    shown = tmux.screen().count("word")
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
    time.sleep(0.2)
    store = open_store(tmp_path / "chats.sqlite3")
    (chat,) = store.chats()
    question, answer = store.path(chat.id)
    assert chat.draft == "an unsent question"
    assert question.content == "go" and answer.state == "interrupted"
    # 200 characters a second are 40 words; what was shown and is more than a second old must be there.
    assert answer.content.count("word") >= shown - 40


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=str)
def test_an_end_from_outside_is_a_clean_one(tmux: Tmux, tmp_path: Path, number: signal.Signals) -> None:
    tmux.start("word " * 2000, 200)
    tmux.wait(lambda screen: "Ask something" in screen)
    tmux.keys("go", "Enter")
    tmux.wait(lambda screen: screen.count("word") > 20)
    tmux.keys("unsent")
    tmux.wait(lambda screen: "unsent" in screen)
    os.kill(int((tmp_path / "pid").read_text()), number)
    screen = tmux.wait(lambda screen: "left in good order" in screen)
    assert "word word" not in screen
    (chat,) = open_store(tmp_path / "chats.sqlite3").chats()
    assert chat.draft == "unsent"


def test_a_terminal_that_goes_takes_the_app_along(tmux: Tmux, tmp_path: Path) -> None:
    tmux.start("word " * 2000, 200)
    tmux.wait(lambda screen: "Ask something" in screen)
    pid = int((tmp_path / "pid").read_text())
    tmux.stop()
    end_s = time.monotonic() + 60
    while psutil.pid_exists(pid):
        assert time.monotonic() < end_s, "the app runs on without a terminal"
        time.sleep(0.1)


def test_escape_codes_of_an_answer_do_not_reach_the_terminal(tmux: Tmux) -> None:
    evil = "a\x1b[2J\x1b[31mred\x1b]0;owned\x07\x1b]52;c;eA==\x07\x9b5m\u202eb ✅"
    tmux.start(f"{evil}\n\n```sh\n{evil}\n```\n\n| {evil} | b |\n|---|---|\n| 1 | {evil} |\n", 0, NO_COLOR="1")
    tmux.wait(lambda screen: "Ask something" in screen)
    tmux.keys("q", "Enter")
    screen = tmux.wait(lambda screen: screen.count("[31mred") >= 3 and "Ask something" in screen)
    assert "\x1b" not in screen and "\u202e" not in screen
    assert not tmux.codes() & {"5", "31"} and "owned" not in tmux.title()


def wait_for_answer(home: Path, number: int) -> None:
    """Wait until that message of the only chat is an answer with some words in it."""
    end_s = time.monotonic() + 90
    while time.monotonic() < end_s:
        store = sqlite3.connect(f"file:{home / 'chats.sqlite3'}?mode=ro", uri=True)
        row = store.execute("SELECT content FROM messages WHERE id = ? AND role = 'assistant'", (number,)).fetchone()
        store.close()
        if row is not None and len(row[0]) > 10:
            return
        time.sleep(0.1)
    raise AssertionError(f"message {number} did not grow")


def engine_of(home: Path) -> int | None:
    """Process of the engine that a chat with this home started."""
    for process in psutil.process_iter(["pid", "cmdline"]):
        try:
            line = process.info["cmdline"] or []
            if "serve" in line and process.environ().get("LOCALSPEC_HOME") == str(home):
                return int(process.info["pid"])
        except psutil.Error:
            continue
    return None


@pytest.mark.demo
@pytest.mark.torch
@pytest.mark.slow
def test_demo_model_answers_survives_a_kill_and_leaves_nothing_running(tmux: Tmux, demo_folder: Path) -> None:
    home = tmux.folder / "home"
    (home / "models").mkdir(parents=True)
    shutil.copytree(demo_folder, home / "models" / demo_folder.name)
    command = [sys.executable, "-m", "localspec.cli", "chat", "--offline", "--device", "cpu"]
    tmux.run(command, LOCALSPEC_HOME=str(home), OMP_NUM_THREADS="1")
    tmux.wait(lambda screen: "Ask something" in screen)
    tmux.keys("/set temperature 0", "Enter")
    tmux.wait(lambda screen: "temperature 0" in screen)
    tmux.keys("What is the capital of France?", "Enter")
    tmux.wait(lambda screen: "Paris" in screen and "(demo)" in screen and " tokens · " in screen, 90)
    tmux.keys("Write a very long story.", "Enter")
    wait_for_answer(home, 4)
    engine = engine_of(home)
    assert engine is not None
    os.kill(engine, signal.SIGKILL)
    tmux.wait(lambda screen: "stopped in mid-answer" in screen)
    tmux.wait(lambda screen: "The engine is back" in screen, 90)
    tmux.keys("C-g")
    wait_for_answer(home, 5)
    tmux.keys("C-q")
    tmux.wait(lambda screen: "Ask something" not in screen)
    end_s = time.monotonic() + 60
    while engine_of(home) is not None and time.monotonic() < end_s:
        time.sleep(0.1)
    assert engine_of(home) is None
    store = open_store(home / "chats.sqlite3")
    states = [(message.role, message.state) for message in store.all_messages(store.chats()[0].id)]
    assert states[:4] == [("user", "done"), ("assistant", "done"), ("user", "done"), ("assistant", "error")]
    assert states[4:] == [("assistant", "cancelled")]

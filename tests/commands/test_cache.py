"""`localspec cache` on a directory with a few blocks, and on none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner

from localspec.cache.spill import SpillStore
from localspec.cache.spill_limits import ChosenLimits, SpillLimits, read_limits
from localspec.commands.cache import cache
from tests.cache.test_spill import WIDE, identity, ids_of, write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCALSPEC_HOME", str(tmp_path))
    return tmp_path


def call(*words: str, code: int = 0) -> str:
    result = CliRunner().invoke(cache, list(words))
    assert result.exit_code == code, result.output
    return result.stdout


def test_nothing_cached(home: Path) -> None:
    assert json.loads(call("ls", "--json")) == []
    assert json.loads(call("df", "--json")) == {"models": [], "free_bytes": None, "written_today_bytes": 0}
    assert json.loads(call("verify", "--json"))["num_blocks"] == 0
    assert json.loads(call("wipe", "--yes", "--json")) == {"deleted_bytes": 0}
    call("rm", "x", code=1)
    assert not (home / "cache").exists(), "looking creates nothing"


def test_see_check_and_delete(home: Path) -> None:
    store = SpillStore(home / "cache" / "kv", identity("some-model"), WIDE)
    write(store, ids_of(1, 600), chat="chat-1")
    write(store, ids_of(2, 300), chat="chat-2")
    assert {row["chat_id"]: row["tokens"] for row in json.loads(call("ls", "--json"))} == {"chat-1": 600, "chat-2": 300}
    assert "chat-1" in call("ls") and "some-model" in call("df")
    [model] = json.loads(call("df", "--json"))["models"]
    assert model["stored_bytes"] == store.index.total_bytes() and model["num_blocks"] == 5
    written = json.loads(call("df", "--json"))["written_today_bytes"]
    assert written == store.index.total_bytes() and "written today" in call("df")
    block = store.lookup(ids_of(2, 300)).segments[0]
    data = bytearray(store.path(block).read_bytes())
    data[5000] ^= 4
    store.path(block).write_bytes(data)
    checked = json.loads(call("verify", "--json"))
    assert len(checked["damaged"]) == 1 and str(store.path(block)) in checked["damaged"][0]
    assert "0 damaged" in call("verify")
    assert json.loads(call("rm", "chat-1", "--json"))["removed_blocks"] == 3
    call("rm", "chat-1", code=1)
    write(store, ids_of(3, 300))
    assert json.loads(call("rm", "some-model", "--json"))["removed_blocks"] == 2
    assert store.lookup(ids_of(3, 300)).num_tokens == 0
    write(store, ids_of(3, 300))
    call("wipe", code=1)
    assert json.loads(call("wipe", "--yes", "--json"))["deleted_bytes"] > 0
    assert not list((home / "cache").rglob("*.blk"))
    assert json.loads(call("df", "--json"))["written_today_bytes"] > written, "the disk has worn by it"


def test_an_index_beyond_repair_can_be_wiped(home: Path) -> None:
    store = SpillStore(home / "cache" / "kv", identity(), WIDE)
    write(store, ids_of(1, 600))
    store.close()
    (home / "cache" / "kv" / "index.sqlite3").write_bytes(b"junk" * 5000)
    call("wipe", "--yes")
    assert not list((home / "cache").rglob("*.blk"))


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_whatever_stands_in_the_indexs_place_is_wiped_and_links_are_not_followed(home: Path, kind: str) -> None:
    folder, elsewhere = home / "cache" / "kv", home / "elsewhere"
    store = SpillStore(folder, identity(), WIDE)
    write(store, ids_of(1, 300))
    store.close()
    for path in folder.glob("index.sqlite3*"):
        path.unlink()
    elsewhere.write_text("mine")
    if kind == "folder":
        (folder / "index.sqlite3" / "inside").mkdir(parents=True)
    else:
        (folder / "index.sqlite3").symlink_to(elsewhere)
    call("ls", code=1)
    call("wipe", "--yes")
    assert call("ls", "--json") == "[]\n" and not list(folder.rglob("*.blk")) and elsewhere.read_text() == "mine"
    shutil.rmtree(folder)
    folder.symlink_to(home)
    call("wipe", "--yes", code=1)
    assert elsewhere.exists()


def test_files_that_cannot_be_deleted_are_said(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "cache" / "kv"
    store = SpillStore(folder, identity("some-model"), WIDE)
    for words in (("rm", "chat-1"), ("rm", "some-model"), ("wipe", "--yes")):
        write(store, ids_of(1, 300), chat="chat-1")
        with monkeypatch.context() as patch:
            # A superuser may delete from read-only folders: the refusal is made up.
            patch.setattr(os, "unlink", refuse)
            patch.setattr(Path, "unlink", refuse)
            patch.setattr(os, "rmdir", refuse)
            assert "cannot be deleted" in CliRunner().invoke(cache, list(words)).output
        assert list(folder.rglob("*.blk"))
        call("wipe", "--yes")
        assert not list(folder.rglob("*.blk"))


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_an_index_that_is_damaged_in_the_middle_ends_no_command_with_a_traceback(home: Path) -> None:
    folder = home / "cache" / "kv"
    store = SpillStore(folder, identity("some-model"), WIDE)
    for chat in range(3):
        write(store, ids_of(chat, 700), chat=f"chat-{chat}")
    store.close()
    sound = (folder / "index.sqlite3").read_bytes()
    said = 0
    for page in range(1, len(sound) // 8192):
        for words in (("ls",), ("df",), ("rm", "chat-1"), ("verify",)):
            damaged = sound[: page * 8192] + bytes(8192) + sound[(page + 1) * 8192 :]
            (folder / "index.sqlite3").write_bytes(damaged)
            result = CliRunner().invoke(cache, list(words))
            assert result.exception is None or isinstance(result.exception, SystemExit), (page, words)
            said += "localspec cache wipe removes all" in result.output
    assert said


def test_names_of_clients_do_not_act_on_the_terminal(home: Path) -> None:
    store = SpillStore(home / "cache" / "kv", identity("mo\x1b[2Jdel"), WIDE)
    name = "a\x1b]0;title\x07\nb"
    write(store, ids_of(1, 300), chat=name)
    store.close()
    for words in (("ls",), ("df",), ("rm", "--", name)):
        assert not set(call(*words)) & {"\x1b", "\x07"}
    assert json.loads(call("ls", "--json")) == []


def test_a_chat_whose_name_was_lost_with_the_index_is_not_said_to_be_gone(home: Path) -> None:
    folder = home / "cache" / "kv"
    store = SpillStore(folder, identity("some-model"), WIDE)
    write(store, ids_of(1, 300), chat="chat-1")
    assert "see localspec cache ls" in CliRunner().invoke(cache, ["rm", "chat-2"]).output
    store.close()
    for path in folder.glob("index.sqlite3*"):
        path.unlink()
    result = CliRunner().invoke(cache, ["rm", "chat-1"])
    assert result.exit_code == 1 and "lost their names" in result.output


def test_limits_are_kept_and_read(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = home / "cache" / "kv"
    assert json.loads(call("limit", "--json")) == {
        "cap_bytes": None, "min_free_bytes": 10**10, "daily_write_bytes": 10**11, "host_bytes": None
    }  # fmt: skip
    assert not folder.exists(), "looking creates nothing"
    call("limit", "--size-gib", "2", "--memory-gib", "0.5")
    call("limit", "--daily-gib", "0")
    assert read_limits(folder) == ChosenLimits(2 << 30, None, 0, 1 << 29)
    assert "2.0 GiB" in call("limit") and (folder / "limits.json").stat().st_mode & 0o777 == 0o600
    for wrong in ("-1", "nan", "inf", "x"):
        call("limit", "--size-gib", wrong, code=2)
    assert read_limits(folder).of_disk() == SpillLimits(2 << 30, 10**10, 0)
    for damage in ('{"cap_bytes": -1}', '{"cap_bytes": true}', "[]", "{", '{"host_bytes": 1e30}'):
        (folder / "limits.json").write_text(damage)
        assert read_limits(folder) == ChosenLimits()
    assert "usual limits hold" in caplog.text
    call("limit", "--size-gib", "2")
    call("limit", "--usual")
    assert read_limits(folder) == ChosenLimits()
    call("wipe", "--yes")

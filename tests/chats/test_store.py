"""The store: tree, search, partial answers, drafts, privacy, damaged and foreign files."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.chats import ChatError, ChatStore, NewChat, Stored, StoreWorker, open_store, private_store
from localspec.chats.schema import MIGRATIONS


@pytest.fixture
def store(tmp_path: Path) -> ChatStore:
    return open_store(tmp_path / "home" / "chats.sqlite3")


def test_message_comes_back_as_it_was_written(store: ChatStore) -> None:
    chat = store.create(NewChat("Title", "m", "Be brief.", {"drafter": "ngram"}))
    wanted = Stored(
        role="assistant",
        content="Zwölf 🙂\n```py\nx\n```",
        reasoning="hm",
        model_id="m",
        token_ids=(1, 151_000, 0),
        spans=((4, "target", "answer"), (3, "ngram", "answer")),
        rejections=((4, 2),),
        stats={"tok_per_s": 12.5, "accepted_per_position": [3, 1]},
    )
    got = store.add(chat.id, wanted)
    assert replace(got, id=0, chat_id="", created_s=0.0) == wanted
    assert store.chat(chat.id).settings == {"drafter": "ngram"}
    assert store.chat(chat.id).leaf_id == got.id


def test_saving_the_text_alone_keeps_who_drafted_what(store: ChatStore) -> None:
    chat = store.create(NewChat())
    answer = store.add(chat.id, Stored("assistant", "", state="streaming"))
    spans, rejections = ((2, "ngram", "answer"),), ((1, 3),)
    whole = replace(answer, content="ab", token_ids=(1,), spans=spans, rejections=rejections, stats={"x": 1})
    store.save(whole)
    store.save_text(replace(whole, content="abcd\ud800", reasoning="hm", token_ids=(1, 2), spans=(), rejections=()))
    assert store.message(answer.id) == replace(whole, content="abcd?", reasoning="hm", token_ids=(1, 2))


def test_branches_share_their_trunk(store: ChatStore) -> None:
    chat = store.create(NewChat())
    question = store.add(chat.id, Stored("user", "2+2?"))
    first = store.add(chat.id, Stored("assistant", "5", question.id))
    second = store.add(chat.id, Stored("assistant", "4", question.id))
    deeper = store.add(chat.id, Stored("user", "sure?", second.id))
    assert [m.content for m in store.path(chat.id)] == ["2+2?", "4", "sure?"]
    assert [m.content for m in store.path(chat.id, first.id)] == ["2+2?", "5"]
    assert store.siblings(first) == (first.id, second.id)
    assert store.places(chat.id) == {question.id: (1, 1), first.id: (1, 2), second.id: (2, 2), deeper.id: (1, 1)}
    assert store.latest_leaf(second.id) == deeper.id
    assert store.latest_leaf(first.id) == first.id
    store.show_branch(chat.id, first.id)
    assert store.chat(chat.id).leaf_id == first.id
    assert len(store.all_messages(chat.id)) == 4


def test_path_does_not_leave_its_chat(store: ChatStore) -> None:
    one, two = store.create(NewChat()), store.create(NewChat())
    message = store.add(one.id, Stored("user", "mine"))
    assert store.path(two.id, message.id) == ()


def test_search_finds_complete_messages_only_and_follows_changes(store: ChatStore) -> None:
    chat = store.create(NewChat("Fruit"))
    answer = store.add(chat.id, Stored("assistant", "half an app", state="streaming"))
    assert store.search("app") == ()
    store.save(replace(answer, content="An apple a day", state="done"))
    (hit,) = store.search("day appl")
    assert (hit.chat_title, hit.message_id) == ("Fruit", answer.id)
    assert "\x02apple\x03" in hit.snippet
    store.save(replace(answer, content="A pear"))
    assert store.search("apple") == ()
    store.delete(chat.id)
    assert store.search("pear") == ()


@pytest.mark.parametrize(
    "query", ['"', "a AND (", "col:x", "NEAR(", "*", "   ", "-x", "'; DROP TABLE chats", "a\0b", "\0", "\ud800"]
)
def test_search_takes_any_text(store: ChatStore, query: str) -> None:
    store.add(store.create(NewChat()).id, Stored("user", "text"))
    assert store.search(query) == ()


def test_deleting_a_chat_removes_all_of_it(store: ChatStore) -> None:
    chat, other = store.create(NewChat()), store.create(NewChat())
    parent = store.add(chat.id, Stored("user", "a"))
    store.add(chat.id, Stored("assistant", "b", parent.id))
    kept = store.add(other.id, Stored("user", "c"))
    store.delete(chat.id)
    assert store.all_messages(chat.id) == ()
    assert [c.id for c in store.chats()] == [other.id]
    assert store.message(kept.id).content == "c"
    with pytest.raises(ChatError, match="There is no chat"):
        store.chat(chat.id)
    with pytest.raises(ChatError, match="no longer there"):
        store.add(chat.id, Stored("user", "late"))


def test_a_chat_of_any_length_can_be_deleted() -> None:
    store = private_store()
    messages = [(n, Stored("user", f"word{n}", n - 1 if n else None)) for n in range(1500)]
    chat = store.insert_tree(NewChat(), messages, 1499)
    assert len(store.path(chat.id)) == 1500
    store.delete(chat.id)
    assert store.all_messages(chat.id) == () and store.chats() == () and store.search("word1499") == ()


def test_drafts_prompts_and_notes(store: ChatStore) -> None:
    chat = store.create(NewChat())
    store.update_chat(chat.id, draft="unsent", title="New name")
    assert (store.chat(chat.id).draft, store.chat(chat.id).title) == ("unsent", "New name")
    for text in ("one", "two", "one"):
        store.add(chat.id, Stored("user", text))
    assert store.recent_prompts() == ("one", "two")
    store.remember("draft", "x")
    store.remember("draft", "y")
    assert (store.note("draft"), store.note("none", "d")) == ("y", "d")


def test_chats_are_listed_by_last_change(tmp_path: Path) -> None:
    ticks = iter(range(1, 100))
    store = open_store(tmp_path / "c", clock=lambda: float(next(ticks)))
    old, new = store.create(NewChat("old")), store.create(NewChat("new"))
    assert [c.title for c in store.chats()] == ["new", "old"]
    store.add(old.id, Stored("user", "again"))
    assert [c.title for c in store.chats()] == ["old", "new"]
    assert store.chats()[0].message_count == 1
    assert new.updated_s < store.chat(old.id).updated_s


def test_lone_surrogates_are_stored_as_question_marks(store: ChatStore) -> None:
    chat = store.create(NewChat())
    assert store.add(chat.id, Stored("user", "a\udcffb")).content == "a?b"
    made = store.create(NewChat("t\udcff", "m", "s\udcff"))
    assert (made.title, made.system_prompt) == ("t?", "s?")
    store.update_chat(made.id, title="\udcffT", system_prompt="\udcffS", draft="\udcffD")
    made = store.chat(made.id)
    assert (made.title, made.system_prompt, made.draft) == ("?T", "?S", "?D")
    store.remember("note", "\udcff")
    assert store.note("note") == "?"


def test_files_are_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "home" / "chats.sqlite3"
    store = open_store(path)
    store.create(NewChat("x"))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_private_store_leaves_nothing_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    opened: list[object] = []
    sys.addaudithook(lambda event, args: opened.append(args[0]) if event == "sqlite3.connect" else None)
    store = private_store()
    chat = store.create(NewChat("secret"))
    store.add(chat.id, Stored("user", "secret words " * 10_000))
    assert len(store.search("secret")) == 1
    assert opened == [":memory:"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["header", "middle", "empty-text"])
def test_damaged_file_is_moved_aside_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "chats.sqlite3"
    store = open_store(path)
    chat = store.create(NewChat())
    texts = [f"message {number} " * 50 for number in range(200)]
    for text in texts:
        store.add(chat.id, Stored("user", text))
    store.close()
    content = bytearray(path.read_bytes())
    if damage == "header":
        content[:100] = b"\x00" * 100
    elif damage == "middle":
        content[len(content) // 4 : len(content) // 2] = b"\xff" * (len(content) // 2 - len(content) // 4)
    else:
        content = bytearray(b"this was a text file\n" * 100)
    path.write_bytes(content)
    again = open_store(path)
    kept = {message.content for chat in again.chats() for message in again.all_messages(chat.id)}
    assert kept <= set(texts) and (len(kept) > 80 if damage == "middle" else not kept)
    (aside,) = [file for file in tmp_path.iterdir() if "damaged" in file.name]
    assert aside.read_bytes() == bytes(content)
    assert str(aside) in again.notice
    assert again.create(NewChat("works")).title == "works"
    assert open_store(path).notice == ""


def test_newer_file_is_refused_and_untouched(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    open_store(path).close()
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    before = path.read_bytes()
    with pytest.raises(ChatError, match="newer localspec"):
        open_store(path)
    assert path.read_bytes() == before


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ChatError, match="cannot be opened"):
        open_store(tmp_path / "file" / "chats.sqlite3")


def test_full_disk_is_one_clear_sentence(store: ChatStore) -> None:
    chat = store.create(NewChat())
    store._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(ChatError, match="free some disk space"):
        store.add(chat.id, Stored("user", "x" * 1_000_000))
    store._connection.execute("PRAGMA max_page_count = 100000")
    assert store.add(chat.id, Stored("user", "y")).content == "y"


_WRITER = """
import sys, time
from dataclasses import replace
from pathlib import Path
from localspec.chats import NewChat, Stored, open_store
store = open_store(Path(sys.argv[1]))
chat = store.create(NewChat("cut"))
answer = store.add(chat.id, Stored("assistant", "", state="streaming"))
store.save(replace(answer, content="so far"))
print("saved", flush=True)
time.sleep(60)
"""


def test_killed_writer_keeps_the_partial_answer(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    process = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "saved\n"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    store = open_store(path)
    (message,) = store.path(store.chats()[0].id)
    assert (message.content, message.state) == ("so far", "interrupted")
    assert len(store.search("far")) == 1


async def test_what_sqlite_refuses_is_said_in_words(tmp_path: Path) -> None:
    worker = StoreWorker(lambda: open_store(tmp_path / "c.sqlite3"))
    await worker.run(lambda s: s._connection.execute("DROP TABLE notes").close())
    with pytest.raises(ChatError, match=r"could not be read \(no such table: notes\)"):
        await worker.run(lambda s: s.note("panel"))
    worker.close()


async def test_worker_keeps_order_and_its_thread(tmp_path: Path) -> None:
    worker = StoreWorker(lambda: open_store(tmp_path / "c.sqlite3"))
    chat = await worker.run(lambda s: s.create(NewChat("a")))
    for number in range(20):
        worker.submit(lambda s, n=number: s.add(chat.id, Stored("user", str(n))))
    contents = await worker.run(lambda s: [m.content for m in s.all_messages(chat.id)])
    assert contents == [str(n) for n in range(20)]
    with pytest.raises(ChatError):
        await worker.run(lambda s: s.chat("none"))
    worker.submit(lambda s: time.sleep(0.05) or s.update_chat(chat.id, title="last"))
    worker.close()
    worker.close()
    assert open_store(tmp_path / "c.sqlite3").chat(chat.id).title == "last"

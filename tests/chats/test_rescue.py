"""Damaged chat files: what can be read of them is in the new one."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.chats import ChatError, NewChat, Stored, open_store


def write_chats(path: Path) -> list[str]:
    """A chat with a draft, an answer that a kill cut off, and a note; its texts."""
    store = open_store(path)
    chat = store.create(NewChat("Dear chat", "m", "Be brief.", {"drafter": "ngram"}))
    parent = None
    for number in range(20):
        parent = store.add(chat.id, Stored("user", f"precious text {number} " * 5, parent)).id
    store.add(chat.id, Stored("assistant", "cut off", parent, token_ids=(1, 2), state="streaming"))
    store.update_chat(chat.id, draft="unsent")
    store.remember("panel", "full")
    store.close()
    return [f"precious text {number} " * 5 for number in range(20)] + ["cut off"]


def change(path: Path, *orders: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        for order in orders:
            connection.execute(order)


def spoil_index(path: Path) -> None:
    change(
        path,
        "UPDATE messages_text_data SET block = x'00ff00ff' WHERE id > 1",
        "UPDATE messages_text_data SET block = x'ffffffffffffffffffff' WHERE id <= 10",
    )


def lose_index(path: Path) -> None:
    change(path, "DROP TABLE messages_text_config")


@pytest.mark.parametrize("spoil", [spoil_index, lose_index])
def test_damage_of_the_search_index_takes_no_message(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    path = tmp_path / "chats.sqlite3"
    texts = write_chats(path)
    spoil(path)
    store = open_store(path)
    (chat,) = store.chats()
    assert (chat.title, chat.system_prompt, chat.draft) == ("Dear chat", "Be brief.", "unsent")
    assert [m.content for m in store.path(chat.id)] == texts and store.note("panel") == "full"
    last = store.path(chat.id)[-1]
    assert last.token_ids == (1, 2) and last.state == "interrupted"
    assert len(store.search("precious")) == 20 and "1 chats with 21 messages" in store.notice
    store.add(chat.id, Stored("user", "more", chat.leaf_id))
    store.close()
    assert [file.name for file in tmp_path.iterdir() if "mending" in file.name] == []
    assert open_store(path).notice == ""


@pytest.mark.parametrize("where", ["id = 1", "id = 10", "id > 10"])
def test_an_index_that_is_damaged_while_it_is_used_is_made_anew(tmp_path: Path, where: str) -> None:
    path = tmp_path / "chats.sqlite3"
    store = open_store(path)
    chat = store.create(NewChat("Title"))
    for number in range(20):
        store.add(chat.id, Stored("user", f"precious text {number} " * 5))
    growing = store.add(chat.id, Stored("assistant", "half", state="streaming"))
    change(path, f"UPDATE messages_text_data SET block = x'00ff00ff' WHERE {where}")
    try:
        store.add(chat.id, Stored("user", "precious more"))
    except ChatError as error:
        assert "made anew" in str(error)
        store.add(chat.id, Stored("user", "precious more"))
    store.save(replace(growing, content="precious whole", state="done"))
    assert len(store.search("precious")) == 22 and store.search("half") == ()
    try:
        store.delete(chat.id)
    except ChatError as error:
        assert "made anew" in str(error)
        store.delete(chat.id)
    assert store.chats() == () and store.search("precious") == ()


def test_messages_around_lost_pages_are_joined_again(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    store = open_store(path)
    chat = store.create(NewChat("Title"))
    parent = None
    for number in range(300):
        parent = store.add(chat.id, Stored("user", f"message {number} " * 50, parent)).id
    store.close()
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20_000] = b"\xff" * 20_000
    path.write_bytes(content)
    again = open_store(path)
    texts = [message.content for message in again.path(again.chats()[0].id)]
    assert 200 < len(texts) < 300 and texts[0].startswith("message 0 ") and texts[-1].startswith("message 299 ")
    assert len(again.search("message", limit=1000)) == len(texts)


def test_messages_without_their_chat_get_one(tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite3"
    write_chats(path)
    change(path, "UPDATE chats SET title = x'00'")  # no text: such a row cannot be trusted
    lose_index(path)
    store = open_store(path)
    (chat,) = store.chats()
    assert chat.title.startswith("precious text 0") and len(store.path(chat.id)) == 21


def test_no_room_for_the_copy_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "chats.sqlite3"
    path.write_bytes(b"this was a text file\n" * 100)

    def full(damaged: Path, fresh: sqlite3.Connection) -> tuple[int, int]:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("localspec.chats.opening.copy_rows", full)
    with pytest.raises(ChatError, match="free some disk space"):
        open_store(path)
    assert [file.name for file in tmp_path.iterdir()] == ["chats.sqlite3"]
    assert path.read_bytes() == b"this was a text file\n" * 100

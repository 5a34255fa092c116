"""Unsent prompts of new chats: each has one owner, and none is lost when its owner ends."""

from __future__ import annotations

from pathlib import Path

from localspec.chats import open_store
from localspec.chats.drafts import keep_draft, leave_draft, take_draft


def nobody_has(owner: str) -> bool:
    return owner.startswith("left by ")


def test_a_draft_is_shown_by_one_owner_and_wiped_by_no_other(tmp_path: Path) -> None:
    one, two = open_store(tmp_path / "c"), open_store(tmp_path / "c")
    keep_draft(one, "first", "half a question")
    assert take_draft(two, "second", nobody_has) == ""
    keep_draft(two, "second", "another")
    keep_draft(two, "second", "")
    assert take_draft(one, "first", nobody_has) == "half a question"
    assert one.notes_like("draft") == {"draft first": "half a question"}


def test_drafts_of_owners_that_ended_are_taken_over_the_latest_first(tmp_path: Path) -> None:
    store = open_store(tmp_path / "c")
    store.remember("draft", "kept before there were owners")
    for name in ("killed", "left", "open"):
        keep_draft(store, name, f"text of {name}")
    leave_draft(store, "left")
    leave_draft(store, "had none")

    def has_gone(owner: str) -> bool:
        return nobody_has(owner) or owner == "killed"

    taken = [take_draft(store, f"new {number}", has_gone) for number in range(4)]
    assert taken == ["text of left", "text of killed", "kept before there were owners", ""]
    assert take_draft(store, "new 0", has_gone) == "text of left"
    assert len(store.notes_like("draft")) == 4


def test_an_empty_draft_of_an_older_file_is_none(tmp_path: Path) -> None:
    store = open_store(tmp_path / "c")
    store.remember("draft", "")
    assert take_draft(store, "new", nobody_has) == ""

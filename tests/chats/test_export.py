"""Export and import: a round trip keeps the tree; a hostile file is refused in one sentence."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localspec.chats import ChatError, ChatStore, NewChat, Stored, private_store
from localspec.chats.export import from_json, to_json, to_markdown


def _example(store: ChatStore) -> str:
    chat = store.create(NewChat("Sums", "m", "Be brief.", {"depth": 3}))
    question = store.add(chat.id, Stored("user", "2+2?"))
    store.add(chat.id, Stored("assistant", "5", question.id, state="cancelled"))
    store.add(
        chat.id,
        Stored(
            "assistant",
            "4 🙂",
            question.id,
            reasoning="two\n\nand two",
            model_id="m",
            token_ids=(4, 9),
            spans=((1, "target", "answer"), (2, "ngram", "answer")),
            rejections=((1, 1),),
            stats={"tok_per_s": 3.0},
        ),
    )
    return chat.id


def _shape(store: ChatStore, chat_id: str) -> list[Any]:
    messages = store.all_messages(chat_id)
    index = {m.id: n for n, m in enumerate(messages)}
    rows = [
        (index.get(m.parent_id or 0), m.role, m.content, m.reasoning, m.state, m.token_ids, m.spans, m.rejections)
        for m in messages
    ]
    leaf = store.chat(chat_id).leaf_id
    return [*rows, [dict(m.stats) for m in messages], None if leaf is None else index[leaf]]


def test_json_round_trip_keeps_the_tree() -> None:
    store, other = private_store(), private_store()
    chat_id = _example(store)
    other.create(NewChat("in the way"))
    imported = from_json(other, to_json(store.chat(chat_id), store.all_messages(chat_id)))
    assert _shape(other, imported.id) == _shape(store, chat_id)
    assert (imported.title, imported.system_prompt, imported.settings) == ("Sums", "Be brief.", {"depth": 3})


def test_markdown_shows_the_branch() -> None:
    store = private_store()
    chat_id = _example(store)
    assert to_markdown(store.chat(chat_id), store.path(chat_id)) == (
        "# Sums\n\n## System\n\nBe brief.\n\n## User\n\n2+2?\n\n## Assistant (m)\n\n> two\n>\n> and two\n\n4 🙂\n"
    )


def _document(**changes: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"format": "localspec-chat", "version": 1, "messages": []}
    return {**base, **changes}


_OK = {"id": 1, "parent_id": None, "role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a chat"),
        (json.dumps(_document(version=9)), "version 9"),
        (json.dumps(_document(messages={})), "a list"),
        (json.dumps(_document(messages=[3])), "message 1 is not an object"),
        (json.dumps(_document(messages=[{**_OK, "id": True}])), "id of its own"),
        (json.dumps(_document(messages=[_OK, _OK])), "message 2 needs an id"),
        (json.dumps(_document(messages=[{**_OK, "parent_id": 1}])), "parent"),
        (json.dumps(_document(messages=[{**_OK, "role": "root"}])), "role 'root'"),
        (json.dumps(_document(messages=[{**_OK, "content": 5}])), '"content" as text'),
        (json.dumps(_document(messages=[{**_OK, "token_ids": [2**70]}])), "token_ids"),
        (json.dumps(_document(messages=[{**_OK, "spans": [[1, "a"]]}])), "another form"),
        (json.dumps(_document(messages=[{**_OK, "parent_id": [1]}])), "parent"),
        (json.dumps(_document(messages=[_OK], leaf_id=7)), "last"),
        (json.dumps(_document(messages=[_OK], leaf_id={})), "last"),
    ],
)
def test_hostile_files_are_refused_and_write_nothing(text: str, complaint: str) -> None:
    store = private_store()
    with pytest.raises(ChatError, match=complaint):
        from_json(store, text)
    assert store.chats() == ()


def test_odd_but_usable_values_are_read() -> None:
    store = private_store()
    row = {**_OK, "content": "\ud800", "state": "streaming", "created_s": "soon", "stats": []}
    chat = from_json(store, json.dumps(_document(messages=[row], leaf_id=1)))
    (message,) = store.path(chat.id)
    assert (message.content, message.state, message.stats) == ("?", "interrupted", {})


_ODD = st.sampled_from(
    [None, True, -1, 0, 3.5, 1e400, float("nan"), 10**400, 2**63, "", "\ud800", "a\x00\x1b[1m", [], [1], {}, {"a": 1},
     [[1, 2]], [[5, "target", "answer"]], [[10**18, "n", "tool_call"]], [[2, 1], [1, 1]]]
)  # fmt: skip
_FIELDS = st.sampled_from(["role", "content", "reasoning", "state", "model_id", "token_ids", "spans", "rejections"])
_MORE = st.sampled_from(["stats", "created_s", "id", "parent_id"])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(_FIELDS | _MORE, _ODD), st.dictionaries(st.sampled_from(["title", "settings", "leaf_id"]), _ODD))
def test_any_file_is_read_or_refused_in_words(message: dict[str, Any], chat: dict[str, Any]) -> None:
    answer = {"id": 2, "parent_id": 1, "role": "assistant", "content": "an answer", **message}
    store = private_store()
    try:
        imported = from_json(store, json.dumps(_document(**{"messages": [_OK, answer], "leaf_id": 1, **chat})))
    except ChatError as refused:
        assert str(refused) and store.chats() == ()
        return
    assert store.all_messages(imported.id)[0].content == "x"
    assert to_json(imported, store.all_messages(imported.id)) and to_markdown(imported, store.path(imported.id))
    assert len(store.search("answer")) <= 1

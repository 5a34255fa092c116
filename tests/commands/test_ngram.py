"""`localspec ngram` on a small tree with a tokenizer of bytes: every command, and what goes wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, models, pre_tokenizers

from localspec.chats import NewChat, Stored, open_store
from localspec.commands.ngram import ngram
from localspec.storage.ngram_manifest import Manifest, TableDirectory

Invoke = Callable[..., Result]


def byte_tokenizer(extra: str = "") -> str:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: number for number, piece in enumerate([*alphabet, *([extra] if extra else [])])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return str(tokenizer.to_str())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    model = folder / "models" / "tiny"
    model.mkdir(parents=True)
    (model / "localspec.json").write_text("{}")
    (model / "tokenizer.json").write_text(byte_tokenizer())
    monkeypatch.setenv("LOCALSPEC_HOME", str(folder))
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / "a.py").write_text("def first() -> int:\n    return 1\n")
    (root / "sub" / "b.py").write_text("def second() -> int:\n    return 2\n")
    (root / "copy.py").write_text("def first() -> int:\n    return 1\n")
    (root / "secret.log").write_text("this must not be read\n")
    (root / ".gitignore").write_text("*.log\n")
    (root / "image.bin").write_bytes(b"\x89PNG\0\0" * 50)
    return root


@pytest.fixture
def invoke(home: Path) -> Invoke:
    def call(*arguments: str | Path, code: int = 0) -> Result:
        result = CliRunner().invoke(ngram, [str(argument) for argument in arguments])
        assert result.exit_code == code, (result.output, result.exception)
        return result

    return call


def sources(home: Path, name: str) -> set[str]:
    return {source.rpartition("#")[0] for source in TableDirectory(home / "ngram" / name).load().sources}


def test_build_takes_text_once_and_leaves_the_rest(home: Path, tree: Path, invoke: Invoke) -> None:
    document = json.loads(invoke("build", "mine", tree, "--json").stdout)
    assert sources(home, "mine") == {str(tree / "a.py"), str(tree / "sub" / "b.py"), str(tree / ".gitignore")}
    assert document["duplicates"] == 1 and document["removed_sources"] == 0
    kept = [tree / "a.py", tree / "sub" / "b.py", tree / ".gitignore"]
    assert document["added_tokens"] == sum(len(path.read_bytes()) for path in kept)
    assert (home / "ngram" / "mine").stat().st_mode & 0o777 == 0o700


def test_add_replaces_what_changed_and_nothing_else(home: Path, tree: Path, invoke: Invoke) -> None:
    invoke("build", "mine", tree)
    assert json.loads(invoke("add", "mine", tree, "--json").stdout)["new_sources"] == 0
    (tree / "a.py").write_text("def first() -> int:\n    return 100\n")
    os.utime(tree / "a.py", ns=(1, 1))
    document = json.loads(invoke("add", "mine", tree, "--json").stdout)
    # The copy of what a.py was is no duplicate any more.
    assert document["new_sources"] == 2 and document["removed_sources"] == 1
    assert len(TableDirectory(home / "ngram" / "mine").load().deleted) <= 1


def test_many_changed_files_are_few_changes_of_the_list(
    home: Path, tree: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tree / f"{number}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"text {number} as it was")
    invoke("build", "mine", tree)
    for number, path in enumerate(paths):
        path.write_text(f"text {number} as it is now") if number % 2 else path.unlink()
    updates = []
    update = TableDirectory.update

    def counted(self: TableDirectory, change: Callable[[Manifest], Manifest]) -> Manifest:
        updates.append(change)
        return update(self, change)

    monkeypatch.setattr(TableDirectory, "update", counted)
    invoke("watch", "mine", tree, "--rounds", "1")
    assert len(updates) < 8
    assert {Path(name).name for name in sources(home, "mine") if name.endswith(".txt")} == {
        path.name for path in paths[1::2]
    }
    assert len(TableDirectory(home / "ngram" / "mine").load().sources) == len(sources(home, "mine"))


def test_watch_follows_new_and_removed_files(home: Path, tree: Path, invoke: Invoke) -> None:
    invoke("build", "mine", tree)
    (tree / "sub" / "b.py").unlink()
    (tree / "new.md").write_text("# A new page\n\nWith some text in it.\n")
    invoke("watch", "mine", tree, "--rounds", "2", "--every", "0.05")
    assert str(tree / "new.md") in sources(home, "mine") and str(tree / "sub" / "b.py") not in sources(home, "mine")


def test_watch_waits_for_a_folder_that_is_away(
    home: Path, tree: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    invoke("build", "mine", tree)
    before, away = sources(home, "mine"), tree.with_name("away")
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if tree.exists():
            tree.rename(away)

    monkeypatch.setattr("localspec.commands.ngram.time.sleep", sleep)
    # A tree that takes long to look through is looked at less often.
    monkeypatch.setattr("localspec.commands.ngram.time.process_time", iter([0.0, 2.0, *range(5, 9)]).__next__)
    told = invoke("watch", "mine", tree, "--rounds", "3").stderr
    assert away.exists() and sources(home, "mine") == before and told.count("nothing is left at") == 1
    assert slept[0] == 50.0
    assert "give paths that exist" in invoke("watch", "mine", tree, "--rounds", "1", code=1).output


def test_watch_drops_what_an_emptied_folder_held_when_told_to(home: Path, tree: Path, invoke: Invoke) -> None:
    invoke("build", "mine", tree)
    before = sources(home, "mine")
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        path.unlink()
    told = invoke("watch", "mine", tree, "--rounds", "3", "--every", "0.05").stderr
    assert sources(home, "mine") == before and told.count("--prune") == 1
    invoke("watch", "mine", tree, "--rounds", "2", "--every", "0.05", "--prune")
    assert sources(home, "mine") == set()


def test_what_is_left_out_is_said(home: Path, tree: Path, invoke: Invoke) -> None:
    result = invoke("build", "mine", tree)
    assert "left out binary files (1)" in result.stderr and "next start" in result.stderr
    assert json.loads(invoke("add", "mine", tree, "--json").stdout)["passed_over"] == {"binary files": 1}


def test_the_last_chat_goes_too(home: Path, tmp_path: Path, invoke: Invoke) -> None:
    stores = [open_store(tmp_path / f"{number}.sqlite3") for number in range(2)]
    chats = [store.create(NewChat(title="talk")) for store in stores]
    for store, chat in zip(stores, chats, strict=True):
        store.add(chat.id, Stored("user", f"Tell me about {chat.id}."))
    paths = [tmp_path / f"{number}.sqlite3" for number in range(2)]
    invoke("build", "chats", *paths)
    assert sources(home, "chats") == {f"chat:{chat.id}" for chat in chats}
    for store, chat in zip(stores, chats, strict=True):
        store.delete(chat.id)
        store.close()
    invoke("add", "chats", *paths)
    assert sources(home, "chats") == set()


def test_json_lines_and_chats(home: Path, tmp_path: Path, invoke: Invoke) -> None:
    lines = [{"text": "one two three"}, {"content": "four five"}, {"messages": [{"role": "user", "content": "six"}]}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "not json", "[1, 2]", '"seven"']))
    document = json.loads(invoke("build", "lines", path, "--json").stdout)
    assert document["added_tokens"] == len("one two three" + "four five" + "six" + "seven")
    chats = home / "chats.sqlite3"
    store = open_store(chats)
    kept, gone = store.create(NewChat(title="kept")), store.create(NewChat(title="gone"))
    for chat in (kept, gone):
        store.add(chat.id, Stored("user", f"Tell me about {chat.title}."))
    invoke("build", "chats", chats)
    assert sources(home, "chats") == {f"chat:{kept.id}", f"chat:{gone.id}"}
    store.delete(gone.id)
    store.close()
    invoke("add", "chats", chats)
    assert sources(home, "chats") == {f"chat:{kept.id}"}


def test_ls_and_stats_say_which_model_a_table_fits(home: Path, tree: Path, invoke: Invoke) -> None:
    assert json.loads(invoke("ls", "--json").stdout) == [] and "ngram build" in invoke("ls").stderr
    invoke("build", "mine", tree)
    [row] = json.loads(invoke("ls", "--json").stdout)
    assert row["name"] == "mine" and row["models"] == ["tiny"] and row["sources"] == 3 and row["tokens"] > 60
    assert json.loads(invoke("stats", "mine", "--json").stdout) == row
    (home / "models" / "tiny" / "tokenizer.json").write_text(byte_tokenizer("another"))
    assert "no installed model" in invoke("ls").stdout
    assert "another tokenizer" in invoke("add", "mine", tree, code=1).stderr


def test_rm_takes_it_all(home: Path, tree: Path, invoke: Invoke) -> None:
    invoke("build", "mine", tree)
    invoke("rm", "mine")
    assert not (home / "ngram" / "mine").exists()
    assert "no table mine" in invoke("rm", "mine", code=1).stderr


@pytest.mark.parametrize("name", ["../up", ".hidden", "a/b", "x" * 65, ""])
def test_names_are_checked(name: str, tree: Path, invoke: Invoke) -> None:
    invoke("build", name, tree, code=2)


def test_wrong_use_is_explained(home: Path, tree: Path, invoke: Invoke) -> None:
    assert "ngram build" in invoke("add", "none", tree, code=1).stderr
    assert "no file or folder" in invoke("build", "mine", tree / "absent", code=1).stderr
    invoke("build", "mine", tree)
    assert "ngram add" in invoke("build", "mine", tree, code=2).stderr
    table = TableDirectory(home / "ngram" / "mine")
    with table.builder_lock():
        assert "another process" in invoke("add", "mine", tree, code=1).stderr
    assert "seconds" in invoke("watch", "mine", tree, "--every", "nan", code=2).stderr
    (home / "ngram" / "link").symlink_to(tree)
    assert "not a link" in invoke("build", "link", tree, code=1).stderr
    (home / "ngram" / "mine" / "manifest").write_bytes(b"0123456789abcdef\n{}")
    assert "damaged" in invoke("stats", "mine", code=1).stderr
    assert "damaged" in invoke("ls").stdout
    (home / "models" / "tiny" / "localspec.json").unlink()
    assert "not installed" in invoke("build", "other", tree, code=1).stderr

"""Which files a walk finds, by git's rules, and a table that follows them through a kill."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from localspec.hub.corpus import (
    BAD_LINES,
    BINARY,
    LARGE,
    LONG_LINES,
    NOT_UTF8,
    PIECE_CHARS,
    Passed,
    find_files,
    read_texts,
)
from localspec.hub.ngram_sync import SyncOptions, TableSync
from localspec.hub.records import HubError
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_manifest import TableDirectory
from tests.commands.test_ngram import byte_tokenizer

IGNORE = r"""
# a comment
*.log
!keep.log
/top.txt
build/
docs/**/draft.md
**/deep/x.txt
na[mk]e.txt
no[!a]t.txt
sp\ ace.txt
\#hash.txt
a/*/c.txt
trail**
"""
FILES = (
    "x.log", "keep.log", "sub/x.log", "top.txt", "sub/top.txt", "build/a.txt", "sub/build/b.txt", "build.txt",
    "docs/draft.md", "docs/one/two/draft.md", "docs/other.md", "deep/x.txt", "one/deep/x.txt", "one/deep/y.txt",
    "name.txt", "nake.txt", "nane.txt", "noat.txt", "nobt.txt", "sp ace.txt", "#hash.txt", "a/b/c.txt", "a/b/d/c.txt",
    "trail.txt", "sub/trailing", "inner/own.txt", "inner/other.txt", "sub/inner/own.txt",
)  # fmt: skip


def tree_of(root: Path) -> Path:
    for name in FILES:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")
    (root / ".gitignore").write_text(IGNORE)
    (root / "inner" / ".gitignore").write_text("own.txt\n!top.txt\n")
    return root


def test_the_walk_finds_what_git_finds(tmp_path: Path) -> None:
    root = tree_of(tmp_path / "tree")
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    command = ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = set(filter(None, listed.split("\0")))
    assert {str(file.path.relative_to(root)) for file in find_files([root])} == expected
    # A folder inside obeys the rules above it.
    inside = {str(file.path.relative_to(root)) for file in find_files([root / "sub"])}
    assert inside == {name for name in expected if name.startswith("sub/")}


def test_binary_large_and_linked_files_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "nul.txt").write_bytes(b"text\0more")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "large.txt").write_text("x" * 5000)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "link.txt").symlink_to(tmp_path / "good.txt")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    files = list(find_files([tmp_path], max_text_bytes=4000))
    assert [text.text for file in files for text in read_texts(file)] == ["good"]
    with pytest.raises(HubError, match="absent"):
        list(find_files([tmp_path / "absent"]))


def test_large_texts_come_in_pieces(tmp_path: Path) -> None:
    text = "".join(f"line {number} of a text, caf\u00e9\n" for number in range(220_000))
    large = tmp_path / "large.txt"
    large.write_text(text)
    assert large.stat().st_size > 4 << 20
    (file,) = find_files([large])
    pieces = [piece.text for piece in read_texts(file)]
    assert "".join(pieces) == text and max(map(len, pieces)) <= PIECE_CHARS and len(pieces) < 12
    assert all(piece.endswith("\n") for piece in pieces)
    # In a tree such a file is data rather than text: left out and counted.
    passed: Passed = Counter()
    assert not list(find_files([tmp_path], passed=passed)) and passed == {LARGE: 1}


def test_long_lines_are_read_and_what_is_left_out_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localspec.hub.corpus.MAX_LINE_BYTES", 5 << 20)
    long = "words " * 800_000
    lines = [{"text": long}, {"text": "x" * (5 << 20)}, {"text": "a \ud800 b"}, {"other": 1}]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), "", "{", '"end"']))
    (tmp_path / "nul.txt").write_bytes(b"text\0more")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    passed: Passed = Counter()
    texts = [text.text for file in find_files([tmp_path], passed=passed) for text in read_texts(file, passed)]
    assert "".join(texts[:-2]) == long and len(texts) > 5 and texts[-2:] == ["a ? b", "end"]
    assert passed == {LONG_LINES: 1, BAD_LINES: 2, BINARY: 1, NOT_UTF8: 1}


def test_a_file_is_found_once_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text("text")
    paths = [tmp_path, tmp_path / "sub", tmp_path / "sub" / ".." / "sub" / "a.txt"]
    assert [file.path for file in find_files(paths)] == [tmp_path / "sub" / "a.txt"]
    with pytest.raises(HubError, match="home folder"):
        list(find_files([Path("~nobody-of-this-name/x")]))


def test_names_that_are_no_utf8_and_trees_deeper_than_calls(tmp_path: Path) -> None:
    model, tree = tmp_path / "model", tmp_path / "tree"
    model.mkdir()
    tree.mkdir()
    (model / "tokenizer.json").write_text(byte_tokenizer())
    odd = tree / os.fsdecode(b"caf\xe9.txt")
    odd.write_text("a text of its own")
    here = os.open(tree, os.O_RDONLY)
    for _ in range(1050):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    try:
        sync = TableSync(tmp_path / "t", model)
        assert sync.run([tree], lambda progress: None).new_sources == 1
        assert not sync.changed([tree])
    finally:
        subprocess.run(["rm", "-rf", str(tree)], check=True)


def test_a_build_that_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tree = tmp_path / "model", tmp_path / "tree"
    model.mkdir()
    tree.mkdir()
    (model / "tokenizer.json").write_text(byte_tokenizer())
    for number in range(40):
        (tree / f"{number:02}.txt").write_text(f"text number {number} " * 20)
    lines = "\n".join(f'{{"text": "line {number} of a file of lines"}}' for number in range(200))
    (tree / "z.jsonl").write_text(lines)
    monkeypatch.setattr("localspec.hub.ngram_sync.BATCH_CHARS", 500)

    def until(left: int) -> TableDirectory:
        """Every add is flushed; the process dies after `left` of them."""
        add = RunBuilder.add

        def dying(self: RunBuilder, source: str, tokens: list[int]) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            add(self, source, tokens)
            self.flush()

        with monkeypatch.context() as patch:
            patch.setattr(RunBuilder, "add", dying)
            with contextlib.suppress(KeyboardInterrupt):
                TableSync(tmp_path / "t", model).run([tree], lambda progress: None)
        return TableDirectory(tmp_path / "t")

    assert not until(25).load().runs
    assert not until(60).load().runs
    report = TableSync(tmp_path / "t", model, SyncOptions()).run([tree], lambda progress: None)
    clean = TableSync(tmp_path / "clean", model, SyncOptions()).run([tree], lambda progress: None)
    assert report.new_sources < clean.new_sources and not TableDirectory(tmp_path / "t").load().staged

    def names(folder: str) -> set[str]:
        return set(TableDirectory(tmp_path / folder).load().sources)

    assert names("t") == names("clean")
    assert report.table.records == clean.table.records

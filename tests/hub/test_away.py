"""A table that follows folders: what is deleted goes, what may only be away stays until the user says otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localspec.hub import away
from localspec.hub.corpus import stored_name
from localspec.hub.ngram_sync import SyncOptions, SyncReport, TableSync
from localspec.hub.records import HubError
from localspec.storage.ngram_manifest import TableDirectory
from tests.commands.test_ngram import byte_tokenizer


class Watched:
    """A tree with a disk in it, and the table that follows it; `mounted` says which folders are disks of their own."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.disk = folder / "tree", folder / "tree" / "disk"
        self.disk.mkdir(parents=True)
        (folder / "model").mkdir()
        (folder / "model" / "tokenizer.json").write_text(byte_tokenizer())
        self.fill()
        self.mounted = {self.disk}
        self.table = folder / "table"
        self.sync = TableSync(self.table, folder / "model", SyncOptions(remove_missing=True))

    def fill(self) -> None:
        (self.tree / "a.txt").write_text("text of the tree itself")
        (self.disk / "b.txt").write_text("text of the disk, one")
        (self.disk / "sub").mkdir(exist_ok=True)
        (self.disk / "sub" / "c.txt").write_text("text of the disk, another")

    def unmount(self) -> None:
        """The mount point stays and is empty."""
        for path in (self.disk / "b.txt", self.disk / "sub" / "c.txt"):
            path.unlink(missing_ok=True)
        (self.disk / "sub").rmdir()
        self.mounted = set()

    def look(self, *paths: Path) -> SyncReport | None:
        given = paths or (self.tree,)
        return self.sync.run(given, lambda progress: None) if self.sync.changed(given) else None

    def names(self) -> set[str]:
        return {Path(name.rpartition("#")[0]).name for name in TableDirectory(self.table).load().sources}

    def device(self, folder: Path) -> int | None:
        return 2 if any(folder.is_relative_to(place) for place in self.mounted) else 1


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    monkeypatch.setattr(away, "_device", watched.device)
    yield watched


def test_a_disk_that_is_not_mounted_takes_nothing_along(watched: Watched) -> None:
    watched.look()
    assert watched.names() == {"a.txt", "b.txt", "c.txt"}
    assert TableDirectory(watched.table).load().mount_points == (stored_name(watched.disk),)
    (watched.disk / "b.txt").unlink()
    assert watched.look() is not None and watched.names() == {"a.txt", "c.txt"}
    watched.unmount()
    (watched.tree / "new.txt").write_text("new text of the tree")
    (watched.tree / "a.txt").unlink()
    # Another process, to which nothing but the table tells of the disk.
    assert watched.look() is not None
    assert watched.names() == {"new.txt", "c.txt"} and watched.sync.away == {watched.disk}
    assert watched.look() is None
    watched.mounted = {watched.disk}
    watched.fill()
    watched.look()
    assert watched.names() == {"a.txt", "b.txt", "c.txt", "new.txt"} and not watched.sync.away


def test_a_root_that_stands_empty_is_away_and_can_be_pruned(watched: Watched) -> None:
    watched.mounted = set()
    watched.look()
    watched.unmount()
    (watched.tree / "a.txt").unlink()
    assert watched.look() is None and watched.sync.away == {watched.tree}
    assert watched.names() == {"a.txt", "b.txt", "c.txt"}
    watched.sync.prune = True
    assert watched.look() is not None and watched.names() == set()


def test_pruning_a_disk_makes_its_place_an_ordinary_folder(watched: Watched) -> None:
    watched.look()
    watched.unmount()
    assert watched.look(watched.disk) is None and watched.sync.away == {watched.disk}
    watched.disk.rmdir()
    with pytest.raises(HubError, match="no file or folder"):
        watched.look(watched.disk)
    watched.sync.prune = True
    with pytest.raises(HubError, match="no file or folder"):
        watched.look(watched.tree / "misspelt")
    watched.look(watched.disk)
    assert watched.names() == {"a.txt"} and TableDirectory(watched.table).load().mount_points == ()
    watched.sync.prune = False
    watched.disk.mkdir()
    watched.fill()
    watched.look()
    (watched.disk / "b.txt").unlink()
    watched.look()
    assert watched.names() == {"a.txt", "c.txt"}

"""An engine with several threads on a store, and other processes that come and go meanwhile."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from localspec.cache.spill import SpillStore
from localspec.storage.files import make_private_file
from tests.cache.test_spill import WIDE, check_found, identity, ids_of, write

ROOT = Path(__file__).parents[2]
LOOK = """
import sys
from pathlib import Path
from localspec.cache.spill_admin import SpillAdmin
with SpillAdmin(Path(sys.argv[1])) as admin:
    print(sum(row.num_blocks for row in admin.models()))
"""


def blocks_seen_by_another_process(folder: Path) -> int:
    return int(subprocess.check_output([sys.executable, "-c", LOOK, str(folder)], text=True, cwd=ROOT))


def test_a_command_that_looks_takes_no_journal_away(tmp_path: Path) -> None:
    """The last process to leave an SQLite file deletes its journal; an engine that is there must count as there."""
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    for seed in range(3):
        write(store, ids_of(seed, 700), chat=f"chat {seed}")
        # Another thread's first look opens a connection of its own.
        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(store.lookup, ids_of(seed, 700)).result(20).num_tokens == 700
        assert blocks_seen_by_another_process(store.folder) == 3 * (seed + 1)
        assert (store.folder / "index.sqlite3-wal").exists()
    store.close()
    again = SpillStore(tmp_path / "kv", identity(), WIDE)
    for seed in range(3):
        found_again = again.lookup(ids_of(seed, 700))
        assert found_again.num_tokens == 700
        check_found(again, found_again, ids_of(seed, 700))
    assert again.index.connection().execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_directory_that_is_thrown_away_begins_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = ids_of(1, 700)
    store = SpillStore(tmp_path / "kv", identity(), WIDE)
    write(store, ids, chat="a")
    store.come_back()
    assert store.lookup(ids).num_tokens == 700, "nothing happens where nothing happened"
    for leave in ("nothing", "an empty directory", "another index"):
        shutil.rmtree(store.folder)
        if leave != "nothing":
            store.folder.mkdir(mode=0o755)
        if leave == "another index":
            SpillStore(store.folder, identity("other"), WIDE).close()
        store.come_back()
        assert store.lookup(ids).num_tokens == 0
        assert write(store, ids, chat="a").written_bytes and not store.off_reason
        assert store.lookup(ids).num_tokens == 700 and blocks_seen_by_another_process(store.folder) == 3
        assert store.folder.stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("thrown away") == 3


def test_the_index_is_never_a_link(tmp_path: Path) -> None:
    target = tmp_path / "other"
    for exists in (False, True):
        if exists:
            target.write_bytes(b"precious")
        link = tmp_path / f"link{exists}"
        link.symlink_to(target)
        with pytest.raises(OSError, match="symbolic links"):
            make_private_file(link)
    assert target.read_bytes() == b"precious"
    make_private_file(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o600

"""What a person may do with the cache on disk: see it, check it, remove parts of it or all. Needs no loaded model.

Torch-free. Safe beside running engines: they see a missing block and compute it again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from localspec.cache.spill import INDEX_NAME
from localspec.cache.spill_index import REBUILT, Block, ModelRow, SpillIndex
from localspec.cache.spill_order import remove_chat, remove_with_dependants
from localspec.cache.spill_rebuild import rebuild
from localspec.storage.blockfile import BlockStore
from localspec.storage.errors import DamagedFile, WrongOwner


@dataclass(frozen=True)
class ChatRow:
    """What a chat has on disk for one model; blocks that it shares with other chats count for each."""

    chat_id: str
    model_id: str
    num_blocks: int
    stored_bytes: int
    tokens: int


@dataclass(frozen=True)
class Checked:
    """Outcome of a verification."""

    num_blocks: int
    read_bytes: int
    damaged: tuple[str, ...]
    """One line for each block that was removed, with the reason."""


class SpillAdmin:
    """The cache directory of this user."""

    def __init__(self, folder: Path) -> None:
        """Raises FileNotFoundError where nothing was ever cached."""
        if not folder.is_dir() or not any(folder.iterdir()):
            raise FileNotFoundError(f"nothing is cached in {folder}")
        self.folder = folder
        self._files = BlockStore(folder)
        self._index = SpillIndex(folder / INDEX_NAME)
        if self._index.is_new:
            rebuild(self._index, self._files)

    def __enter__(self) -> SpillAdmin:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()

    def chats(self) -> list[ChatRow]:
        """Largest first."""
        names = {row.fingerprint: row.model_id for row in self._index.models()}
        return [
            ChatRow(chat_id, names.get(fingerprint, "?"), count, size, tokens)
            for chat_id, fingerprint, count, size, tokens in self._index.chats()
        ]

    def without_chat(self) -> tuple[int, int]:
        """(blocks, bytes) of programs that named no chat."""
        (count, size) = self._index.connection().execute(
            "SELECT count(*), coalesce(sum(file_bytes), 0) FROM block WHERE key NOT IN (SELECT key FROM chat)"
        ).fetchone()  # fmt: skip
        return int(count), int(size)

    def has_lost_names(self) -> bool:
        """Whether there are blocks of which nobody knows the chat, since the index was made again from the files."""
        return bool(self._index.counter(REBUILT)) and self.without_chat()[0] > 0

    def models(self) -> list[ModelRow]:
        """Every model (with its drafters and back end) that has blocks or had some."""
        return sorted(self._index.models(), key=lambda row: -row.stored_bytes)

    def free_bytes(self) -> int:
        """Of the disk that holds the cache."""
        return shutil.disk_usage(self.folder).free

    def written_today_bytes(self) -> int:
        """Bytes written since midnight UTC, by every engine on this directory."""
        today = int(time.time() // 86400)
        return self._index.counter("day_bytes") if self._index.counter("day") == today else 0

    def remove_chat(self, chat_id: str) -> int:
        """Delete what only this chat used; returns the number of blocks. Raises OSError where files cannot go."""
        return remove_chat(self._index, self._files, chat_id)

    def remove_model(self, model_id: str) -> int:
        """Delete every block of a model; returns the number of blocks. Raises OSError where files cannot go."""
        removed = 0
        for row in self._index.models():
            if row.model_id == model_id:
                removed += row.num_blocks
                with self._index.transaction() as db:
                    db.execute("DELETE FROM block WHERE fingerprint = ?", (row.fingerprint,))
                shutil.rmtree(self.folder / row.fingerprint.hex(), ignore_errors=True)
        self._index.scrub()
        _see_that_gone(self.folder, [row.fingerprint.hex() for row in self._index.models() if row.model_id == model_id])
        return removed

    def wipe(self) -> int:
        """Delete everything; returns the bytes that were indexed. Raises OSError where files cannot go."""
        stored_bytes = self._index.total_bytes()
        with self._index.transaction() as db:
            for table in ("block", "chat", "segment_ids"):
                db.execute(f"DELETE FROM {table}")
            # What was written today stays written: the disk has worn by it.
            db.execute("DELETE FROM counter WHERE name NOT IN ('day', 'day_bytes')")
        self._files.sweep(())
        self._index.connection().execute("VACUUM")
        self._index.scrub()
        _see_that_gone(self.folder, ["*"])
        return stored_bytes

    def verify(self) -> Iterator[tuple[int, Checked]]:
        """Read every block; yields (bytes to do, progress so far). Damaged ones are removed, the reason is kept."""
        total_bytes = self._index.total_bytes()
        num_blocks = read_bytes = 0
        damaged: list[str] = []
        for row in self._index.models():
            for block in list(self._index.all_blocks(row.fingerprint)):
                problem = self._problem(block)
                num_blocks, read_bytes = num_blocks + 1, read_bytes + block.file_bytes
                if problem:
                    damaged.append(problem)
                    try:
                        remove_with_dependants(self._index, self._files, [block])
                    except OSError as error:
                        damaged[-1] += f"; {error}"
                yield total_bytes, Checked(num_blocks, read_bytes, tuple(damaged))

    def _problem(self, block: Block) -> str:
        path = self._files.path(block.fingerprint, block.key)
        if self._index.get(block.key) is None:
            return ""
        try:
            header = self._files.read_header(block.fingerprint, block.key)
            stated = (header.parent_key, header.token_begin, header.token_end)
            if stated != (block.parent, block.token_begin, block.token_end):
                return f"{path}: holds another range than the index says"
            buffer = bytearray(header.payload_bytes)
            self._files.read_into(block.fingerprint, block.key, header.layout, memoryview(buffer))
        except FileNotFoundError:
            return f"{path}: the file is gone"
        except (DamagedFile, WrongOwner, OSError) as error:
            return str(error)
        return ""


def forget_chat_on_disk(folder: Path, chat_id: str) -> int:
    """Delete what only this chat has in a cache directory that no engine of ours uses; returns the number of blocks.

    Raises OSError, sqlite3.Error where it cannot.
    """
    try:
        with SpillAdmin(folder) as admin:
            return admin.remove_chat(chat_id)
    except FileNotFoundError:
        return 0


def sweep_all(folder: Path) -> None:
    """Remove a cache whose index cannot even be opened, whatever stands in the index's place; links are not followed.

    Raises OSError where the directory is not ours or refuses.
    """
    BlockStore(folder).sweep(())
    for path in folder.glob(f"{INDEX_NAME}*"):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    _see_that_gone(folder, ["*"])


def _see_that_gone(folder: Path, models: list[str]) -> None:
    """Raises OSError where blocks of these fingerprints (hexadecimal, or a pattern) cannot be deleted."""
    failures: list[OSError] = []
    for path in (path for model in models for path in folder.glob(f"{model}/*/*.blk")):
        try:
            # An engine may have written it just now.
            path.unlink(missing_ok=True)
        except OSError as error:
            failures.append(error)
    if failures:
        raise OSError(f"{len(failures)} cached files cannot be deleted: {failures[0]}")

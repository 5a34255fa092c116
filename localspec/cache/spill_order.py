"""Which blocks go when room is needed, and what goes with them: no block outlives what it hangs on.

Torch-free. Row first, file after, so that a crash between the two leaves litter and never a row without its file.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterable

from localspec.cache.spill_index import SEGMENT, STATE, Block, SpillIndex
from localspec.cache.spill_limits import SpillLimits
from localspec.storage.blockfile import BlockStore


class NoRoom(Exception):
    """The caps leave no room for a write; the message says which."""


class MakeRoom:
    """Keeps the caps: bytes of all models, bytes that must stay free on the disk, bytes written a day."""

    def __init__(
        self, index: SpillIndex, files: BlockStore, cap_bytes: int, limits: SpillLimits, today: Callable[[], int]
    ) -> None:
        self._index = index
        self._files = files
        self._cap_bytes = cap_bytes
        self._limits = limits
        self._today = today

    def make(self, wanted_bytes: int, keep: frozenset[bytes] = frozenset()) -> None:
        """Evict until `wanted_bytes` more fit. Raises NoRoom when only blocks of `keep` are left to go."""
        while (excess := self._excess(wanted_bytes)) > 0:
            block = self._index.first_to_go()
            if block is None or block.key in keep:
                if wanted_bytes:
                    raise NoRoom(f"{excess / 1e6:.0f} MB more are needed than the disk or the cap leaves")
                return
            remove_with_dependants(self._index, self._files, [block])

    def spend(self, db: sqlite3.Connection, written_bytes: int) -> None:
        """Count what a turn wrote."""
        today = self._today()
        spent = self._index.counter("day_bytes") if self._index.counter("day") == today else 0
        self._index.set_counter(db, "day", today)
        self._index.set_counter(db, "day_bytes", spent + written_bytes)

    def check_budget(self, wanted_bytes: int) -> None:
        """Raises NoRoom when today's writes are used up."""
        if self.spent_today_bytes() + wanted_bytes > self._limits.daily_write_bytes:
            raise NoRoom(f"today's {self._limits.daily_write_bytes / 1e9:.0f} GB of writes are used up")

    def spent_today_bytes(self) -> int:
        """Bytes written since midnight UTC, by every process on this directory."""
        return self._index.counter("day_bytes") if self._index.counter("day") == self._today() else 0

    def _excess(self, wanted_bytes: int) -> int:
        over_cap = self._index.total_bytes() + wanted_bytes - self._cap_bytes
        free_bytes = shutil.disk_usage(self._files.root).free
        return max(over_cap, self._limits.min_free_bytes + wanted_bytes - free_bytes)


def remove_with_dependants(index: SpillIndex, files: BlockStore, blocks: Iterable[Block]) -> int:
    """Remove blocks, what hangs on them, and what they alone made useful; returns how many went.

    Raises OSError, with all rows gone, where files of them could not be deleted.
    """
    stateful = {row.fingerprint for row in index.models() if row.needs_state}
    removed: list[Block] = []
    with index.transaction() as db:
        for block in blocks:
            removed += _remove(index, db, block, block.fingerprint in stateful)
    unlink_without_row(index, files, removed)
    return len(removed)


def remove_chat(index: SpillIndex, files: BlockStore, chat_id: str) -> int:
    """Remove what only this chat used, and its name; returns how many blocks went. Raises OSError as above."""
    blocks = index.of_chat(chat_id)
    with index.transaction() as db:
        db.execute("DELETE FROM chat WHERE chat_id = ?", (chat_id,))
    try:
        return remove_with_dependants(index, files, blocks)
    finally:
        index.scrub()


def unlink_without_row(index: SpillIndex, files: BlockStore, blocks: Iterable[Block]) -> None:
    """Delete files whose rows are gone, but not one that another process has written and indexed again meanwhile.

    Raises OSError at the end, where some could not be deleted.
    """
    failures: list[OSError] = []
    with index.transaction():
        for block in blocks:
            if not index.has(block.key):
                try:
                    files.delete(block.fingerprint, block.key)
                except OSError as error:
                    failures.append(error)
    if failures:
        raise OSError(f"{len(failures)} cached files cannot be deleted: {failures[0]}")


def _remove(index: SpillIndex, db: sqlite3.Connection, block: Block, stateful: bool) -> list[Block]:
    removed = index.below(block.key)
    index.remove(db, removed)
    if block.kind == SEGMENT:
        removed += _remove_uncovered_states(index, db, block.parent)
    if stateful:
        removed += _remove_useless_segments(index, db, block.parent)
    return removed


def _remove_uncovered_states(index: SpillIndex, db: sqlite3.Connection, parent: bytes) -> list[Block]:
    """States inside a segment need the segment's tokens up to them."""
    children = index.children(parent)
    covered = max((child.token_end for child in children if child.kind == SEGMENT), default=-1)
    lost = [child for child in children if child.kind == STATE and child.token_end > covered]
    index.remove(db, lost)
    return lost


def _remove_useless_segments(index: SpillIndex, db: sqlite3.Connection, chain: bytes) -> list[Block]:
    """Where a model resumes only from states: segments up the chain that no state stands in or after."""
    removed: list[Block] = []
    while not index.has_state(chain):
        useless = index.leaf_segments(chain)
        index.remove(db, useless)
        removed += useless
        block = index.get(chain)
        if block is None or index.has_child(chain):
            break
        chain = block.parent
    return removed

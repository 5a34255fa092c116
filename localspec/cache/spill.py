"""Cached segments and states on disk: what is kept, what is found again, what goes first.

Torch-free: payloads are bytes to it. It promises that a block which `lookup` names was whole when its row was written,
that the caps hold after every write, and that no failure of the disk reaches a generation: writing stops and says so.
A power cut may tear a file, which its checksum shows, so nothing is synced.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from localspec.cache.spill_index import INDEX_ERRORS, SEGMENT, STATE, Block, ModelRow, SpillIndex
from localspec.cache.spill_keys import id_bytes
from localspec.cache.spill_limits import SpillLimits
from localspec.cache.spill_lookup import Either, Found, Known, ModelIdentity, find
from localspec.cache.spill_order import MakeRoom, remove_chat, remove_with_dependants
from localspec.cache.spill_rebuild import rebuild
from localspec.storage.blockfile import HEADER_BYTES, BlockStore, parse_block_header, verify_parts
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.files import WriteFunction, make_private_directory, sweep_temporary_files

__all__ = ["Found", "ModelIdentity", "SpillLimits", "SpillStore"]

log = logging.getLogger(__name__)
INDEX_NAME = "index.sqlite3"
LAYOUTS = {SEGMENT: "segment", STATE: "state"}
LITTER_AGE_S = 600.0
"""A file without a row is younger than this only while its writer is about to add the row."""
RETRY_S = 60.0


class SpillStore:
    """The tier of one model over a directory that other models and processes share. Safe for threads."""

    def __init__(
        self,
        folder: Path,
        identity: ModelIdentity,
        limits: SpillLimits,
        *,
        write_function: WriteFunction = os.write,
        today: Callable[[], int] = lambda: int(time.time() // 86400),
    ) -> None:
        """Open or create the directory (0700) and keep the caps. Raises OSError, sqlite3.Error where it cannot."""
        make_private_directory(folder)
        self.identity = identity
        self.folder = folder
        self.files = BlockStore(folder, write_function=write_function)
        self.index = SpillIndex(folder / INDEX_NAME)
        self.off_reason = ""
        """Why nothing is written now; empty while all is well."""
        self._off_until_s = 0.0
        if self.index.was_lost:
            log.warning("the index of %s could not be read and is made again from the files", folder)
        self._prefill_tok_per_s: float | None = None
        self._today = today
        self._limits = limits
        try:
            self._begin()
        except INDEX_ERRORS as error:
            self.index_failed(error)
            self._begin()

    def _begin(self) -> None:
        self._register()
        stored, limits = self.index.total_bytes(), self._limits
        free_bytes = shutil.disk_usage(self.folder).free
        cap = limits.cap_bytes if limits.cap_bytes is not None else min(100_000_000_000, (free_bytes + stored) // 5)
        self.cap_bytes = cap
        self.room = MakeRoom(self.index, self.files, cap, limits, self._today)
        self.room.make(0)
        self._prefill_tok_per_s = self.rates()[0]

    def _register(self) -> None:
        identity = self.identity
        row = ModelRow(identity.fingerprint, identity.model_id, identity.folder, identity.needs_state)
        with self.index.transaction() as db:
            self.index.register(db, row)

    def rates(self) -> tuple[float | None, float | None]:
        """(prefill tokens/s, read bytes/s) as measured here before; None where never. A disk is the same to all."""
        rows = self.index.models()
        own = next((row for row in rows if row.fingerprint == self.identity.fingerprint), None)
        read = max((row.read_bytes_per_s for row in rows if row.read_bytes_per_s is not None), default=None)
        if own is None:
            return None, read
        return own.prefill_tok_per_s, own.read_bytes_per_s or read

    def stored_bytes(self) -> int:
        """Of this model's blocks."""
        stored = 0
        with self._guarded():
            own = (row for row in self.index.models() if row.fingerprint == self.identity.fingerprint)
            stored = sum(row.stored_bytes for row in own)
        return stored

    def kept_by_another(self, chat_id: str) -> bool:
        """Whether the chat has blocks of other models only."""
        found = False
        with self._guarded():
            owners = self.index.owners_of_chat(chat_id)
            found = bool(owners) and self.identity.fingerprint not in owners
        return found

    @property
    def prefill_tok_per_s(self) -> float | None:
        """As measured last; decides what a block is worth."""
        return self._prefill_tok_per_s

    def set_rates(self, prefill_tok_per_s: float | None, read_bytes_per_s: float | None) -> None:
        """Store measured rates; None leaves the old one."""
        self._prefill_tok_per_s = prefill_tok_per_s or self._prefill_tok_per_s
        with self._guarded(), self.index.transaction() as db:
            self.index.set_rates(db, self.identity.fingerprint, prefill_tok_per_s, read_bytes_per_s)

    def lookup(self, token_ids: Sequence[int], salt: str = "", above: Known | None = None) -> Found:
        """The longest prefix of the ids that can be restored from here and `above`, whose blocks are taken first;
        nothing where the index cannot be read."""
        found = Found()
        with self._guarded():
            known = self.index if above is None else Either(above, self.index)
            found = find(self.identity, known, id_bytes(token_ids), salt)
        return found

    def use(self, found: Found, chat_id: str | None) -> None:
        """A restore read these blocks: they become young again."""
        with self._guarded(), self.index.transaction() as db:
            self.index.use(db, [block.key for block in found.blocks], chat_id)

    def path(self, block: Block) -> Path:
        """The file of a block."""
        return self.files.path(block.fingerprint, block.key)

    def check(self, block: Block, data: memoryview) -> memoryview:
        """The payload of a block file that was read whole, after every doubt was looked into.

        Raises:
            DamagedFile: torn, flipped, or of a size that this model's blocks cannot have.
            WrongOwner: another model's, another position's, or another kind of block.
        """
        payload = data[HEADER_BYTES : HEADER_BYTES + self.payload_bytes(block)]
        self.check_parts(block, data[:HEADER_BYTES], [payload])
        return payload

    def check_parts(self, block: Block, head: memoryview, payload: Iterable[memoryview]) -> None:
        """As `check`, of a payload that comes in several parts, of which none is asked for where the head is wrong."""
        header = parse_block_header(head)
        stated = (header.fingerprint, header.key, header.parent_key, header.token_begin, header.token_end)
        if stated != (block.fingerprint, block.key, block.parent, block.token_begin, block.token_end):
            raise WrongOwner(f"{self.path(block)} holds another block than the index says")
        if header.layout != LAYOUTS[block.kind] or header.payload_bytes != self.payload_bytes(block):
            raise DamagedFile(f"{self.path(block)} has another layout or size than this model's blocks")
        verify_parts(header, payload, self.path(block))

    def payload_bytes(self, block: Block) -> int:
        """Size of a block's payload, from its kind and range."""
        if block.kind == STATE:
            return self.identity.state_bytes
        return self.identity.token_bytes * (block.token_end - block.token_begin)

    def drop(self, block: Block) -> None:
        """A block turned out unusable: it goes, with what hangs on it."""
        with self._guarded():
            remove_with_dependants(self.index, self.files, [block])

    def forget_chat(self, chat_id: str) -> int:
        """Delete the files that only this chat used; returns how many blocks went. Raises OSError where some are left:
        who asked must know."""
        try:
            return remove_chat(self.index, self.files, chat_id)
        except INDEX_ERRORS as error:
            self.index_failed(error)
            raise OSError(f"its index failed: {error}") from error

    def sweep(self) -> int:
        """Make a lost index again from the files; remove temporary files, blocks of models that are gone, and files
        without a row; returns bytes freed.

        May take a second for each ten thousand files, so it runs on a thread of its own.
        """
        freed_bytes = 0
        with self._guarded():
            if self.index.is_new:
                self.index.is_new = False
                num_rows = rebuild(self.index, self.files)
                if num_rows:
                    log.info("%d cached blocks were found again without their index", num_rows)
                self.room.make(0)
            known = {row.fingerprint: row for row in self.index.models()}
            gone = [row for row in known.values() if row.folder and not Path(row.folder).is_dir()]
            if gone:
                with self.index.transaction() as db:
                    for row in gone:
                        self.index.forget_model(db, row.fingerprint)
            keep = set(known) - {row.fingerprint for row in gone}
            sweep_temporary_files(self.folder)
            freed_bytes = self.files.sweep(keep).freed_bytes
            for fingerprint in keep:
                freed_bytes += self._sweep_litter(fingerprint)
        return freed_bytes

    def close(self) -> None:
        """Close the index; nobody may be inside a call."""
        self.index.close()

    @property
    def may_write(self) -> bool:
        """Whether it is worth making copies of anything now."""
        return not self.off_reason or time.monotonic() >= self._off_until_s

    def come_back(self) -> None:
        """Before a turn is written: a directory that was thrown away under a running engine is made again."""
        with self._guarded():
            make_private_directory(self.folder)
            if self.index.reopen_if_replaced():
                log.warning("the caches in %s were thrown away and begin again", self.folder)
                self._register()

    def stop_writing(self, reason: str) -> None:
        """Say why nothing is written; tried again after a minute."""
        if reason != self.off_reason:
            log.warning("conversations are not kept on disk for now: %s", reason)
        self.off_reason = reason
        self._off_until_s = time.monotonic() + RETRY_S

    def writes_again(self) -> None:
        """A write succeeded."""
        if self.off_reason:
            log.info("conversations are kept on disk again")
        self.off_reason = ""

    def _sweep_litter(self, fingerprint: bytes) -> int:
        freed_bytes = 0
        now_s = time.time()
        shard, rows = -1, set[bytes]()
        for key, size in self.files.blocks(fingerprint):
            if key[0] != shard:
                shard, rows = key[0], self.index.keys_in_shard(fingerprint, key[0])
            if key in rows:
                continue
            with contextlib.suppress(OSError):
                # Either side of now: a clock that was set back must not keep litter for ever.
                age_s = abs(now_s - self.files.path(fingerprint, key).stat().st_mtime)
                if age_s > LITTER_AGE_S and self.index.get(key) is None:
                    self.files.delete(fingerprint, key)
                    freed_bytes += size
        return freed_bytes

    def index_failed(self, error: Exception) -> None:
        """Say what the index cannot do; a damaged one begins again, and the next sweep fills it from the files."""
        if isinstance(error, (sqlite3.OperationalError, sqlite3.ProgrammingError)):
            log.warning("the index of cached conversations is not usable now: %s", error)
            return
        log.warning("the index of cached conversations is damaged (%s) and begins again", error)
        with contextlib.suppress(OSError, sqlite3.Error):
            self.index.reset()
            self._register()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """A failing index is a miss, never an error of the caller."""
        try:
            yield
        except INDEX_ERRORS as error:
            self.index_failed(error)
        except OSError as error:
            log.warning("cached conversations cannot be reached now: %s", error)

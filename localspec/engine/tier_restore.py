"""From disk into pages: finds what the tier has of a prompt, reads it, and puts it into the prefix tree.

Runs on a thread of its own. The decode thread only gives and takes page numbers; it never waits for a file, and nobody
sees a page before all of the prefix is in place and every block's checksum was right.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localspec.cache.pool import StateSnapshot
from localspec.cache.spill import Found, SpillStore
from localspec.cache.spill_index import Block
from localspec.core.records import PAGE_TOKENS, SEGMENT_TOKENS
from localspec.engine.tier_bytes import BlockBytes
from localspec.scheduler.scheduler import Scheduler
from localspec.storage.aio import AsyncReader, OpenFile, Priority, ReadRequest, Ticket
from localspec.storage.blockfile import HEADER_BYTES
from localspec.storage.buffers import ALIGNMENT_BYTES
from localspec.storage.errors import DamagedFile, WrongOwner

log = logging.getLogger(__name__)
MIN_GAIN_TOKENS = 32
"""Reading fewer tokens than this is never asked for."""
FIXED_COST_S = 0.003
READ_AHEAD_BLOCKS = 3
PIECE_BYTES = 8 << 20
MAX_TRIES = 4
Call = Callable[[Callable[[], None]], Future[None]]
"""Runs a function on the decode thread between two steps."""


@dataclass(frozen=True)
class Wish:
    """A prompt whose cached prefix is wanted; `matched_tokens` of it are in the tree already."""

    token_ids: tuple[int, ...]
    matched_tokens: int
    salt: str = ""
    chat_id: str | None = None
    cancelled: Callable[[], bool] = lambda: False


@dataclass(frozen=True)
class Restored:
    """What a restore brought and cost."""

    tokens: int = 0
    read_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Pages:
    """Pages of a prefix that is being restored; the first `held_tokens` were in the tree."""

    numbers: list[int]
    held_tokens: int
    epoch: int
    since: Any


@dataclass(frozen=True)
class _Reading:
    """A block on its way into a buffer; `error` if it could not even be asked for."""

    block: Block
    buffer: Tensor
    tickets: tuple[Ticket, ...] = ()
    error: Exception | None = None

    def settle(self) -> None:
        """Leave no read under way into the buffer."""
        for ticket in self.tickets:
            if not ticket.cancel():
                with contextlib.suppress(Exception):
                    ticket.result()


class _Unusable(Exception):
    """A block on disk cannot be used."""

    def __init__(self, block: Block, error: Exception) -> None:
        super().__init__(str(error))
        self.block = block


class Restorer:
    """Serves one wish at a time."""

    def __init__(self, store: SpillStore, copies: BlockBytes, scheduler: Scheduler, call: Call) -> None:
        self._store = store
        self._copies = copies
        self._scheduler = scheduler
        self._call = call
        self._reader = AsyncReader(threads=2, buffer_cap_bytes=4 * PIECE_BYTES)
        self._buffers: list[Tensor] = []
        self._state_buffer: Tensor | None = None
        self.epoch = 0
        """Changed by the decode thread when the tree's contents are in doubt."""

    def close(self) -> None:
        self._reader.close()

    def restore(self, wish: Wish, worth_reading: Callable[[int, int], bool]) -> Restored:
        """Bring what is worth it; `worth_reading(tokens, bytes)` decides. Never raises for what a disk can do."""
        for _ in range(MAX_TRIES):
            found = self._store.lookup(wish.token_ids, wish.salt)
            gain = found.num_tokens - wish.matched_tokens
            if gain < MIN_GAIN_TOKENS or not worth_reading(gain, self._bytes_beyond(found, wish.matched_tokens)):
                break
            try:
                return self._bring(found, wish)
            except _Unusable as error:
                log.warning("a cached block cannot be used and will be computed again: %s", error)
                self._store.drop(error.block)
        return Restored()

    def _bytes_beyond(self, found: Found, matched_tokens: int) -> int:
        state_bytes = found.state.file_bytes if found.state is not None else 0
        return state_bytes + sum(b.file_bytes for b in found.segments if b.token_end > matched_tokens)

    def _bring(self, found: Found, wish: Wish) -> Restored:
        pages = self._on_decode_thread(lambda: self._take_pages(found, wish))
        if pages is None:
            return Restored()
        started_s = time.perf_counter()
        snapshot: StateSnapshot | None = None
        num_loaded = -1
        try:
            blocks = [block for block in found.segments if block.token_end > pages.held_tokens]
            num_loaded = self._load_segments(blocks, found, pages, wish)
            if found.state is not None and num_loaded == found.num_tokens:
                snapshot = self._load_state(found.state)
        finally:
            done = num_loaded == found.num_tokens and (snapshot is not None) == (found.state is not None)
            self._on_decode_thread(lambda: self._give_pages(found, wish, pages, snapshot, done))
        seconds = time.perf_counter() - started_s
        if not done:
            return Restored()
        self._store.use(found, wish.chat_id)
        read_bytes = self._bytes_beyond(found, pages.held_tokens)
        return Restored(found.num_tokens - wish.matched_tokens, read_bytes, seconds)

    def _take_pages(self, found: Found, wish: Wish) -> _Pages | None:
        """Decode thread: hold the pages that the tree has of the prefix and take fresh ones for the rest."""
        scheduler = self._scheduler
        ids = wish.token_ids[: found.num_tokens]
        if scheduler.prefix.match(ids, scheduler.needs_state, wish.salt).total_tokens == len(ids):
            return None
        match = scheduler.prefix.match(ids, False, wish.salt)
        held = list(match.pages)
        scheduler.pool.retain(held)
        wanted = -(-len(ids) // PAGE_TOKENS) - len(held)
        if wanted > scheduler.pool.num_free:
            scheduler.prefix.evict(wanted - scheduler.pool.num_free)
        if wanted > scheduler.pool.num_free:
            scheduler.pool.release(held)
            return None
        fresh = scheduler.pool.allocate(wanted, after=held[-1] if held else None)
        return _Pages([*held, *fresh], len(held) * PAGE_TOKENS, self.epoch, self._copies.moment())

    def _give_pages(
        self, found: Found, wish: Wish, pages: _Pages, snapshot: StateSnapshot | None, complete: bool
    ) -> None:
        """Decode thread: into the tree if all is there, and let go of the pages."""
        scheduler = self._scheduler
        if complete and pages.epoch == self.epoch:
            ids = wish.token_ids[: found.num_tokens]
            scheduler.prefix.insert(ids, pages.numbers, wish.chat_id, wish.salt)
            if snapshot is not None:
                scheduler.prefix.add_snapshot(ids, snapshot, wish.salt)
        scheduler.pool.release(pages.numbers)

    def _load_segments(self, blocks: list[Block], found: Found, pages: _Pages, wish: Wish) -> int:
        """Read ahead, check, copy; returns how many tokens are in place, fewer than found only if cancelled."""
        reading: deque[_Reading] = deque()
        ahead = iter(blocks)
        spare = self._segment_buffers(min(READ_AHEAD_BLOCKS, len(blocks)))
        num_loaded = pages.held_tokens if not blocks else 0
        try:
            while not wish.cancelled():
                while spare and (block := next(ahead, None)) is not None:
                    reading.append(self._post(block, spare.pop()))
                if not reading:
                    return max(num_loaded, pages.held_tokens)
                current = reading[0]
                self._place(self._landed(current), current.block, found, pages)
                num_loaded = min(current.block.token_end, found.num_tokens)
                spare.append(reading.popleft().buffer)
            return -1
        finally:
            for each in reading:
                each.settle()

    def _place(self, payload: Tensor, block: Block, found: Found, pages: _Pages) -> None:
        first_page = block.token_begin // PAGE_TOKENS
        numbers = pages.numbers[first_page : first_page + SEGMENT_TOKENS // PAGE_TOKENS]
        num_tokens = min(block.token_end, found.num_tokens) - block.token_begin
        skip_tokens = max(0, pages.held_tokens - block.token_begin)
        self._copies.load_pages(payload, numbers, num_tokens, skip_tokens, pages.since)

    def _load_state(self, block: Block) -> StateSnapshot:
        if self._state_buffer is None:
            self._state_buffer = self._copies.host_memory(HEADER_BYTES + self._copies.state_bytes)
        return self._copies.load_state(self._landed(self._post(block, self._state_buffer)))

    def _post(self, block: Block, buffer: Tensor) -> _Reading:
        total_bytes = HEADER_BYTES + self._store.payload_bytes(block)
        view: memoryview = buffer.numpy().data
        try:
            file = OpenFile(self._store.path(block), no_follow=True)
            if file.size_bytes != total_bytes:
                raise DamagedFile(f"{file.path} has {file.size_bytes} bytes instead of {total_bytes}")
            requests = [ReadRequest(file, a, b - a, None, view[a:b]) for a, b in _pieces(total_bytes)]
            return _Reading(block, buffer, tuple(self._reader.submit_many(requests, Priority.BULK)))
        except (OSError, DamagedFile) as error:
            return _Reading(block, buffer, error=error)

    def _landed(self, reading: _Reading) -> Tensor:
        """The checked payload of a block. Raises _Unusable."""
        block, buffer = reading.block, reading.buffer
        total_bytes = HEADER_BYTES + self._store.payload_bytes(block)
        try:
            if reading.error is not None:
                raise reading.error
            for ticket in reading.tickets:
                ticket.result()
            self._store.check(block, buffer.numpy().data[:total_bytes])
        except (OSError, DamagedFile, WrongOwner) as error:
            raise _Unusable(block, error) from error
        return buffer[HEADER_BYTES:total_bytes]

    def _segment_buffers(self, count: int) -> list[Tensor]:
        size = HEADER_BYTES + SEGMENT_TOKENS * self._copies.token_bytes
        while len(self._buffers) < count:
            self._buffers.append(self._copies.host_memory(size))
        return self._buffers[:count]

    def _on_decode_thread(self, function: Callable[[], Any]) -> Any:
        box: list[Any] = []
        self._call(lambda: box.append(function())).result()
        return box[0]


def _pieces(total_bytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages, which a disk can put in place, and the odd rest on its own."""
    whole_bytes = total_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    pieces = [(start, min(start + PIECE_BYTES, whole_bytes)) for start in range(0, whole_bytes, PIECE_BYTES)]
    return [*pieces, (whole_bytes, total_bytes)] if whole_bytes < total_bytes else pieces

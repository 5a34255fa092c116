"""From host memory and disk into pages: finds what the tiers have of a prompt and puts it into the prefix tree.

Runs on a thread of its own. The decode thread only gives and takes page numbers; it never waits for a file, and nobody
sees a page before all of the prefix is in place and every block's checksum was right.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localspec.cache.host_pool import HostPool
from localspec.cache.miss import DAMAGED, SLOW_DISK
from localspec.cache.pool import StateSnapshot
from localspec.cache.spill import Found, SpillStore
from localspec.cache.spill_index import STATE, Block
from localspec.cache.spill_keys import id_bytes
from localspec.cache.spill_lookup import find
from localspec.core.records import PAGE_TOKENS, SEGMENT_TOKENS
from localspec.engine.tier_bytes import BlockBytes
from localspec.engine.tier_reading import BlockReader, Reading, Unusable
from localspec.scheduler.scheduler import Scheduler
from localspec.storage.blockfile import HEADER_BYTES
from localspec.storage.errors import DamagedFile

log = logging.getLogger(__name__)
MIN_GAIN_TOKENS = 32
"""Reading fewer tokens than this is never asked for."""
FIXED_COST_S = 0.003
READ_AHEAD_BLOCKS = 6
"""Buffers for blocks that are read into some."""
BLOCKS_UNDER_WAY = 16
MAX_TRIES = 4
Call = Callable[[Callable[[], None]], Future[None]]
"""Runs a function on the decode thread between two steps."""


@dataclass(eq=False)
class Wish:
    """A prompt whose cached prefix is wanted; `matched_tokens` of it are in the tree already."""

    token_ids: tuple[int, ...]
    matched_tokens: int
    salt: str = ""
    chat_id: str | None = None
    private: bool = False
    cancelled: Callable[[], bool] = lambda: False
    dropped: bool = False
    """Set when the chat was forgotten meanwhile."""

    @property
    def unwanted(self) -> bool:
        return self.dropped or self.cancelled()

    @property
    def owner(self) -> str | None:
        """The chat that is noted at what was used, which outlives this process."""
        return None if self.private else self.chat_id


@dataclass(frozen=True)
class Restored:
    """What a restore brought from host memory and from the disk, and what it cost. `problem`: why it brought less
    than there seemed to be; `found`: the blocks that were used."""

    tokens: int = 0
    host_bytes: int = 0
    host_s: float = 0.0
    read_bytes: int = 0
    read_s: float = 0.0
    problem: str = ""
    found: Found | None = None

    @property
    def seconds(self) -> float:
        return self.host_s + self.read_s


@dataclass(frozen=True)
class _Pages:
    """Pages of a prefix that is being restored, and room for its state; the first `held_tokens` were in the tree."""

    numbers: list[int]
    held_tokens: int
    epoch: int
    since: Any
    room: StateSnapshot | None


@dataclass(frozen=True)
class _Span:
    """What of a block is wanted, and where: its first `num_tokens` without the first `skip_tokens`, in these pages."""

    pages: list[int]
    num_tokens: int
    skip_tokens: int

    @staticmethod
    def of(block: Block, found: Found, pages: _Pages) -> _Span:
        first_page = block.token_begin // PAGE_TOKENS
        return _Span(
            pages.numbers[first_page : first_page + SEGMENT_TOKENS // PAGE_TOKENS],
            min(block.token_end, found.num_tokens) - block.token_begin,
            max(0, pages.held_tokens - block.token_begin),
        )


@dataclass
class _Cost:
    """Bytes and seconds of one restore, by tier."""

    host_bytes: int = 0
    host_s: float = 0.0
    read_bytes: int = 0


class Restorer:
    """Serves one wish at a time. `store` None: there is no disk below host memory."""

    def __init__(
        self, store: SpillStore | None, host: HostPool, copies: BlockBytes, scheduler: Scheduler, call: Call
    ) -> None:
        self._store = store
        self._host = host
        self._copies = copies
        self._scheduler = scheduler
        self._call = call
        self._reader = BlockReader(store, copies.reaches_pages) if store is not None else None
        self._buffers: list[Tensor] = []
        self._state_buffer: Tensor | None = None
        self.epoch = 0
        """Changed by the decode thread when the tree's contents are in doubt."""

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def restore(self, wish: Wish, worth_reading: Callable[[int, int], bool]) -> Restored:
        """Bring what is worth it; `worth_reading(tokens, bytes)` decides for bytes on disk. Never raises for what a
        disk can do."""
        problem = ""
        for _ in range(MAX_TRIES):
            found = self._find(wish)
            gain = found.num_tokens - wish.matched_tokens
            if gain >= MIN_GAIN_TOKENS and not worth_reading(gain, self._disk_bytes(found, wish.matched_tokens)):
                problem = SLOW_DISK
                found = self._in_memory(wish)
                gain = found.num_tokens - wish.matched_tokens
            if gain < MIN_GAIN_TOKENS:
                break
            try:
                return self._bring(found, wish)
            except Unusable as error:
                log.warning("a cached block cannot be used and will be computed again: %s", error)
                problem = DAMAGED
                if self._store is not None:
                    self._store.drop(error.block)
        return Restored(problem=problem)

    def _find(self, wish: Wish) -> Found:
        if self._store is None:
            return self._in_memory(wish)
        found = self._store.lookup(wish.token_ids, wish.salt, above=self._host)
        # An index that fails finds nothing, but memory still may.
        return found if found.num_tokens else self._in_memory(wish)

    def _in_memory(self, wish: Wish) -> Found:
        return find(self._host.identity, self._host, id_bytes(wish.token_ids), wish.salt)

    def _disk_bytes(self, found: Found, matched_tokens: int) -> int:
        """Bytes beyond the match that only the disk has."""
        wanted = [b for b in found.blocks if b.kind == STATE or b.token_end > matched_tokens]
        return sum(block.file_bytes for block in wanted if not self._host.has(block.key))

    def _bring(self, found: Found, wish: Wish) -> Restored:
        pages = self._on_decode_thread(lambda: self._take_pages(found, wish))
        if pages is None:
            return Restored()
        started_s = time.perf_counter()
        cost = _Cost()
        snapshot: StateSnapshot | None = None
        done = False
        try:
            blocks = [b for b in found.blocks if b.kind == STATE or b.token_end > pages.held_tokens]
            snapshot, done = self._load(blocks, found, pages, wish, cost)
        finally:
            complete = done and (snapshot is not None) == (found.state is not None)
            self._on_decode_thread(lambda: self._give_pages(found, wish, pages, snapshot, complete))
        if not complete:
            return Restored()
        seconds = time.perf_counter() - started_s
        read_s = seconds - cost.host_s if cost.read_bytes else 0.0
        tokens = found.num_tokens - wish.matched_tokens
        return Restored(tokens, cost.host_bytes, seconds - read_s, cost.read_bytes, read_s, found=found)

    def note_use(self, restored: Restored, wish: Wish) -> None:
        """Blocks that were used become young: written down once nobody waits for them any more."""
        if restored.found is not None and not wish.dropped:
            self._host.use((block.key for block in restored.found.blocks), wish.owner)
            if self._store is not None:
                self._store.use(restored.found, wish.owner)

    def _take_pages(self, found: Found, wish: Wish) -> _Pages | None:
        """Decode thread: hold the pages that the tree has of the prefix and take fresh ones for the rest."""
        scheduler = self._scheduler
        ids = wish.token_ids[: found.num_tokens]
        if scheduler.prefix.match(ids, scheduler.needs_state, wish.salt).total_tokens == len(ids):
            return None
        room = self._copies.room(scheduler.prefix.give_up_snapshot) if found.state is not None else None
        if room is None and found.state is not None:
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
        return _Pages([*held, *fresh], len(held) * PAGE_TOKENS, self.epoch, self._copies.moment(), room)

    def _give_pages(
        self, found: Found, wish: Wish, pages: _Pages, snapshot: StateSnapshot | None, complete: bool
    ) -> None:
        """Decode thread: into the tree if all is there and still wanted, and let go of the pages."""
        scheduler = self._scheduler
        if complete and pages.epoch == self.epoch and not wish.dropped:
            ids = wish.token_ids[: found.num_tokens]
            scheduler.prefix.insert(ids, pages.numbers, wish.chat_id, wish.salt)
            if snapshot is not None:
                scheduler.prefix.add_snapshot(ids, snapshot, wish.salt)
        scheduler.pool.release(pages.numbers)

    def _load(
        self, blocks: list[Block], found: Found, pages: _Pages, wish: Wish, cost: _Cost
    ) -> tuple[StateSnapshot | None, bool]:
        """Read ahead, check, copy. Returns the state and whether all is in place, which fails if it is unwanted."""
        reading: deque[Reading] = deque()
        placing: deque[tuple[Any, Reading]] = deque()
        ahead = deque(blocks)
        spare = list(self._buffers)
        snapshot: StateSnapshot | None = None
        try:
            while not wish.unwanted:
                self._read_ahead(ahead, reading, spare, found, pages)
                if not reading:
                    self._finish(placing, spare, 0)
                    return snapshot, True
                current = reading[0]
                payload = current.landed()
                started_s = time.perf_counter()
                if payload is None:
                    cost.read_bytes += HEADER_BYTES + sum(place.nbytes for place in current.places)
                elif current.block.kind == STATE:
                    assert pages.room is not None
                    self._copies.load_state(payload, pages.room)
                    snapshot = pages.room
                else:
                    span = _Span.of(current.block, found, pages)
                    mark = self._copies.load_pages(payload, span.pages, span.num_tokens, span.skip_tokens, pages.since)
                    placing.append((mark, current))
                    # One block is copied to the device while the next is waited for and checked.
                    self._finish(placing, spare, 1)
                if current.ready is not None:
                    cost.host_bytes += current.ready.numel()
                    cost.host_s += time.perf_counter() - started_s
                elif payload is not None:
                    cost.read_bytes += HEADER_BYTES + payload.numel()
                reading.popleft()
            return None, False
        finally:
            self._finish(placing, spare, 0)
            for each in reading:
                each.give_up()

    def _read_ahead(
        self, ahead: deque[Block], reading: deque[Reading], spare: list[Tensor], found: Found, pages: _Pages
    ) -> None:
        """Ask for the next blocks, as far as there are buffers for them."""
        while ahead and len(reading) < BLOCKS_UNDER_WAY:
            each = self._begin(ahead[0], spare, found, pages)
            if each is None:
                return
            ahead.popleft()
            reading.append(each)

    def _finish(self, placing: deque[tuple[Any, Reading]], spare: list[Tensor], num_left: int) -> None:
        """Wait for copies to the device until so many are left; their buffers are free again."""
        while len(placing) > num_left:
            mark, placed = placing.popleft()
            self._copies.finish(mark)
            spare += [placed.buffer] if placed.buffer is not None else []

    def _begin(self, block: Block, spare: list[Tensor], found: Found, pages: _Pages) -> Reading | None:
        """A block from memory, or its read begun; None while no buffer is free for it."""
        ready: Tensor | None = self._host.payload(block.key)
        if ready is not None:
            return Reading(block, ready)
        if self._reader is None:
            return Reading(block, error=DamagedFile("the block left host memory meanwhile"))
        if block.kind == STATE:
            if self._state_buffer is None:
                self._state_buffer = self._copies.host_memory(HEADER_BYTES + self._copies.state_bytes)
            return self._reader.into_buffer(block, self._state_buffer)
        span = _Span.of(block, found, pages)
        if span.num_tokens == block.token_end - block.token_begin and not span.skip_tokens:
            places = self._copies.places(span.pages, span.num_tokens)
            reading = self._reader.into_places(block, places) if places else None
            if reading is not None:
                return reading
        if not spare and len(self._buffers) < READ_AHEAD_BLOCKS:
            spare.append(self._copies.host_memory(HEADER_BYTES + SEGMENT_TOKENS * self._copies.token_bytes))
            self._buffers.append(spare[-1])
        return self._reader.into_buffer(block, spare.pop()) if spare else None

    def _on_decode_thread(self, function: Callable[[], Any]) -> Any:
        box: list[Any] = []
        self._call(lambda: box.append(function())).result()
        return box[0]

"""Pages of n-gram runs in a fixed piece of RAM, filled by reads that nobody waits for.

Knows which page lies in which frame and whether it has arrived whole; does not know what a record means. One caller of
`request` at a time; `page` may be called beside it from another thread and never waits. Completions come from the
reader's threads and touch one byte of state each.
"""

from __future__ import annotations

import functools
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from localspec.storage.aio import AsyncReader, QueueFull, ReadCancelled, ReaderClosed, ReadRequest, Ticket
from localspec.storage.buffers import aligned_memory
from localspec.storage.ngram_format import PAGE_BYTES, page_is_whole
from localspec.storage.ngram_run_file import Run

# The frame, and what the dictionary and the state cost for it.
FRAME_COST_BYTES = PAGE_BYTES + 256
MIN_FRAMES = 64

_EMPTY, _PENDING, _READY, _FAILED, _DAMAGED = range(5)


class PageKey(NamedTuple):
    """A page of an opened run; the slot is never used again for another run."""

    slot: int
    page_number: int


class PageCache:
    """Least recently used pages go first; a page that is being read stays, since the disk writes into it."""

    def __init__(self, reader: AsyncReader, cap_bytes: int, max_pending: int) -> None:
        """Reserve the frames; they cost memory from their first use on."""
        self._reader = reader
        self.frame_count = max(MIN_FRAMES, cap_bytes // FRAME_COST_BYTES)
        self._max_pending = min(max_pending, self.frame_count // 2)
        self._memory = aligned_memory(self.frame_count * PAGE_BYTES).data
        self._state = bytearray(self.frame_count)
        self._frames: OrderedDict[PageKey, int] = OrderedDict()
        self._free = list(range(self.frame_count - 1, -1, -1))
        self._posted: deque[Ticket] = deque()
        self.requested_pages = 0
        self.cached_pages = 0
        """Of the requested ones, those that needed no read."""
        self.dropped_pages = 0
        """Not asked for, or taken back unread, because the disk did not keep up."""
        self.read_errors = 0
        self.damaged: set[PageKey] = set()

    @property
    def used_bytes(self) -> int:
        """Frames in use."""
        return (self.frame_count - len(self._free)) * PAGE_BYTES

    @property
    def pending_reads(self) -> int:
        """Pages asked for and not answered."""
        return self._state.count(_PENDING)

    def request(self, wanted: Sequence[tuple[PageKey, Run]]) -> None:
        """Have pages read that are not here; returns at once. What does not fit in is dropped, oldest wishes first."""
        self.requested_pages += len(wanted)
        requests, frames = [], []
        for key, run in wanted:
            frame = self._frames.get(key)
            if frame is not None:
                self._frames.move_to_end(key)
                if self._state[frame] != _FAILED:
                    self.cached_pages += 1
                    continue
            else:
                frame = self._take_frame()
                if frame is None:
                    self.dropped_pages += 1
                    continue
                self._frames[key] = frame
            self._state[frame] = _PENDING
            at = frame * PAGE_BYTES
            arrived = functools.partial(self._arrived, key, frame, run.header.run_id)
            requests.append(
                ReadRequest(
                    run.file, key.page_number * PAGE_BYTES, PAGE_BYTES, arrived, self._memory[at : at + PAGE_BYTES]
                )
            )
            frames.append(frame)
        if not requests:
            return
        try:
            self._posted.extend(self._reader.submit_many(requests))
        except (QueueFull, ReaderClosed):
            self.dropped_pages += len(requests)
            for frame in frames:
                self._state[frame] = _FAILED
        self._take_back_oldest()

    def page(self, key: PageKey) -> bytes | None:
        """A copy of the page if it is here and whole."""
        frame = self._frames.get(key)
        if frame is None or self._state[frame] != _READY:
            return None
        data = bytes(self._memory[frame * PAGE_BYTES : (frame + 1) * PAGE_BYTES])
        try:
            self._frames.move_to_end(key)
        except KeyError:
            return None
        # A frame that was given to another page meanwhile may have been copied half-way.
        return data if self._frames.get(key) == frame and self._state[frame] == _READY else None

    def is_damaged(self, key: PageKey) -> bool:
        """Whether the page was read and is not what was written."""
        return key in self.damaged

    def _arrived(self, key: PageKey, frame: int, run_id: int, ticket: Ticket) -> None:
        error = ticket.error()
        if error is not None:
            if not isinstance(error, ReadCancelled | ReaderClosed):
                self.read_errors += 1
            self._state[frame] = _FAILED
            return
        at = frame * PAGE_BYTES
        whole = page_is_whole(self._memory[at : at + PAGE_BYTES], run_id, key.page_number)
        if not whole:
            self.damaged.add(key)
        self._state[frame] = _READY if whole else _DAMAGED

    def _take_frame(self) -> int | None:
        if self._free:
            return self._free.pop()
        # At most half the frames are ever pending, so a few steps find one that is not; a bound all the same.
        for _ in range(self._max_pending + 1):
            key, frame = self._frames.popitem(last=False)
            if self._state[frame] != _PENDING:
                return frame
            self._frames[key] = frame
        return None

    def _take_back_oldest(self) -> None:
        self._forget_done()
        for _ in range(len(self._posted) - self._max_pending):
            if self._posted.popleft().cancel():
                self.dropped_pages += 1

    def _forget_done(self) -> None:
        while self._posted and self._posted[0].done():
            self._posted.popleft()

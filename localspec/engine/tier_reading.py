"""Blocks on their way from the disk: into a buffer, or into the pages they belong to, and checked on the way.

Knows files, buffers and checksums; nothing of prompts or of the prefix tree. Into pages a block goes through a small
stage that the disk fills fast, see `huge_memory`; it is copied from there while the processor still holds it. What
cannot be trusted is wiped out at once: pages must hold finite numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from queue import SimpleQueue

import numpy as np
from torch import Tensor

from localspec.cache.spill import SpillStore
from localspec.cache.spill_index import Block
from localspec.storage.aio import AsyncReader, OpenFile, Priority, ReadRequest, Ticket
from localspec.storage.blockfile import HEADER_BYTES
from localspec.storage.buffers import ALIGNMENT_BYTES, huge_memory
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.scatter import placed, read_through

READ_THREADS = 4
"""As many reads in flight as an NVMe disk needs to reach its rate; they sleep in the kernel."""
CHECK_THREADS = 2
"""Checksums let go of the interpreter, so blocks are checked while those before them are put in place."""
PLACING_THREADS = 8
"""More than READ_THREADS, as each also copies and checks what it read before it reads on."""
STAGE_BYTES = 1 << 20
PIECE_BYTES = 8 << 20


class Unusable(Exception):
    """A block on disk cannot be used."""

    def __init__(self, block: Block, error: Exception) -> None:
        super().__init__(str(error))
        self.block = block


@dataclass(frozen=True)
class Reading:
    """A block in host memory (`ready`), or on its way into a buffer or into `places`, memory of the pages themselves;
    `checked` says when it is whole; `error` if it could not even be asked for."""

    block: Block
    ready: Tensor | None = None
    buffer: Tensor | None = None
    payload: Tensor | None = None
    """What of the buffer holds it, once it is whole."""
    places: Sequence[memoryview] = ()
    tickets: tuple[Ticket, ...] = ()
    checked: Future[None] | None = None
    error: Exception | None = None

    def landed(self) -> Tensor | None:
        """Wait for the block: its checked payload, None where it lies in its pages already. Raises Unusable."""
        if self.ready is not None:
            return self.ready
        try:
            if self.error is not None:
                raise self.error
            assert self.checked is not None
            self.checked.result()
        except (OSError, DamagedFile, WrongOwner) as error:
            raise Unusable(self.block, error) from error
        return self.payload

    def give_up(self) -> None:
        """Leave no read under way, and nothing in pages that nobody vouches for."""
        for ticket in self.tickets:
            ticket.cancel()
        # What checks a buffer also waits for the reads into it, so it must run.
        if self.checked is not None and not (self.places and self.checked.cancel()):
            wait((self.checked,))
        for place in self.places:
            np.frombuffer(place, dtype=np.uint8)[:] = 0


class BlockReader:
    """Reads and checks the blocks of one store."""

    def __init__(self, store: SpillStore, into_places: bool) -> None:
        """into_places: whether that is to be asked for; its stages are made now."""
        self._store = store
        self._reader = AsyncReader(threads=READ_THREADS, buffer_cap_bytes=4 * PIECE_BYTES)
        self._checkers = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="check")
        self._placers = ThreadPoolExecutor(PLACING_THREADS, thread_name_prefix="place")
        self._stages: SimpleQueue[memoryview] = SimpleQueue()
        if into_places:
            memory = huge_memory(PLACING_THREADS * STAGE_BYTES).data
            for start in range(0, len(memory), STAGE_BYTES):
                self._stages.put(memory[start : start + STAGE_BYTES])
        self._direct: bool | None = None

    def close(self) -> None:
        self._checkers.shutdown()
        self._placers.shutdown()
        self._stages = SimpleQueue()
        self._reader.close()

    def into_buffer(self, block: Block, buffer: Tensor) -> Reading:
        """Begin to read a block into a buffer that holds it whole."""
        view: memoryview = buffer.numpy().data
        try:
            file, total_bytes = self._open(block)
            requests = [ReadRequest(file, a, b - a, None, view[a:b]) for a, b in _pieces(total_bytes)]
            tickets = tuple(self._reader.submit_many(requests, Priority.BULK))
            checked = self._checkers.submit(
                self._check, block, tickets, view[:HEADER_BYTES], view[HEADER_BYTES:total_bytes]
            )
            return Reading(
                block, buffer=buffer, payload=buffer[HEADER_BYTES:total_bytes], tickets=tickets, checked=checked
            )
        except (OSError, DamagedFile) as error:
            return Reading(block, buffer=buffer, error=error)

    def into_places(self, block: Block, places: Sequence[memoryview]) -> Reading | None:
        """Begin to read a block's payload into memory that it belongs to; None where that has another size."""
        if sum(place.nbytes for place in places) != self._store.payload_bytes(block):
            return None
        try:
            file, total_bytes = self._open(block)
        except (OSError, DamagedFile) as error:
            return Reading(block, error=error)
        checked = self._placers.submit(self._place, block, file, total_bytes, places)
        return Reading(block, places=places, checked=checked)

    def _open(self, block: Block) -> tuple[OpenFile, int]:
        """The file, which has the bytes that such a block must have."""
        total_bytes = HEADER_BYTES + self._store.payload_bytes(block)
        file = OpenFile(self._store.path(block), no_follow=True, direct=self._direct)
        self._direct = file.direct
        if file.size_bytes != total_bytes:
            raise DamagedFile(f"{file.path} has {file.size_bytes} bytes instead of {total_bytes}")
        return file, total_bytes

    def _place(self, block: Block, file: OpenFile, total_bytes: int, places: Sequence[memoryview]) -> None:
        stage = self._stages.get()
        try:
            pieces = read_through(file, total_bytes, stage)
            first = next(pieces)
            rest = chain((first[HEADER_BYTES:],), pieces)
            self._store.check_parts(block, first[:HEADER_BYTES], placed(rest, places))
        finally:
            self._stages.put(stage)

    def _check(self, block: Block, tickets: tuple[Ticket, ...], head: memoryview, payload: memoryview) -> None:
        # Whatever became of one, none may write into the memory once it is given up.
        for ticket in tickets:
            self._reader.wait_for(ticket, None)
        for ticket in tickets:
            ticket.result()
        self._store.check_parts(block, head, (payload,))


def _pieces(total_bytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages, which a disk can put in place, and the odd rest on its own."""
    whole_bytes = total_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    pieces = [(start, min(start + PIECE_BYTES, whole_bytes)) for start in range(0, whole_bytes, PIECE_BYTES)]
    return [*pieces, (whole_bytes, total_bytes)] if whole_bytes < total_bytes else pieces

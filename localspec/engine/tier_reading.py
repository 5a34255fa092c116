"""Blocks on their way from the disk: into a buffer, or straight into the pages they belong to, and checked there.

Knows files, buffers and checksums; nothing of prompts or of the prefix tree. Reading into pages spares a CPU the copy
of everything that is restored. What cannot be trusted is wiped out there at once: pages must hold finite numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from localspec.cache.spill import SpillStore
from localspec.cache.spill_index import Block
from localspec.storage.aio import AsyncReader, OpenFile, Priority, ReadRequest, Ticket
from localspec.storage.blockfile import HEADER_BYTES
from localspec.storage.buffers import ALIGNMENT_BYTES, aligned_memory
from localspec.storage.errors import DamagedFile, WrongOwner
from localspec.storage.scatter import groups, read_scattered

READ_THREADS = 4
"""As many reads in flight as an NVMe disk needs to reach its rate; they sleep in the kernel."""
CHECK_THREADS = 2
"""Checksums let go of the interpreter, so blocks are checked while those before them are put in place."""
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
    parts: tuple[Ticket | Future[None], ...] = ()
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
        for part in self.parts:
            part.cancel()
        if self.checked is not None:
            wait((self.checked,))
        for place in self.places:
            np.frombuffer(place, dtype=np.uint8)[:] = 0


class BlockReader:
    """Reads and checks the blocks of one store."""

    def __init__(self, store: SpillStore) -> None:
        self._store = store
        self._reader = AsyncReader(threads=READ_THREADS, buffer_cap_bytes=4 * PIECE_BYTES)
        self._scatterers = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="scatter")
        self._checkers = ThreadPoolExecutor(CHECK_THREADS, thread_name_prefix="check")
        self._direct: bool | None = None

    def close(self) -> None:
        self._checkers.shutdown()
        self._scatterers.shutdown()
        self._reader.close()

    def into_buffer(self, block: Block, buffer: Tensor) -> Reading:
        """Begin to read a block into a buffer that holds it whole."""
        view: memoryview = buffer.numpy().data
        try:
            file, total_bytes = self._open(block)
            requests = [ReadRequest(file, a, b - a, None, view[a:b]) for a, b in _pieces(total_bytes)]
            tickets = tuple(self._reader.submit_many(requests, Priority.BULK))
            checked = self._checkers.submit(
                self._check, block, tickets, view[:HEADER_BYTES], [view[HEADER_BYTES:total_bytes]]
            )
            return Reading(
                block, buffer=buffer, payload=buffer[HEADER_BYTES:total_bytes], parts=tickets, checked=checked
            )
        except (OSError, DamagedFile) as error:
            return Reading(block, buffer=buffer, error=error)

    def into_places(self, block: Block, places: Sequence[memoryview]) -> Reading | None:
        """Begin to read a block's payload into memory that it belongs to; None where a disk could not do that."""
        head = aligned_memory(HEADER_BYTES).data
        reads = groups([head, *places], PIECE_BYTES)
        if reads is None or sum(place.nbytes for place in places) != self._store.payload_bytes(block):
            return None
        try:
            file, _ = self._open(block)
        except (OSError, DamagedFile) as error:
            return Reading(block, error=error)
        parts: list[Future[None]] = []
        offset_bytes = 0
        for read in reads:
            parts.append(self._scatterers.submit(read_scattered, file, offset_bytes, read))
            offset_bytes += sum(place.nbytes for place in read)
        checked = self._checkers.submit(self._check, block, tuple(parts), head, places)
        return Reading(block, places=places, parts=tuple(parts), checked=checked)

    def _open(self, block: Block) -> tuple[OpenFile, int]:
        """The file, which has the bytes that such a block must have."""
        total_bytes = HEADER_BYTES + self._store.payload_bytes(block)
        file = OpenFile(self._store.path(block), no_follow=True, direct=self._direct)
        self._direct = file.direct
        if file.size_bytes != total_bytes:
            raise DamagedFile(f"{file.path} has {file.size_bytes} bytes instead of {total_bytes}")
        return file, total_bytes

    def _check(
        self, block: Block, parts: tuple[Ticket | Future[None], ...], head: memoryview, payload: Sequence[memoryview]
    ) -> None:
        # Whatever became of one, none may write into the memory once it is given up.
        wait([part for part in parts if isinstance(part, Future)])
        for part in parts:
            if isinstance(part, Ticket):
                self._reader.wait_for(part, None)
        for part in parts:
            part.result()
        self._store.check_parts(block, head, payload)


def _pieces(total_bytes: int) -> list[tuple[int, int]]:
    """Ranges of whole pages, which a disk can put in place, and the odd rest on its own."""
    whole_bytes = total_bytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    pieces = [(start, min(start + PIECE_BYTES, whole_bytes)) for start in range(0, whole_bytes, PIECE_BYTES)]
    return [*pieces, (whole_bytes, total_bytes)] if whole_bytes < total_bytes else pieces

"""A file read through a small stage into many places, each piece handed on while the processor still holds it.

Knows files, offsets and memory; nothing of what is read. A disk is asked for few large pieces of memory at a time,
however scattered the places are, and puts no demand on their addresses and sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from localspec.storage.buffers import ALIGNMENT_BYTES
from localspec.storage.errors import DamagedFile
from localspec.storage.open_file import OpenFile

ReadFunction = Callable[[int, Sequence[memoryview], int], int]
"""Descriptor, places, offset -> bytes read: os.preadv, or a stand-in that is slow or fails in tests."""


def read_through(
    file: OpenFile, num_bytes: int, stage: memoryview, read_function: ReadFunction = os.preadv
) -> Iterator[memoryview]:
    """The first bytes of a file in order, in pieces that lie in `stage` until the next one is asked for.

    stage: flat bytes, whole blocks of a disk at a whole address.

    Raises:
        DamagedFile: the file ends before.
        OSError: the disk refuses.
    """
    done_bytes = filled_bytes = 0
    while done_bytes < num_bytes:
        # A whole number of blocks, so the last read reaches beyond the end.
        wanted_bytes = -(-(num_bytes - done_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        target = stage[filled_bytes : filled_bytes + wanted_bytes]
        count = min(read_function(file.fileno(), [target], done_bytes), num_bytes - done_bytes)
        done_bytes += count
        filled_bytes += count
        # Past the cache a count that is no multiple of the block means the end of the file.
        if count <= 0 or (file.direct and count % 512 and done_bytes < num_bytes):
            raise DamagedFile(f"{file.path} ends at byte {done_bytes}, inside a read.")
        if filled_bytes == len(stage) or done_bytes == num_bytes:
            yield stage[:filled_bytes]
            filled_bytes = 0


def placed(pieces: Iterable[memoryview], places: Iterable[memoryview]) -> Iterator[memoryview]:
    """The pieces again, each once it was copied to where the places, taken one after the other, go on."""
    targets = (np.frombuffer(place, dtype=np.uint8) for place in places if place.nbytes)
    target = next(targets, None)
    for piece in pieces:
        source = np.frombuffer(piece, dtype=np.uint8)
        while target is not None and len(source):
            count = min(len(target), len(source))
            # ndarray assignment lets go of the interpreter, a memoryview copy would not.
            target[:count] = source[:count]
            target, source = target[count:], source[count:]
            if not len(target):
                target = next(targets, None)
        yield piece

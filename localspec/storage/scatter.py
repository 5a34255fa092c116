"""One range of a file read into many places at once, so that what it holds need not be copied there afterwards.

Knows files, offsets and memory; nothing of what is read. Past the page cache a disk wants whole blocks at whole
addresses: `groups` says whether the places are such.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import numpy as np

from localspec.storage.buffers import ALIGNMENT_BYTES
from localspec.storage.errors import DamagedFile
from localspec.storage.open_file import OpenFile

MOST_PLACES = 512
"""The kernel takes 1,024 in one call."""
ReadFunction = Callable[[int, Sequence[memoryview], int], int]
"""Descriptor, places, offset -> bytes read: os.preadv, or a stand-in that is slow or fails in tests."""


def groups(places: Sequence[memoryview], most_bytes: int) -> list[Sequence[memoryview]] | None:
    """The places in order, in groups for one read each of up to `most_bytes`; None where a disk could not fill them
    directly: addresses and sizes must be whole blocks, and none larger than a group."""
    found: list[list[memoryview]] = []
    filled_bytes = most_bytes
    for place in places:
        address: int = np.frombuffer(place, dtype=np.uint8).__array_interface__["data"][0]
        if address % ALIGNMENT_BYTES or place.nbytes % ALIGNMENT_BYTES or not 0 < place.nbytes <= most_bytes:
            return None
        if filled_bytes + place.nbytes > most_bytes or len(found[-1]) == MOST_PLACES:
            found.append([])
            filled_bytes = 0
        found[-1].append(place)
        filled_bytes += place.nbytes
    return list(found)


def read_scattered(
    file: OpenFile, offset_bytes: int, places: Sequence[memoryview], read_function: ReadFunction = os.preadv
) -> None:
    """Fill the places, flat bytes each, with what follows the offset.

    Raises:
        DamagedFile: the file ends before.
        OSError: the disk refuses.
    """
    left = list(places)
    while left:
        count = read_function(file.fileno(), left, offset_bytes)
        # Past the cache a count that is no multiple of the block means the end of the file.
        if count <= 0 or (file.direct and count % 512):
            raise DamagedFile(f"{file.path} ends at byte {offset_bytes + max(count, 0)}, inside a read.")
        offset_bytes += count
        while left and count >= left[0].nbytes:
            count -= left.pop(0).nbytes
        if count:
            left[0] = left[0][count:]

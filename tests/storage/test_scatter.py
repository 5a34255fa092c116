"""A file through a stage into many places: whole, in short counts, past its end, odd sizes, and memory used ahead."""

from __future__ import annotations

import ctypes
import os
import platform
import random
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.storage.aio import OpenFile
from localspec.storage.buffers import HUGE_PAGE_BYTES, aligned_memory, huge_memory, use_ahead
from localspec.storage.errors import DamagedFile
from localspec.storage.scatter import placed, read_through

CONTENT = random.Random(1).randbytes(9 * 4096 + 700)


@pytest.mark.parametrize("most_bytes_at_once", [1 << 30, 12288, 512])
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("num_bytes", [len(CONTENT), 5 * 4096, 3])
def test_a_file_comes_in_full_stages(tmp_path: Path, most_bytes_at_once: int, direct: bool, num_bytes: int) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    file = OpenFile(tmp_path / "file", direct=None if direct else False)
    stage = aligned_memory(2 * 4096).data

    def short(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        return os.preadv(fd, [targets[0][:most_bytes_at_once]], offset)

    pieces = [bytes(piece) for piece in read_through(file, num_bytes, stage, short)]
    assert b"".join(pieces) == CONTENT[:num_bytes]
    assert all(len(piece) == len(stage) for piece in pieces[:-1])
    with pytest.raises(DamagedFile, match="inside a read"):
        list(read_through(file, len(CONTENT) + 1, stage, short))


@pytest.mark.parametrize("sizes", [(4096, 12288, 8192), (1, 0, 4099, 3, 20000), (40000,), (100,), ()])
def test_places_are_filled_in_order(sizes: Sequence[int]) -> None:
    places = [memoryview(bytearray(b"x" * size)) for size in sizes]
    pieces = [memoryview(CONTENT)[start : start + 5000] for start in range(0, len(CONTENT), 5000)]
    seen = 0
    for piece in placed(pieces, places):
        seen += len(piece)
        # Placed by the time it is handed on.
        assert b"".join(places)[:seen] == CONTENT[: min(seen, sum(sizes))]
    assert seen == len(CONTENT)
    assert b"".join(places)[seen:] == b"x" * (sum(sizes) - seen)


def test_memory_for_a_disk() -> None:
    memory = huge_memory(HUGE_PAGE_BYTES + 4096)
    assert len(memory) == HUGE_PAGE_BYTES + 4096 and not memory.any()
    assert int(memory.__array_interface__["data"][0]) % HUGE_PAGE_BYTES == 0


def kernel_version() -> tuple[int, int]:
    major, minor = platform.release().split(".")[:2]
    return int(major), int(minor)


def test_memory_used_ahead_keeps_what_is_written_meanwhile() -> None:
    memory = aligned_memory(64 << 20)
    address = int(memory.__array_interface__["data"][0])
    there = np.zeros(len(memory) // 4096, dtype=np.uint8)
    use_ahead(address + 100, 5 * 4096)
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), ctypes.c_void_p(there.ctypes.data)) == 0
    assert not there[6:].any()
    if kernel_version() >= (5, 14):
        assert there[:6].all()
    thread = threading.Thread(target=use_ahead, args=(address + 100, len(memory) - 100))
    thread.start()
    memory[::4096] = 7
    thread.join()
    use_ahead(address, len(memory))
    assert np.count_nonzero(memory) == len(memory) // 4096

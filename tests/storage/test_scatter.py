"""One range of a file into many places: whole, in short counts, past its end, and what a disk could not fill."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from localspec.storage.aio import OpenFile
from localspec.storage.buffers import aligned_memory
from localspec.storage.errors import DamagedFile
from localspec.storage.scatter import groups, read_scattered


def places_of(*num_blocks: int) -> list[memoryview]:
    return [aligned_memory(4096 * count).data for count in num_blocks]


@pytest.mark.parametrize("most_bytes_at_once", [1 << 30, 12288, 512])
@pytest.mark.parametrize("direct", [True, False])
def test_places_are_filled_in_order(tmp_path: Path, most_bytes_at_once: int, direct: bool) -> None:
    content = random.Random(1).randbytes(9 * 4096)
    (tmp_path / "file").write_bytes(content)
    file = OpenFile(tmp_path / "file", direct=None if direct else False)
    places = places_of(1, 3, 2, 1)

    def short(fd: int, left: Sequence[memoryview], offset: int) -> int:
        first = left[0][:most_bytes_at_once]
        return os.preadv(fd, [first, *(left[1:] if len(first) == len(left[0]) else [])], offset)

    read_scattered(file, 4096, places, short)
    assert b"".join(places) == content[4096 : 8 * 4096]
    with pytest.raises(DamagedFile, match="inside a read"):
        read_scattered(file, 4096 * 6, places_of(2, 2), short)


def test_groups_for_a_disk() -> None:
    places = places_of(1, 2, 3, 1)
    assert groups(places, 4 * 4096) == [places[:2], places[2:]]
    assert groups([], 4096) == []
    for unfit in ([places[2][1:4097]], [places[2][:100]], places_of(5), [places[0][:0]]):
        assert groups([*places, *unfit], 4 * 4096) is None
    many = groups(places_of(*[1] * 600), 1 << 30)
    assert many is not None and [len(group) for group in many] == [512, 88]

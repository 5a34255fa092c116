"""Blocks read straight into the memory they belong to: whole, damaged, given up, and what a disk could not fill."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from localspec.cache.spill import ModelIdentity, SpillStore
from localspec.cache.spill_index import Block
from localspec.cache.spill_keys import fingerprint
from localspec.cache.spill_write import TurnWriter
from localspec.engine import tier_reading
from localspec.engine.tier_reading import PLACING_THREADS, BlockReader, Unusable
from localspec.storage.buffers import aligned_memory
from localspec.storage.scatter import read_through
from tests.cache.test_spill import WIDE

pytestmark = pytest.mark.torch
TOKEN_BYTES = 48
PLACE_BYTES = 4096
CONTENT = random.Random(1).randbytes(256 * TOKEN_BYTES)


def places_of(num_bytes: int) -> list[memoryview]:
    places = [aligned_memory(PLACE_BYTES).data for _ in range(num_bytes // PLACE_BYTES)]
    for place in places:
        place[:] = b"x" * PLACE_BYTES
    return places


def stored(folder: Path) -> tuple[SpillStore, Block]:
    identity = ModelIdentity(fingerprint(["m"]), "m", "", TOKEN_BYTES, 0, False)
    store = SpillStore(folder / "kv", identity, WIDE)
    ids = list(range(256))
    writer = TurnWriter(store, ids, "", None)
    assert writer.add_segment(writer.missing[0], [CONTENT])
    writer.finish()
    [block] = store.lookup(ids).segments
    return store, block


def test_blocks_in_place(tmp_path: Path) -> None:
    store, block = stored(tmp_path)
    reader = BlockReader(store, into_places=True)
    places = places_of(len(CONTENT))
    reading = reader.into_places(block, places)
    assert reading is not None and reading.landed() is None
    assert b"".join(places) == CONTENT
    buffered = reader.into_buffer(block, torch.zeros(4096 + len(CONTENT), dtype=torch.uint8)).landed()
    assert buffered is not None and buffered.numpy().tobytes() == CONTENT
    assert reader.into_places(block, places[:-1]) is None, "another size"
    odd = [memoryview(bytearray(PLACE_BYTES + 1))[1:], memoryview(bytearray(len(CONTENT) - PLACE_BYTES))]
    reading = reader.into_places(block, odd)
    assert reading is not None and reading.landed() is None
    assert b"".join(odd) == CONTENT, "at odd addresses"

    data = bytearray(store.path(block).read_bytes())
    for damaged in (data[:5000] + b"\xff" * 64 + data[5064:], data[:-4096], b"\x00" * len(data)):
        store.path(block).write_bytes(damaged)
        places = places_of(len(CONTENT))
        reading = reader.into_places(block, places)
        assert reading is not None
        with pytest.raises(Unusable):
            reading.landed()
        reading.give_up()
        held = b"".join(places)
        # Where nothing could be asked for, nothing was written either.
        assert held in (bytes(len(CONTENT)), b"x" * len(CONTENT))
    reader.close()
    store.close()


@pytest.mark.parametrize("kind", ["fails", "ends", "flips"])
def test_a_piece_in_the_middle_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    store, block = stored(tmp_path)

    def read(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        count = os.preadv(fd, targets, offset)
        if offset and kind == "fails":
            raise OSError("the disk is gone")
        if offset and kind == "flips":
            targets[0][17] ^= 4
        return 0 if offset and kind == "ends" else count

    monkeypatch.setattr(tier_reading, "STAGE_BYTES", 8192)
    reader = BlockReader(store, into_places=True)
    for read_function in (read, os.preadv):
        monkeypatch.setattr(tier_reading, "read_through", partial(read_through, read_function=read_function))
        # More at once than there are stages, so that each is used again.
        all_places = [places_of(len(CONTENT)) for _ in range(2 * PLACING_THREADS)]
        for reading, places in [(reader.into_places(block, each), each) for each in all_places]:
            assert reading is not None
            if read_function is os.preadv:
                assert reading.landed() is None and b"".join(places) == CONTENT
                continue
            with pytest.raises(Unusable):
                reading.landed()
            reading.give_up()
            assert b"".join(places) == bytes(len(CONTENT))
    reader.close()
    store.close()


def test_what_is_given_up_under_way_stays_wiped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, block = stored(tmp_path)
    under_way, go_on = threading.Semaphore(0), threading.Event()

    def read(fd: int, targets: Sequence[memoryview], offset: int) -> int:
        if offset:
            under_way.release()
            assert go_on.wait(60)
        return os.preadv(fd, targets, offset)

    monkeypatch.setattr(tier_reading, "STAGE_BYTES", 8192)
    monkeypatch.setattr(tier_reading, "read_through", partial(read_through, read_function=read))
    reader = BlockReader(store, into_places=True)
    all_places = [places_of(len(CONTENT)) for _ in range(2 * PLACING_THREADS)]
    readings = [reader.into_places(block, places) for places in all_places]
    for _ in range(PLACING_THREADS):
        assert under_way.acquire(timeout=60)
    assert b"".join(all_places[0])[:4096] == CONTENT[:4096], "a piece is in place, the next one is not"
    threading.Timer(0.05, go_on.set).start()
    for reading in reversed(readings):
        assert reading is not None
        reading.give_up()
    reader.close()
    assert all(b"".join(places) == bytes(len(CONTENT)) for places in all_places)
    store.close()

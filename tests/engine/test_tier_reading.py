"""Blocks read straight into the memory they belong to: whole, damaged, given up, and what a disk could not fill."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from localspec.cache.spill import ModelIdentity, SpillStore
from localspec.cache.spill_keys import fingerprint
from localspec.cache.spill_write import TurnWriter
from localspec.engine.tier_reading import BlockReader, Unusable
from localspec.storage.buffers import aligned_memory
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


def test_blocks_in_place(tmp_path: Path) -> None:
    identity = ModelIdentity(fingerprint(["m"]), "m", "", TOKEN_BYTES, 0, False)
    store = SpillStore(tmp_path / "kv", identity, WIDE)
    ids = list(range(256))
    writer = TurnWriter(store, ids, "", None)
    assert writer.add_segment(writer.missing[0], [CONTENT])
    writer.finish()
    [block] = store.lookup(ids).segments
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

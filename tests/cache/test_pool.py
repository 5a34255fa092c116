"""Rooms for snapshots: as many as were planned, free again with their last holder, and exact."""

from __future__ import annotations

import pytest
import torch

from localspec.cache.pool import CachePool, StateSnapshot
from localspec.core.cache_spec import CacheSpec, PlaneSpec, StateSpec

pytestmark = pytest.mark.torch
SPECS = (
    CacheSpec(
        "target",
        "weights",
        (PlaneSpec("k.0", (2, 8), "float32"),),
        (StateSpec("s", (3, 5), "float32"), StateSpec("c", (7,), "bfloat16"), StateSpec("ring", (4, 2), "float32", 4)),
    ),
    CacheSpec("mtp", "weights", (), (StateSpec("s", (11,), "int64"),)),
)


def pool(num_snapshots: int) -> CachePool:
    found = CachePool(SPECS, 3, 2, torch.device("cpu"), num_snapshots=num_snapshots)
    generator = torch.Generator().manual_seed(4)
    for spec in SPECS:
        for state in found.cache(spec.owner).states.values():
            state.copy_(torch.randint(-99, 99, state.shape, generator=generator))
    return found


def none_left() -> bool:
    return False


def test_a_snapshot_comes_back_as_it_was() -> None:
    buffers = pool(2)
    before = {(o, n): s.clone() for o in ("target", "mtp") for n, s in buffers.cache(o).states.items()}
    first, second = (buffers.save_states(slot, none_left) for slot in (1, 0))
    assert first is not None and second is not None and set(first) == {"target/s", "target/c", "mtp/s"}
    for owner in ("target", "mtp"):
        for state in buffers.cache(owner).states.values():
            state.fill_(1)
    buffers.restore_states(0, first)
    buffers.restore_states(1, second)
    for (owner, name), state in before.items():
        found = buffers.cache(owner).states[name]
        expected = torch.zeros_like(state) if name == "ring" else state.flip(0)
        assert torch.equal(found, expected), (owner, name)


def test_there_is_no_more_room_than_was_planned() -> None:
    buffers = pool(3)
    kept = [buffers.save_states(0, none_left) for _ in range(3)]
    assert None not in kept and buffers.save_states(1, none_left) is None
    expected = kept[0]["target/s"].clone() if kept[0] is not None else None
    still_read: list[StateSnapshot | None] = []

    def give_up() -> bool:
        last = kept.pop()
        if not still_read:
            still_read.append(last)
        return True

    held = buffers.save_states(1, give_up)
    assert held is not None and len(kept) == 1, "the first that was given up was still held, the second was not"
    assert expected is not None and kept[0] is not None and torch.equal(kept[0]["target/s"], expected)
    assert buffers.save_states(1, none_left) is None
    still_read.clear()
    assert buffers.save_states(1, none_left) is not None, "nobody holds it any more"
    assert pool(0).save_states(0, none_left) is None

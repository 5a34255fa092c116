"""Host memory in pieces: the cap, registering, a driver that refuses."""

from __future__ import annotations

import pytest

from localspec.engine import tier_memory
from localspec.engine.tier_memory import HostMemory

pytestmark = pytest.mark.torch


class Driver:
    """Takes `allowed` pieces."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.held: list[int] = []

    def register(self, address: int, num_bytes: int) -> bool:
        if len(self.held) >= self.allowed:
            return False
        self.held.append(address)
        return True

    def memory(self, cap_bytes: int) -> HostMemory:
        return HostMemory(cap_bytes, self.register, self.held.remove)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_memory, "PIECE_BYTES", 1 << 16)


def test_grows_piece_by_piece_to_the_cap_and_takes_memory_back() -> None:
    driver = Driver(100)
    memory = driver.memory(3 << 16)
    taken = [memory.take(40_000, False) for _ in range(4)]
    assert [each is not None for each in taken] == [True, True, True, False]
    assert memory.grown_bytes == memory.pinned_bytes == 3 << 16
    taken[0].fill_(7)  # type: ignore[union-attr]
    assert int(taken[1].sum()) == 0  # type: ignore[union-attr]
    del taken[0]
    assert memory.take(30_000, True) is not None
    memory.close()
    assert not driver.held


def test_one_block_larger_than_a_piece() -> None:
    memory = HostMemory(1 << 20, None, None)
    block = memory.take(300_000, True)
    assert block is not None and block.shape == (300_000,) and block.data_ptr() % 4096 == 0
    assert memory.take(1 << 20, True) is None
    assert memory.pinned_bytes == 0 and not memory.needs_ring


def test_a_driver_that_stops_ends_the_growth() -> None:
    memory = Driver(2).memory(8 << 16)
    taken = [memory.take(1 << 16, False) for _ in range(4)]
    assert [each is not None for each in taken] == [True, True, False, False]
    assert memory.cap_bytes == 2 << 16 and not memory.needs_ring


def test_a_driver_that_refuses_leaves_plain_memory_and_a_ring() -> None:
    memory = Driver(0).memory(2 << 16)
    taken = [memory.take(1 << 16, False) for _ in range(3)]
    assert [each is not None for each in taken] == [True, True, False]
    assert memory.needs_ring and memory.pinned_bytes == 0


def test_prepared_memory_is_registered_once() -> None:
    driver = Driver(100)
    memory = driver.memory(5 << 16)
    memory.prepare(3 << 16)
    assert memory.grown_bytes == 3 << 16
    memory.prepare(100 << 16)
    assert memory.grown_bytes == memory.pinned_bytes == 5 << 16
    refused = Driver(0).memory(2 << 16)
    refused.prepare(2 << 16)
    assert refused.needs_ring
    plain = HostMemory(1 << 20, None, None)
    plain.prepare(1 << 20)
    assert plain.grown_bytes == 0

"""Chunks beside streams: as large as the target allows, whatever the machine."""

from __future__ import annotations

import pytest

from localspec.scheduler.chunks import ChunkSizes


def settle(chunks: ChunkSizes, cost_ms: float, per_token_ms: float, rounds: int = 30) -> int:
    """Run chunks on a machine where one costs a fixed time and a time for each token."""
    size = 0
    for _ in range(rounds):
        size = chunks.beside_streams()
        chunks.see_chunk(size, cost_ms + per_token_ms * size)
    return size


@pytest.mark.parametrize(
    ("cost_ms", "per_token_ms", "expected"),
    [(1.0, 0.5, 64), (5.0, 0.1, 256), (5.0, 0.05, 768), (2.0, 0.001, 2048), (500.0, 1.0, 64)],
)
def test_finds_the_largest_chunk_within_the_target(cost_ms: float, per_token_ms: float, expected: int) -> None:
    assert settle(ChunkSizes(512, 2048, 50.0), cost_ms, per_token_ms) == expected


def test_leaves_room_for_the_step() -> None:
    chunks = ChunkSizes(512, 2048, 50.0)
    chunks.see_step(19.0)
    assert settle(chunks, 5.0, 0.05) == 512


def test_follows_a_machine_that_changes() -> None:
    chunks = ChunkSizes(512, 2048, 50.0)
    assert settle(chunks, 5.0, 0.05) == 768
    assert settle(chunks, 5.0, 0.15) == 256, "further back in a long prompt"
    assert settle(chunks, 5.0, 0.01) == 2048, "the next, short prompt"


def test_a_card_that_pads_to_tiles_gets_whole_ones() -> None:
    chunks = ChunkSizes(512, 2048, 50.0)
    chunks.see_step(9.0)
    sizes = []
    for turn in range(40):
        sizes.append(chunks.beside_streams())
        rows = -(-sizes[-1] // 256) * 256
        chunks.see_chunk(sizes[-1], 22.0 + 0.1 * rows + 0.2 * turn)
    assert sizes[0] == 512 and sizes[-10:] == [256] * 10


def test_odd_ends_tell_nothing() -> None:
    chunks = ChunkSizes(64, 256, 50.0)
    chunks.see_chunk(63, 1e6)
    chunks.see_chunk(64, 0.0)
    assert chunks.beside_streams() == 64

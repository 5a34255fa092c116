"""Layers of a chunk beside streams: as many as the target allows, whatever the machine."""

from __future__ import annotations

import pytest

from localspec.scheduler.chunks import LayerPace


def settle(pace: LayerPace, layer_ms: float, rounds: int = 30) -> int:
    """Run parts of chunks of 2,048 tokens on a machine where each layer takes a fixed time."""
    count = 0
    for _ in range(rounds):
        count = pace.beside_streams(2048)
        pace.see_layers(2048, count, layer_ms * count)
    return count


@pytest.mark.parametrize(("layer_ms", "expected"), [(4.2, 11), (0.5, 64), (49.0, 1), (500.0, 1), (12.4, 4)])
def test_finds_the_most_layers_within_the_target(layer_ms: float, expected: int) -> None:
    assert settle(LayerPace(64, 50.0), layer_ms) == expected


def test_begins_with_a_part_and_leaves_room_for_the_step() -> None:
    pace = LayerPace(64, 50.0)
    assert pace.beside_streams(2048) == 8
    pace.see_step(20.0)
    assert settle(pace, 4.2) == 7
    pace.see_step(500.0)
    pace.see_step(20.0)
    assert pace.beside_streams(2048) == 7, "one that was captured on the way says nothing of the others"
    for _ in range(3):
        pace.see_step(500.0)
    assert pace.beside_streams(2048) == 1, "a step that takes longer than the target leaves one layer"


def test_follows_a_machine_that_changes() -> None:
    pace = LayerPace(64, 50.0)
    assert settle(pace, 4.0) == 12
    assert settle(pace, 8.0) == 6, "further back in a long prompt"
    assert settle(pace, 1.0) == 50, "the next, short prompt"


def test_other_sizes_follow_from_those_that_were_seen() -> None:
    pace = LayerPace(64, 50.0)
    pace.see_layers(2048, 64, 64 * 10.0)
    assert pace.beside_streams(300) == 5, "hardly less than a whole one, as far as anybody knows"
    pace.see_layers(250, 64, 64 * 1.0)
    assert pace.beside_streams(256) == 50 and pace.beside_streams(512) == 25
    assert pace.beside_streams(4096) == 3, "twice a chunk, not sixteen times a small one"


def test_a_cheap_rest_of_a_chunk_does_not_mislead() -> None:
    pace = LayerPace(64, 50.0)
    pace.see_layers(2048, 64, 64 * 5.0)
    pace.see_layers(2048, 1, 0.5)
    assert pace.beside_streams(2048) == 10


def test_nothing_is_learnt_from_nothing() -> None:
    pace = LayerPace(30, 50.0)
    pace.see_layers(64, 0, 5.0)
    pace.see_layers(64, 3, 0.0)
    assert pace.beside_streams(64) == 4 and pace.measured_ms() == {}

"""Parts of a prompt's chunk as they land: what each took, and what the whole chunk took, told once."""

from __future__ import annotations

from typing import Any

import pytest

from localspec.core.records import PrefillPlan
from localspec.engine.prompt_reader import PromptReader

pytestmark = pytest.mark.torch
LAYERS = 5


class Clock:
    """A part takes a millisecond a layer and half a one more; it is done when the device says so."""

    def __init__(self, device: Device) -> None:
        self._device, self.ms = device, 0.0

    def mark(self) -> None:
        self.ms = self._device.last_ms

    def done(self) -> bool:
        return self._device.landed

    def intervals_ms(self) -> tuple[float, float]:
        return self.ms, 0.0

    def since_ms(self, before: Clock) -> float:
        raise AssertionError("parts of a prompt are no steps in a row")


class Reading:
    def __init__(self, plan: PrefillPlan) -> None:
        self.plan, self.num_done = plan, 0


class Device:
    landed, last_ms, begun = False, 0.0, 0

    def clock(self) -> Clock:
        return Clock(self)

    def begin_prefill(self, plan: PrefillPlan) -> Reading:
        self.begun += 1
        return Reading(plan)

    def advance_prefill(self, reading: Reading, num_layers: int) -> bool:
        ran = min(num_layers, LAYERS + 1 - reading.num_done)
        reading.num_done += ran
        self.last_ms = ran + 0.5
        return reading.num_done > LAYERS


def plan(sequence_id: int, start: int = 0) -> PrefillPlan:
    return PrefillPlan(0, sequence_id, start, start + 64, "off")


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def reader(device: Any) -> PromptReader:
    return PromptReader(device)


def test_a_chunk_is_told_whole_with_its_last_part(device: Device, reader: PromptReader) -> None:
    ended = [reader.run(plan(1), 2) for _ in range(3)]
    assert ended == [False, False, True] and not reader.landed()
    device.landed = True
    landed = reader.landed()
    assert [part.num_layers for part in landed] == [2, 2, 2]
    assert [part.chunk_ms for part in landed] == [None, None, 7.5] and not reader.landed()
    # The same prompt again, after it was forgotten.
    assert reader.run(plan(1), None) and [part.chunk_ms for part in reader.landed()] == [6.5]


def test_a_chunk_that_was_given_up_counts_for_nobody(device: Device, reader: PromptReader) -> None:
    device.landed = True
    assert not reader.run(plan(1), 2) and not reader.run(plan(2), 3)
    assert device.begun == 2 and reader.run(plan(2), 3)
    assert [part.chunk_ms for part in reader.landed()] == [None, None, 7.0]

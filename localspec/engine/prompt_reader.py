"""Chunks of prompts on their way through the layers, a part at a time, and how long each part took.

On a card a launch returns long before its work is done, so times come from the device's own clock and are read once
they are there; nothing here waits.
"""

from __future__ import annotations

from collections import deque

from localspec.core.records import PrefillPlan
from localspec.engine.device_step import DeviceStep, StepClock
from localspec.engine.step import run_prefill
from localspec.runner.runner import Reading

ALL_LAYERS = 1 << 30


class PromptReader:
    """Parts in the order in which they were started. One chunk may be half read; a cancelled one is never taken up
    again, because its sequence is not."""

    def __init__(self, device: DeviceStep) -> None:
        self._device = device
        self._open: Reading | None = None
        self._under_way: deque[tuple[PrefillPlan, int, StepClock]] = deque()

    def run(self, plan: PrefillPlan, num_layers: int | None) -> bool:
        """Start the next layers of a chunk, None for all that are left; whether those were its last."""
        reading = self._open
        if reading is None or reading.plan != plan:
            reading = self._device.begin_prefill(plan)
        before = reading.num_done
        clock, done = run_prefill(reading, ALL_LAYERS if num_layers is None else num_layers, self._device)
        self._under_way.append((plan, reading.num_done - before, clock))
        self._open = None if done else reading
        return done

    def landed(self) -> list[tuple[PrefillPlan, int, float]]:
        """Parts that are done since the last call: their chunk, number of layers and milliseconds."""
        done = []
        while self._under_way and self._under_way[0][2].done():
            plan, num_layers, clock = self._under_way.popleft()
            done.append((plan, num_layers, clock.intervals_ms()[0]))
        return done

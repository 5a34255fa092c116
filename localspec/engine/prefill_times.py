"""Chunks of prompts on their way through the device, and how long each took there.

On a card a launch returns long before its work is done, so times come from the device's own clock and are read once
they are there; nothing here waits.
"""

from __future__ import annotations

from collections import deque

from localspec.core.records import PrefillPlan
from localspec.engine.device_step import DeviceStep, StepClock
from localspec.engine.step import run_prefill


class PrefillTimes:
    """Chunks in the order in which they were started."""

    def __init__(self, device: DeviceStep) -> None:
        self._device = device
        self._under_way: deque[tuple[PrefillPlan, StepClock]] = deque()

    def run(self, plan: PrefillPlan) -> None:
        """Start a chunk."""
        self._under_way.append((plan, run_prefill(plan, self._device)))

    def landed(self) -> list[tuple[PrefillPlan, float]]:
        """Chunks that are done since the last call, with their milliseconds."""
        done = []
        while self._under_way and self._under_way[0][1].done():
            plan, clock = self._under_way.popleft()
            done.append((plan, clock.intervals_ms()[0]))
        return done

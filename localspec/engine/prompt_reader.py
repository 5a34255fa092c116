"""Chunks of prompts on their way through the layers, a part at a time, and how long each part took.

On a card a launch returns long before its work is done, so times come from the device's own clock and are read once
they are there; nothing here waits.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from localspec.core.records import PrefillPlan
from localspec.engine.device_step import DeviceStep, StepClock
from localspec.engine.step import run_prefill
from localspec.runner.runner import Reading

ALL_LAYERS = 1 << 30


@dataclass(frozen=True)
class LandedPart:
    """num_layers: the drafters' pass counted as one; chunk_ms: of the whole chunk, told with its last part."""

    plan: PrefillPlan
    num_layers: int
    ms: float
    chunk_ms: float | None


class PromptReader:
    """Parts in the order in which they were started. One chunk may be half read; a cancelled one is never taken up
    again, because its sequence is not."""

    def __init__(self, device: DeviceStep) -> None:
        self._device = device
        self._open: Reading | None = None
        self._under_way: deque[tuple[PrefillPlan, int, bool, StepClock]] = deque()
        self._chunk: tuple[PrefillPlan | None, float] = None, 0.0
        """What has landed of a chunk, in milliseconds."""

    def run(self, plan: PrefillPlan, num_layers: int | None) -> bool:
        """Start the next layers of a chunk, None for all that are left; whether those were its last."""
        reading = self._open
        if reading is None or reading.plan != plan:
            # What a chunk that was given up holds makes room for the next.
            self._open = reading = None
            reading = self._device.begin_prefill(plan)
        before = reading.num_done
        clock, done = run_prefill(reading, ALL_LAYERS if num_layers is None else num_layers, self._device)
        self._under_way.append((plan, reading.num_done - before, done, clock))
        self._open = None if done else reading
        return done

    def landed(self) -> list[LandedPart]:
        """Parts that are done since the last call."""
        done = []
        while self._under_way and self._under_way[0][3].done():
            plan, num_layers, is_last, clock = self._under_way.popleft()
            ms = clock.intervals_ms()[0]
            known, before_ms = self._chunk
            chunk_ms = ms + (before_ms if known == plan else 0.0)
            self._chunk = (None, 0.0) if is_last else (plan, chunk_ms)
            done.append(LandedPart(plan, num_layers, ms, chunk_ms if is_last else None))
        return done

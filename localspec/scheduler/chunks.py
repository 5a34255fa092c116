"""How much of a prompt's chunk to run between two steps of running streams: as many layers as a target time allows.

Torch-free. A chunk keeps its size beside streams, because on a card a small one takes hardly less time than a large
one (each unpacks every weight); its pass through the layers is cut instead, so that its bits depend on no neighbour.
Learns from measured times of layers and steps.
"""

from __future__ import annotations

import statistics
from collections import deque

from localspec.core.records import PAGE_TOKENS

SEEN_STEPS = 5
FIRST_PART = 8
"""One layer in so many is run at first, before any was measured."""


class LayerPace:
    """For one engine. Sizes of chunks count in whole pages."""

    def __init__(self, num_layers: int, target_ms: float) -> None:
        self.num_layers = num_layers
        self._target_ms = target_ms
        self._layer_ms: dict[int, float] = {}
        self._parts: dict[int, deque[tuple[int, float]]] = {}
        """Layers and milliseconds of the last parts of each size, of one whole pass together: layers differ, and they
        cost more the further back they attend."""
        self._steps_ms: deque[float] = deque(maxlen=SEEN_STEPS)

    def see_layers(self, num_tokens: int, num_layers: int, ms: float) -> None:
        """Some layers of a chunk of so many tokens were run."""
        if num_layers < 1 or ms <= 0:
            return
        size = _in_pages(num_tokens)
        parts = self._parts.setdefault(size, deque())
        parts.append((num_layers, ms))
        while sum(count for count, _ in parts) - parts[0][0] >= self.num_layers:
            parts.popleft()
        self._layer_ms[size] = sum(part_ms for _, part_ms in parts) / sum(count for count, _ in parts)

    def see_step(self, ms: float) -> None:
        """A step of the streams was run."""
        self._steps_ms.append(ms)

    def measured_ms(self) -> dict[int, float]:
        """What is known by now: milliseconds of one layer by tokens of the chunk."""
        return {size: round(ms, 3) for size, ms in sorted(self._layer_ms.items())}

    def beside_streams(self, num_tokens: int) -> int:
        """Layers of a chunk that, with a step of the streams, are expected to keep to the target; at least one."""
        layer_ms = self._expected_ms(_in_pages(num_tokens))
        if layer_ms is None:
            return -(-self.num_layers // FIRST_PART)
        # A step that comes up for the first time is compiled or captured: the middle of a few tells what they take.
        room_ms = self._target_ms - (statistics.median(self._steps_ms) if self._steps_ms else 0.0)
        return max(1, min(self.num_layers, int(room_ms / layer_ms)))

    def _expected_ms(self, size: int) -> float | None:
        """A larger chunk never takes less time, nor longer per token, than a smaller one."""
        if size in self._layer_ms:
            return self._layer_ms[size]
        guesses = [ms * max(1.0, size / known) for known, ms in self._layer_ms.items()]
        return min(guesses, default=None)


def _in_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE_TOKENS) * PAGE_TOKENS

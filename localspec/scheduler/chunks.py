"""How much of a prompt to read between two steps of running streams: as much as a target step time allows.

Torch-free. Learns from measured times of chunks and steps; a larger chunk never takes longer per token than a smaller
one, so every measurement bounds the others too.
"""

from __future__ import annotations

from localspec.core.records import PAGE_TOKENS, SEGMENT_TOKENS

NEW_SHARE = 0.5
"""Weight of the newest measurement: a chunk costs more the further back it attends, so old ones mislead."""
SAME_SHARE = 0.15
"""A card pads chunks to whole tiles: smaller ones take as long, and two times differ by so much by chance."""
_SIZES = (PAGE_TOKENS, 2 * PAGE_TOKENS, *(SEGMENT_TOKENS * count for count in (1, 2, 3, 4, 6, 8, 12, 16)))
"""Below a tile by halves, above it by whole tiles, which are never padded."""


class ChunkSizes:
    """Sizes for one engine. `first_tokens` is used until a chunk was measured."""

    def __init__(self, first_tokens: int, most_tokens: int, target_ms: float) -> None:
        self._sizes = tuple(size for size in _SIZES if size <= most_tokens) or (most_tokens,)
        self._first_tokens = min(first_tokens, most_tokens)
        self._target_ms = target_ms
        self._chunk_ms: dict[int, float] = {}
        self._step_ms = 0.0

    def see_chunk(self, num_tokens: int, ms: float) -> None:
        """A chunk was read; odd sizes, at the ends of prompts, tell nothing."""
        if num_tokens not in self._sizes or ms <= 0:
            return
        old = self._chunk_ms.get(num_tokens)
        ms = ms if old is None else (1 - NEW_SHARE) * old + NEW_SHARE * ms
        self._chunk_ms[num_tokens] = ms
        for size, known_ms in self._chunk_ms.items():
            linear_ms = ms * size / num_tokens
            if size > num_tokens:
                self._chunk_ms[size] = max(ms, min(known_ms, linear_ms))
            elif size < num_tokens:
                self._chunk_ms[size] = min(ms, max(known_ms, linear_ms))

    def see_step(self, ms: float) -> None:
        """A step of the streams was run."""
        self._step_ms = ms if not self._step_ms else (1 - NEW_SHARE) * self._step_ms + NEW_SHARE * ms

    def measured_ms(self) -> dict[int, float]:
        """What is known of chunks by now: milliseconds by tokens."""
        return {size: round(ms, 2) for size, ms in sorted(self._chunk_ms.items())}

    def beside_streams(self) -> int:
        """The largest chunk that, with a step of the streams, is expected to keep to the target; where none does, the
        largest that takes hardly longer than the quickest."""
        if not self._chunk_ms:
            return self._first_tokens
        expected = {size: self._expected_ms(size) for size in self._sizes}
        quickest_ms = min(expected.values())
        room_ms = max(self._target_ms - self._step_ms, (1 + SAME_SHARE) * quickest_ms)
        return max(size for size, ms in expected.items() if ms <= room_ms)

    def _expected_ms(self, size: int) -> float:
        if size in self._chunk_ms:
            return self._chunk_ms[size]
        below = max((known for known in self._chunk_ms if known < size), default=None)
        nearest = below if below is not None else min(self._chunk_ms)
        return self._chunk_ms[nearest] * size / nearest

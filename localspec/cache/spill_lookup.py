"""What a prompt finds in a set of cached blocks: the longest chain of segments, and the state due at its end.

Torch-free. The same walk serves the index on disk, the blocks in host memory, and both at once: either side holds no
block without the one before it, so neither does their union.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localspec.cache.spill_index import SEGMENT, Block
from localspec.cache.spill_keys import Place, common_tokens, root_key, segment_key, segment_places, state_key
from localspec.core.records import SEGMENT_TOKENS
from localspec.storage.blockfile import HEADER_BYTES


@dataclass(frozen=True)
class ModelIdentity:
    """Whose blocks these are. Sizes are those of a payload; `needs_state`: keys and values alone are worth nothing."""

    fingerprint: bytes
    model_id: str
    folder: str
    token_bytes: int
    state_bytes: int
    needs_state: bool


@dataclass(frozen=True)
class Found:
    """What there is of a prompt: segments that cover `num_tokens`, and the state at that position if one is due."""

    num_tokens: int = 0
    segments: tuple[Block, ...] = ()
    state: Block | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The state first, as it is the largest."""
        return (*([self.state] if self.state is not None else []), *self.segments)


class Known(Protocol):
    """Blocks by key and by what they follow."""

    def has(self, key: bytes) -> bool:
        """Whether a block is there."""
        ...

    def neighbours(self, parent: bytes, ids: bytes) -> list[tuple[Block, bytes]]:
        """Segments after `parent` with their ids, the one with the longest common prefix with `ids` among them."""
        ...

    def states_after(self, parents: Sequence[bytes]) -> list[Block]:
        """States that belong to any of these chains."""
        ...


@dataclass(frozen=True)
class Either:
    """Two sets of blocks as one; of equally good blocks the first set's is taken."""

    first: Known
    second: Known

    def has(self, key: bytes) -> bool:
        return self.first.has(key) or self.second.has(key)

    def neighbours(self, parent: bytes, ids: bytes) -> list[tuple[Block, bytes]]:
        return [*self.first.neighbours(parent, ids), *self.second.neighbours(parent, ids)]

    def states_after(self, parents: Sequence[bytes]) -> list[Block]:
        return [*self.first.states_after(parents), *self.second.states_after(parents)]


def find(identity: ModelIdentity, known: Known, ids: bytes, salt: str) -> Found:
    """The longest usable prefix; `ids` as `id_bytes` gives them."""
    root = root_key(identity.fingerprint, salt)
    whole = [place for place in segment_places(root, ids) if place.num_tokens == SEGMENT_TOKENS]
    file_bytes = HEADER_BYTES + SEGMENT_TOKENS * identity.token_bytes
    segments = [
        Block(place.key, identity.fingerprint, place.parent, SEGMENT, place.begin, place.end, file_bytes)
        for place in whole[: _num_present(known, whole)]
    ]
    num_tokens = len(segments) * SEGMENT_TOKENS
    parent = segments[-1].key if segments else root
    tail = _best_tail(known, parent, num_tokens, ids[4 * num_tokens : 4 * (num_tokens + SEGMENT_TOKENS)])
    if tail is not None:
        segments.append(tail[0])
        num_tokens += tail[1]
    if not identity.needs_state:
        return Found(num_tokens, tuple(segments))
    state = _best_state(known, segments, ids, num_tokens)
    if state is None:
        return Found()
    kept = tuple(block for block in segments if block.token_begin < state.token_end)
    return Found(state.token_end, kept, state)


def _num_present(known: Known, places: list[Place]) -> int:
    """How many segments of a chain are there. None outlives the one before it, so halving finds the end."""
    low, high = 0, len(places)
    if places and known.has(places[-1].key):
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if known.has(places[middle].key) else (low, middle)
    return low


def _best_tail(known: Known, parent: bytes, begin: int, ids: bytes) -> tuple[Block, int] | None:
    best: tuple[Block, int] | None = None
    for block, held in known.neighbours(parent, ids) if ids else ():
        common = common_tokens(held, ids)
        # The ids may come from an index without checksums: the key must be theirs.
        sound = segment_key(parent, held) == block.key and block.token_begin == begin
        if sound and common > (best[1] if best else 0) and block.token_end == begin + len(held) // 4:
            best = (block, common)
    return best


def _best_state(known: Known, segments: list[Block], ids: bytes, num_tokens: int) -> Block | None:
    begins = {block.parent: block.token_begin for block in segments}
    best: Block | None = None
    for state in known.states_after(list(begins)):
        begin = begins[state.parent]
        if not begin < state.token_end <= num_tokens or state.token_begin != begin:
            continue
        sound = state_key(state.parent, ids[4 * begin : 4 * state.token_end]) == state.key
        if sound and (best is None or state.token_end > best.token_end):
            best = state
    return best

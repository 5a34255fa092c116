"""Admission of a sequence that is larger than the device: which pages it keeps there and how many lie elsewhere.

Torch-free. One such sequence runs at a time, and the last one is kept for its next turn. Its first pages stay, so that
they can be shared and found again; later ones share a ring in turn, and what the ring held before goes to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from localspec.cache.pages import PagePool
from localspec.cache.prefix import Match, PrefixTree, Snapshot, common_length
from localspec.core.records import MAX_ROWS, PAGE_TOKENS, Request

SHARE_FOR_OTHERS = 4
"""One page in so many is left to sequences that run beside it."""


@dataclass(frozen=True)
class OverflowLimits:
    """`cold_pages` in host memory, 0: no sequence may be larger than the device; `ring_pages`: see `cache.cold`."""

    cold_pages: int = 0
    ring_pages: int = 0


@dataclass(frozen=True)
class OverflowShare:
    """What a sequence gets: `match` of its prompt within the pages that stay, `num_head` and `num_ring` pages."""

    match: Match
    num_head: int
    num_ring: int


@dataclass
class Parked:
    """The last sequence that was larger than the device, kept as it lies for its next turn.

    `states`: snapshots by number of tokens; the pages are held.
    """

    ids: tuple[int, ...]
    pages: list[int]
    num_ring: int
    salt: str
    chat_id: str | None
    states: Sequence[tuple[int, Snapshot]] = ()

    def match(self, request: Request, needs_state: bool) -> Match | None:
        """How much of a prompt is here, if it goes on where the ring's pages still are."""
        if request.cache_salt != self.salt:
            return None
        usable = common_length(self.ids, request.prompt_ids[:-1])
        snapshot: Snapshot | None = None
        if needs_state:
            before = [(tokens, state) for tokens, state in self.states if tokens <= usable]
            usable, snapshot = max(before, key=lambda item: item[0], default=(0, None))
        # The ring went on as if every draft of the last steps had been accepted.
        first_hot = -(-(len(self.ids) + 4 * MAX_ROWS) // PAGE_TOKENS) - self.num_ring
        if not usable or usable < first_hot * PAGE_TOKENS:
            return None
        return Match(usable, (), None, 0, snapshot)


def share_for(
    request: Request, total_pages: int, pool: PagePool, prefix: PrefixTree, limits: OverflowLimits, needs_state: bool
) -> OverflowShare | None:
    """The pages of a sequence of `total_pages`, whose matched ones are then held; None while they cannot be had.

    Evicts what is only cached, the end of the sequence's own cached prefix too where the ring needs its pages.
    """
    ring = limits.ring_pages
    most_head = pool.num_pages - 1 - pool.num_pages // SHARE_FOR_OTHERS - ring
    if most_head < 1 or total_pages - most_head - ring > limits.cold_pages:
        return None
    ids = request.prompt_ids[: min(len(request.prompt_ids) - 1, most_head * PAGE_TOKENS)]
    match = prefix.match(ids, needs_state, request.cache_salt)
    held = [*match.pages, *([match.partial_page] if match.partial_page is not None else [])]
    pool.retain(held)
    wanted = most_head + ring - len(match.pages)
    if wanted > pool.num_free:
        prefix.evict(wanted - pool.num_free)
    # Less than was hoped for is enough as long as host memory holds the rest.
    head = min(most_head, pool.num_free + len(match.pages) - ring)
    if head < len(held) or head < 1 or total_pages - head - ring > limits.cold_pages:
        pool.release(held)
        return None
    return OverflowShare(match, head, ring)

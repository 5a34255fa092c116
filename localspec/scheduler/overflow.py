"""Admission of a sequence that is larger than the device: which pages it keeps there and how many lie elsewhere.

Torch-free. One such sequence runs at a time. Its first pages stay, so that they can be shared and found again; later
ones share a ring in turn, and what the ring held before goes to host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from localspec.cache.pages import PagePool
from localspec.cache.prefix import Match, PrefixTree
from localspec.core.records import PAGE_TOKENS, Request

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

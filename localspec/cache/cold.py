"""Pages of a conversation that outgrew the device: they lie in host memory and visit the device layer by layer.

Knows the target's planes, one sequence's cold pages, and the device's copy engine. Attention itself does not change:
for each layer the cold pages are put into a landing ground that the layer's own planes reach with further page numbers,
and the layer gets a block table that points there. So every kernel sums the same keys in the same order, and where a
page lies changes no bit. While a layer computes, the pages of the next one are on their way into the other half.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from localspec.cache.pool import CachePool
from localspec.core.records import MAX_SLOTS, PAGE_TOKENS


@dataclass(frozen=True)
class _Pair:
    """Keys and values of one layer. pages: [.., 64, Hkv, D] from the layer's first page to the end of the buffer;
    host: [cold pages, 64, Hkv, D]; landing: number of the landing ground's first page, seen from the layer."""

    pages: tuple[Tensor, Tensor]
    host: tuple[Tensor, Tensor]
    landing: int


class ColdPages:
    """The cold pages of at most one sequence."""

    def __init__(self, pool: CachePool, host: dict[str, Tensor], num_pages: int, table_pages: int) -> None:
        """host: a buffer [num_pages * page bytes] uint8 for each plane of the target, pinned where possible.

        table_pages: pages of a slot's block table. Raises ValueError for planes that are not pairs of keys and values.
        """
        cache, device = pool.cache("target"), pool.device
        self.num_pages = num_pages
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._pairs: dict[str, _Pair] = {}
        for key_name in cache.planes:
            if key_name.startswith("k."):
                names = (key_name, f"v.{key_name[2:]}")
                pages = (cache.planes[names[0]], cache.planes[names[1]])
                shape, dtype = (num_pages, *pages[0].shape[1:]), pages[0].dtype
                lying = (host[names[0]].view(dtype).view(shape), host[names[1]].view(dtype).view(shape))
                self._pairs[key_name] = _Pair(pages, lying, pages[0].shape[0] - 2 * num_pages)
        if 2 * len(self._pairs) != len(cache.planes):
            raise ValueError("only planes of keys and values can lie in host memory")
        self._order = list(self._pairs)
        self._moved: list[Any] = [None] * len(self._order)
        # [S, P] int32: 1 where a page is cold, and its place among the cold ones.
        self._cold = torch.zeros(MAX_SLOTS, table_pages, dtype=torch.int32, device=device)
        self._places = torch.zeros_like(self._cold)
        self._count = 0

    @property
    def count(self) -> int:
        """Pages that are cold now."""
        return self._count

    def move_out(self, slot: int, table_index: int, page: int) -> None:
        """Copy a page of a slot, the next after those that are cold already, to host memory; then it may be reused."""
        for pair in self._pairs.values():
            for pages, host in zip(pair.pages, pair.host, strict=True):
                host[self._count].copy_(pages[page], non_blocking=True)
        self._cold[slot, table_index].fill_(1)
        self._places[slot, table_index].fill_(self._count)
        self._count += 1

    def leave(self, slot: int) -> None:
        """The slot's sequence ended; its cold pages stay, in case it goes on."""
        self._cold[slot].zero_()
        self._places[slot].zero_()

    def enter(self, slot: int, first_index: int) -> None:
        """The sequence goes on in a slot; its cold pages are those from `first_index` of its table on."""
        cold = slice(first_index, first_index + self._count)
        self._cold[slot, cold] = 1
        self._places[slot, cold] = torch.arange(self._count, dtype=torch.int32, device=self._places.device)

    def clear(self) -> None:
        """Another sequence begins."""
        self._count = 0

    def tables(self, plane: str, block_tables: Tensor) -> Tensor:
        """Bring a layer's cold pages near. block_tables: [S, P] int32 with 0 for cold pages -> the layer's own tables.

        plane: the layer's plane of keys. Layers come in their order, each once in a forward pass.
        """
        index = self._order.index(plane)
        if index == 0:
            self._bring(0)
        if index + 1 < len(self._order):
            self._bring(index + 1)
        if self._moved[index] is not None:
            torch.cuda.current_stream().wait_event(self._moved[index])
        first = self._pairs[plane].landing + (index % 2) * self.num_pages
        return torch.add(block_tables + self._places, self._cold, alpha=first)

    def _bring(self, index: int) -> None:
        """Start the copies of a layer's cold pages into its half of the landing ground.

        The half was last read by the layer before the running one, all of which was started by now.
        """
        pair = self._pairs[self._order[index]]
        first = pair.landing + (index % 2) * self.num_pages
        if self._stream is None:
            self._copy(pair, first)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._copy(pair, first)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._moved[index] = event

    def _copy(self, pair: _Pair, first: int) -> None:
        for pages, host in zip(pair.pages, pair.host, strict=True):
            pages[first : first + self._count].copy_(host[: self._count], non_blocking=True)


@dataclass(frozen=True)
class OverflowPages:
    """How a sequence that is larger than the device lies there: its first pages stay, later ones share a ring in turn.

    Page p of the sequence is `head[p]` or `ring[(p - len(head)) % len(ring)]`; what the ring held before is cold.
    """

    head: tuple[int, ...]
    ring: tuple[int, ...]

    def page(self, index: int) -> int:
        """The device page of page `index` of the sequence, while it is there."""
        return self.head[index] if index < len(self.head) else self.ring[(index - len(self.head)) % len(self.ring)]


class OverflowSlot:
    """One sequence's way through its ring. `slot` is -1 while it waits for its next turn."""

    def __init__(self, slot: int, pages: OverflowPages) -> None:
        self.slot = slot
        self._pages = pages
        self._mapped = len(pages.head) + len(pages.ring)

    def advance(self, end_tokens: int, cold: ColdPages, block_tables: Tensor) -> None:
        """Make room for tokens below `end_tokens`: the ring's oldest pages become cold. block_tables: [S, P] int32."""
        for index in range(self._mapped, -(-end_tokens // PAGE_TOKENS)):
            page, leaving = self._pages.page(index), index - len(self._pages.ring)
            cold.move_out(self.slot, leaving, page)
            block_tables[self.slot, leaving].fill_(0)
            block_tables[self.slot, index].fill_(page)
            self._mapped = index + 1

    def go_on(self, slot: int, cold: ColdPages) -> list[int]:
        """The next turn, in a slot; returns its block table, 0 for cold pages."""
        self.slot = slot
        head = self._pages.head
        cold.enter(slot, len(head))
        first_hot = self._mapped - len(self._pages.ring)
        return [*head, *[0] * (first_hot - len(head)), *(self._pages.page(i) for i in range(first_hot, self._mapped))]


def ring_pages(chunk_tokens: int, window_rows: int) -> int:
    """Pages of a ring that a chunk, and two windows beyond what the host knows, never fill."""
    return -(-chunk_tokens // PAGE_TOKENS) + -(-4 * window_rows // PAGE_TOKENS) + 2

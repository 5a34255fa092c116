"""Page numbers of the pool: who holds which. Knows nothing of what a page contains.

Page 0 is never handed out: rows that must not be kept write there.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(Exception):
    """The pool has no free page left; evict from the prefix tree or wait for a sequence to end."""


class PagePool:
    """Reference-counted page numbers 1 .. num_pages-1.

    `allocate` prefers the page after a sequence's last one and otherwise the start of the longest free run, so that
    sequences tend to lie in one piece, which a CPU reads without gathering.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"a pool needs at least 2 pages, not {num_pages}")
        self.num_pages = num_pages
        self._references = [0] * num_pages
        self._references[0] = 1
        self._num_free = num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """`count` pages with one reference each; takes all or none. Raises OutOfPages."""
        if count > self._num_free:
            raise OutOfPages(f"{count} pages wanted, {self._num_free} free")
        pages: list[int] = []
        previous = after
        for _ in range(count):
            page = previous + 1 if previous is not None else self._longest_run_start()
            if page >= self.num_pages or self._references[page]:
                page = self._longest_run_start()
            self._references[page] = 1
            self._num_free -= 1
            pages.append(page)
            previous = page
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are already held. Raises ValueError for a free page."""
        for page in pages:
            if not self._references[page]:
                raise ValueError(f"page {page} is free and cannot be retained")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference; a page without references is free. Raises ValueError for a free page."""
        for page in pages:
            if page == 0 or not self._references[page]:
                raise ValueError(f"page {page} is not held and cannot be released")
            self._references[page] -= 1
            if not self._references[page]:
                self._num_free += 1

    def _longest_run_start(self) -> int:
        best_start, best_length, start = 0, 0, None
        for page in range(1, self.num_pages + 1):
            free = page < self.num_pages and not self._references[page]
            if free and start is None:
                start = page
            elif not free and start is not None:
                if page - start > best_length:
                    best_start, best_length = start, page - start
                start = None
        return best_start

"""How to consume what `Engine.generate` returns: closed at the end of a block, whatever ended it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

Item = TypeVar("Item")


@asynccontextmanager
async def closing(items: AsyncIterator[Item]) -> AsyncIterator[AsyncIterator[Item]]:
    """`contextlib.aclosing` for iterators that need not be generators."""
    try:
        yield items
    finally:
        close = getattr(items, "aclose", None)
        if close is not None:
            await close()

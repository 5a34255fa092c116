"""One thread that owns a store, so that an event loop never waits for the disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from localspec.chats.records import ChatError
from localspec.chats.store import ChatStore

Result = TypeVar("Result")


class StoreWorker:
    """Runs work on a store in its own thread, in the order it was given."""

    def __init__(self, opener: Callable[[], ChatStore]) -> None:
        self._opener = opener
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="chats")
        self._store: ChatStore | None = None
        self._closed = False

    async def run(self, work: Callable[[ChatStore], Result]) -> Result:
        """The result of `work(store)`. Raises what it raised, or what opening the store raised; ChatError for SQLite's.

        Cancelling the caller does not undo work that was handed over.
        """
        return await asyncio.shield(asyncio.wrap_future(self.submit(work)))

    def submit(self, work: Callable[[ChatStore], Result]) -> Future[Result]:
        """Hand work over without waiting; also usable without an event loop (`.result()`)."""
        return self._executor.submit(self._do, work)

    def close(self) -> None:
        """Finish what was handed over, close the store and end the thread."""
        if self._closed:
            return
        self._closed = True
        self._executor.submit(self._close_store)
        self._executor.shutdown(wait=True)

    def _do(self, work: Callable[[ChatStore], Result]) -> Result:
        try:
            return work(self._opened())
        except sqlite3.Error as error:
            # Writes say more; this is what reading can raise.
            raise ChatError(
                f"The chats could not be read ({error}): start localspec again, which mends a damaged file."
            ) from error

    def _opened(self) -> ChatStore:
        if self._store is None:
            self._store = self._opener()
        return self._store

    def _close_store(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

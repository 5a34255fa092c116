"""Loads models in the background, one at a time, and keeps the one that was asked for last.

A load that is no longer wanted ends at its next report, and what it may have built goes. The model that is loaded
answers until the place of the next one is found, so a name that does not exist takes nothing away. Waiting for a load
holds no thread. Knows threads and attempts; what is built is the caller's.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from localspec.api.types import EngineError

log = logging.getLogger(__name__)
END_WAIT_S = 30.0
"""As long as a model may take to write what it keeps."""
Report = Callable[[str], None]


class Closable(Protocol):
    """What an attempt builds."""

    def start(self) -> None:
        """Begin to run."""
        ...

    def close(self) -> None:
        """End all of it; may take a while."""
        ...


Model = TypeVar("Model", bound=Closable)
Maker = Callable[[Report], Model]


class _Unwanted(Exception):
    """Something else was asked for meanwhile."""


@dataclass
class Attempt(Generic[Model]):
    """One load: what it is at, and how it ended."""

    model_id: str
    stage: str = ""
    failure: EngineError | None = None
    is_wanted: bool = True
    settled: Future[None] = field(default_factory=Future)
    thread: threading.Thread | None = None

    def report(self, stage: str) -> None:
        """Where it is. Raises where it is not wanted any more."""
        if not self.is_wanted:
            raise _Unwanted(self.model_id)
        self.stage = stage

    def settle(self, failure: EngineError | None = None) -> None:
        """The first outcome counts. Under the lock of the models."""
        if not self.settled.done():
            self.failure = failure
            self.settled.set_result(None)


class LoadedModels(Generic[Model]):
    """At most one model runs. All methods from any thread, coroutines from any event loop."""

    def __init__(self, find: Callable[[str, Report], Maker[Model]]) -> None:
        """find: what makes a model of this id; runs on the loading thread, while another model may still answer."""
        self._find = find
        self._lock = threading.Lock()
        self.is_closed = False
        self._ending: Future[None] = Future()
        """Done unless the model that ran is being ended for the next one."""
        self._ending.set_result(None)
        self.current: Model | None = None
        self.last: Attempt[Model] | None = None

    def begin(self, model_id: str) -> Attempt[Model]:
        """Load a model in the background, in place of the one that runs or is being loaded. Such a load of the same
        model goes on."""
        attempt: Attempt[Model] = Attempt(model_id)
        with self._lock:
            before = self.last
            if before is not None and before.model_id == model_id and not before.settled.done():
                return before
            self.last = attempt
            if before is not None:
                before.is_wanted = False
                before.settle(EngineError("not_ready", f"{model_id} was asked for while {before.model_id} was loading"))
            if self.is_closed:
                attempt.is_wanted = False
                attempt.settle(_closed())
                return attempt
            attempt.thread = threading.Thread(target=self._load, args=(attempt, before), name="load", daemon=True)
            attempt.thread.start()
        return attempt

    async def until_settled(self) -> None:
        """Until the last load that was asked for has ended, well or not; at once where none was."""
        while True:
            attempt = self.last
            if attempt is None:
                return
            # A waiter that leaves leaves the others waiting.
            await asyncio.shield(asyncio.wrap_future(attempt.settled))
            if attempt is self.last:
                return

    async def outcome(self, attempt: Attempt[Model]) -> None:
        """Until this load has ended. Raises its EngineError."""
        await asyncio.shield(asyncio.wrap_future(attempt.settled))
        if attempt.failure is not None:
            raise attempt.failure

    async def close(self) -> None:
        """End what runs; whoever waits for a load is told, and what is being loaded goes when it can."""
        with self._lock:
            self.is_closed = True
            current, self.current = self.current, None
            ending = self._ending
            if self.last is not None:
                self.last.is_wanted = False
                self.last.settle(_closed())
        if current is not None:
            await asyncio.to_thread(current.close)
        # What it had to keep is being written, on a thread that ends with the process.
        await asyncio.wait([asyncio.wrap_future(ending)], timeout=END_WAIT_S)

    def _load(self, attempt: Attempt[Model], before: Attempt[Model] | None) -> None:
        try:
            if before is not None and before.thread is not None:
                # Two models at once may be more than the machine holds.
                before.thread.join()
            attempt.report(f"looking for {attempt.model_id}")
            make = self._find(attempt.model_id, attempt.report)
            self._end_current(attempt)
            self._install(attempt, make(attempt.report))
        except _Unwanted:
            log.info("loading %s was given up", attempt.model_id)
        except EngineError as error:
            self._settle(attempt, error)
        except Exception as error:  # whatever a damaged file or a driver raises, the user gets one line
            log.debug("loading %s failed", attempt.model_id, exc_info=True)
            self._settle(attempt, EngineError("not_ready", f"{attempt.model_id} could not be loaded: {error}"))

    def _end_current(self, attempt: Attempt[Model]) -> None:
        with self._lock:
            attempt.report(attempt.stage)
            current, self.current = self.current, None
            ending = self._ending = Future()
        try:
            if current is not None:
                current.close()
        finally:
            ending.set_result(None)
        # Its memory is wanted now; what refers to itself would keep it for a while.
        del current
        gc.collect()

    def _install(self, attempt: Attempt[Model], made: Model) -> None:
        with self._lock:
            if attempt.is_wanted:
                made.start()
                self.current = made
                attempt.settle()
                return
        made.start()
        made.close()

    def _settle(self, attempt: Attempt[Model], failure: EngineError) -> None:
        with self._lock:
            attempt.settle(failure)


def _closed() -> EngineError:
    return EngineError("not_ready", "the engine was closed")

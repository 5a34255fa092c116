"""What other threads ask of the decode thread, in order, until that thread ends; then everything is refused at once.

Who asked may have left meanwhile: what was asked for is done all the same, and nobody is told. Knows no requests.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from localspec.api.types import EngineError

log = logging.getLogger(__name__)
Action = Callable[[], None]


def settle(future: Future[None], error: Exception | None = None) -> bool:
    """What was asked for is done, or has failed; whether somebody still waits to know."""
    is_awaited = future.set_running_or_notify_cancel()
    if is_awaited and error is not None:
        future.set_exception(error)
    elif is_awaited:
        future.set_result(None)
    return is_awaited


def model_gone() -> EngineError:
    """For what comes too late to be done."""
    return EngineError("not_ready", "the model was unloaded; ask again")


def _nobody() -> None:
    """Nobody waits for an answer."""


@dataclass(frozen=True)
class _Command:
    do: Action
    refuse: Action


class Inbox:
    """`post` and `call` from any thread; the rest on the decode thread."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True

    def post(self, do: Action, refuse: Action = _nobody) -> None:
        """Run `do` between two steps, or `refuse` if the thread has ended or ends before."""
        with self._lock:
            if self._is_open:
                self._commands.put(_Command(do, refuse))
                return
        refuse()

    def call(self, function: Action) -> Future[None]:
        """Run a function between two steps; the future carries its exception, or EngineError (`not_ready`)."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                function()
            except Exception as error:
                if not settle(future, error):
                    log.exception("what nobody waits for any more failed")
            else:
                settle(future)

        def refuse() -> None:
            settle(future, model_gone())

        self.post(run, refuse)
        return future

    def next(self, timeout_s: float | None = None) -> Action | None:
        """Wait for the next thing to do; None when that takes longer than `timeout_s`."""
        try:
            return self._commands.get(timeout=timeout_s).do
        except queue.Empty:
            return None

    def close(self) -> None:
        """Refuse what waits and whatever comes."""
        with self._lock:
            self._is_open = False
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command.refuse()

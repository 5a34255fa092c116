"""What is asked of the decode thread is done or refused, exactly once, whoever leaves and whenever the thread ends."""

from __future__ import annotations

import threading
import time

import pytest

from localspec.api.types import EngineError
from localspec.engine.inbox import Inbox


def fail() -> None:
    raise IndexError("as asked")


def run_all(inbox: Inbox) -> None:
    while (action := inbox.next(0)) is not None:
        action()


def test_all_is_done_in_order_and_told() -> None:
    inbox, done = Inbox(), list[str]()
    inbox.post(lambda: done.append("first"))
    told = inbox.call(lambda: done.append("second"))
    failing = inbox.call(fail)
    assert not told.done()
    run_all(inbox)
    assert done == ["first", "second"] and told.result(0) is None
    with pytest.raises(IndexError):
        failing.result(0)


def test_who_leaves_stops_nothing() -> None:
    inbox, done = Inbox(), list[str]()
    left = inbox.call(lambda: done.append("done"))
    left_failing = inbox.call(fail)
    assert left.cancel() and left_failing.cancel()
    run_all(inbox)
    assert done == ["done"]


def test_waiting_ends_after_the_time_that_was_given() -> None:
    inbox = Inbox()
    started_s = time.monotonic()
    assert inbox.next(0.05) is None
    assert time.monotonic() - started_s >= 0.04


def test_what_comes_after_the_end_is_refused_at_once() -> None:
    inbox, seen = Inbox(), list[str]()
    inbox.post(lambda: seen.append("done"), lambda: seen.append("refused before"))
    waiting = inbox.call(lambda: seen.append("done"))
    inbox.close()
    inbox.post(lambda: seen.append("done"), lambda: seen.append("refused after"))
    for future in (waiting, inbox.call(lambda: seen.append("done"))):
        with pytest.raises(EngineError) as found:
            future.result(0)
        assert found.value.code == "not_ready"
    assert seen == ["refused before", "refused after"] and inbox.next(0) is None


def test_nothing_is_lost_between_a_poster_and_the_end() -> None:
    for _ in range(20):
        inbox, seen = Inbox(), list[int]()

        def ask(inbox: Inbox = inbox, seen: list[int] = seen) -> None:
            for number in range(200):
                inbox.post(lambda number=number: seen.append(number), lambda number=number: seen.append(number))

        thread = threading.Thread(target=ask)
        thread.start()
        for _ in range(20):
            if (action := inbox.next(0)) is not None:
                action()
        inbox.close()
        thread.join()
        assert sorted(seen) == list(range(200))

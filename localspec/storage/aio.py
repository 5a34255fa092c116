"""Reads on worker threads: the caller posts a batch and goes on, the bytes arrive later, look-ups before bulk.

Knows files, offsets and aligned memory (64 B to 16 MiB a read, O_DIRECT where the file system allows it); knows nothing
of what is read. Threads with preadv, because that releases the interpreter and costs a fifth of any asyncio way.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import numpy as np

from localspec.storage.buffers import ALIGNMENT_BYTES, BufferArena
from localspec.storage.errors import DamagedFile, QueueFull, ReadCancelled, ReaderClosed
from localspec.storage.open_file import OpenFile
from localspec.storage.read_statistics import LatencyHistogram, ReaderStatistics, percentiles_us

__all__ = ["AsyncReader", "OpenFile", "Priority", "QueueFull", "ReadCancelled", "ReadFunction", "ReadRequest",
           "ReaderClosed", "ReaderStatistics", "Ticket"]  # fmt: skip

_LOG = logging.getLogger(__name__)

MAX_READ_BYTES = 16 << 20
_STARVED_POLL_S = 0.002

ReadFunction = Callable[[int, Sequence[memoryview], int], int]
"""Descriptor, buffers, offset -> bytes read: os.preadv, or a stand-in that is slow or fails in tests."""


class Priority(enum.IntEnum):
    """What goes first."""

    LOOKUP = 0
    """Small reads that a step would like to have; they have memory of their own kept back."""
    BULK = 1
    """Restores and loads."""


class ReadRequest(NamedTuple):
    """What to read, and where to put it."""

    file: OpenFile
    offset_bytes: int
    length_bytes: int
    callback: Callable[[Ticket], None] | None = None
    """Called on a worker thread once the ticket is done, failed ones too; must be short and must not raise."""
    into: memoryview | None = None
    """Writable memory of exactly the length; None takes a piece of the reader's own."""


class Ticket:
    """One posted read."""

    __slots__ = ("_claim", "_data", "_done", "_error", "_reader", "priority", "request", "submitted_s")

    def __init__(self, request: ReadRequest, priority: Priority, reader: AsyncReader, submitted_s: float) -> None:
        """Made by the reader only."""
        self.request = request
        self.priority = priority
        self.submitted_s = submitted_s
        self._reader = reader
        self._data: memoryview | None = None
        self._error: Exception | None = None
        self._done = False
        # Whoever pops the one entry owns the outcome: a worker or cancel().
        self._claim = [True]

    def done(self) -> bool:
        """Whether the outcome, good or bad, is there."""
        return self._done

    def error(self) -> Exception | None:
        """Why the read failed; None while it runs and when it succeeded."""
        return self._error

    def result(self, timeout_s: float | None = None) -> memoryview:
        """The bytes; waits for them. Memory of the reader stays lent while any view of it lives.

        Raises:
            TimeoutError: not there in time.
            OSError, DamagedFile: the read failed, or the file ends inside the request.
            ReadCancelled, ReaderClosed: it was never begun.
        """
        if not self._done and not self._reader.wait_for(self, timeout_s):
            raise TimeoutError(f"No answer from {self.request.file.path} within {timeout_s} s.")
        if self._error is not None:
            raise self._error
        assert self._data is not None
        return self._data

    def cancel(self) -> bool:
        """Take the request back; False when a worker has it already."""
        if not self._claimed():
            return False
        self._reader.finish(self, None, ReadCancelled(f"A read of {self.request.file.path} was cancelled."))
        return True

    def _claimed(self) -> bool:
        with contextlib.suppress(IndexError):
            return self._claim.pop()
        return False


class _WorkerCounters:
    """Written by one worker, read by anyone."""

    def __init__(self) -> None:
        self.reads = 0
        self.read_bytes = 0
        self.errors = 0
        self.busy = False
        self.latency = LatencyHistogram()
        self.device = LatencyHistogram()


class AsyncReader:
    """Worker threads that read files into aligned memory; a context manager. Every method is safe for threads."""

    def __init__(
        self,
        *,
        threads: int = 4,
        buffer_cap_bytes: int = 64 << 20,
        max_queued: int = 4096,
        read_function: ReadFunction = os.preadv,
    ) -> None:
        """Start the workers. `buffer_cap_bytes` is never exceeded by reads into the reader's own memory."""
        # An eighth is kept for look-ups, so that a restore cannot starve them.
        self.arena = BufferArena(buffer_cap_bytes, reserve_bytes=buffer_cap_bytes // 8)
        self._max_queued = max_queued
        self._read_function = read_function
        self._lookups: deque[Ticket] = deque()
        self._bulk: deque[Ticket] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        # One token wakes one worker. SimpleQueue waits and wakes in C, without a lock held by Python code.
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._completed = threading.Condition(threading.Lock())
        self._waiters = 0
        self._cancelled = 0
        self._closing = False
        self._counters = [_WorkerCounters() for _ in range(threads)]
        self._rate_base = (time.perf_counter(), 0, 0)
        self._rates = (0.0, 0.0)
        self._workers = [
            threading.Thread(target=self._work, args=(counters,), name=f"localspec-read-{index}", daemon=True)
            for index, counters in enumerate(self._counters)
        ]
        for worker in self._workers:
            worker.start()

    def submit(
        self,
        file: OpenFile,
        offset_bytes: int,
        length_bytes: int,
        callback: Callable[[Ticket], None] | None = None,
        *,
        priority: Priority = Priority.LOOKUP,
        into: memoryview | None = None,
    ) -> Ticket:
        """Post one read; see `submit_many`."""
        return self.submit_many([ReadRequest(file, offset_bytes, length_bytes, callback, into)], priority)[0]

    def submit_many(self, requests: Sequence[ReadRequest], priority: Priority = Priority.LOOKUP) -> list[Ticket]:
        """Post a batch and return at once: one tuple and one ticket a read, at most one wake-up a worker.

        Raises:
            ValueError: a range is negative, empty, above 16 MiB or above the memory cap, or `into` has another size.
            QueueFull: too much is waiting; nothing was posted.
            ReaderClosed: the reader or a file of the batch is closed.
        """
        waiting = len(self._lookups) + len(self._bulk)
        if waiting + len(requests) > self._max_queued:
            raise QueueFull(f"{waiting} reads are waiting and {self._max_queued} is the limit; post these later.")
        for request in requests:
            self._check(request, priority)
        now_s = time.perf_counter()
        tickets = [Ticket(request, priority, self, now_s) for request in requests]
        (self._lookups if priority is Priority.LOOKUP else self._bulk).extend(tickets)
        for _ in range(min(len(tickets), len(self._workers) - self._bell.qsize())):
            self._bell.put(None)
        return tickets

    def call(self, function: Callable[[], None]) -> None:
        """Have a worker run something short before its next read, such as finding out what to read.

        Raises ReaderClosed; what no worker has begun by then is never run.
        """
        if self._closing:
            raise ReaderClosed("Nothing can be run: the reader was closed.")
        self._calls.append(function)
        if self._bell.qsize() < len(self._workers):
            self._bell.put(None)

    def _check(self, request: ReadRequest, priority: Priority) -> None:
        file, offset, length, _, into = request
        if self._closing or file.closed:
            raise ReaderClosed(f"{file.path} cannot be read: it or its reader was closed.")
        if offset < 0 or not 0 < length <= MAX_READ_BYTES:
            raise ValueError(
                f"A read must have 1 to {MAX_READ_BYTES} bytes at an offset of 0 or more, not {request[1:3]}."
            )
        if into is not None:
            if into.nbytes != length or into.readonly:
                raise ValueError(f"The target of a read of {length} bytes must be writable and of that size.")
            return
        room = self.arena.cap_bytes - (0 if priority is Priority.LOOKUP else self.arena.reserve_bytes)
        if length + 2 * ALIGNMENT_BYTES > room:
            raise ValueError(f"A read of {length} bytes never fits the buffer cap of {room} bytes; raise the cap.")

    def wait_for(self, ticket: Ticket, timeout_s: float | None) -> bool:
        """Block until the ticket is done; False when the time ran out first."""
        with self._completed:
            # Counted before the look at done(): a worker sets done first and looks for waiters after.
            self._waiters += 1
            try:
                return self._completed.wait_for(ticket.done, timeout_s)
            finally:
                self._waiters -= 1

    def finish(self, ticket: Ticket, data: memoryview | None, error: Exception | None) -> None:
        """Record an outcome and tell whoever waits; called once a ticket, by whoever claimed it."""
        ticket._data = data
        ticket._error = error
        ticket._done = True
        if isinstance(error, ReadCancelled):
            self._cancelled += 1
        if self._waiters:
            with self._completed:
                self._completed.notify_all()
        if ticket.request.callback is not None:
            try:
                ticket.request.callback(ticket)
            except Exception:
                _LOG.exception("The callback of a read of %s failed.", ticket.request.file.path)

    def _work(self, counters: _WorkerCounters) -> None:
        while True:
            if self._calls:
                self._run_call()
                continue
            ticket = self._next_ticket()
            if ticket is None:
                if self._closing:
                    return
                self._bell.get()
            elif not self._serve(ticket, counters):
                # No memory: others hold it. The request keeps its place, look-ups may pass it meanwhile.
                (self._lookups if ticket.priority is Priority.LOOKUP else self._bulk).appendleft(ticket)
                ticket = None
                with contextlib.suppress(queue.Empty):
                    self._bell.get(timeout=_STARVED_POLL_S)

    def _run_call(self) -> None:
        try:
            function = self._calls.popleft()
        except IndexError:
            return
        try:
            function()
        except Exception:
            _LOG.exception("What a reader was asked to run failed.")

    def _next_ticket(self) -> Ticket | None:
        for waiting in (self._lookups, self._bulk):
            with contextlib.suppress(IndexError):
                return waiting.popleft()
        return None

    def _serve(self, ticket: Ticket, counters: _WorkerCounters) -> bool:
        """Read one ticket; False when there was no memory for it, which leaves it unclaimed."""
        request = ticket.request
        skew, span = request.file.span(request.offset_bytes, request.length_bytes)
        scratch = None
        if not _fits_in_place(request):
            scratch = self.arena.lend(span, urgent=ticket.priority is Priority.LOOKUP)
            if scratch is None and not self._closing and not ticket.done():
                return False
        if not ticket._claimed():
            return True
        if self._closing:
            self.finish(ticket, None, ReaderClosed(f"{request.file.path} was not read: the reader closed."))
            return True
        counters.busy = True
        started_s = time.perf_counter()
        try:
            if scratch is None:
                assert request.into is not None
                self._read(request.file, request.into, request.offset_bytes, request.length_bytes)
                data = request.into
            else:
                self._read(request.file, scratch.data[:span], request.offset_bytes - skew, skew + request.length_bytes)
                data = scratch.data[skew : skew + request.length_bytes]
                if request.into is not None:
                    # ndarray assignment lets go of the interpreter, a memoryview copy would not.
                    np.frombuffer(request.into, dtype=np.uint8)[:] = np.frombuffer(data, dtype=np.uint8)
                    data = request.into
        except Exception as error:
            counters.errors += 1
            counters.busy = False
            # The traceback would keep the memory lent as long as the ticket lives.
            self.finish(ticket, None, error.with_traceback(None))
            return True
        ended_s = time.perf_counter()
        counters.device.add(ended_s - started_s)
        counters.latency.add(ended_s - ticket.submitted_s)
        counters.reads += 1
        counters.read_bytes += request.length_bytes
        counters.busy = False
        self.finish(ticket, data, None)
        return True

    def _read(self, file: OpenFile, target: memoryview, offset_bytes: int, needed_bytes: int) -> None:
        target = target.cast("B")
        done_bytes = 0
        while done_bytes < needed_bytes:
            count = self._read_function(file.fileno(), [target[done_bytes:]], offset_bytes + done_bytes)
            done_bytes += count
            # Past the cache a count that is no multiple of the block means the end of the file.
            if count <= 0 or (file.direct and count % 512 and done_bytes < needed_bytes):
                raise DamagedFile(f"{file.path} ends at byte {offset_bytes + done_bytes}, inside a read.")

    def statistics(self) -> ReaderStatistics:
        """Counters since the start and rates of the last second or more."""
        now_s = time.perf_counter()
        reads = sum(counters.reads for counters in self._counters)
        read_bytes = sum(counters.read_bytes for counters in self._counters)
        since_s, base_reads, base_bytes = self._rate_base
        if now_s - since_s >= 1.0 or not self._rates[0]:
            elapsed_s = max(now_s - since_s, 1e-9)
            self._rates = ((reads - base_reads) / elapsed_s, (read_bytes - base_bytes) / elapsed_s / 1e6)
        if now_s - since_s >= 1.0:
            self._rate_base = (now_s, reads, read_bytes)
        p50, p90, p99 = percentiles_us([c.latency for c in self._counters], (0.5, 0.9, 0.99))
        device_p50, device_p99 = percentiles_us([c.device for c in self._counters], (0.5, 0.99))
        return ReaderStatistics(
            reads=reads,
            read_bytes=read_bytes,
            errors=sum(counters.errors for counters in self._counters),
            cancelled=self._cancelled,
            reads_per_s=self._rates[0],
            megabytes_per_s=self._rates[1],
            queued=len(self._lookups) + len(self._bulk),
            in_flight=sum(counters.busy for counters in self._counters),
            buffer_bytes=self.arena.used_bytes,
            buffer_cap_bytes=self.arena.cap_bytes,
            latency_p50_us=p50,
            latency_p90_us=p90,
            latency_p99_us=p99,
            device_p50_us=device_p50,
            device_p99_us=device_p99,
        )

    def close(self, timeout_s: float = 5.0) -> None:
        """Fail what no worker has begun, finish the rest, end the threads; a read stuck on a dead disk is left."""
        self._closing = True
        self._calls.clear()
        for _ in self._workers:
            self._bell.put(None)
        for worker in self._workers:
            worker.join(timeout_s)
        # Posted in the moment of closing, or left by a worker that is stuck.
        while (ticket := self._next_ticket()) is not None:
            if ticket._claimed():
                self.finish(ticket, None, ReaderClosed(f"{ticket.request.file.path} was not read: the reader closed."))

    def __enter__(self) -> AsyncReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _fits_in_place(request: ReadRequest) -> bool:
    into = request.into
    if into is None:
        return False
    if not request.file.direct:
        return True
    if request.offset_bytes % ALIGNMENT_BYTES or request.length_bytes % ALIGNMENT_BYTES:
        return False
    address: int = np.frombuffer(into, dtype=np.uint8).__array_interface__["data"][0]
    return address % ALIGNMENT_BYTES == 0

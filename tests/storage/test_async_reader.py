"""The reader: right bytes at any offset, a hard memory cap, priorities, slow and broken disks."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from localspec.storage.aio import (
    AsyncReader,
    OpenFile,
    Priority,
    QueueFull,
    ReadCancelled,
    ReaderClosed,
    ReadRequest,
)
from localspec.storage.buffers import ALIGNMENT_BYTES, BufferArena, aligned_memory
from localspec.storage.errors import DamagedFile
from localspec.storage.read_statistics import LatencyHistogram, percentiles_us

SIZE_BYTES = 3_000_017


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(1).bytes(SIZE_BYTES)


@pytest.fixture(params=["disk", "memory"])
def file(request: pytest.FixtureRequest, tmp_path: Path, content: bytes) -> OpenFile:
    folder = tmp_path
    if request.param == "memory":
        if not Path("/dev/shm").is_dir():
            pytest.skip("no file system in memory")
        folder = Path("/dev/shm") / f"localspec-test-{os.getpid()}"
        folder.mkdir(exist_ok=True)
        request.addfinalizer(folder.rmdir)
    path = folder / "data"
    path.write_bytes(content)
    request.addfinalizer(path.unlink)
    return OpenFile(path, random_access=True)


class Gate:
    """A disk that answers when told to."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.offsets: list[int] = []

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        assert self.opened.wait(10)
        return os.preadv(fd, buffers, offset)


def test_what_a_file_beside_it_said_is_not_asked_again(
    file: OpenFile, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", None)
    again = OpenFile(file.path, direct=file.direct)
    monkeypatch.undo()
    assert again.direct == file.direct
    with AsyncReader(threads=1) as reader:
        assert bytes(reader.submit(again, 5, 9000).result(10)) == content[5:9005]


def test_bytes_at_odd_offsets_and_sizes(file: OpenFile, content: bytes) -> None:
    rng = np.random.default_rng(2)
    cases = [(0, 64), (4095, 2), (1, 64), (SIZE_BYTES - 1, 1), (SIZE_BYTES - 4097, 4097), (0, SIZE_BYTES)]
    cases += [
        (int(a), int(n)) for a, n in zip(rng.integers(0, 2_900_000, 60), rng.integers(1, 99_999, 60), strict=True)
    ]
    with AsyncReader(threads=3, buffer_cap_bytes=16 << 20) as reader:
        tickets = reader.submit_many([ReadRequest(file, offset, length) for offset, length in cases])
        for (offset, length), ticket in zip(cases, tickets, strict=True):
            assert ticket.result(10) == content[offset : offset + length]
            assert ticket.done()
            assert ticket.error() is None
        figures = reader.statistics()
    assert figures.reads == len(cases)
    assert figures.read_bytes == sum(length for _, length in cases)
    assert 0 < figures.device_p50_us <= figures.latency_p99_us * 1.13
    assert figures.latency_p50_us <= figures.latency_p90_us <= figures.latency_p99_us


def test_largest_read(tmp_path: Path) -> None:
    path = tmp_path / "big"
    data = os.urandom((16 << 20) + 99)
    path.write_bytes(data)
    with AsyncReader(threads=1, buffer_cap_bytes=24 << 20) as reader:
        file = OpenFile(path)
        assert reader.submit(file, 99, 16 << 20, priority=Priority.BULK).result(20) == data[99:]
        with pytest.raises(ValueError, match="16777216"):
            reader.submit(file, 0, (16 << 20) + 1)
        for bad in ((-1, 5), (0, 0), (0, -4)):
            with pytest.raises(ValueError):
                reader.submit(file, *bad)
    with AsyncReader(threads=1, buffer_cap_bytes=1 << 20) as reader, pytest.raises(ValueError, match="never fits"):
        reader.submit(file, 0, 1 << 20)


@pytest.mark.parametrize("offset", [0, 4096, 77])
@pytest.mark.parametrize("skew", [0, 1])
def test_into_own_memory(file: OpenFile, content: bytes, offset: int, skew: int) -> None:
    target = aligned_memory(8192 + 1)[skew : skew + 8192].data
    with AsyncReader(threads=1, buffer_cap_bytes=1 << 20) as reader:
        assert reader.submit(file, offset, 8192, into=target).result(10) == content[offset : offset + 8192]
        assert bytes(target) == content[offset : offset + 8192]
        with pytest.raises(ValueError, match="target"):
            reader.submit(file, 0, 100, into=target)
        with pytest.raises(ValueError, match="target"):
            reader.submit(file, 0, 3, into=memoryview(b"abc"))


def test_direct_is_used_on_disk(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 5000)
    try:
        fd = os.open(tmp_path / "x", os.O_RDONLY | os.O_DIRECT)
        os.preadv(fd, [aligned_memory(4096).data], 0)
        os.close(fd)
    except OSError:
        pytest.skip("the file system of the tests has no O_DIRECT")
    assert OpenFile(tmp_path / "x").direct


def test_memory_is_a_hard_cap(file: OpenFile, content: bytes) -> None:
    cap = 1 << 20
    with AsyncReader(threads=4, buffer_cap_bytes=cap) as reader:
        bulk = reader.submit_many([ReadRequest(file, 200_000 * i, 200_000) for i in range(12)], Priority.BULK)
        held = [bulk[0].result(10), bulk[1].result(10)]
        time.sleep(0.1)
        done = [ticket for ticket in bulk if ticket.done()]
        assert 2 <= len(done) <= 4
        assert reader.statistics().buffer_bytes <= cap - cap // 8
        # A look-up has memory of its own kept back while bulk is stuck.
        assert reader.submit(file, 5, 4096).result(10) == content[5:4101]
        del held, done
        for index in range(12):
            assert bulk[index].result(10) == content[200_000 * index : 200_000 * (index + 1)]
            bulk[index] = bulk[-1]
        del bulk
        gc.collect()
        deadline = time.monotonic() + 60
        while reader.statistics().buffer_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reader.statistics().buffer_bytes == 0


def test_view_outlives_ticket_and_is_not_overwritten(file: OpenFile, content: bytes) -> None:
    with AsyncReader(threads=2, buffer_cap_bytes=1 << 20) as reader:
        view = reader.submit(file, 100, 50_000).result(10)[7:40_000]
        for index in range(200):
            reader.submit(file, 1000 * index, 60_000).result(10)
        assert view == content[107:40_100]


def test_lookups_pass_bulk(file: OpenFile) -> None:
    gate = Gate()
    with AsyncReader(threads=1, read_function=gate) as reader:
        reader.submit(file, 0, 4096, priority=Priority.BULK)
        while not gate.offsets:
            time.sleep(0.001)
        bulk = reader.submit_many([ReadRequest(file, 4096 * (i + 1), 4096) for i in range(5)], Priority.BULK)
        lookups = reader.submit_many([ReadRequest(file, 4096 * (i + 100), 4096) for i in range(3)])
        assert reader.statistics().queued == 8
        gate.opened.set()
        for ticket in [*bulk, *lookups]:
            ticket.result(10)
    assert gate.offsets[1:4] == [4096 * 100, 4096 * 101, 4096 * 102]


def test_slow_disk_does_not_hold_the_caller(file: OpenFile) -> None:
    def slow(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(0.05)
        return os.preadv(fd, buffers, offset)

    with AsyncReader(threads=2, read_function=slow) as reader:
        started = time.perf_counter()
        tickets = reader.submit_many([ReadRequest(file, 4096 * i, 4096) for i in range(8)])
        assert time.perf_counter() - started < 0.04
        assert not any(ticket.done() for ticket in tickets)
        with pytest.raises(TimeoutError):
            tickets[-1].result(0.01)
        assert tickets[-1].cancel()
        assert not tickets[-1].cancel()
        with pytest.raises(ReadCancelled):
            tickets[-1].result(1)
        for ticket in tickets[:-1]:
            ticket.result(5)
        assert not tickets[0].cancel()
        figures = reader.statistics()
        assert (figures.reads, figures.cancelled) == (7, 1)
        assert figures.latency_p99_us > 150_000


def test_errors_reach_the_ticket_and_the_callback(file: OpenFile, content: bytes) -> None:
    def broken(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == 8192:
            raise OSError(5, "Input/output error")
        return os.preadv(fd, [memoryview(buffers[0])[:4096]], offset)

    seen: list[Exception | None] = []
    with AsyncReader(threads=2, read_function=broken) as reader:
        bad = reader.submit(file, 8192, 100, lambda ticket: seen.append(ticket.error()))
        with pytest.raises(OSError, match="Input/output"):
            bad.result(10)
        beyond = reader.submit(file, SIZE_BYTES - 10, 11)
        with pytest.raises(DamagedFile, match="ends at byte"):
            beyond.result(10)
        with pytest.raises(DamagedFile):
            reader.submit(file, SIZE_BYTES + 50_000, 11).result(10)

        def explode(ticket: object) -> None:
            raise RuntimeError("a callback's own mistake")

        reader.submit(file, 0, 10, explode).result(10)
        # Short counts are continued, and the workers have survived all of it.
        assert reader.submit(file, 100_000, 50_000).result(10) == content[100_000:150_000]
        assert reader.statistics().errors == 3
    assert isinstance(seen[0], OSError)


def test_queue_is_bounded_and_close_fails_the_rest(file: OpenFile) -> None:
    gate = Gate()
    reader = AsyncReader(threads=1, max_queued=4, read_function=gate)
    first = reader.submit(file, 0, 10)
    while not gate.offsets:
        time.sleep(0.001)
    waiting = reader.submit_many([ReadRequest(file, 0, 10)] * 4)
    with pytest.raises(QueueFull, match="4"):
        reader.submit(file, 0, 10)
    threading.Timer(0.05, gate.opened.set).start()
    reader.close()
    assert len(first.result(1)) == 10
    for ticket in waiting:
        with pytest.raises(ReaderClosed):
            ticket.result(1)
    with pytest.raises(ReaderClosed):
        reader.submit(file, 0, 10)


def test_closed_file_serves_what_is_posted(file: OpenFile, content: bytes) -> None:
    gate = Gate()
    with AsyncReader(threads=1, read_function=gate) as reader:
        own = OpenFile(file.path)
        ticket = reader.submit(own, 10, 20)
        own.close()
        with pytest.raises(ReaderClosed):
            reader.submit(own, 10, 20)
        del own
        gc.collect()
        gate.opened.set()
        assert ticket.result(10) == content[10:30]


def test_links_are_refused_on_request(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert OpenFile(tmp_path / "b").size_bytes == 1
    with pytest.raises(OSError):
        OpenFile(tmp_path / "b", no_follow=True)


def test_arena_never_lends_a_byte_twice() -> None:
    arena = BufferArena(64 * ALIGNMENT_BYTES, reserve_bytes=8 * ALIGNMENT_BYTES)
    rng = np.random.default_rng(3)
    held: list[tuple[np.ndarray, int]] = []
    for step in range(3000):
        if held and rng.random() < 0.5:
            array, mark = held.pop(int(rng.integers(len(held))))
            assert (array == mark).all()
            del array
        else:
            urgent = bool(rng.integers(2))
            array = arena.lend(int(rng.integers(1, 9 * ALIGNMENT_BYTES)), urgent=urgent)
            if array is None:
                continue
            if not urgent:
                assert arena.used_bytes <= 56 * ALIGNMENT_BYTES
            array[:] = step % 251
            held.append((array, step % 251))
        assert sum(array.nbytes for array, _ in held) == arena.used_bytes <= arena.cap_bytes
    array = None
    held.clear()
    assert arena.used_bytes == 0
    assert arena.lend(arena.cap_bytes, urgent=True) is not None


def test_percentiles_are_right_to_an_eighth() -> None:
    rng = np.random.default_rng(4)
    samples = rng.lognormal(5, 2, 5000)
    histogram = LatencyHistogram()
    for sample in samples:
        histogram.add(float(sample) * 1e-6)
    for share, found in zip((0.1, 0.5, 0.99), percentiles_us([histogram], (0.1, 0.5, 0.99)), strict=True):
        exact = float(np.quantile(samples, share))
        assert exact * 0.99 - 1 <= found <= exact * 1.15 + 1
    assert percentiles_us([LatencyHistogram()], [0.5]) == [0.0]
    histogram.add(1e9)


def test_calls_run_on_workers_and_end_with_the_reader(caplog: pytest.LogCaptureFixture) -> None:
    names: list[str] = []
    done = threading.Event()
    with AsyncReader(threads=1) as reader:
        reader.call(lambda: names.append(threading.current_thread().name))
        reader.call(lambda: names[5])  # fails, and harms nobody
        reader.call(done.set)
        assert done.wait(10)
    assert names == ["localspec-read-0"] and "asked to run failed" in caplog.text
    with pytest.raises(ReaderClosed):
        reader.call(done.set)

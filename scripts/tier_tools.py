"""What the scripts that measure the tiers share: watched requests, and disks whose page cache is out of play."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from localspec.api.types import Sampling
from localspec.core.records import Request
from localspec.engine.build import Assembled
from localspec.engine.loop import EndNews, News, PrefillNews, StepNews
from localspec.storage.aio import AsyncReader, OpenFile, Priority, Ticket

PIECE_BYTES = 8 << 20
READS_IN_FLIGHT = 8
WAIT_S = 60.0
NO_DISKS = ("tmpfs", "ramfs", "devtmpfs")
NEEDED_FREE_BYTES = 8 << 30


@dataclass
class Watched:
    """What a request gave, and when."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    started_s: float = 0.0
    end: EndNews | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def see(self, news: News) -> None:
        if isinstance(news, PrefillNews):
            self.cached_tokens = news.cached_tokens
        elif isinstance(news, StepNews):
            self.times_s += [time.perf_counter()] * len(news.result.token_ids)
            self.token_ids += news.result.token_ids
            self.logprobs += news.result.logprobs
        elif isinstance(news, EndNews):
            self.end = news
            self.done.set()

    @property
    def first_token_s(self) -> float:
        return self.times_s[0] - self.started_s

    @property
    def facts(self) -> tuple[list[int], list[float]]:
        return self.token_ids, self.logprobs


def submit(parts: Assembled, ids: Sequence[int], max_tokens: int, **more: Any) -> Watched:
    """Start a request."""
    watched = Watched(started_s=time.perf_counter())
    request = Request("", tuple(ids), Sampling(), 1, max_tokens, (), drafter="off", logprobs=0, **more)
    parts.loop.submit(request, watched.see)
    return watched


def finished(watched: Watched) -> Watched:
    """Wait for a request's end."""
    if not watched.done.wait(WAIT_S):
        raise RuntimeError("a request did not end in time")
    if watched.end is not None and watched.end.error is not None:
        raise RuntimeError(watched.end.error.message)
    return watched


def prompt(seed: int, num_tokens: int, vocab_size: int) -> list[int]:
    return [(31 * i + 17 * seed + (i // 40) % 7 + i * i % 11) % (vocab_size - 100) for i in range(num_tokens)]


def forget_pages(folder: Path) -> None:
    """Ask the kernel to drop the files from its page cache."""
    for path in folder.rglob("*.blk"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def disk_rate(folder: Path) -> tuple[float, bool]:
    """(bytes/s, whether past the page cache) of reading the block files with several reads in flight."""
    forget_pages(folder)
    pending: deque[Ticket] = deque()
    direct, total = True, 0
    with AsyncReader(threads=4, buffer_cap_bytes=2 * READS_IN_FLIGHT * PIECE_BYTES) as reader:
        started_s = time.perf_counter()
        for path in sorted(folder.rglob("*.blk")):
            file = OpenFile(path)
            direct = direct and file.direct
            for offset in range(0, file.size_bytes, PIECE_BYTES):
                length = min(PIECE_BYTES, file.size_bytes - offset)
                pending.append(reader.submit(file, offset, length, priority=Priority.BULK))
                total += length
                if len(pending) >= READS_IN_FLIGHT:
                    pending.popleft().result()
        while pending:
            pending.popleft().result()
        return total / (time.perf_counter() - started_s), direct


def real_disk(wanted: Path | None) -> tuple[Path, dict[str, Any]]:
    """(a new directory, what it lies on): below `wanted`, else below the first usual place that is no memory."""
    mounts = {Path(part.mountpoint): part.fstype for part in psutil.disk_partitions(all=True)}
    places = [wanted] if wanted else [Path(p) for p in (tempfile.gettempdir(), "/var/tmp", Path.cwd(), Path.home())]
    told: dict[str, Any] = {}
    for place in places:
        place.mkdir(parents=True, exist_ok=True)
        mount = next((p for p in (place.resolve(), *place.resolve().parents) if p in mounts), Path("/"))
        free_bytes = shutil.disk_usage(place).free
        told = {"mount": str(mount), "file_system": mounts.get(mount, "?"), "free_gb": round(free_bytes / 1e9, 1)}
        if told["file_system"] not in NO_DISKS and free_bytes >= NEEDED_FREE_BYTES:
            return Path(tempfile.mkdtemp(prefix="localspec-tiers-", dir=place)), told
    print(f"no disk with room was found; {told} is used", file=sys.stderr)
    return Path(tempfile.mkdtemp(prefix="localspec-tiers-", dir=places[0])), told

#!/usr/bin/env python3
"""The tiers below a card, with the 27B's shapes and random weights: a long chat from host memory and from disk, a long
prompt beside a stream, and the chat on a card that holds a part of it.

    python scripts/device_tiers.py [--tokens 32768] [--kv DIR] [--out FILE] [--tiny]

A chat of 32k tokens is computed and written. Then the pages are emptied and it comes back from host memory; a second
engine over the same directory, whose files the page cache was asked to forget, reads it from disk. Tokens and
log-probabilities must be equal each time. Bars: first token from disk within 1.3 times bytes / measured disk rate
+ 100 ms, and within 15% of the recompute where the disk reads 4 GB/s or more; beside a stream, 95th percentile of the
time between its tokens at most 60 ms and the prompt read at half its standalone rate or more.
`--tiny` takes the same way with a tiny model on a CPU, where no bar means anything. Prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from localspec.api.types import Sampling
from localspec.cache.spill import SpillLimits
from localspec.core.records import PAGE_TOKENS, Request
from localspec.engine.build import Assembled, EngineOptions, assemble, cache_dtype
from localspec.engine.loop import EndNews, News, PrefillNews, StepNews
from localspec.engine.tiers import HostAndDisk
from localspec.kernels.ops import Ops
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint
from localspec.storage.aio import AsyncReader, OpenFile, Priority, Ticket

ANSWER_TOKENS = 16
STREAM_PROMPT_TOKENS = 300
PIECE_BYTES = 8 << 20
READS_IN_FLIGHT = 8
WAIT_S = 170.0


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


@dataclass
class Bench:
    """A loaded model, a directory, and the report."""

    model: Model
    ops: Ops
    num_tokens: int
    kv_dir: Path
    host_bytes: int
    report: dict[str, Any] = field(default_factory=dict)

    computed: Watched | None = None

    def engine(self, resident_tokens: int | None = None) -> Assembled:
        options = EngineOptions(
            device=str(self.ops.device),
            kv_dir=self.kv_dir if resident_tokens is None else None,
            kv_limits=SpillLimits(cap_bytes=1 << 40, min_free_bytes=1 << 30),
            host_bytes=self.host_bytes,
            resident_tokens=resident_tokens,
        )
        parts = assemble(self.model, self.ops, self.num_tokens + 4096, {}, options)
        parts.loop.start()
        # Compiles kernels and captures the graphs of short and of long contexts.
        for length in (min(2500, self.num_tokens // 2), self.num_tokens):
            finished(submit(parts, self.ids(90 + length % 7, length), ANSWER_TOKENS, private=True))
        return parts

    def ids(self, seed: int, num_tokens: int) -> list[int]:
        return prompt(seed, num_tokens, self.model.vocab_size)

    def settle(self, parts: Assembled) -> float:
        """Wait until every turn is where it is to be kept; seconds."""
        started_s = time.perf_counter()
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        while tiers.num_waiting:
            if time.perf_counter() - started_s > WAIT_S:
                raise RuntimeError("the turn was not written in time")
            time.sleep(0.01)
        return time.perf_counter() - started_s

    def restores(self) -> None:
        """Compute, then from host memory, then from disk."""
        chat = self.ids(1, self.num_tokens)
        parts = self.engine()
        try:
            self.settle(parts)
            computed = finished(submit(parts, chat, ANSWER_TOKENS, chat_id="bench"))
            self.computed = computed
            write_s = self.settle(parts)
            parts.loop.call(parts.scheduler.prefix.clear).result(60)
            from_host = finished(submit(parts, chat, ANSWER_TOKENS, chat_id="bench"))
            host_figures = dict(parts.metrics.snapshot().tiers)
        finally:
            parts.loop.stop()
        stored = sum(path.stat().st_size for path in self.kv_dir.rglob("*.blk"))
        rate, direct = disk_rate(self.kv_dir)
        forget_pages(self.kv_dir)
        parts = self.engine()
        try:
            tiers = parts.loop.tiers
            assert isinstance(tiers, HostAndDisk) and tiers.store is not None
            needed = sum(block.file_bytes for block in tiers.store.lookup(chat[:-1]).blocks)
            from_disk = finished(submit(parts, chat, ANSWER_TOKENS, chat_id="bench"))
            disk_figures = dict(parts.metrics.snapshot().tiers)
        finally:
            parts.loop.stop()
        bar_s = 1.3 * needed / rate + 0.1
        share = from_disk.first_token_s / computed.first_token_s
        self.report["restore"] = {
            "tokens": self.num_tokens,
            "stored_bytes": stored,
            "needed_bytes": needed,
            "write_s": round(write_s, 3),
            "recompute_first_token_s": round(computed.first_token_s, 4),
            "host": {
                "first_token_s": round(from_host.first_token_s, 4),
                "cached_tokens": from_host.cached_tokens,
                "equal": from_host.facts == computed.facts,
                "restore_mb_per_s": host_figures["host_restore_mb_per_s"],
                "pinned_bytes": host_figures["host_pinned_bytes"],
            },
            "disk": {
                "first_token_s": round(from_disk.first_token_s, 4),
                "cached_tokens": from_disk.cached_tokens,
                "equal": from_disk.facts == computed.facts,
                "restore_mb_per_s": disk_figures["ssd_restore_mb_per_s"],
                "rate_gb_per_s": round(rate / 1e9, 3),
                "past_page_cache": direct,
                "bar_s": round(bar_s, 4),
                "within_bar": from_disk.first_token_s <= bar_s,
                "share_of_recompute": round(share, 4),
                "within_15_percent": share <= 0.15 if rate >= 4e9 else None,
            },
        }

    def beside_a_stream(self) -> None:
        """A long prompt alone, then beside a stream that runs on."""
        parts = self.engine()
        try:
            alone = finished(submit(parts, self.ids(5, self.num_tokens), 1, cache_salt="alone"))
            figures = []
            for round_ in range(2):
                stream = submit(parts, self.ids(6 + round_, STREAM_PROMPT_TOKENS), 3500, cache_salt="stream")
                while len(stream.token_ids) < 20 and not stream.done.is_set():
                    time.sleep(0.002)
                length = self.num_tokens if round_ else self.num_tokens // 4
                long = finished(submit(parts, self.ids(8 + round_, length), 1, cache_salt=f"long {round_}"))
                still_running = not stream.done.is_set()
                parts.loop.call(lambda: [parts.scheduler.cancel(s) for s in parts.scheduler.active]).result(60)
                stream.done.wait(WAIT_S)
                begin_s, end_s = long.started_s, long.times_s[0]
                inside = [t for t in stream.times_s if begin_s <= t <= end_s]
                gaps_ms = sorted((b - a) * 1e3 for a, b in pairwise(inside))
                figures.append((length, long.first_token_s, gaps_ms, still_running))
            length, seconds, gaps_ms, still_running = figures[-1]
            p95 = gaps_ms[int(0.95 * (len(gaps_ms) - 1))] if gaps_ms else None
            kept = alone.first_token_s / seconds
            self.report["beside_a_stream"] = {
                "prompt_tokens": length,
                "alone_tok_per_s": round(self.num_tokens / alone.first_token_s, 1),
                "beside_tok_per_s": round(length / seconds, 1),
                "rate_kept": round(kept, 3),
                "stream_tokens_meanwhile": len(gaps_ms) + 1,
                "stream_ran_throughout": still_running,
                "gap_p50_ms": round(gaps_ms[len(gaps_ms) // 2], 2) if gaps_ms else None,
                "gap_p95_ms": round(p95, 2) if p95 is not None else None,
                "gap_max_ms": round(gaps_ms[-1], 2) if gaps_ms else None,
                "chunk_tokens": parts.scheduler.chunks.beside_streams(),
                "within_bar": p95 is not None and p95 <= 60.0 and kept >= 0.5,
            }
        finally:
            parts.loop.stop()

    def overflow(self) -> None:
        """The same chat on an engine whose pages hold a part of it."""
        parts = self.engine(max(256, self.num_tokens // 16))
        try:
            split = finished(submit(parts, self.ids(1, self.num_tokens), ANSWER_TOKENS))
            steps_s = split.times_s[-1] - split.times_s[0]
            device_pages = parts.scheduler.pool.num_pages
            cold = parts.runner.cold
            self.report["overflow"] = {
                "device_tokens": (device_pages - 1) * PAGE_TOKENS,
                "host_tokens": cold.num_pages * PAGE_TOKENS if cold is not None else 0,
                "equal": self.computed is not None and split.facts == self.computed.facts,
                "first_token_s": round(split.first_token_s, 3),
                "ms_per_token": round(steps_s / (ANSWER_TOKENS - 1) * 1e3, 2),
            }
        finally:
            parts.loop.stop()


def load(tiny: bool, layers: int) -> tuple[Model, Ops]:
    """Random weights: the 27B's shapes on the card, or a tiny model on the CPU."""
    ops, _ = choose("cpu" if tiny else "cuda:0")
    ops.cache_dtype = cache_dtype(ops, "auto")
    config: dict[str, Any] = json.loads(json.dumps(QWEN3_5_27B))
    config["text_config"]["num_hidden_layers"] = layers
    if tiny:
        config = architecture("qwen3_5").tiny_config()
    with torch.inference_mode():
        model = architecture("qwen3_5").load(config, SyntheticCheckpoint(config, ops.device), ops)
    if not tiny:
        torch.cuda.empty_cache()
    return model, ops


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=None, help="length of the chat; 32768, or 1500 with --tiny")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--kv", type=Path, help="a directory on the disk to be measured; a temporary one otherwise")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    started_s = time.perf_counter()
    kv_dir = arguments.kv or Path(tempfile.mkdtemp(prefix="localspec-tiers-"))
    model, ops = load(arguments.tiny, arguments.layers)
    num_tokens = arguments.tokens or (1500 if arguments.tiny else 32768)
    bench = Bench(model, ops, num_tokens, kv_dir, int(arguments.host_gib * (1 << 30)))
    bench.report = {
        "benchmark": "device_tiers",
        "device": torch.cuda.get_device_name(0) if ops.device.type == "cuda" else "cpu",
        "weights": "random",
        "layers": "tiny" if arguments.tiny else arguments.layers,
        "load_s": round(time.perf_counter() - started_s, 1),
        "failed": [],
    }
    sections: dict[str, Callable[[], None]] = {"restores": bench.restores, "beside a stream": bench.beside_a_stream}
    sections["overflow"] = bench.overflow
    try:
        for name, section in sections.items():
            try:
                section()
            except Exception:
                bench.report["failed"].append(name)
                traceback.print_exc(file=sys.stderr)
    finally:
        if arguments.kv is None:
            shutil.rmtree(kv_dir, ignore_errors=True)
    bench.report["seconds"] = round(time.perf_counter() - started_s, 1)
    document = json.dumps(bench.report)
    print(document, flush=True)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n")
    return 1 if bench.report["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""The tiers below a card, with the 27B's shapes and random weights: a long chat from host memory and from disk, a long
prompt beside a stream, and the chat on a card that holds a part of it.

    python scripts/device_tiers.py [--tokens 32768] [--kv DIR] [--out FILE] [--limit 195] [--tiny]

A chat of 32k tokens is computed and written. Then the pages are emptied and it comes back from host memory; a second
engine over the same directory, whose files the page cache was asked to forget, reads it from disk. Tokens and
log-probabilities must be equal each time. Bars: first token from disk within 1.3 times bytes / measured disk rate
+ 100 ms, and within 15% of the recompute where the disk reads 4 GB/s or more; beside a stream, 95th percentile of the
time between its tokens at most 60 ms and the prompt read at half its standalone rate or more.
Every stage has a limit of its own; what it found is printed and written as soon as it ends, and one that hangs is left
behind with its stacks on stderr. `--tiny` takes the same way with a tiny model on a CPU, where no bar means anything.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from tier_tools import NEEDED_FREE_BYTES, WAIT_S, Watched, disk_rate, finished, forget_pages, prompt, real_disk, submit

from localspec.cache.spill import SpillLimits
from localspec.core.records import PAGE_TOKENS
from localspec.engine.build import Assembled, EngineOptions, assemble, cache_dtype
from localspec.engine.tiers import HostAndDisk
from localspec.engine.warm_up import warm_up
from localspec.kernels.ops import Ops
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint

ANSWER_TOKENS = 16
STREAM_PROMPT_TOKENS = 300
STREAM_TOKENS = 3500
MEMORY_DISK = Path("/dev/shm")


@dataclass
class Bench:
    """The stages, in their order; each leaves what the next ones need."""

    tiny: bool
    layers: int
    num_tokens: int
    kv_dir: Path
    host_bytes: int
    report: dict[str, Any] = field(default_factory=dict)
    _loaded: tuple[Model, Ops] | None = None
    _running: Assembled | None = None
    _computed: Watched | None = None

    def stages(self) -> list[tuple[str, float, Callable[[], None]]]:
        """(name, limit in seconds, what to do)."""
        return [
            ("load", 45.0, self.load),
            ("start", 75.0, self.start),
            ("compute", 40.0, self.compute),
            ("host", 20.0, self.from_host),
            ("close", 45.0, self.close),
            ("disk", 50.0, self.from_disk),
            ("stream", 45.0, self.beside_a_stream),
            ("overflow", 45.0, self.overflow),
            ("fast disk", 40.0, self.from_fast_disk),
        ]

    def load(self) -> None:
        """Random weights: the 27B's shapes on the card, or a tiny model on the CPU."""
        ops, _ = choose("cpu" if self.tiny else "cuda:0")
        ops.cache_dtype = cache_dtype(ops, "auto")
        config: dict[str, Any] = json.loads(json.dumps(QWEN3_5_27B))
        config["text_config"]["num_hidden_layers"] = self.layers
        if self.tiny:
            config = architecture("qwen3_5").tiny_config()
        with torch.inference_mode():
            model = architecture("qwen3_5").load(config, SyntheticCheckpoint(config, ops.device), ops)
        if not self.tiny:
            torch.cuda.empty_cache()
            self.report["device"] = torch.cuda.get_device_name(0)
        self._loaded = model, ops

    def start(self) -> None:
        """An engine over the directory: kernels are compiled, graphs captured."""
        self._running = self._engine()

    def compute(self) -> None:
        """The chat, after another of its length which finds everything warm; then until it is written."""
        parts = self._parts()
        first = finished(submit(parts, self._ids(5), 1, private=True))
        computed = finished(submit(parts, self._ids(1), ANSWER_TOKENS, chat_id="bench"))
        self._computed = computed
        self.report["compute"] = {
            "tokens": self.num_tokens,
            "first_token_s": round(computed.first_token_s, 4),
            "first_time_s": round(first.first_token_s, 4),
            "tok_per_s": round(self.num_tokens / computed.first_token_s, 1),
            "write_s": round(self._settle(parts), 3),
            "stored_bytes": sum(path.stat().st_size for path in self.kv_dir.rglob("*.blk")),
            "host_pinned_bytes": parts.metrics.snapshot().tiers["host_pinned_bytes"],
        }

    def from_host(self) -> None:
        """The pages are emptied; memory has the chat."""
        parts = self._parts()
        parts.loop.call(parts.scheduler.clear).result(WAIT_S)
        again = finished(submit(parts, self._ids(1), ANSWER_TOKENS, chat_id="bench"))
        figures = parts.metrics.snapshot().tiers
        self.report["host"] = self._restored(again) | {"restore_mb_per_s": figures["host_restore_mb_per_s"]}

    def close(self) -> None:
        """End the first engine."""
        parts, self._running = self._parts(), None
        parts.loop.stop()

    def from_disk(self) -> None:
        """A new engine over the same directory, of whose files the page cache knows nothing."""
        self.report["disk"] = self._reopened(self.kv_dir)

    def from_fast_disk(self) -> None:
        """The same from a file system in memory, which stands for a disk that is faster than this machine's."""
        if self._running is not None:
            self.close()
        if shutil.disk_usage(MEMORY_DISK).free < NEEDED_FREE_BYTES:
            raise RuntimeError(f"{MEMORY_DISK} has no room")
        with tempfile.TemporaryDirectory(prefix="localspec-tiers-", dir=MEMORY_DISK) as folder:
            shutil.copytree(self.kv_dir, folder, dirs_exist_ok=True)
            self.report["fast_disk"] = {"is": "a file system in memory"} | self._reopened(Path(folder))
            self.close()

    def _reopened(self, kv_dir: Path) -> dict[str, Any]:
        rate, direct = disk_rate(kv_dir)
        parts = self._running = self._engine(kv_dir=kv_dir)
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk) and tiers.store is not None
        finished(submit(parts, self._ids(7), 2, private=True))
        self._settle(parts)
        needed = sum(block.file_bytes for block in tiers.store.lookup(self._ids(1)[:-1]).blocks)
        forget_pages(kv_dir)
        again = finished(submit(parts, self._ids(1), ANSWER_TOKENS, chat_id="bench"))
        figures = parts.metrics.snapshot().tiers
        bar_s = 1.3 * needed / rate + 0.1
        restored = self._restored(again)
        return restored | {
            "rate_gb_per_s": round(rate / 1e9, 3),
            "past_page_cache": direct,
            "needed_bytes": needed,
            "restore_mb_per_s": figures["ssd_restore_mb_per_s"],
            "bar_s": round(bar_s, 4),
            "within_bar": again.first_token_s <= bar_s,
            "within_15_percent": restored["share_of_recompute"] <= 0.15 if rate >= 4e9 else None,
        }

    def beside_a_stream(self) -> None:
        """A long prompt alone, then beside a stream that runs on, after a shorter one which shows the chunk sizes."""
        parts = self._parts()
        alone = finished(submit(parts, self._ids(9), 1, cache_salt="alone"))
        rounds = [
            self._round(parts, seed, length) for seed, length in ((10, self.num_tokens // 4), (12, self.num_tokens))
        ]
        seconds, gaps_ms, still_running = rounds[-1]
        p95 = gaps_ms[int(0.95 * (len(gaps_ms) - 1))] if gaps_ms else None
        kept = alone.first_token_s / seconds
        self.report["beside_a_stream"] = {
            "prompt_tokens": self.num_tokens,
            "alone_tok_per_s": round(self.num_tokens / alone.first_token_s, 1),
            "beside_tok_per_s": round(self.num_tokens / seconds, 1),
            "rate_kept": round(kept, 3),
            "stream_tokens_meanwhile": len(gaps_ms) + 1,
            "stream_ran_throughout": still_running,
            "gap_p50_ms": round(gaps_ms[len(gaps_ms) // 2], 2) if gaps_ms else None,
            "gap_p95_ms": round(p95, 2) if p95 is not None else None,
            "gap_max_ms": round(gaps_ms[-1], 2) if gaps_ms else None,
            "gaps_over_60_ms": [round(gap, 1) for gap in gaps_ms if gap > 60.0][:20],
            "chunk_tokens": parts.scheduler.limits.chunk_tokens,
            "layers_at_once": parts.scheduler.pace.beside_streams(parts.scheduler.limits.chunk_tokens),
            "layer_ms": parts.scheduler.pace.measured_ms(),
            "within_bar": p95 is not None and p95 <= 60.0 and kept >= 0.5,
        }

    def overflow(self) -> None:
        """The same chat on an engine whose pages hold a part of it."""
        if self._running is not None:
            self.close()
        parts = self._running = self._engine(max(256, self.num_tokens // 16))
        split = finished(submit(parts, self._ids(1), ANSWER_TOKENS))
        steps_s = split.times_s[-1] - split.times_s[0]
        cold = parts.runner.cold
        spec = parts.runner.model.cache_spec
        cold_bytes = cold.count * PAGE_TOKENS * spec.bytes_per_token if cold is not None else 0
        self.report["overflow"] = {
            "device_tokens": (parts.scheduler.pool.num_pages - 1) * PAGE_TOKENS,
            "host_tokens": cold.num_pages * PAGE_TOKENS if cold is not None else 0,
            "cold_tokens": cold.count * PAGE_TOKENS if cold is not None else 0,
            "equal": self._computed is not None and split.facts == self._computed.facts,
            "first_token_s": round(split.first_token_s, 3),
            "ms_per_token": round(steps_s / (ANSWER_TOKENS - 1) * 1e3, 2),
            "brought_gb_per_s": round(cold_bytes * (ANSWER_TOKENS - 1) / steps_s / 1e9, 2),
        }
        self.close()

    def _parts(self) -> Assembled:
        if self._running is None:
            raise RuntimeError("the engine that this stage needs did not start")
        return self._running

    def _engine(self, resident_tokens: int | None = None, kv_dir: Path | None = None) -> Assembled:
        if self._loaded is None:
            raise RuntimeError("the model was not loaded")
        model, ops = self._loaded
        options = EngineOptions(
            device=str(ops.device),
            kv_dir=(kv_dir or self.kv_dir) if resident_tokens is None else None,
            kv_limits=SpillLimits(cap_bytes=1 << 40, min_free_bytes=1 << 30),
            host_bytes=self.host_bytes,
            resident_tokens=resident_tokens,
        )
        parts = assemble(model, ops, self.num_tokens + 4096, {}, options)
        limits = parts.scheduler.limits
        held_tokens = min(limits.context_tokens, (parts.scheduler.pool.num_pages - 1) * PAGE_TOKENS)
        warm_up(parts.loop.stages, held_tokens, limits.chunk_tokens)
        parts.loop.start()
        finished(submit(parts, self._ids(3)[: min(2500, self.num_tokens // 2)], ANSWER_TOKENS, private=True))
        return parts

    def _ids(self, seed: int) -> list[int]:
        assert self._loaded is not None
        return prompt(seed, self.num_tokens, self._loaded[0].vocab_size)

    def _settle(self, parts: Assembled) -> float:
        """Wait until every turn is where it is to be kept; seconds."""
        started_s = time.perf_counter()
        tiers = parts.loop.tiers
        assert isinstance(tiers, HostAndDisk)
        while tiers.num_waiting:
            if time.perf_counter() - started_s > WAIT_S:
                raise RuntimeError("the turn was not written in time")
            time.sleep(0.01)
        return time.perf_counter() - started_s

    def _restored(self, again: Watched) -> dict[str, Any]:
        computed = self._computed
        if computed is None:
            raise RuntimeError("there is no computed chat to compare with")
        return {
            "first_token_s": round(again.first_token_s, 4),
            "cached_tokens": again.cached_tokens,
            "equal": again.facts == computed.facts,
            "share_of_recompute": round(again.first_token_s / computed.first_token_s, 4),
        }

    def _round(self, parts: Assembled, seed: int, length: int) -> tuple[float, list[float], bool]:
        """(seconds to the long prompt's first token, gaps of the stream meanwhile in ms, whether it ran throughout)."""
        stream = submit(parts, self._ids(seed)[:STREAM_PROMPT_TOKENS], STREAM_TOKENS, cache_salt="stream")
        deadline_s = time.perf_counter() + WAIT_S
        while len(stream.token_ids) < 20 and not stream.done.is_set() and time.perf_counter() < deadline_s:
            time.sleep(0.002)
        long = finished(submit(parts, self._ids(seed + 1)[:length], 1, cache_salt="long"))
        still_running = not stream.done.is_set()
        parts.loop.call(lambda: cancel_all(parts)).result(WAIT_S)
        stream.done.wait(WAIT_S)
        begin_s, end_s = long.started_s, long.times_s[0]
        inside = [t for t in stream.times_s if begin_s <= t <= end_s]
        return long.first_token_s, sorted((b - a) * 1e3 for a, b in pairwise(inside)), still_running


def cancel_all(parts: Assembled) -> None:
    """Decode thread: end what runs."""
    for sequence in parts.scheduler.active:
        parts.scheduler.cancel(sequence)


def _run(stage: Callable[[], None], errors: list[str]) -> None:
    try:
        stage()
    except Exception as error:
        errors.append(f"{type(error).__name__}: {error}")
        traceback.print_exc(file=sys.stderr)


def run_stages(bench: Bench, limit_s: float, tell: Callable[[], None]) -> None:
    """Each stage on a thread of its own, which is left behind if it does not end."""
    report, started_s = bench.report, time.perf_counter()
    for name, stage_limit_s, stage in bench.stages():
        left_s = limit_s - (time.perf_counter() - started_s)
        if left_s < 1.0:
            report["failed"].append(f"{name}: no time was left")
            continue
        errors: list[str] = []
        began_s = time.perf_counter()
        thread = threading.Thread(target=_run, args=(stage, errors), name=f"stage {name}", daemon=True)
        thread.start()
        thread.join(min(stage_limit_s, left_s))
        if thread.is_alive():
            errors.append(f"did not end in {min(stage_limit_s, left_s):.0f} s")
            faulthandler.dump_traceback(sys.stderr, all_threads=True)
        report["failed"] += [f"{name}: {error}" for error in errors]
        report["seconds"][name] = round(time.perf_counter() - began_s, 2)
        tell()


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=None, help="length of the chat; 32768, or 1500 with --tiny")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--kv", type=Path, help="below this directory, on the disk to be measured")
    parser.add_argument("--host-gib", type=float, default=8.0)
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    parser.add_argument("--limit", type=float, default=195.0, help="seconds in all")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    kv_dir, disk = real_disk(arguments.kv)
    num_tokens = arguments.tokens or (1500 if arguments.tiny else 32768)
    bench = Bench(arguments.tiny, arguments.layers, num_tokens, kv_dir, int(arguments.host_gib * (1 << 30)))
    bench.report = {
        "benchmark": "device_tiers",
        "device": "cpu",
        "weights": "random",
        "layers": "tiny" if arguments.tiny else arguments.layers,
        "on": disk,
        "failed": [],
        "seconds": {},
    }

    def tell() -> None:
        document = json.dumps(bench.report)
        print(document, flush=True)
        if arguments.out is not None:
            arguments.out.write_text(document + "\n")

    try:
        run_stages(bench, arguments.limit, tell)
    finally:
        shutil.rmtree(kv_dir, ignore_errors=True)
    return 1 if bench.report["failed"] else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    # A stage that hangs must not keep the process.
    os._exit(status)

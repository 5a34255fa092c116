"""Measure the n-gram store on this machine: build speed and memory, then look-ups in a paced decode loop.

The corpus is Python source cut into words (not a model's tokens: speed does not depend on which ids they are, hit rates
do). Every tenth file is held out and plays the model's output. The decode loop does what a drafter does: look up the
context, draft what was found, ask for the pages of every way the verification can end, then wait out the step; the held
out text decides how much of a draft is accepted. It runs three times over the same text: with a memory cap of a tenth
of the table and nothing cached, with the whole table in memory, and without a table.

Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_build import BuildReport, RunBuilder
from localspec.storage.ngram_runs import NgramTable

TOKENIZER = b"words of python source, ids by us"[:32]
WORD = re.compile(r"\w+|[^\w\s]|\s+")
# Draft length by length of the match: what storage-side simulation found to pay.
DRAFT_TOKENS = {6: 2, 8: 4, 12: 8, 16: 14}
Tokens = NDArray[np.uint32]


@dataclass(frozen=True)
class Loop:
    """One run of the decode loop."""

    tokens_per_step: float
    steps_per_s: float
    lookup_us_p50: float
    lookup_us_p99: float
    prefetch_us_p50: float
    prefetch_us_p99: float
    thread_share: float
    """Time of the decode thread in look-ups and prefetches / length of a step."""
    hit_rate: float
    late_rate: float
    pages_cached_share: float
    read_us_p50: float
    read_us_p99: float


def words_of(roots: Sequence[Path], limit_tokens: int) -> list[Tokens]:
    """Token ids of every Python file, at most `limit_tokens` in all."""
    vocabulary: dict[str, int] = {}
    documents, total = [], 0
    for path in sorted(path for root in roots for path in root.rglob("*.py")):
        words = WORD.findall(path.read_text(encoding="utf-8", errors="replace"))
        documents.append(np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], dtype=np.uint32))
        total += len(words)
        if total >= limit_tokens:
            break
    return documents


def repeated(documents: Sequence[Tokens], token_count: int) -> Iterator[Tokens]:
    """The corpus over and over, each time under other ids: new text of the same shape, up to a size."""
    made, round_number = 0, 0
    while made < token_count:
        for tokens in documents:
            yield tokens if not round_number else (tokens * np.uint32(2 * round_number + 1)) & np.uint32(0xFFFFF)
            made += len(tokens)
            if made >= token_count:
                return
        round_number += 1


def measure_build(
    directory: Path, documents: Sequence[Tokens], token_count: int, min_count: int, order: int
) -> dict[str, float]:
    """Build a table; figures by wall clock and by CPU time."""
    before_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    with RunBuilder(directory, TOKENIZER, order=order) as builder:
        for tokens in repeated(documents, token_count):
            builder.add("corpus", tokens)
        builder.flush()
        sorted_s = time.perf_counter()
        report: BuildReport = builder.finish(min_count)
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    return {
        "tokens": report.tokens,
        "records": report.records,
        "tokens_per_s": report.tokens / wall_s,
        "tokens_per_cpu_s": report.tokens / cpu_s,
        "merge_share": 1 - (sorted_s - started_s) / wall_s,
        "table_bytes": report.table_bytes,
        "bytes_per_token": report.table_bytes / max(report.tokens, 1),
        "write_amplification": report.written_bytes / max(report.table_bytes, 1),
        "rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "rss_before_bytes": before_bytes,
    }


def decode(table: NgramTable | None, reader: AsyncReader, text: Sequence[int], steps: int, step_s: float) -> Loop:
    """The paced loop; `text` is what the model would write."""
    position, emitted = 64, 0
    lookups, prefetches = [], []
    begun_s = time.perf_counter()
    for step in range(steps):
        context = text[position - 32 : position]
        a = time.perf_counter()
        found = table.lookup(context) if table else None
        b = time.perf_counter()
        draft = found.tokens[: DRAFT_TOKENS[found.match_tokens]] if found else ()
        if table:
            table.prefetch_step(context, draft)
        c = time.perf_counter()
        lookups.append(b - a)
        prefetches.append(c - b)
        accepted = 0
        while accepted < len(draft) and draft[accepted] == text[position + accepted]:
            accepted += 1
        position += accepted + 1
        emitted += accepted + 1
        if position > len(text) - 64:
            position = 64
        time.sleep(max(0.0, begun_s + (step + 1) * step_s - time.perf_counter()))
    wall_s = time.perf_counter() - begun_s
    table_figures, reader_figures = table.statistics() if table else None, reader.statistics()
    return Loop(
        tokens_per_step=emitted / steps,
        steps_per_s=steps / wall_s,
        lookup_us_p50=float(np.percentile(lookups, 50)) * 1e6,
        lookup_us_p99=float(np.percentile(lookups, 99)) * 1e6,
        prefetch_us_p50=float(np.percentile(prefetches, 50)) * 1e6,
        prefetch_us_p99=float(np.percentile(prefetches, 99)) * 1e6,
        thread_share=float(np.mean(lookups) + np.mean(prefetches)) / step_s,
        hit_rate=table_figures.hits / table_figures.lookups if table_figures else 0.0,
        late_rate=table_figures.late / table_figures.lookups if table_figures else 0.0,
        pages_cached_share=table_figures.cached_pages / max(table_figures.requested_pages, 1) if table_figures else 0.0,
        read_us_p50=reader_figures.latency_p50_us,
        read_us_p99=reader_figures.latency_p99_us,
    )


def measure_decode(
    directory: Path, text: Sequence[int], steps: int, step_s: float, table_bytes: int
) -> dict[str, Loop]:
    """The same text with a tenth of the table in memory, with all of it, and with none."""
    loops = {}
    small_bytes = max(2 << 20, table_bytes // 10)
    with AsyncReader(threads=4) as reader:
        table = NgramTable.open(directory, TOKENIZER, reader, ram_cap_bytes=small_bytes)
        loops["on disk, cap 1/10"] = decode(table, reader, text, steps, step_s)
    with AsyncReader(threads=4) as reader:
        table = NgramTable.open(directory, TOKENIZER, reader, ram_cap_bytes=2 * table_bytes)
        # The first pass, unpaced but for the disk, brings every page that the second one wants.
        for end in range(64, len(text) - 64, 8):
            table.prefetch_step(text[end - 32 : end], text[end : end + 8])
            while table.pending_reads > 100:
                time.sleep(0.001)
        while table.pending_reads:
            time.sleep(0.001)
        loops["in memory"] = decode(table, reader, text, steps, step_s)
        loops["no table"] = decode(None, reader, text, steps, step_s / 50)
    return loops


def print_build(build: dict[str, float]) -> None:
    """The rows about the build."""
    wall, cpu = build["tokens_per_s"] / 1e6, build["tokens_per_cpu_s"] / 1e6
    print(f"{'tokens':20} {build['tokens'] / 1e6:10.1f} M")
    print(
        f"{'built':20} {wall:10.2f} M tokens/s by the clock, {cpu:.2f} by CPU time, {build['merge_share']:.0%} merging"
    )
    print(f"{'table':20} {build['table_bytes'] / 1e6:10.0f} MB, {build['bytes_per_token']:.1f} bytes a token")
    print(f"{'written':20} {build['write_amplification']:10.2f} times the table")
    print(f"{'peak memory':20} {build['rss_peak_bytes'] / 1e6:10.0f} MB, {build['rss_before_bytes'] / 1e6:.0f} before")


def print_loops(loops: dict[str, Loop]) -> None:
    """The rows about the decode loop, times in microseconds."""
    if loops:
        print(
            f"{'decode loop':20} {'tok/step':>9}{'lookup':>8}{'p99':>6}{'prefetch':>9}{'p99':>6}{'of step':>9}", end=""
        )
        print(f"{'hits':>7}{'late':>7}{'read':>7}{'p99':>7}")
    for name, loop in loops.items():
        print(f"{name:20} {loop.tokens_per_step:9.3f}{loop.lookup_us_p50:8.0f}{loop.lookup_us_p99:6.0f}", end="")
        print(f"{loop.prefetch_us_p50:9.0f}{loop.prefetch_us_p99:6.0f}{loop.thread_share:9.2%}", end="")
        print(f"{loop.hit_rate:7.1%}{loop.late_rate:7.2%}{loop.read_us_p50:7.0f}{loop.read_us_p99:7.0f}")


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="source trees; this Python's libraries by default")
    parser.add_argument("--corpus-tokens", type=int, default=12_000_000, help="words to read from the trees at most")
    parser.add_argument("--tokens", type=int, default=0, help="build from this many, repeating the trees under new ids")
    parser.add_argument("--min-count", type=int, default=1)
    parser.add_argument("--order", type=int, default=8, choices=sorted(DRAFT_TOKENS)[:2], help="tokens of a context")
    parser.add_argument("--steps", type=int, default=2000, help="of the decode loop; 0 measures the build only")
    parser.add_argument("--rate", type=float, default=200.0, help="steps a second")
    parser.add_argument("--directory", type=Path, help="where to build; a new temporary directory by default")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)  # as the engine does
    roots = options.paths or [Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib")]
    documents = words_of(roots, options.corpus_tokens)
    held_out = documents[5::10]
    rest = [tokens for index, tokens in enumerate(documents) if index % 10 != 5]
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        build = measure_build(
            directory / "t", rest, options.tokens or sum(map(len, rest)), options.min_count, options.order
        )
        print_build(build)
        loops: dict[str, Loop] = {}
        if options.steps:
            text = np.concatenate(held_out).tolist()[: 40 * options.steps]
            loops = measure_decode(directory / "t", text, options.steps, 1 / options.rate, int(build["table_bytes"]))
        print_loops(loops)
        figures = {
            "build": build,
            "decode": {name: asdict(loop) for name, loop in loops.items()},
            "cores": os.cpu_count(),
        }
        if loops:
            figures["tokens_per_step_disk_over_memory"] = (
                loops["on disk, cap 1/10"].tokens_per_step / loops["in memory"].tokens_per_step
            )
        print(json.dumps(figures))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()

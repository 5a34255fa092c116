"""The caches of conversations, measured: a chat reopened after a restart against its recompute, the turns of a chat
with and without them, and an index of a million rows.

    python scripts/measure_spill.py reopen [--model DIR] [--tokens 8000] [--rounds 5] [--out FILE]
    python scripts/measure_spill.py turns [--model DIR] [--kv DIR] [--out FILE]
    python scripts/measure_spill.py index [--segments 1000000] [--kv DIR]

`reopen` runs one prompt on an engine with an empty cache, closes it, and asks the same prompt of a new engine over the
same directory (the page cache is asked to forget the files first), a few times, and gives the median. The bar: time to
first token at most 1.3 times bytes / measured disk rate + 100 ms, with the rate as measured right after.

`turns` asks five questions of one chat, once as they come and once with a salt of its own for each request, which no
cache can serve; the bar from turn 2 on: 68% less time to the first token, and only what is new computed. `index` times
the start and lookups of prompts of up to 32k tokens (wall, and the time the processor spent, for busy machines).
Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tier_tools import disk_rate, forget_pages

from localspec.api.types import Sampling
from localspec.cache.spill import ModelIdentity, SpillLimits, SpillStore
from localspec.cache.spill_index import SEGMENT
from localspec.cache.spill_keys import fingerprint, id_bytes, root_key, segment_places
from localspec.core.records import SEGMENT_TOKENS, Request
from localspec.engine.build import Assembled, EngineOptions, ModelPlace, build
from localspec.engine.loop import DecodeLoop, EndNews, News, PrefillNews, StepNews

CHAIN_SEGMENTS = 128
INDEXES = ("block_by_parent", "block_by_priority", "segment_ids_by_key", "chat_by_key")
TRIGGERS = ("block_added", "block_removed")


@dataclass
class Asked:
    """What one request gave."""

    first_token_s: float = 0.0
    cached_tokens: int = 0
    miss_reason: str = ""
    token_ids: list[int] = field(default_factory=list)


def ask(loop: DecodeLoop, ids: list[int], salt: str = "", max_tokens: int = 8) -> Asked:
    """One request on a running engine, alone."""
    asked, done = Asked(), threading.Event()

    def see(news: News) -> None:
        if isinstance(news, PrefillNews):
            asked.cached_tokens, asked.miss_reason = news.cached_tokens, news.miss_reason
        elif isinstance(news, StepNews):
            asked.first_token_s = asked.first_token_s or time.perf_counter() - started_s
            asked.token_ids.extend(news.result.token_ids)
        elif isinstance(news, EndNews):
            done.set()

    started_s = time.perf_counter()
    loop.submit(Request("", tuple(ids), Sampling(), 1, max_tokens, (), drafter="off", cache_salt=salt), see)
    done.wait()
    return asked


def engine(model_dir: Path, kv_dir: Path, context: int) -> Assembled:
    """The demo model's engine over a cache directory, running."""
    limits = SpillLimits(cap_bytes=1 << 40, min_free_bytes=0)
    options = EngineOptions(device="cpu", context_tokens=context, kv_dir=kv_dir, kv_limits=limits)
    parts = build(ModelPlace("demo", model_dir, "demo"), options, lambda stage: None).parts
    parts.loop.start()
    return parts


def first_token(model_dir: Path, kv_dir: Path, ids: list[int], context: int) -> dict[str, float]:
    """Start an engine, ask once, close it; seconds to the first token and what came from the cache."""
    parts = engine(model_dir, kv_dir, context)
    asked = ask(parts.loop, ids)
    started_s = time.perf_counter()
    parts.loop.stop()
    facts: dict[str, float] = {"first_token_s": asked.first_token_s, "cached_tokens": asked.cached_tokens}
    facts |= {"close_s": time.perf_counter() - started_s, **parts.metrics.snapshot().tiers}
    return facts | {"check": hash(tuple(asked.token_ids))}


def turns_of(model_dir: Path, kv_dir: Path) -> dict[str, object]:
    """Five turns: 400 tokens at first, 60 more each time, answers of 24."""
    generator = random.Random(3)
    parts = engine(model_dir, kv_dir, 2048)
    ask(parts.loop, [generator.randrange(1000, 40_000) for _ in range(300)], "warm-up")
    rows: list[dict[str, Any]] = []
    ids = [generator.randrange(1000, 40_000) for _ in range(400)]
    for turn in range(1, 6):
        without = ask(parts.loop, ids, f"alone {turn}", 24)
        cached = ask(parts.loop, ids, max_tokens=24)
        if cached.token_ids != without.token_ids:
            raise SystemExit("a cached turn gave other tokens; no figure stands")
        rows.append(
            {
                "turn": turn,
                "prompt_tokens": len(ids),
                "computed_tokens": len(ids) - cached.cached_tokens,
                "without_s": round(without.first_token_s, 4),
                "cached_s": round(cached.first_token_s, 4),
                "less": round(1 - cached.first_token_s / without.first_token_s, 3),
                "miss_reason": cached.miss_reason,
            }
        )
        ids = [*ids, *cached.token_ids, *(generator.randrange(1000, 40_000) for _ in range(60))]
    parts.loop.stop()
    return {"turns": rows, "least_less_from_turn_2": min(row["less"] for row in rows[1:])}


def reopen(model_dir: Path, kv_dir: Path, num_tokens: int, rounds: int) -> dict[str, object]:
    """Compute and keep a chat once, then open it `rounds` times, each time beside the disk's rate at that moment."""
    generator = random.Random(3)
    ids = [generator.randrange(1000, 40_000) for _ in range(num_tokens)]
    context = num_tokens + 64
    cold = first_token(model_dir, kv_dir, ids, context)
    stored = sum(path.stat().st_size for path in kv_dir.rglob("*.blk"))
    seconds, bars, rates, restores = [], [], [], []
    for _ in range(rounds):
        forget_pages(kv_dir)
        warm = first_token(model_dir, kv_dir, ids, context)
        if cold["check"] != warm["check"]:
            raise SystemExit("the restored chat gave other tokens; no figure stands")
        forget_pages(kv_dir)
        rate, _ = disk_rate(kv_dir)
        seconds.append(round(warm["first_token_s"], 3))
        bars.append(round(1.3 * stored / rate + 0.1, 3))
        rates.append(round(rate / 1e6, 1))
        restores.append(warm["ssd_restore_mb_per_s"])
    return {
        "tokens": num_tokens,
        "cached_tokens": warm["cached_tokens"],
        "stored_mb": round(stored / 1e6, 1),
        "recompute_s": round(cold["first_token_s"], 3),
        "from_disk_s": statistics.median(seconds),
        "ratio": round(statistics.median(seconds) / cold["first_token_s"], 4),
        "disk_mb_per_s": statistics.median(rates),
        "bar_s": statistics.median(bars),
        "rounds_within_bar": sum(second <= bar for second, bar in zip(seconds, bars, strict=True)),
        "restore_mb_per_s": statistics.median(restores),
        "rounds": [list(figures) for figures in zip(seconds, bars, rates, restores, strict=True)],
        "first_close_s": round(cold["close_s"], 3),
    }


def chain_ids(chain: int) -> list[int]:
    return [(chain * 7919 + i * 31) % 50_000 for i in range(CHAIN_SEGMENTS * SEGMENT_TOKENS)]


def fill(store: SpillStore, num_segments: int) -> None:
    """Rows only. Indexes are made at the end: one by one a million takes an hour."""
    index, owner = store.index, store.identity
    db = index.connection()
    made = dict(db.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall())
    db.execute("BEGIN")
    for name in INDEXES:
        db.execute(f"DROP INDEX {name}")
    for name in TRIGGERS:
        db.execute(f"DROP TRIGGER {name}")
    root = root_key(owner.fingerprint, "")
    for chain in range(num_segments // CHAIN_SEGMENTS):
        data = id_bytes(chain_ids(chain))
        places = segment_places(root, data)
        rows = [
            (p.key, owner.fingerprint, p.parent, SEGMENT, p.begin, p.end, 8 << 20, -30.0, chain / 32.0) for p in places
        ]
        db.executemany("INSERT INTO block VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", rows)
        ids = [(p.parent, data[4 * p.begin : 4 * p.end], p.key) for p in places]
        db.executemany("INSERT INTO segment_ids VALUES (?, ?, ?)", ids)
    for name in (*INDEXES, *TRIGGERS):
        db.execute(made[name])
    count = num_segments // CHAIN_SEGMENTS * CHAIN_SEGMENTS
    db.execute("UPDATE model SET num_blocks = ?, stored_bytes = ?", (count, count * (8 << 20)))
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def index_of(kv_dir: Path, num_segments: int) -> dict[str, float]:
    owner = ModelIdentity(fingerprint(["measure"]), "measure", "", 32_768, 0, False)
    limits = SpillLimits(cap_bytes=1 << 60, min_free_bytes=0)
    store = SpillStore(kv_dir, owner, limits)
    started_s = time.perf_counter()
    fill(store, num_segments)
    fill_s = time.perf_counter() - started_s
    store.close()
    started_s = time.perf_counter()
    store = SpillStore(kv_dir, owner, limits)
    start_s = time.perf_counter() - started_s
    generator = random.Random(1)
    times_ms, busy_ms = [], []
    for _ in range(300):
        ids = chain_ids(generator.randrange(num_segments // CHAIN_SEGMENTS))
        cut = generator.randrange(1, len(ids))
        asked = [*ids[:cut], 60_000]
        started_s, busy_s = time.perf_counter(), time.thread_time()
        found = store.lookup(asked)
        times_ms.append((time.perf_counter() - started_s) * 1e3)
        busy_ms.append((time.thread_time() - busy_s) * 1e3)
        if found.num_tokens != cut:
            raise SystemExit(f"a lookup found {found.num_tokens} of {cut} tokens")
    times_ms.sort()
    return {
        "segments": num_segments,
        "index_mb": round((kv_dir / "index.sqlite3").stat().st_size / 1e6),
        "fill_s": round(fill_s, 1),
        "start_s": round(start_s, 4),
        "lookup_p50_ms": round(statistics.median(times_ms), 3),
        "lookup_p95_ms": round(times_ms[285], 3),
        "lookup_busy_p50_ms": round(statistics.median(busy_ms), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("reopen", "turns", "index"))
    parser.add_argument("--model", type=Path, default=Path(".test-home/models/smollm2-135m"))
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=5, help="how often the chat is opened")
    parser.add_argument("--segments", type=int, default=1_000_000)
    parser.add_argument("--kv", type=Path)
    parser.add_argument("--out", type=Path, help="write the JSON there too")
    arguments = parser.parse_args()
    kv_dir = arguments.kv or Path(tempfile.mkdtemp(prefix="localspec-spill-"))
    try:
        result: dict[str, object]
        if arguments.what == "reopen":
            result = reopen(arguments.model, kv_dir, arguments.tokens, arguments.rounds)
        elif arguments.what == "turns":
            result = turns_of(arguments.model, kv_dir)
        else:
            result = dict(index_of(kv_dir, arguments.segments))
    finally:
        if arguments.kv is None:
            shutil.rmtree(kv_dir, ignore_errors=True)
    for name, value in result.items():
        print(f"{name:<20} {value}")
    document = json.dumps({"benchmark": f"spill_{arguments.what}", **result})
    print(document)
    if arguments.out is not None:
        arguments.out.write_text(document + "\n")


if __name__ == "__main__":
    main()

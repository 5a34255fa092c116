#!/usr/bin/env python3
"""Decoding beside an n-gram table on the SSD against the same table in memory, at the 27B's shapes: one JSON.

    python scripts/device_ngram.py [PATH...] [--tokenizer FILE] [--layers 64 32] [--out FILE] [--tiny]

A table is built from the Python files of the trees (this Python's libraries if none are named) as `localspec ngram
build` does, some files kept back. Weights are random, so the target is made to write the kept-back files: what is drawn
at a row is the file's next token, on the same path as any other step, and look-ups, hits and accepted drafts are those
of real code. Two engines recite the same files: one reads the table from a disk whose page cache was asked to forget
it, with the memory that the engine gives a table; the other has every page in memory. Bars: the table at least 8 times
its memory, tokens/s on disk 0.98 of those in memory, and the decode thread's time for look-ups 2% of a step. Fewer
layers stand for more steps a second. `--tiny` takes the same way with a tiny model on a CPU, where no rate means
anything.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from localspec.api.types import Sampling
from localspec.core.records import Draft, Request, Rows
from localspec.drafters import NgramTableHandle
from localspec.drafters._ngram_device import DeviceNgramDrafter
from localspec.drafters._ngram_policy import NgramPolicy
from localspec.engine.build import Assembled, EngineOptions, assemble, cache_dtype
from localspec.engine.ngram_feed import FeedingRing
from localspec.engine.ngram_tables import MAX_PENDING_READS, RAM_CAP_PER_TABLE_BYTES, READ_THREADS
from localspec.engine.ring import Landed, ResultRing
from localspec.engine.synthetic_decode import Decoded, decode_all
from localspec.hub.corpus import tokenizer_fingerprint
from localspec.hub.ngram_sync import SyncOptions, TableSync
from localspec.kernels.ops import Ops
from localspec.kernels.table import choose
from localspec.models import Model, architecture
from localspec.runner.synthetic import QWEN3_5_27B, SyntheticCheckpoint
from localspec.sampling.accept import RowRules
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_cache import FRAME_COST_BYTES, PageKey
from localspec.storage.ngram_format import PAGE_BYTES
from localspec.storage.ngram_runs import NgramTable

ROOT = Path(__file__).parent.parent
BARS = {"table_over_memory": 8.0, "disk_over_memory": 0.98, "decode_thread_share": 0.02}
LIBRARIES = ("torch", "transformers", "numpy")


@dataclass(frozen=True)
class Plan:
    """What to measure. corpus_bytes: of text in the table; each of `texts` files is written as `max_tokens` tokens
    after the `prompt_tokens` before them; ram_cap_bytes: of the table on disk."""

    config: Mapping[str, Any]
    tokenizer: Path
    trees: tuple[Path, ...]
    layers: tuple[int, ...] = (64, 32)
    device: str = "cuda"
    depth: int = 7
    corpus_bytes: int = 52 << 20
    texts: int = 6
    prompt_tokens: int = 512
    max_tokens: int = 768
    ram_cap_bytes: int = RAM_CAP_PER_TABLE_BYTES


class Recital:
    """Stands where acceptance is forced (see `sampling/synthetic.py`): every row draws the text's next token."""

    def __init__(self, length_tokens: int, device: torch.device) -> None:
        self.text = torch.zeros(length_tokens, dtype=torch.int64, device=device)

    def __call__(self, rows: Rows, draft: Draft, seeds: Tensor) -> RowRules:
        following = self.text[(rows.positions + 1).clamp(0, len(self.text) - 1)]
        return RowRules(forced=torch.where(rows.slots >= 0, following, -1))


class Stopwatch:
    """Seconds of the decode thread in landing steps with a table, less those of landing them without."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0

    def ring(self, lag: int, parts: Assembled, drafter: DeviceNgramDrafter) -> FeedingRing:
        """The engine's ring with the look-ups' part timed."""
        watch = self

        class Inner(ResultRing):
            def pop(self, drain: bool = False) -> list[Landed]:
                begun_s = time.perf_counter()
                landed = super().pop(drain)
                watch.seconds -= time.perf_counter() - begun_s
                return landed

        class Timed(FeedingRing, Inner):
            def pop(self, drain: bool = False) -> list[Landed]:
                begun_s = time.perf_counter()
                landed = super().pop(drain)
                watch.seconds += time.perf_counter() - begun_s
                watch.calls += len(landed)
                return landed

        return Timed(lag, parts.scheduler, drafter.follow)


def chosen_files(trees: Sequence[Path], corpus_bytes: int, share: float) -> tuple[list[Path], list[Path]]:
    """Python files for the table, and those kept back: a share of them by a hash of the path, each text once."""
    kept: list[Path] = []
    held: list[Path] = []
    seen: set[bytes] = set()
    total = 0
    for path in sorted(path for tree in trees for path in tree.rglob("*.py")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        digest = hashlib.sha256(data).digest()
        if not data or digest in seen:
            continue
        seen.add(digest)
        # Only the end of the path: the same files are kept back wherever the tree lies.
        number = hashlib.sha256("/".join(path.parts[-3:]).encode()).digest()[0]
        (held if number < share * 256 else kept).append(path)
        total += len(data)
        if total >= corpus_bytes:
            break
    return kept, held


def texts_of(paths: Sequence[Path], tokenizer: Tokenizer, plan: Plan) -> list[list[int]]:
    """The middle of each of some files that are long enough, the first one to warm up with, as token ids."""
    needed = plan.prompt_tokens + plan.max_tokens + 1
    found: list[list[int]] = []
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.name.encode()).digest()):
        ids = tokenizer.encode(path.read_text(encoding="utf-8", errors="replace"), add_special_tokens=False).ids
        if len(ids) >= needed:
            begin = (len(ids) - needed) // 2
            found.append(ids[begin : begin + needed])
        if len(found) > plan.texts:
            break
    if len(found) < 2:
        raise SystemExit(f"no two of {len(paths)} kept-back files have {needed} tokens; name larger trees")
    return found


def forget(folder: Path) -> None:
    """Ask the page cache to drop a table's files."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_all(table: NgramTable) -> None:
    """Have every page of a table in its memory."""
    for slot in table._view.slots:
        for first in range(1, slot.run.header.page_count + 1, MAX_PENDING_READS):
            pages = range(first, min(first + MAX_PENDING_READS, slot.run.header.page_count + 1))
            table._cache.request([(PageKey(slot.number, page), slot.run) for page in pages])
            while table.pending_reads:
                time.sleep(0.0005)


class Bench:
    """One document that grows section by section; `keep` is given it as it grows."""

    def __init__(self, plan: Plan, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
        self._plan, self._folder, self._keep = plan, folder, keep
        self._started_s = time.perf_counter()
        ops, _ = choose(plan.device)
        ops.cache_dtype = cache_dtype(ops, "auto")
        self._ops: Ops = ops
        self._fingerprint = b""
        self._texts: list[list[int]] = []
        self.document: dict[str, Any] = {
            "benchmark": "device_ngram",
            "device": torch.cuda.get_device_name(ops.device) if ops.device.type == "cuda" else "cpu",
            "weights": "random",
            "text": "kept-back files that the target is made to write",
            "depth": plan.depth,
            "bars": BARS,
            "figures": {},
        }

    def run(self) -> dict[str, Any]:
        """The table, then every number of layers; the order of disk and memory changes between them."""
        self.build()
        for index, layers in enumerate(self._plan.layers):
            config = json.loads(json.dumps(self._plan.config))
            config["text_config"]["num_hidden_layers"] = layers
            with torch.inference_mode():
                model = architecture("qwen3_5").load(config, SyntheticCheckpoint(config, self._ops.device), self._ops)
            self._say(f"{layers} layers loaded", {})
            found: dict[str, Any] = {}
            self.document[f"layers_{layers}"] = found
            for place in ("disk", "memory")[:: -1 if index % 2 else 1]:
                found[place] = self.recite(model, on_disk=place == "disk", plain=place == "disk" and not index)
                self._say(f"{layers} layers, {place}", found[place])
            self._compare(found)
            self._say(f"{layers} layers, compared", self.document["figures"])
            del model
            gc.collect()
        return self.document

    def build(self) -> None:
        """The table as a user builds one, and the texts that are kept back."""
        plan, model_folder = self._plan, self._folder / "model"
        model_folder.mkdir()
        shutil.copy(plan.tokenizer, model_folder / "tokenizer.json")
        self._fingerprint = tokenizer_fingerprint(model_folder)
        tokenizer = Tokenizer.from_file(str(plan.tokenizer))
        kept, held = chosen_files(plan.trees, plan.corpus_bytes, 13 / 256)
        self._texts = texts_of(held, tokenizer, plan)
        begun_s = time.perf_counter()
        report = TableSync(self._folder / "table", model_folder, SyncOptions()).run(kept, lambda progress: None)
        table = report.table
        self.document["table"] = {
            "trees": sorted({tree.name for tree in plan.trees}),
            "files": len(kept),
            "tokenizer_tokens": tokenizer.get_vocab_size(),
            "tokens": table.tokens,
            "table_bytes": table.table_bytes,
            "bytes_per_token": round(table.table_bytes / max(table.tokens, 1), 1),
            "tokenise_s": round(report.tokenise_s, 2),
            "index_s": round(report.index_s, 2),
            "indexed_tokens_per_s": round(table.tokens / max(report.index_s, 1e-9)),
            "seconds": round(time.perf_counter() - begun_s, 2),
            "ram_cap_bytes": plan.ram_cap_bytes,
        }
        self.document["figures"]["table_over_memory"] = round(table.table_bytes / plan.ram_cap_bytes, 2)
        self._say("table", self.document["table"])

    def recite(self, model: Model, on_disk: bool, plain: bool) -> dict[str, Any]:
        """All texts with the table in one place, each once and for the first time; `plain`: one without drafts too."""
        watch = Stopwatch()
        with AsyncReader(threads=READ_THREADS) as reader, self._engine(model, reader, on_disk, watch) as engine:
            parts, table, handle, recital = engine
            self._write(parts, recital, self._texts[0], "ngram_disk")
            if on_disk:
                forget(self._folder / "table")
            before, read_before = table.statistics(), reader.statistics()
            watch.seconds, watch.calls, handle.counts.drafts, handle.counts.accepted_tokens = 0.0, 0, 0, 0
            all_seen = [self._write(parts, recital, text, "ngram_disk") for text in self._texts[1:]]
            after, read = table.statistics(), reader.statistics()
            found = _figures(all_seen)
            steps = watch.calls
            requested = max(after.requested_pages - before.requested_pages, 1)
            found |= {
                "lookups": after.lookups - before.lookups,
                "hits": after.hits - before.hits,
                "late": after.late - before.late,
                "spoke_in_steps": round(handle.counts.drafts / max(steps, 1), 4),
                "accepted_per_draft": round(handle.counts.accepted_tokens / max(handle.counts.drafts, 1), 3),
                "decode_thread_us_per_step": round(watch.seconds / max(steps, 1) * 1e6, 2),
                "decode_thread_share": round(watch.seconds / sum(seen.seconds for seen in all_seen), 5),
                "requested_pages": requested,
                "cached_share": round((after.cached_pages - before.cached_pages) / requested, 4),
                "dropped_pages": after.dropped_pages - before.dropped_pages,
                "reads": read.reads - read_before.reads,
                "read_mb": round((read.read_bytes - read_before.read_bytes) / 1e6, 2),
                "read_p50_us": read.device_p50_us,
                "read_p99_us": read.device_p99_us,
                "past_page_cache": table._view.slots[0].run.file.direct,
                "table_memory_bytes": after.index_bytes + after.cache_bytes,
            }
            if plain:
                self._write(parts, recital, self._texts[0], "off")
                self.document["plain"] = _figures([self._write(parts, recital, self._texts[1], "off")])
        return found

    @contextmanager
    def _engine(
        self, model: Model, reader: AsyncReader, on_disk: bool, watch: Stopwatch
    ) -> Iterator[tuple[Assembled, NgramTable, NgramTableHandle, Recital]]:
        plan = self._plan
        folder = self._folder / "table"
        everything_bytes = 2 * (self.document["table"]["table_bytes"] // PAGE_BYTES + 1) * FRAME_COST_BYTES
        cap_bytes = plan.ram_cap_bytes if on_disk else max(everything_bytes, plan.ram_cap_bytes)
        table = NgramTable.open(
            folder, self._fingerprint, reader, ram_cap_bytes=cap_bytes, max_pending=MAX_PENDING_READS
        )
        if on_disk:
            forget(folder)
        else:
            read_all(table)
            self._say("every page in memory", {"bytes": table.statistics().cache_bytes})
        handle = NgramTableHandle("libraries", table)
        drafter = DeviceNgramDrafter((handle,), NgramPolicy(), self._ops, model.vocab_size)
        limit = plan.prompt_tokens + plan.max_tokens + 1024
        options = EngineOptions(device=str(self._ops.device))
        parts = assemble(model, self._ops, limit, {"ngram_disk": drafter}, options)
        recital = Recital(limit, self._ops.device)
        device: Any = parts.loop.stages.device
        device._acceptance = recital
        parts.loop._ring = watch.ring(parts.loop._ring.lag, parts, drafter)
        parts.loop.start()
        try:
            yield parts, table, handle, recital
        finally:
            parts.loop.stop()
            drafter.close()
            del parts, device
            gc.collect()
            if self._ops.device.type == "cuda":
                torch.cuda.empty_cache()

    def _write(self, parts: Assembled, recital: Recital, text: Sequence[int], drafter: str) -> Decoded:
        plan = self._plan
        ids = torch.tensor(text)

        def take() -> None:
            recital.text[: len(ids)].copy_(ids)

        parts.loop.call(take).result()
        depth = None if drafter == "off" else plan.depth
        prompt = tuple(text[: plan.prompt_tokens])
        request = Request("", prompt, Sampling(), 1, plan.max_tokens, (), drafter=drafter, depth=depth)
        seen = decode_all(parts, [request])[0]
        expected = list(text[plan.prompt_tokens : plan.prompt_tokens + plan.max_tokens])
        if seen.token_ids != expected:
            raise RuntimeError("what was written is not the text")
        return seen

    def _compare(self, found: dict[str, Any]) -> None:
        figures, disk, memory = self.document["figures"], found["disk"], found["memory"]
        found["disk_over_memory"] = round(disk["tok_per_s"] / memory["tok_per_s"], 4)
        found["tokens_per_step_disk_over_memory"] = round(disk["tokens_per_step"] / memory["tokens_per_step"], 4)
        figures["disk_over_memory"] = min(figures.get("disk_over_memory", 9.0), found["disk_over_memory"])
        figures["decode_thread_share"] = max(figures.get("decode_thread_share", 0.0), disk["decode_thread_share"])

    def _say(self, what: str, found: Any) -> None:
        self.document["seconds"] = round(time.perf_counter() - self._started_s, 1)
        print(f"{self.document['seconds']} s, {what}: {json.dumps(found)}", flush=True)
        self._keep(self.document)


def _figures(all_seen: Sequence[Decoded]) -> dict[str, float]:
    """Of several answers together, and the slowest and fastest one."""
    tokens = sum(len(seen.token_ids) for seen in all_seen)
    seconds = sum(seen.seconds for seen in all_seen)
    steps = sum(seen.end.timings.verify_steps for seen in all_seen if seen.end is not None)
    rows = [seen.figures() for seen in all_seen]
    return {
        "tokens": tokens,
        "tok_per_s": round(tokens / seconds, 2),
        "steps_per_s": round(steps / seconds, 2),
        "tokens_per_step": round(tokens / steps, 4),
        "idle": round(sum(row["idle"] for row in rows) / len(rows), 4),
        "draft_ms": round(sum(row["draft_ms"] for row in rows) / len(rows), 4),
        "verify_ms": round(sum(row["verify_ms"] for row in rows) / len(rows), 4),
        "slowest_text_tok_per_s": round(min(row["tok_per_s"] for row in rows), 2),
        "fastest_text_tok_per_s": round(max(row["tok_per_s"] for row in rows), 2),
    }


def library_folders() -> tuple[Path, ...]:
    """Where the large libraries of this Python lie."""
    specs = [importlib.util.find_spec(name) for name in LIBRARIES]
    return tuple(sorted({Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin}))


def plan_of(arguments: argparse.Namespace) -> Plan:
    """The plan of a command line."""
    trees = tuple(arguments.paths) or library_folders()
    if not arguments.tiny:
        return Plan(QWEN3_5_27B, arguments.tokenizer, trees, tuple(arguments.layers), depth=arguments.depth)
    config = json.loads(json.dumps(architecture("qwen3_5").tiny_config()))
    config["text_config"]["vocab_size"] = Tokenizer.from_file(str(arguments.tokenizer)).get_vocab_size()
    return Plan(
        config,
        arguments.tokenizer,
        trees,
        layers=(config["text_config"]["num_hidden_layers"],),
        device="cpu",
        depth=arguments.depth,
        corpus_bytes=4 << 20,
        texts=2,
        prompt_tokens=64,
        max_tokens=96,
        ram_cap_bytes=2 << 20,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", type=Path, help="source trees; this Python's libraries by default")
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "tests/data/small_hybrid/tokenizer.json")
    parser.add_argument("--layers", type=int, nargs="+", default=[64, 32])
    parser.add_argument("--depth", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to build; a new temporary directory by default")
    parser.add_argument("--out", type=Path, default=Path("scripts/results/h200_ngram.json"))
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)

    def keep(document: dict[str, Any]) -> None:
        arguments.out.write_text(json.dumps(document, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="localspec-ngram-", dir=arguments.folder) as folder:
        print(json.dumps(Bench(plan_of(arguments), Path(folder), keep).run()), flush=True)


if __name__ == "__main__":
    main()

"""Measure what n-gram tables add to drafting on real code, without a model and with the demo model.

Replay: files of a source tree are split in two; a table is built from one part, and the held-out files stand for the
model's output (teacher-forced: the draft is right as far as it equals the file). The drafters of the engine propose as
they do there; tokens a step are counted with the text itself alone, with the table alone, with chains of both, and with
an exhaustive reference in the table's place that knows every occurrence of every context of the same lengths. It is an
upper bound for a model that writes exactly these files.

Model (--model): the demo model answers real prompts with drafting off, ngram, and the chain with the table; steps,
hits, milliseconds and speed-up are printed also where the gain is nil.

Prints a table and one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from localspec.api.types import Delta, Done, GenerateRequest, Message
from localspec.core.records import MAX_SLOTS, Draft, Forward, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter, NgramTableHandle
from localspec.drafters._ngram_device import DeviceNgramDrafter
from localspec.drafters._ngram_policy import NgramPolicy
from localspec.drafters.ngram import NgramDrafter, NgramOptions
from localspec.drafters.ngram_disk import NgramDiskDrafter
from localspec.engine.build import EngineOptions, ModelPlace
from localspec.engine.drafting import NO_CACHE
from localspec.engine.engine import LocalEngine
from localspec.hub.corpus import find_files, read_texts, tokenizer_fingerprint
from localspec.hub.ngram_sync import SyncOptions, TableSync
from localspec.kernels.backends.reference import ReferenceOps
from localspec.runner.slots import make_state
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_choice import Continuation
from localspec.storage.ngram_format import CONTINUATION_TOKENS
from localspec.storage.ngram_runs import NgramTable

CONTEXT_TOKENS = 4096
LONGER = (16, 12)
"""Context lengths that a table tells apart beside its order."""


@dataclass(frozen=True)
class Replayed:
    """One method over the held-out text."""

    tokens_per_step: float
    drafted_per_step: float
    accepted_per_draft: float
    table_share: float
    """Of the steps, those in which a table's draft ran."""
    accepted_per_table_draft: float
    propose_us_p50: float


class Exhaustive:
    """Every occurrence of every context of the given lengths, by sorted hashes: the table's answers without limits."""

    def __init__(self, documents: Sequence[Sequence[int]], order: int) -> None:
        self._lengths = (*LONGER, order)
        # Gaps of tokens that occur nowhere keep contexts and continuations inside their document.
        gap = np.full(32, (1 << 24) - 1, dtype=np.uint64)
        self._text = np.concatenate([np.concatenate([np.array(d, dtype=np.uint64), gap]) for d in documents])
        self._index = {length: self._sorted(length) for length in self._lengths}

    def lookup(self, context: Sequence[int]) -> Continuation | None:
        """The longest length that occurs; of its continuations the most frequent path."""
        for length in self._lengths:
            if len(context) < length:
                continue
            hashes, ends = self._index[length]
            wanted = _window_hashes(np.array(context[-length:], dtype=np.uint64), length)[0]
            first, last = np.searchsorted(hashes, wanted, "left"), np.searchsorted(hashes, wanted, "right")
            if first < last:
                return self._most_frequent(ends[first:last], length)
        return None

    def prefetch_step(self, history: Sequence[int], draft: Sequence[int]) -> None:
        """All of it is in memory."""

    def _sorted(self, length: int) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
        hashes = _window_hashes(self._text, length)
        ends = np.arange(len(hashes)) + length
        known = (self._text[ends.clip(max=len(self._text) - 1)] != (1 << 24) - 1) & (ends < len(self._text))
        order = np.argsort(hashes[known], kind="stable")
        return hashes[known][order], ends[known][order]

    def _most_frequent(self, ends: NDArray[np.int64], length: int) -> Continuation:
        tokens: list[int] = []
        total, support, alive = len(ends), 0, ends
        while len(tokens) < CONTINUATION_TOKENS:
            following = Counter(int(token) for token in self._text[alive + len(tokens)])
            following.pop((1 << 24) - 1, None)
            if not following:
                break
            token, count = following.most_common(1)[0]
            support = support or count
            alive = alive[self._text[alive + len(tokens)] == token]
            tokens.append(token)
        return Continuation(tuple(tokens), length, support, support / total, 1)


def _window_hashes(text: NDArray[np.uint64], length: int) -> NDArray[np.uint64]:
    total = np.zeros(max(0, len(text) - length + 1), dtype=np.uint64)
    for offset in range(length):
        total *= np.uint64(0x9E3779B97F4A7C15)
        total += text[offset : offset + len(total)] + np.uint64(1)
        total ^= total >> np.uint64(29)
    return total


class OneStepLate:
    """The card's form on CPU tensors: its table is fed what landed while the next step was already under way."""

    def __init__(self, drafter: DeviceNgramDrafter) -> None:
        self._drafter = drafter
        self.name, self.origins, self.max_depth = drafter.name, drafter.origins, drafter.max_depth
        self.needs, self.cache_spec = drafter.needs, drafter.cache_spec
        self._landed: list[tuple[list[int], list[int]]] = []
        self._length = 0

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        return self._drafter.propose(depths, state, cache)

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        length = int(state.lengths[0])
        if rows.kind == "verify":
            known = state.history[0, :length].tolist()
            self._landed.append((known[-LONGER[0] :], known[self._length :]))
            if len(self._landed) > 1:
                self._drafter._feed.follow(0, *self._landed.pop(0))
        self._length = length

    def forget(self, slot: int) -> None:
        self._landed = []
        self._drafter._feed.follow(0, (), (), True)


def replay(drafters: Sequence[Drafter], documents: Sequence[Sequence[int]], depth: int, table: Any) -> Replayed:
    """Teacher-forced run of a chain: the first drafter that has something speaks."""
    steps = emitted = drafted = drafts = accepted_tokens = 0
    table_drafts = table_accepted = 0
    times_us: list[float] = []
    state = make_state(CONTEXT_TOKENS, 8, torch.device("cpu"))
    for document in documents:
        _start(drafters, state, document)
        length = 32
        while length < len(document):
            state.lengths[0] = length
            begun_s = time.perf_counter()
            tokens, origin = _propose(drafters, state, length, depth)
            times_us.append((time.perf_counter() - begun_s) * 1e6)
            _settle(table)
            came = document[length : length + len(tokens) + 1]
            accepted = next(
                (at for at, token in enumerate(tokens) if at >= len(came) or token != came[at]), len(tokens)
            )
            accepted = min(accepted, len(came) - 1)
            _observe(drafters, state, document, length, tokens, accepted)
            steps += 1
            emitted += accepted + 1
            drafted += len(tokens)
            drafts += bool(tokens)
            accepted_tokens += accepted
            if origin.startswith("table:"):
                table_drafts += 1
                table_accepted += accepted
            length += accepted + 1
    return Replayed(
        emitted / steps,
        drafted / steps,
        accepted_tokens / max(drafts, 1),
        table_drafts / steps,
        table_accepted / max(table_drafts, 1),
        float(np.median(times_us)),
    )


def _start(drafters: Sequence[Drafter], state: SequenceState, document: Sequence[int]) -> None:
    state.history[0, : len(document)] = torch.tensor(document)
    state.lengths[0] = 32
    for drafter in drafters:
        drafter.forget(0)
        drafter.observe(_rows("prefill", state, [0] * 31, 0), Forward(torch.zeros(1)), state, NO_CACHE)


def _propose(drafters: Sequence[Drafter], state: SequenceState, length: int, depth: int) -> tuple[list[int], str]:
    tokens: list[int] = []
    origin = ""
    for drafter in drafters:
        limit = min(depth, drafter.max_depth)
        by_slot = torch.tensor([limit] + [0] * (MAX_SLOTS - 1))
        draft = drafter.propose(Depths(by_slot, limit, (0,), (length,)), state, NO_CACHE)
        count = int(draft.num_drafts[0])
        if count and not tokens:
            tokens = draft.token_ids[0, :count].tolist()
            origin = draft.origin_names[int(draft.origins[0, 0])]
    return tokens, origin


def _observe(
    drafters: Sequence[Drafter],
    state: SequenceState,
    document: Sequence[int],
    length: int,
    tokens: list[int],
    right: int,
) -> None:
    state.lengths[0] = length + right + 1
    rows = _rows("verify", state, [document[length - 1], *tokens], length - 1)
    for drafter in drafters:
        drafter.observe(rows, Forward(torch.zeros(1)), state, NO_CACHE)


def _rows(kind: Any, state: SequenceState, tokens: list[int], start: int) -> Rows:
    count = len(tokens)
    first = torch.zeros(MAX_SLOTS, dtype=torch.int64)
    windows = first.clone()
    windows[0] = count
    positions = torch.arange(start, start + count)
    slots = torch.zeros(count, dtype=torch.int64)
    return Rows(
        kind, torch.tensor(tokens), positions, slots, state.block_tables, state.lengths, first, windows, first, start
    )


def _settle(table: Any) -> None:
    """A verification takes longer than the reads."""
    while isinstance(table, NgramTable) and table.pending_reads:
        time.sleep(0.0001)


def split(paths: Sequence[Path], tokenizer: Tokenizer, held_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids of the files for the table, and of held-out files (one in twenty, by a hash of the name)."""
    kept, held = [], []
    seen: set[bytes] = set()
    for file in find_files(paths):
        for text in read_texts(file) if file.path.suffix == ".py" else ():
            digest = hashlib.sha256(text.text.encode()).digest()
            if digest in seen:
                continue
            seen.add(digest)
            ids = tokenizer.encode(text.text, add_special_tokens=False).ids
            out = hashlib.sha256(str(file.path).encode()).digest()[0] < 13
            (held if out else kept).append(ids)
    chosen, total = [], 0
    for ids in held:
        if total < held_tokens and len(ids) > 256:
            chosen.append(ids[:3000])
            total += len(chosen[-1])
    return kept, chosen


def measure_replay(
    paths: Sequence[Path], model: Path, held_tokens: int, depth: int, order: int, only: str | None
) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    kept, held = split(paths, tokenizer, held_tokens)
    print(f"{sum(map(len, kept)):,} tokens in the table, {sum(map(len, held)):,} held out in {len(held)} files")
    fingerprint = tokenizer_fingerprint(model)
    found: dict[str, Any] = {
        "table_tokens": sum(map(len, kept)),
        "held_tokens": sum(map(len, held)),
        "depth": depth,
        "order": order,
    }
    with tempfile.TemporaryDirectory() as folder, AsyncReader() as reader:
        with RunBuilder(Path(folder), fingerprint, order=order) as builder:
            for ids in kept:
                builder.add("tree", ids)
            report = builder.finish()
        cap_bytes = max(report.table_bytes // 8, 2 << 20)
        found |= {"table_bytes": report.table_bytes, "ram_cap_bytes": cap_bytes}
        reference: Any = Exhaustive(kept, order)
        context = NgramDrafter(NgramOptions(), host_knows=True)
        careful = NgramDrafter(NgramOptions(min_match_tokens=order), host_knows=True)

        def disk(source: Any) -> NgramDiskDrafter:
            return NgramDiskDrafter((NgramTableHandle("tree", source),), NgramPolicy())

        def on_card(source: NgramTable) -> OneStepLate:
            handles = (NgramTableHandle("tree", source),)
            return OneStepLate(DeviceNgramDrafter(handles, NgramPolicy(), ReferenceOps(torch.device("cpu")), 1 << 24))

        def opened() -> NgramTable:
            return NgramTable.open(Path(folder), fingerprint, reader, ram_cap_bytes=cap_bytes)

        for name, chain in {
            "context": lambda table: (context,),
            "table": lambda table: (disk(table),),
            "context, table": lambda table: (context, disk(table)),
            "table, context": lambda table: (disk(table), context),
            "context from 8, table, context": lambda table: (careful, disk(table), context),
            "card's table, context": lambda table: (on_card(table), context),
        }.items():
            if only is not None and only not in name:
                continue
            table = opened()
            found[name] = asdict(replay(chain(table), held, depth, table))
            _print(name, found[name])
            if name not in ("context", "context, table", "card's table, context"):
                found[f"{name} (exhaustive)"] = asdict(replay(chain(reference), held, depth, reference))
                _print(f"{name} (exhaustive)", found[f"{name} (exhaustive)"])
            if name == "table":
                statistics = table.statistics()
                found["pages_cached_share"] = statistics.cached_pages / max(statistics.requested_pages, 1)
    return found


PROMPTS = {
    "code, as the library wrote it": (True, "library"),
    "code of this repository": (True, "repository"),
    "unit test for a function": (
        False, "Write a Python unittest.TestCase with three tests for a function add(a, b). Reply with code only."
    ),
    "argparse script": (False, "Write a Python script with argparse that counts the lines of a file. Code only."),
    "prose": (False, "Explain in a paragraph why the sky is blue."),
    "list": (False, "Name ten fruits, one a line."),
}  # fmt: skip
METHODS = ("off", "ngram", "ngram_disk", "ngram_disk+ngram")


async def measure_model(paths: Sequence[Path], model: Path, max_tokens: int) -> dict[str, Any]:
    """Answers of the demo model, greedy: every method must give the same tokens."""
    with tempfile.TemporaryDirectory() as folder:
        report = TableSync(Path(folder) / "tree", model, SyncOptions()).run(paths, lambda progress: None)
        print(f"table of {report.table.tokens:,} tokens in {report.table.table_bytes / 1e6:.0f} MB")
        rows: dict[str, Any] = {"table_tokens": report.table.tokens}
        engine = await _engine(model, Path(folder), learn=False)
        try:
            for name, (raw, text) in PROMPTS.items():
                rows[name] = await _answers(engine, _code(text, paths) if raw else text, raw, max_tokens)
                _print_answers(name, rows[name])
            rows["storage"] = dict(engine.metrics().storage)
        finally:
            await engine.aclose()
        # The same question in two lives of the engine: closing the first writes its answer to the user's own table.
        again = PROMPTS["unit test for a function"][1]
        engine = await _engine(model, Path(folder), learn=True)
        try:
            await _answers(engine, again, False, max_tokens, ("off",))
        finally:
            await engine.aclose()
        engine = await _engine(model, Path(folder), learn=False)
        try:
            rows["asked again"] = await _answers(engine, again, False, max_tokens)
            _print_answers("asked again", rows["asked again"])
        finally:
            await engine.aclose()
    return rows


async def _engine(model: Path, tables: Path, learn: bool) -> LocalEngine:
    place = ModelPlace(model.name, model, model.name)
    options = EngineOptions(device="cpu", context_tokens=2048, ngram_dir=tables, ngram_learn=learn)
    engine = LocalEngine(lambda model_id, show: place, options)
    engine.start(model.name)
    await engine.wait_ready()
    return engine


def _print_answers(name: str, rows: dict[str, dict[str, Any]]) -> None:
    for method, row in rows.items():
        print(f"{name:32} {method:18} " + "  ".join(f"{key} {value}" for key, value in row.items()), flush=True)


def _code(name: str, paths: Sequence[Path]) -> str:
    """The middle of a file of the library, or of this repository."""
    path = paths[0] / "argparse.py" if name == "library" else Path(__file__).parent.parent / "localspec" / "config.py"
    return path.read_text(encoding="utf-8")[1500:3000]


async def _answers(
    engine: LocalEngine, text: str, raw: bool, max_tokens: int, methods: Sequence[str] = METHODS
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    plain_ids: tuple[int, ...] = ()
    for method in methods:
        request = GenerateRequest(
            messages=() if raw else (Message("user", text),),
            prompt=text if raw else None,
            max_tokens=max_tokens,
            drafter=method,
        )
        ids: list[int] = []
        table_chars = chars = 0
        before = engine.metrics().storage
        async for event in engine.generate(request):
            if isinstance(event, Delta):
                ids.extend(event.token_ids)
                chars += sum(span.n_chars for span in event.spans)
                table_chars += sum(span.n_chars for span in event.spans if span.origin.startswith("table:"))
            elif isinstance(event, Done):
                timings = event.timings
        if method == "off":
            plain_ids, plain_rate = tuple(ids), timings.tok_per_s
        assert tuple(ids) == plain_ids, f"{method} changed the answer"
        after = engine.metrics().storage
        rows[method] = {
            "tokens": len(ids),
            "steps": timings.verify_steps,
            "drafted": timings.draft_n,
            "accepted": timings.draft_n_accepted,
            "lookups": int(after["ngram_lookups"] - before["ngram_lookups"]),
            "hits": int(after["ngram_hits"] - before["ngram_hits"]),
            "table_chars_share": round(table_chars / max(chars, 1), 3),
            "draft_ms_per_step": round(timings.draft_ms / max(timings.verify_steps, 1), 3),
            "tok_per_s": round(timings.tok_per_s, 1),
            "speedup": round(timings.tok_per_s / plain_rate, 2) if plain_rate else None,
        }
    return rows


def _print(name: str, row: dict[str, float]) -> None:
    print(
        f"{name:44} {row['tokens_per_step']:.3f} tokens/step  {row['drafted_per_step']:.2f} drafted  "
        f"table in {row['table_share']:.1%} of steps, {row['accepted_per_table_draft']:.2f} accepted each  "
        f"{row['propose_us_p50']:.0f} us"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--folder", type=Path, required=True, help="model folder")
    parser.add_argument("--held-tokens", type=int, default=40_000)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--order", type=int, default=8)
    parser.add_argument("--model", action="store_true", help="answer prompts with the demo model instead")
    parser.add_argument("--only", help="of the replay's methods, those whose name holds this")
    parser.add_argument("--max-tokens", type=int, default=96)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.model:
        print(json.dumps(asyncio.run(measure_model(given.paths, given.folder, given.max_tokens))))
        return 0
    print(
        json.dumps(measure_replay(given.paths, given.folder, given.held_tokens, given.depth, given.order, given.only))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

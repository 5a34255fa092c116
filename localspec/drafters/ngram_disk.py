"""Drafts from tables of n-grams that lie on the SSD: what followed the last tokens in the user's own text.

Where the host knows the tokens at once (CPU) it looks them up itself; pages that the next step may need are asked for
before the verification and read during it. On a card see `_ngram_device.py`. A page that is late is no draft.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter, DrafterSetup, NgramTableHandle
from localspec.drafters._ngram_device import DeviceNgramDrafter
from localspec.drafters._ngram_policy import CONTEXT_TOKENS, Advisor, Guess, NgramPolicy
from localspec.storage.aio import AsyncReader
from localspec.storage.ngram_build import RunBuilder
from localspec.storage.ngram_choice import Continuation
from localspec.storage.ngram_format import CONTINUATION_TOKENS
from localspec.storage.ngram_runs import MAX_WISHES, NgramTable

needs_weights = False
NAME = "ngram_disk"
IDLE_STEPS = 32
"""A slot for which this long nobody asked is not read for."""
_TINY_CLASSES = 16
_TINY_SHIFT = 4
_TINY_TOKENS = 16_000
_TINY_ORDER = 3
_TINY_CAP_BYTES = 8 << 20


@dataclass
class _Slot:
    """What is remembered of one sequence between two calls."""

    prefetched: bool = False
    """Pages for the end of the prompt were asked for."""
    idle_steps: int = 0
    known_tokens: int = 0
    guesses: tuple[Guess, ...] = ()
    """For the position after `known_tokens`; not yet judged."""


class NgramDiskDrafter:
    """The host's form: every value it reads is in host memory."""

    name = NAME
    max_depth = CONTINUATION_TOKENS
    needs = HiddenNeeds()
    cache_spec = CacheSpec(owner=NAME, fingerprint=NAME)

    def __init__(self, handles: tuple[NgramTableHandle, ...], policy: NgramPolicy) -> None:
        self.origins: tuple[str, ...] = tuple(f"table:{handle.name}" for handle in handles)
        self.advisor = Advisor(handles, policy)
        self._slots: dict[int, _Slot] = {}

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """The best table's continuation of each slot's last tokens, and reads posted for what may come after it."""
        num_slots = state.lengths.shape[0]
        tokens = [[-1] * depths.max_depth for _ in range(num_slots)]
        origins = [[0] * depths.max_depth for _ in range(num_slots)]
        confidence = [[0.0] * depths.max_depth for _ in range(num_slots)]
        counts = [0] * num_slots
        lengths, allowed = state.lengths.tolist(), depths.depths.tolist()
        for number in depths.slots:
            if not allowed[number] or not lengths[number]:
                continue
            guess = self._ask(number, lengths[number], _tail(state, number, lengths[number]), allowed[number])
            if guess is not None:
                count = counts[number] = min(allowed[number], len(guess.tokens))
                tokens[number][:count] = guess.tokens[:count]
                origins[number][:count] = [guess.table] * count
                confidence[number][:count] = [guess.found.share] * count
        shape = (num_slots, depths.max_depth)
        return Draft(
            token_ids=torch.tensor(tokens, dtype=torch.int64).reshape(shape),
            origins=torch.tensor(origins, dtype=torch.int64).reshape(shape),
            num_drafts=torch.tensor(counts, dtype=torch.int64),
            origin_names=self.origins,
            confidence=torch.tensor(confidence, dtype=torch.float32).reshape(shape),
        )

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Judge what was guessed by what came, and have the pages read for the position that was reached."""
        if rows.kind == "prefill":
            for number in set(rows.slots.tolist()) - {-1}:
                self._prefetch_prompt(number, state)
            return
        lengths = state.lengths.tolist()
        windows, starts = rows.window_rows.tolist(), rows.window_starts.tolist()
        for number, slot in self._slots.items():
            if not windows[number] or slot.idle_steps >= IDLE_STEPS:
                continue
            slot.idle_steps += 1
            came = state.history[number, slot.known_tokens : lengths[number]].tolist() if slot.guesses else []
            if came:
                start = starts[number]
                self.advisor.judge(slot.guesses, came)
                ran = rows.token_ids[start + 1 : start + windows[number]].tolist()
                self.advisor.count(slot.guesses[0], ran, came)
            slot.guesses = ()
            # What a drafter before this one had accepted could not be foreseen; these pages come soon enough for the
            # step after the next at worst.
            self.advisor.prefetch(_tail(state, number, lengths[number])[:-1], ())

    def forget(self, slot: int) -> None:
        """Another text begins; what the tables were worth stays known."""
        self._slots.pop(slot, None)

    def _ask(self, number: int, known_tokens: int, tail: list[int], depth: int) -> Guess | None:
        slot = self._slots.setdefault(number, _Slot())
        slot.idle_steps, slot.known_tokens = 0, known_tokens
        slot.guesses = self.advisor.ask(tail)
        best = slot.guesses[0] if slot.guesses else None
        self.advisor.prefetch(tail, best.tokens[:depth] if best is not None else ())
        return best if best is not None and best.speaks else None

    def _prefetch_prompt(self, number: int, state: SequenceState) -> None:
        slot = self._slots.setdefault(number, _Slot())
        if not slot.prefetched:
            slot.prefetched = True
            self.advisor.prefetch(_tail(state, number, int(state.lengths[number]))[:-1], ())


def _tail(state: SequenceState, number: int, length: int) -> list[int]:
    """The last tokens of a slot, as many as any table looks at."""
    tail: list[int] = state.history[number, max(0, length - CONTEXT_TOKENS) : length].tolist()
    return tail


def build(setup: DrafterSetup) -> Drafter:
    """The drafter over the tables that were opened for this model. Raises ValueError if there is none."""
    if not setup.ngram_tables:
        raise ValueError("ngram_disk needs a table; make one with: localspec ngram build NAME PATH")
    if setup.ops.waits:
        return NgramDiskDrafter(setup.ngram_tables, NgramPolicy())
    return DeviceNgramDrafter(setup.ngram_tables, NgramPolicy(), setup.ops, setup.model.vocab_size)


class _CoarseTable(NgramTable):
    """Takes neighbouring token ids for one, so that a small table knows something after any text."""

    def prefetch_step(self, history: Sequence[int], draft: Sequence[int]) -> None:
        super().prefetch_step(*([token >> _TINY_SHIFT for token in tokens] for tokens in (history, draft)))

    def lookup(self, context: Sequence[int]) -> Continuation | None:
        found = super().lookup([token >> _TINY_SHIFT for token in context])
        return replace(found, tokens=tuple(token << _TINY_SHIFT for token in found.tokens)) if found else None


class _CoarseDeviceDrafter(DeviceNgramDrafter):
    """The same for the device's form."""

    def _history(self, state: SequenceState) -> Tensor:
        return super()._history(state) >> _TINY_SHIFT


def tiny(setup: DrafterSetup) -> Drafter:
    """Over a dense table of random text; all its pages are in memory, so that what it says depends on nothing else."""
    generator = random.Random(1)
    classes = min(((setup.model.vocab_size - 1) >> _TINY_SHIFT) + 1, _TINY_CLASSES)
    text = [generator.randrange(classes) for _ in range(_TINY_TOKENS)]
    fingerprint = bytes(32)
    with tempfile.TemporaryDirectory() as folder, AsyncReader(threads=1, max_queued=_TINY_TOKENS) as reader:
        with RunBuilder(Path(folder), fingerprint, order=_TINY_ORDER) as builder:
            builder.add("text", text)
            builder.finish()
        table = _CoarseTable.open(
            Path(folder), fingerprint, reader, ram_cap_bytes=_TINY_CAP_BYTES, max_pending=_TINY_TOKENS
        )
        for begin in range(0, len(text), MAX_WISHES):
            # More wishes at once would push each other out where the worker is slow.
            table.prefetch(text[at : at + _TINY_ORDER - 1] for at in range(begin, begin + MAX_WISHES))
            while table.pending_reads:
                time.sleep(0.0002)
    policy = NgramPolicy(draft_tokens=((_TINY_ORDER, CONTINUATION_TOKENS),), min_share=0.0, min_first_right=0.0)
    handles = (NgramTableHandle("tiny", table),)
    if setup.ops.waits:
        return NgramDiskDrafter(handles, policy)
    drafter = _CoarseDeviceDrafter(handles, policy, setup.ops, setup.model.vocab_size)
    for at in range(0, len(text) - _TINY_ORDER, _TINY_ORDER):
        drafter.table.insert(table.ready_records(text[at : at + _TINY_ORDER - 1]), 0)
    return drafter

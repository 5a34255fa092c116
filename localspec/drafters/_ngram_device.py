"""N-gram tables for a device that the host cannot look into: a small table in its memory, probed where the tokens are.

The host learns tokens one step late. A thread of its own follows the text, has the pages read that the next step may
need, and copies their records into a fixed-size table on the device; the draft hashes the true last tokens there and
probes it, without a wait and with fixed shapes, so that a graph can hold it. A record that is torn, stale or late only
loses a hit: its key is cleared first and written last. Hashes and records are those of `storage/ngram_format.py`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, NgramTableHandle
from localspec.drafters._ngram_policy import Advisor, Guess, NgramPolicy
from localspec.kernels.ngram_probe import BUCKET_RECORDS, DraftRules, Hashing, NgramProbe
from localspec.kernels.ops import Ops
from localspec.storage.ngram_format import (
    CONTINUATION_TOKENS,
    FULL_SHARE,
    MIX_FACTORS,
    MULTIPLIERS,
    RECORD_BYTES,
    TAG_TOKENS,
    mix,
)

log = logging.getLogger(__name__)
NUM_BUCKETS = 1 << 13
"""A context's records lie in one bucket of 8: 4 MiB of table, 512 bytes read a slot and step."""
STAGED_RECORDS = 256
MAX_SEQUENCES = 64
"""Whose last guesses are kept."""
READ_WAIT_S = 0.004
"""The feeding thread waits this long for pages; a step is longer."""
_WORDS = RECORD_BYTES // 8
_MASK_64 = (1 << 64) - 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_LAST_FACTOR = 0x9FB21C651E98DF25


def bucket_of(prefix: int, last_token: int) -> int:
    """The bucket of a prefix hash and a last token, as the device finds it."""
    return mix((prefix + last_token * _LAST_FACTOR) & _MASK_64) % NUM_BUCKETS


class DeviceTable:
    """Open addressing in buckets of 8. words: [records, 8] int64 on the device; the host remembers what lies where."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        num_records = NUM_BUCKETS * BUCKET_RECORDS
        self.words = torch.zeros(num_records, _WORDS, dtype=torch.int64, device=device)
        self._staging = torch.zeros(STAGED_RECORDS, _WORDS + 1, dtype=torch.int64, pin_memory=cuda)
        self._arrived = torch.zeros(STAGED_RECORDS, _WORDS + 1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if cuda else None  # type: ignore[no-untyped-call]
        self._held: list[bytes] = [b""] * num_records
        self._victim = 0

    def insert(self, records: NDArray[np.void], table: int) -> int:
        """Copy those of the records that are not there; returns how many. For one thread; may wait for its own copies.

        records: RECORD array; their source gives way to the number of the table.
        """
        fresh: dict[int, bytes] = {}
        for record in _numbered(records, table):
            place = self._place(record)
            if place is not None:
                fresh[place] = record
        places = list(fresh)
        for begin in range(0, len(places), STAGED_RECORDS):
            self._copy({place: fresh[place] for place in places[begin : begin + STAGED_RECORDS]})
        return len(fresh)

    def _place(self, record: bytes) -> int | None:
        """Where to write a record: over its older self, an empty place or one in turn; None if it lies there as is."""
        low, high = int.from_bytes(record[4:8], "little"), int.from_bytes(record[:4], "little")
        last = int.from_bytes(record[8:11], "little")
        first = bucket_of(high << 32 | low, last) * BUCKET_RECORDS
        held = self._held[first : first + BUCKET_RECORDS]
        if record in held:
            return None
        identity = _identity(record)
        # Same context, table and tags: an older count or continuation.
        same = (at for at, other in enumerate(held) if _identity(other) == identity)
        empty = (at for at, other in enumerate(held) if not other)
        place = next(same, next(empty, None))
        if place is None:
            self._victim = (self._victim + 1) % BUCKET_RECORDS
            place = self._victim
        self._held[first + place] = record
        return first + place

    def _copy(self, batch: dict[int, bytes]) -> None:
        count = len(batch)
        rows = np.frombuffer(b"".join(batch.values()), dtype=np.int64).reshape(count, _WORDS)
        self._staging[:count, :_WORDS] = torch.from_numpy(rows.copy())
        self._staging[:count, _WORDS] = torch.tensor(list(batch))
        with self.beside():
            arrived = self._arrived[:count]
            arrived.copy_(self._staging[:count], non_blocking=True)
            places, keys = arrived[:, _WORDS].contiguous(), arrived[:, 0].contiguous()
            self.words[:, 0].index_fill_(0, places, 0)
            self.words[:, 1:].index_copy_(0, places, arrived[:, 1:_WORDS].contiguous())
            self.words[:, 0].index_copy_(0, places, keys)

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Work beside the steps; on leaving it is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


def _identity(record: bytes) -> bytes:
    return record[:11] + record[12:15] + record[16:20]


def _numbered(records: NDArray[np.void], table: int) -> list[bytes]:
    numbered = records.copy()
    numbered["source_share"] = (numbered["source_share"] & np.uint32(0xFF000000)) | np.uint32(table)
    data = numbered.tobytes()
    return [data[at : at + RECORD_BYTES] for at in range(0, len(data), RECORD_BYTES)]


class DeviceNgramDrafter:
    """The device's form. `propose` runs on the device alone; `follow` feeds it from the host."""

    name = "ngram_disk"
    max_depth = CONTINUATION_TOKENS
    needs = HiddenNeeds()
    cache_spec = CacheSpec(owner="ngram_disk", fingerprint="ngram_disk")

    def __init__(self, handles: tuple[NgramTableHandle, ...], policy: NgramPolicy, ops: Ops, vocab_size: int) -> None:
        self.origins: tuple[str, ...] = tuple(f"table:{handle.name}" for handle in handles)
        self.advisor = Advisor(handles, policy)
        self.table = DeviceTable(ops.device)
        self._ops = ops
        orders = sorted({handle.table.order for handle in handles})
        self._probe = NgramProbe(
            self.table.words, _hashing(orders, ops), _rules(orders, len(handles), policy, ops, vocab_size)
        )
        self._feed = NgramFeed(self)

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """The best record for each slot's last tokens that lies in the device's table now."""
        found = self._ops.table_drafts(
            self._probe, self._history(state), state.lengths, depths.depths, depths.max_depth
        )
        return Draft(
            token_ids=found.token_ids,
            origins=found.tables,
            num_drafts=found.num_drafts,
            origin_names=self.origins,
            confidence=found.confidence,
        )

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Nothing is kept on the device but the table."""

    def forget(self, slot: int) -> None:
        """The table holds other texts, not this one."""

    def follow(
        self,
        sequence_id: int,
        tail: Sequence[int],
        came: Sequence[int],
        ended: bool,
        drafted_by: Sequence[str] = (),
        num_accepted: int = 0,
    ) -> None:
        """A step of a sequence has landed. Returns at once.

        tail: the last known tokens, those of the step (`came`) included; ended: no step follows; drafted_by: origins of
        the drafts that were verified, of which the first `num_accepted` stood.
        """
        for index, origin in enumerate(self.origins):
            if origin in drafted_by:
                counts = self.advisor.handles[index].counts
                counts.drafts += 1
                counts.accepted_tokens += list(drafted_by[:num_accepted]).count(origin)
        self._feed.post(sequence_id, tuple(tail), tuple(came), ended)

    def close(self) -> None:
        """End the feeding thread."""
        self._feed.close()

    def set_speaking(self, speaking: dict[tuple[int, int], bool]) -> None:
        """Tell the device which tables at which match length may speak."""
        flags = torch.ones(self._probe.rules.speaks.shape, dtype=torch.int64)
        for (table, match_tokens), speaks in speaking.items():
            level = TAG_TOKENS.index(match_tokens) + 1 if match_tokens in TAG_TOKENS else 0
            flags[table, level] = int(speaks)
        with self.table.beside():
            self._probe.rules.speaks.copy_(flags)

    def _history(self, state: SequenceState) -> Tensor:
        """[S, H] int64 tokens as the table knows them."""
        return state.history


def _hashing(orders: Sequence[int], ops: Ops) -> Hashing:
    # Columns: both tags, then the prefix of each order; a distance outside a hash's reach weighs nothing.
    reaches = [range(tokens) for tokens in TAG_TOKENS] + [range(1, order) for order in orders]
    weights = [[_signed(m) if at in reach else 0 for reach in reaches] for at, m in enumerate(MULTIPLIERS)]
    return Hashing(
        torch.tensor(weights, dtype=torch.int64, device=ops.device),
        torch.tensor(orders, dtype=torch.int64, device=ops.device),
        TAG_TOKENS,
        (_signed(MIX_FACTORS[0]), _signed(MIX_FACTORS[1])),
        _signed(_LAST_FACTOR),
    )


def _rules(orders: Sequence[int], num_tables: int, policy: NgramPolicy, ops: Ops, vocab_size: int) -> DraftRules:
    levels = [[policy.allowed(length) for length in (order, *TAG_TOKENS)] for order in orders]
    return DraftRules(
        torch.tensor(levels, dtype=torch.int64, device=ops.device),
        torch.ones(num_tables, 3, dtype=torch.int64, device=ops.device),
        int(policy.min_share * FULL_SHARE),
        int(policy.unsure_share * FULL_SHARE),
        vocab_size,
    )


class NgramFeed:
    """The thread that follows the text and fills the device's table; started by the first post."""

    def __init__(self, drafter: DeviceNgramDrafter) -> None:
        self._drafter = drafter
        self._inbox: queue.SimpleQueue[tuple[int, tuple[int, ...], tuple[int, ...], bool] | None] = queue.SimpleQueue()
        self._guesses: dict[int, tuple[Guess, ...]] = {}
        self._speaking: dict[tuple[int, int], bool] = {}
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def post(self, sequence_id: int, tail: tuple[int, ...], came: tuple[int, ...], ended: bool) -> None:
        """From the decode thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ngram-feed", daemon=True)
            self._thread.start()
        self._inbox.put((sequence_id, tail, came, ended))

    def close(self) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._inbox.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        with torch.inference_mode():
            while (item := self._inbox.get()) is not None:
                try:
                    self.follow(*item)
                except Exception:
                    # The steps go on without these drafts, and every one of them may fail alike.
                    log.log(logging.DEBUG if self._has_failed else logging.ERROR, "no n-gram drafts", exc_info=True)
                    self._has_failed = True

    def follow(self, sequence_id: int, tail: Sequence[int], came: Sequence[int], ended: bool = False) -> None:
        """One landed step: judge, read what the step after the running one may need, copy it to the device.

        The running step emits one token or follows a draft; which one was drafted is guessed by asking the tables
        what they would have said.
        """
        advisor = self._drafter.advisor
        guesses = self._guesses.pop(sequence_id, ())
        if guesses and came:
            advisor.judge(guesses, came)
            self._tell()
        if ended:
            return
        self._guesses[sequence_id] = guesses = advisor.ask(tail)
        if len(self._guesses) > MAX_SEQUENCES:
            # Of a sequence whose end nobody told: a stop string, a client that left.
            self._guesses.pop(next(iter(self._guesses)))
        ahead = guesses[0].tokens if guesses else ()
        advisor.prefetch(tail, ahead)
        deadline_s = time.monotonic() + READ_WAIT_S
        while any(handle.table.pending_reads for handle in advisor.handles):
            if time.monotonic() >= deadline_s or not self._inbox.empty():
                break
            time.sleep(0.0002)
        for index, handle in enumerate(advisor.handles):
            width = handle.table.order - 1
            known = [*tail[-width:], *ahead]
            for at in range(len(known) - width + 1):
                records = handle.table.ready_records(known[at : at + width])
                if len(records):
                    self._drafter.table.insert(records, index)

    def _tell(self) -> None:
        speaking = self._drafter.advisor.speaking()
        if speaking != self._speaking:
            self._speaking = speaking
            self._drafter.set_speaking(speaking)

"""The tier below the device: conversations go to disk behind the decode thread and come back before they are needed.

Two threads, one each way, so that a restore never waits behind a write. The decode thread hands over page numbers and
goes on; a request whose prefix is being read waits in the queue while the others run.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch

from localspec.cache.pool import CachePool, StateSnapshot
from localspec.cache.spill import ModelIdentity, SpillLimits, SpillStore
from localspec.cache.spill_index import INDEX_ERRORS
from localspec.cache.spill_keys import fingerprint
from localspec.core.cache_spec import CacheSpec
from localspec.core.records import PAGE_TOKENS
from localspec.engine.metrics import MetricsRecorder
from localspec.engine.tier_bytes import BlockBytes, layout_parts
from localspec.engine.tier_restore import FIXED_COST_S, MIN_GAIN_TOKENS, Call, Restored, Restorer, Wish
from localspec.engine.tier_spill import Spiller, Turn
from localspec.scheduler.scheduler import Scheduler
from localspec.scheduler.sequence import Sequence

log = logging.getLogger(__name__)
MAX_WAITING_TURNS = 16
MIN_STATE_DISTANCE_TOKENS = 2 * PAGE_TOKENS
CLOSE_LIMIT_S = 30.0
NEW_SHARE = 0.3
"""Weight of the newest measurement in a rate."""


class NoTiers:
    """An engine that keeps nothing below the device. Methods without a thread named are the decode thread's."""

    @property
    def restoring(self) -> bool:
        """Whether a restore holds pages or requests; its end comes as a command."""
        return False

    def start(self, call: Call) -> None:
        """`call` runs a function on the decode thread, which must run already."""

    def fetch(self, sequence: Sequence) -> None:
        """If the disk may hold more of a queued request's prompt than the tree, look there before admission."""

    def warm(self, token_ids: tuple[int, ...], chat_id: str | None) -> Future[None]:
        """Any thread: bring the prefix of a conversation near; done when it is there or will not come."""
        return _done()

    def retired(self, sequence: Sequence, ids: tuple[int, ...], states: list[tuple[int, StateSnapshot]]) -> None:
        """A sequence's tokens are in the tree; write them, and the states at their positions, when there is time."""

    def forget(self, chat_id: str) -> Future[None]:
        """Any thread: delete what only this chat has on disk, turns that wait to be written included."""
        return _done()

    def see_prefill(self, num_tokens: int, milliseconds: float) -> None:
        """How fast this machine reads prompts."""

    def reset(self) -> None:
        """The tree was emptied because its contents are in doubt."""

    def close(self) -> None:
        """Any other thread: write what waits (for a limited time), end the threads. The decode thread still runs."""


class DiskTiers(NoTiers):
    """One per loaded model."""

    def __init__(self, store: SpillStore, copies: BlockBytes, scheduler: Scheduler, metrics: MetricsRecorder) -> None:
        self._store = store
        self._copies = copies
        self._scheduler = scheduler
        self._metrics = metrics
        self._wishes: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waiting: list[Turn] = []
        self._lock = threading.Lock()
        self._close_by_s: float | None = None
        self._prefill_tok_per_s, self._read_bytes_per_s = store.rates()
        self._asked = self._served = self._read_bytes = 0
        self._read_s = self._saved_s = 0.0
        self._restoring = 0
        self._threads: list[threading.Thread] = []

    @property
    def restoring(self) -> bool:
        return self._restoring > 0

    def start(self, call: Call) -> None:
        self._call = call
        self._restorer = Restorer(self._store, self._copies, self._scheduler, call)
        self._spiller = Spiller(self._store, self._copies, self._scheduler, call)
        for name, work in (("restore", self._wishes), ("spill", self._turns)):
            thread = threading.Thread(target=self._serve, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        self._turns.put(self._sweep)

    def fetch(self, sequence: Sequence) -> None:
        request, scheduler = sequence.request, self._scheduler
        ids = request.prompt_ids[:-1]
        matched = scheduler.prefix.match(ids, scheduler.needs_state, request.cache_salt).total_tokens
        if len(ids) - matched < MIN_GAIN_TOKENS:
            return
        chat_id = None if request.private else request.chat_id
        wish = Wish(ids, matched, request.cache_salt, chat_id, lambda: sequence.cancelled)
        sequence.held = True
        self._restoring += 1
        self._wishes.put(lambda: self._fetch(wish, lambda: self._let_go(sequence)))

    def warm(self, token_ids: tuple[int, ...], chat_id: str | None) -> Future[None]:
        future: Future[None] = Future()
        wish = Wish(token_ids, 0, chat_id=chat_id)
        self._wishes.put(lambda: self._fetch(wish, lambda: future.set_result(None)))
        return future

    def retired(self, sequence: Sequence, ids: tuple[int, ...], states: list[tuple[int, StateSnapshot]]) -> None:
        request = sequence.request
        if self._scheduler.needs_state:
            ids = ids[: max((position for position, _ in states), default=0)]
        if request.private or len(ids) < MIN_GAIN_TOKENS or not self._store.may_write:
            return
        turn = Turn(ids, _worth_keeping(states), request.cache_salt, request.chat_id, self._copies.moment())
        with self._lock:
            if len(self._waiting) >= MAX_WAITING_TURNS:
                log.warning("the disk is slower than the conversations: a turn is not kept there")
                return
            self._waiting.append(turn)
        self._turns.put(lambda: self._spill(turn))

    def forget(self, chat_id: str) -> Future[None]:
        future: Future[None] = Future()
        with self._lock:
            for turn in self._waiting:
                turn.dropped = turn.dropped or turn.chat_id == chat_id

        def work() -> None:
            self._store.forget_chat(chat_id)
            self._report()
            future.set_result(None)

        self._turns.put(work)
        return future

    def see_prefill(self, num_tokens: int, milliseconds: float) -> None:
        if num_tokens >= PAGE_TOKENS and milliseconds > 0:
            self._prefill_tok_per_s = _mixed(self._prefill_tok_per_s, num_tokens / milliseconds * 1e3)

    def reset(self) -> None:
        self._restorer.epoch += 1

    def close(self) -> None:
        self._close_by_s = time.monotonic() + CLOSE_LIMIT_S
        self._turns.put(None)
        self._wishes.put(None)
        for thread in self._threads:
            thread.join(CLOSE_LIMIT_S)
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the disk did not answer in time; the last turns are not kept there")
            return
        self._store.set_rates(self._prefill_tok_per_s, self._read_bytes_per_s)
        self._restorer.close()
        self._store.close()

    def _serve(self, work: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        with torch.inference_mode():
            while (item := work.get()) is not None:
                try:
                    item()
                except Exception:
                    log.exception("the cache on disk failed; the conversation will be computed again")

    def _fetch(self, wish: Wish, done: Callable[[], None]) -> None:
        try:
            if self._close_by_s is None and not wish.cancelled():
                self._count(wish, self._restorer.restore(wish, self._worth_reading))
        finally:
            done()

    def _let_go(self, sequence: Sequence) -> None:
        def release() -> None:
            sequence.held = False
            self._restoring -= 1

        self._call(release)

    def _worth_reading(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading is faster than computing; unknown rates are found out by reading."""
        if self._prefill_tok_per_s is None or self._read_bytes_per_s is None:
            return True
        return num_bytes / self._read_bytes_per_s + FIXED_COST_S < num_tokens / self._prefill_tok_per_s

    def _count(self, wish: Wish, restored: Restored) -> None:
        self._asked += 1
        if restored.tokens:
            self._served += 1
            self._read_bytes += restored.read_bytes
            self._read_s += restored.seconds
            if self._prefill_tok_per_s is not None:
                self._saved_s += restored.tokens / self._prefill_tok_per_s - restored.seconds
            if restored.read_bytes and restored.seconds:
                self._read_bytes_per_s = _mixed(self._read_bytes_per_s, restored.read_bytes / restored.seconds)
        self._report()

    def _spill(self, turn: Turn) -> None:
        try:
            self._spiller.spill(turn, self._out_of_time)
        finally:
            with self._lock:
                self._waiting.remove(turn)
        self._store.set_rates(self._prefill_tok_per_s, self._read_bytes_per_s)
        self._report()

    def _out_of_time(self) -> bool:
        return self._close_by_s is not None and time.monotonic() >= self._close_by_s

    def _sweep(self) -> None:
        freed_bytes = self._store.sweep()
        if freed_bytes:
            log.info("%.0f MB of cached conversations were of no use any more", freed_bytes / 1e6)
        self._report()

    def _report(self) -> None:
        figures: dict[str, float] = {
            "ssd_cap_bytes": self._store.cap_bytes,
            "ssd_hit_rate": round(self._served / self._asked, 3) if self._asked else 0.0,
            "ssd_restore_mb_per_s": round(self._read_bytes / self._read_s / 1e6, 1) if self._read_s else 0.0,
            "ssd_saved_s": round(self._saved_s, 3),
            "ssd_writing": 0.0 if self._store.off_reason else 1.0,
        }
        with contextlib.suppress(*INDEX_ERRORS, OSError):
            figures["ssd_bytes"] = self._store.index.total_bytes()
            figures["ssd_written_today_bytes"] = self._store.room.spent_today_bytes()
        self._metrics.update(tiers=figures)


@dataclass(frozen=True)
class CacheOwner:
    """Whose cache it is, and `backend`: everything but weights and layout that the bits of a cached value depend on."""

    model_id: str
    model_folder: str
    backend: str
    device: torch.device


def open_tiers(
    folder: Path,
    limits: SpillLimits,
    owner: CacheOwner,
    specs: list[CacheSpec],
    pool: CachePool,
    scheduler: Scheduler,
    metrics: MetricsRecorder,
) -> NoTiers:
    """The tier in `folder` for these specs; none, said in the log, where the directory cannot be used."""
    copies = BlockBytes(specs, pool, owner.device)
    if not copies.token_bytes:
        return NoTiers()
    identity = ModelIdentity(
        fingerprint=fingerprint(layout_parts(specs, owner.backend)),
        model_id=owner.model_id,
        folder=owner.model_folder,
        token_bytes=copies.token_bytes,
        state_bytes=copies.state_bytes,
        needs_state=scheduler.needs_state,
    )
    try:
        return DiskTiers(SpillStore(folder, identity, limits), copies, scheduler, metrics)
    except (OSError, *INDEX_ERRORS) as error:
        log.warning("conversations are not kept on disk: %s", error)
        return NoTiers()


def _worth_keeping(states: list[tuple[int, StateSnapshot]]) -> list[tuple[int, StateSnapshot]]:
    """Without those that stand within a page or two after another: they are large, and so few tokens are quick."""
    kept = states[:1]
    for position, snapshot in states[1:-1]:
        if position - kept[-1][0] >= MIN_STATE_DISTANCE_TOKENS:
            kept.append((position, snapshot))
    return [*kept, *states[1:][-1:]]


def _done() -> Future[None]:
    future: Future[None] = Future()
    future.set_result(None)
    return future


def _mixed(old: float | None, new: float) -> float:
    return new if old is None else (1 - NEW_SHARE) * old + NEW_SHARE * new

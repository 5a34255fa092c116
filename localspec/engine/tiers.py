"""The tiers below the device: conversations go to host memory and to disk behind the decode thread, and come back
before they are needed.

Three threads (device to memory, memory to disk, and back), so that a restore never waits behind a write. The decode
thread hands over page numbers and goes on; a request whose prefix is on its way waits in the queue while others run.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

from localspec.api.types import EngineError
from localspec.cache.host_pool import HostPool
from localspec.cache.miss import OTHER_MODEL
from localspec.cache.pool import CachePool, StateSnapshot
from localspec.cache.spill import ModelIdentity, SpillLimits, SpillStore
from localspec.cache.spill_index import INDEX_ERRORS
from localspec.cache.spill_keys import fingerprint
from localspec.cache.spill_limits import read_limits
from localspec.core.cache_spec import CacheSpec
from localspec.core.records import PAGE_TOKENS
from localspec.engine.inbox import model_gone, settle
from localspec.engine.metrics import MetricsRecorder
from localspec.engine.no_tiers import NoTiers
from localspec.engine.tier_bytes import BlockBytes, layout_parts
from localspec.engine.tier_figures import TierFigures
from localspec.engine.tier_keep import Keeper, PageCopier, Turn
from localspec.engine.tier_memory import HostMemory, host_memory_for
from localspec.engine.tier_restore import FIXED_COST_S, MIN_GAIN_TOKENS, Call, Restored, Restorer, Wish
from localspec.engine.tier_spill import Spiller
from localspec.scheduler.scheduler import Scheduler
from localspec.scheduler.sequence import Sequence

log = logging.getLogger(__name__)
MAX_WAITING_TURNS = 16
MIN_STATE_DISTANCE_TOKENS = 2 * PAGE_TOKENS
CLOSE_LIMIT_S = 30.0
MOST_USED_AHEAD_BYTES = 1 << 30
"""Of a CPU's cache that is placed while the model loads: a third of a second, and memory that stays in use."""
HOST_SHARE, HOST_MOST_BYTES = 0.25, 64 << 30
"""Share of the free memory that copies of a card's conversations may take."""
PREPARED_BYTES = 2 << 30
"""Of that memory, registered at start."""
CPU_HOST_SHARE, CPU_HOST_MOST_BYTES = 0.1, 2 << 30
"""On a CPU the pages lie in the same memory: copies only serve what the pages were taken from."""
Work = queue.SimpleQueue[Callable[[], None] | None]


class HostAndDisk(NoTiers):
    """One per loaded model. `store` None: the disk cannot be used, host memory can."""

    def __init__(
        self,
        store: SpillStore | None,
        host: tuple[HostPool, HostMemory],
        copies: BlockBytes,
        scheduler: Scheduler,
        metrics: MetricsRecorder,
    ) -> None:
        self._store = store
        self._pool, self._memory = host
        self._copies = copies
        self._scheduler = scheduler
        self._figures = TierFigures(store, *host, metrics)
        self._wishes: Work = queue.SimpleQueue()
        self._turns: Work = queue.SimpleQueue()
        self._writes: Work = queue.SimpleQueue()
        self._waiting: list[Turn] = []
        self._wished: list[Wish] = []
        self._lock = threading.Lock()
        self._close_by_s: float | None = None
        """Set once, under the lock, when nothing more is taken."""
        self._restoring = 0
        self._threads: list[threading.Thread] = []

    @property
    def restoring(self) -> bool:
        return self._restoring > 0

    @property
    def store(self) -> SpillStore | None:
        """The disk's part; None where it cannot be used."""
        return self._store

    @property
    def num_waiting(self) -> int:
        """Finished turns that are not yet where they are to be kept."""
        with self._lock:
            return len(self._waiting)

    def start(self, call: Call) -> None:
        self._call = call
        self._restorer = Restorer(self._store, self._pool, self._copies.with_own_stream(), self._scheduler, call)
        self._turns.put(lambda: self._memory.prepare(PREPARED_BYTES))
        self._keeper = Keeper(self._pool, self._memory, PageCopier(self._copies, self._scheduler, call))
        if self._store is not None:
            copier = PageCopier(self._copies.with_own_stream(), self._scheduler, call)
            self._spiller = Spiller(self._store, self._pool, copier)
            self._writes.put(self._begin_disk)
        for name, work in (("restore", self._wishes), ("keep", self._turns), ("spill", self._writes)):
            thread = threading.Thread(target=self._serve, args=(work,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def fetch(self, sequence: Sequence) -> None:
        request, scheduler = sequence.request, self._scheduler
        ids = request.prompt_ids[:-1]
        matched = scheduler.prefix.match(ids, scheduler.needs_state, request.cache_salt).total_tokens
        if len(ids) - matched < MIN_GAIN_TOKENS:
            return
        wish = Wish(ids, matched, request.cache_salt, request.chat_id, request.private, lambda: sequence.cancelled)
        # It is let go by a command to this very thread, so it is held by then.
        if self._ask(wish, lambda problem: self._let_go(sequence, problem)):
            sequence.held = True
            self._restoring += 1

    def warm(self, token_ids: tuple[int, ...], chat_id: str | None, private: bool = False) -> Future[None]:
        future: Future[None] = Future()
        wish = Wish(token_ids, 0, chat_id=chat_id, private=private)

        def brought(problem: str) -> None:
            settle(future)

        if not self._ask(wish, brought):
            settle(future)
        return future

    def _ask(self, wish: Wish, done: Callable[[str], None]) -> bool:
        """Have a wish served, `done` is told of the problem with it; False where no wish is served any more."""
        with self._lock:
            if self._close_by_s is not None:
                return False
            self._wished.append(wish)
            self._wishes.put(lambda: self._fetch(wish, done))
        return True

    def retired(self, sequence: Sequence, ids: tuple[int, ...], states: list[tuple[int, StateSnapshot]]) -> None:
        request = sequence.request
        if sequence.forgotten or self._close_by_s is not None:
            return
        if self._scheduler.needs_state:
            ids = ids[: max((position for position, _ in states), default=0)]
        if len(ids) < MIN_GAIN_TOKENS:
            return
        kept = _worth_keeping(states)
        turn = Turn(ids, kept, request.cache_salt, request.chat_id, request.private, self._copies.moment())
        with self._lock:
            if len(self._waiting) >= MAX_WAITING_TURNS:
                log.warning("the disk is slower than the conversations: a turn is not kept there")
                return
            self._waiting.append(turn)
        self._turns.put(lambda: self._keep(turn))

    def forget(self, chat_id: str) -> Future[None]:
        future: Future[None] = Future()

        def begin(_: Future[None]) -> None:
            self.forgotten(chat_id)
            with self._lock:
                if self._close_by_s is None:
                    self._turns.put(from_memory)
                    return
            settle(future, model_gone())

        def from_memory() -> None:
            self._pool.forget_chat(chat_id)
            self._writes.put(from_disk)

        def from_disk() -> None:
            try:
                if self._store is not None:
                    self._store.forget_chat(chat_id)
            except OSError as error:
                log.warning("a forgotten chat is still on the disk: %s", error)
                settle(future, EngineError("internal", f"the cache on the disk cannot be deleted: {error}"))
            else:
                settle(future)
            self._figures.report()

        # Behind what the decode thread was told before, so that no turn which ended meanwhile comes after it.
        self._call(lambda: None).add_done_callback(begin)
        return future

    def forgotten(self, chat_id: str) -> None:
        with self._lock:
            for turn in self._waiting:
                turn.dropped = turn.dropped or turn.chat_id == chat_id
            for wish in self._wished:
                wish.dropped = wish.dropped or wish.chat_id == chat_id

    def see_prefill(self, num_tokens: int, milliseconds: float) -> None:
        if num_tokens >= PAGE_TOKENS and milliseconds > 0:
            self._figures.see_prefill(num_tokens / milliseconds * 1e3)

    def reset(self) -> None:
        self._restorer.epoch += 1

    def close(self) -> None:
        with self._lock:  # What comes behind the None of a queue would never be served.
            self._close_by_s = time.monotonic() + CLOSE_LIMIT_S
        self._wishes.put(None)
        self._turns.put(lambda: self._writes.put(None))
        self._turns.put(None)
        for thread in self._threads:
            thread.join(max(1.0, self._close_by_s + 1.0 - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("the disk did not answer in time; the last turns are not kept there")
            return
        self._restorer.close()
        if self._store is not None:
            self._figures.store_rates()
            self._store.close()
        self._pool.clear()
        self._memory.close()

    def _serve(self, work: Work) -> None:
        with torch.inference_mode():
            while (item := work.get()) is not None:
                try:
                    item()
                except Exception:
                    log.exception("the cache below the device failed; the conversation will be computed again")

    def _fetch(self, wish: Wish, done: Callable[[str], None]) -> None:
        restored, problem = Restored(), ""
        try:
            if self._close_by_s is None and not wish.unwanted:
                restored = self._restorer.restore(wish, self._worth_reading)
                self._figures.count(restored)
                problem = restored.problem or self._other_model(wish, restored.tokens)
        finally:
            with self._lock:
                self._wished.remove(wish)
            done(problem)
        self._restorer.note_use(restored, wish)
        self._figures.report()

    def _let_go(self, sequence: Sequence, problem: str) -> None:
        def release() -> None:
            sequence.held = False
            sequence.tier_problem = problem
            self._restoring -= 1

        self._call(release)

    def _other_model(self, wish: Wish, restored_tokens: int) -> str:
        """Whether the chat is on disk, but as another model (or back end, or set of drafters) computed it."""
        if restored_tokens or wish.matched_tokens or wish.owner is None or self._store is None:
            return ""
        return OTHER_MODEL if self._store.kept_by_another(wish.owner) else ""

    def _worth_reading(self, num_tokens: int, num_bytes: int) -> bool:
        """Whether reading is faster than computing; unknown rates are found out by reading."""
        prefill, read = self._figures.prefill_tok_per_s, self._figures.read_bytes_per_s
        if not num_bytes or prefill is None or read is None:
            return True
        return num_bytes / read + FIXED_COST_S < num_tokens / prefill

    def _keep(self, turn: Turn) -> None:
        written = self._store is not None and not turn.private and self._store.may_write
        try:
            self._keeper.keep(turn, self._out_of_time)
        finally:
            if written:
                self._writes.put(lambda: self._spill(turn))
            else:
                self._done_with(turn)
        self._figures.report()

    def _spill(self, turn: Turn) -> None:
        try:
            self._spiller.spill(turn, self._out_of_time)
        finally:
            self._done_with(turn)
        if self._store is not None and self._store.index.is_new:
            self._store.sweep()
        self._figures.store_rates()
        self._figures.report()

    def _done_with(self, turn: Turn) -> None:
        with self._lock:
            self._waiting.remove(turn)

    def _out_of_time(self) -> bool:
        return self._close_by_s is not None and time.monotonic() >= self._close_by_s

    def _begin_disk(self) -> None:
        assert self._store is not None
        freed_bytes = self._store.sweep()
        if freed_bytes:
            log.info("%.0f MB of cached conversations were of no use any more", freed_bytes / 1e6)
        self._figures.measure_disk()
        self._figures.report()


@dataclass(frozen=True)
class TierLimits:
    """`host_bytes` None takes a share of the memory that is free at start."""

    disk: SpillLimits = field(default_factory=SpillLimits)
    host_bytes: int | None = None

    def or_chosen(self, folder: Path) -> TierLimits:
        """With what the user chose for a cache directory, where nothing else is said here."""
        chosen = read_limits(folder)
        return TierLimits(
            chosen.of_disk() if self.disk == SpillLimits() else self.disk,
            chosen.host_bytes if self.host_bytes is None else self.host_bytes,
        )


@dataclass(frozen=True)
class CacheOwner:
    """Whose cache it is, and `backend`: everything but weights and layout that the bits of a cached value depend on."""

    model_id: str
    model_folder: str
    backend: str
    device: torch.device


def open_tiers(
    folder: Path,
    limits: TierLimits,
    owner: CacheOwner,
    specs: list[CacheSpec],
    pool: CachePool,
    scheduler: Scheduler,
    metrics: MetricsRecorder,
) -> NoTiers:
    """Host memory and the disk at `folder` for these specs; a directory that cannot be used is said in the log."""
    copies = BlockBytes(specs, pool, owner.device)
    if not copies.token_bytes:
        return NoTiers()
    limits = limits.or_chosen(folder)
    identity = ModelIdentity(
        fingerprint=fingerprint(layout_parts(specs, owner.backend)),
        model_id=owner.model_id,
        folder=owner.model_folder,
        token_bytes=copies.token_bytes,
        state_bytes=copies.state_bytes,
        needs_state=scheduler.needs_state,
    )
    store: SpillStore | None = None
    try:
        store = SpillStore(folder, identity, limits.disk)
    except (OSError, *INDEX_ERRORS) as error:
        log.warning("conversations are not kept on disk: %s", error)
    if store is not None:
        # Whoever kept conversations opens one: the traps of new memory take as long as a third of reading it.
        num_tokens = min(store.stored_bytes(), MOST_USED_AHEAD_BYTES) // copies.token_bytes
        copies.use_ahead(min(num_tokens, scheduler.limits.context_tokens))
    memory = host_memory_for(owner.device, host_cap_bytes(limits.host_bytes, owner.device))
    return HostAndDisk(store, (HostPool(identity, memory.take), memory), copies, scheduler, metrics)


def host_cap_bytes(asked_bytes: int | None, device: torch.device) -> int:
    """What was asked for, else a share of the memory that is free now."""
    if asked_bytes is not None:
        return asked_bytes
    free_bytes = psutil.virtual_memory().available
    if device.type == "cuda":
        return min(int(free_bytes * HOST_SHARE), HOST_MOST_BYTES)
    return min(int(free_bytes * CPU_HOST_SHARE), CPU_HOST_MOST_BYTES)


def _worth_keeping(states: list[tuple[int, StateSnapshot]]) -> list[tuple[int, StateSnapshot]]:
    """Without those that stand within a page or two after another: they are large, and so few tokens are quick."""
    kept = states[:1]
    for position, snapshot in states[1:-1]:
        if position - kept[-1][0] >= MIN_STATE_DISTANCE_TOKENS:
            kept.append((position, snapshot))
    return [*kept, *states[1:][-1:]]

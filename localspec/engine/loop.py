"""The decode thread: admits, plans, steps, hands results out. Touches no files, JSON, templates or text.

Everything that arrives from other threads comes through one queue; everything that leaves goes through the sinks,
which must not block.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import torch

from localspec.api.types import EngineError, Timings
from localspec.cache.pool import StateSnapshot
from localspec.core.records import PrefillPlan, Request, SlotResult, VerifyPlan
from localspec.engine.accounting import StepAccounting
from localspec.engine.capture_ahead import CaptureAhead
from localspec.engine.device_step import DeviceStep, StepNeeds
from localspec.engine.drafting import DrafterSet
from localspec.engine.inbox import Inbox
from localspec.engine.metrics import MetricsRecorder, RequestClock
from localspec.engine.no_tiers import NoTiers
from localspec.engine.prompt_reader import PromptReader
from localspec.engine.ring import ResultRing
from localspec.engine.saved_states import SavedStates
from localspec.engine.step import run_verify
from localspec.engine.step_needs import step_needs
from localspec.engine.tuner import Tuner
from localspec.runner.runner import Runner
from localspec.sampling.grammar import RequestGrammar
from localspec.scheduler.scheduler import Admission, QueueFull, Scheduler
from localspec.scheduler.sequence import Sequence, Stage

log = logging.getLogger(__name__)
SWITCH_INTERVAL_S = 0.00005
"""A pure-Python thread holds the interpreter for this long at most before the decode thread may go on, which asks for
it some thirty times a step: at 0.5 ms four clients posting 70 kB bodies made a step of 5 ms last 34 (H200)."""


@dataclass(frozen=True)
class PrefillNews:
    done_tokens: int
    total_tokens: int
    cached_tokens: int
    miss_reason: str


@dataclass(frozen=True)
class StepNews:
    result: SlotResult


@dataclass(frozen=True)
class EndNews:
    """The last news of a request: how it ended and where its time went, or the error."""

    finish: str
    timings: Timings
    error: EngineError | None = None


@dataclass(frozen=True)
class Stages:
    """The device side of a loaded model. Stages do not hold or call each other; `device` calls them in order."""

    runner: Runner
    drafters: DrafterSet
    device: DeviceStep


News = PrefillNews | StepNews | EndNews
Sink = Callable[[News], None]


@dataclass
class Ticket:
    """A submitted request as its submitter holds it."""

    request: Request
    sink: Sink
    grammar: RequestGrammar | None = None
    clock: RequestClock = field(default_factory=RequestClock)
    sequence: Sequence | None = None
    cancelled: bool = False

    @property
    def failure(self) -> EngineError | None:
        """Why the request cannot go on."""
        if self.grammar is None or not self.grammar.error:
            return None
        return EngineError("bad_request", self.grammar.error)


class DecodeLoop:
    """Runs until `stop`. One instance per loaded model."""

    def __init__(
        self,
        stages: Stages,
        scheduler: Scheduler,
        ring: ResultRing,
        tuner: Tuner,
        metrics: MetricsRecorder,
        tiers: NoTiers,
        ahead: CaptureAhead | None = None,
    ) -> None:
        self.stages = stages
        self.tiers = tiers
        self._device = stages.device
        self._prefills = PromptReader(stages.device)
        self._scheduler = scheduler
        self._ring = ring
        self._tuner = tuner
        self._accounting = StepAccounting(tuner, metrics, ring.lag, stages.drafters.schedule)
        self._metrics = metrics
        self._states = SavedStates(stages.runner, scheduler)
        self._ahead = ahead
        self._inbox = Inbox()
        self._tickets: dict[int, Ticket] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()
        self.tiers.start(self.call)

    def stop(self) -> None:
        """End running requests with `cancelled` and wait for the thread."""
        self.tiers.close()
        self._inbox.post(self._begin_stop)
        self._thread.join()

    def submit(self, request: Request, sink: Sink, grammar: RequestGrammar | None = None) -> Ticket:
        """Queue a request; its news go to `sink`, EndNews last. `grammar` belongs to this thread from now on."""
        ticket = Ticket(request, sink, grammar)
        gone = EngineError("not_ready", "the model was unloaded before the answer began; ask again")
        self._inbox.post(lambda: self._accept_ticket(ticket), lambda: sink(EndNews("error", Timings(), gone)))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request within one step. Harmless after its end."""
        self._inbox.post(lambda: self._cancel(ticket))

    def call(self, function: Callable[[], None]) -> Future[None]:
        """See `Inbox.call`."""
        return self._inbox.call(function)

    def capture_ahead(self) -> bool:
        """On this thread: capture a step that requests which ask as the last one did may need. False if there is none,
        or somebody asks for something else."""
        return self._ahead is not None and not self._scheduler.active and self._ahead.run_one(usual=False)

    def forget(self, chat_id: str) -> Future[None]:
        """Drop the cached prefixes of a chat; of what still runs or is on its way here nothing will be kept."""

        def drop() -> None:
            self._scheduler.forget_chat(chat_id)
            self.tiers.forgotten(chat_id)

        return self.call(drop)

    def _run(self) -> None:
        with torch.inference_mode():
            while not self._stopping:
                try:
                    self._turn()
                except Exception as error:
                    log.exception("a step failed")
                    self._give_up(EngineError("internal", f"the step failed ({type(error).__name__}: {error})"))
            self._give_up(None)
        self._inbox.close()

    def _give_up(self, error: EngineError | None) -> None:
        """End every request. Where that fails too the device is gone for good, and this thread with it."""
        try:
            self._fail_all(error)
        except Exception as worse:
            log.exception("the engine cannot go on")
            self._metrics.update(state="failed", stage=f"the device does not answer any more ({worse})")
            self._stopping = True

    def _turn(self) -> None:
        self._drain_commands(wait=self._scheduler.idle or (self.tiers.restoring and not self._scheduler.active))
        self._count_prefills()
        self._retire()
        while (admission := self._scheduler.admit()) is not None:
            self._load(admission)
        plan = self._scheduler.plan()
        if isinstance(plan, PrefillPlan):
            self._prefill(plan)
        elif isinstance(plan, VerifyPlan):
            self._verify(plan)
        else:
            self._land(drain=True)
        self._report()

    def _drain_commands(self, wait: bool) -> None:
        if wait:
            nobody_asks = not self._scheduler.active and not self._scheduler.waiting
            ahead = self._ahead if nobody_asks else None
            action = ahead.work_until(self._inbox.next) if ahead is not None else self._inbox.next()
        else:
            action = self._inbox.next(0)
        while action is not None:
            action()
            action = self._inbox.next(0)

    def _accept_ticket(self, ticket: Ticket) -> None:
        if ticket.cancelled or self._stopping:
            ticket.sink(EndNews("cancelled", ticket.clock.timings(0)))
            return
        try:
            ticket.sequence = self._scheduler.add(ticket.request)
        except QueueFull as error:
            ticket.sink(EndNews("error", Timings(), EngineError("overloaded", f"{error}; try again later")))
            return
        self._tickets[ticket.sequence.id] = ticket
        self.tiers.fetch(ticket.sequence)

    def _cancel(self, ticket: Ticket) -> None:
        ticket.cancelled = True
        sequence = ticket.sequence
        if sequence is None or sequence.stage is Stage.FINISHED:
            return
        self._scheduler.cancel(sequence)
        if sequence.stage is Stage.WAITING:
            self._end(sequence, "cancelled")

    def _load(self, admission: Admission) -> None:
        sequence, match = admission.sequence, admission.match
        runner = self.stages.runner
        if admission.copy_from_page is not None:
            runner.pool.copy_page(admission.copy_from_page, admission.pages[len(match.pages)])
        snapshot = match.snapshot
        assert snapshot is None or isinstance(snapshot, StateSnapshot)
        pages = list(admission.pages)
        runner.admit(sequence.slot, sequence.request, pages, snapshot, admission.num_ring, admission.goes_on)
        self._device.admit(sequence.slot, sequence.request)
        self.stages.drafters.admit(sequence.slot, sequence.request)
        self._metrics.count_request(sequence.request.client, sequence.prompt_tokens, sequence.cached_tokens)
        self._send_prefill_news(sequence)

    def _prefill(self, plan: PrefillPlan) -> None:
        ended = self._prefills.run(plan, self._scheduler.layers_now(plan))
        self._land(drain=True)
        if not ended:
            self._scheduler.prefill_paused(plan)
            return
        done = self._scheduler.prefill_done(plan)
        for sequence in self._scheduler.active:
            if sequence.id == plan.sequence_id:
                if done is not None or plan.end_tokens in sequence.state_positions:
                    self._remember_prompt(sequence, plan.end_tokens)
                self._send_prefill_news(sequence)

    def _count_prefills(self) -> None:
        pace = self._scheduler.pace
        for part in self._prefills.landed():
            num_tokens = part.plan.end_tokens - part.plan.start_tokens
            if part.chunk_ms is not None:
                self.tiers.see_prefill(num_tokens, part.chunk_ms)
            pace.see_layers(num_tokens, part.num_layers, part.ms)
            if part.plan.sequence_id in self._tickets:
                self._tickets[part.plan.sequence_id].clock.prefill_ms += part.ms

    def _verify(self, plan: VerifyPlan) -> None:
        # Masks depend on what the step before said, which lands while this one's forward pass runs.
        needs = replace(self._needs(plan), catch_up=lambda: self._land(drain=True))
        outgrown = {sequence.slot for sequence in self._scheduler.active if sequence.outgrown}
        bounds = {slot.slot: slot.length_bound_tokens for slot in plan.slots if slot.slot not in outgrown}
        self.stages.drafters.keep_up(bounds, self.stages.runner.state)
        self.stages.drafters.count_plan(plan)
        if self._ahead is not None:
            self._ahead.see(plan, needs)
        self._ring.push(run_verify(plan, self._device, needs, self.stages.runner.ops.waits))
        self._land(drain=False)

    def _needs(self, plan: VerifyPlan) -> StepNeeds:
        requests = [ticket.request for ticket in self._tickets.values()]
        tickets = {slot.slot: self._tickets.get(slot.sequence_id) for slot in plan.slots}
        grammars = {slot: t.grammar for slot, t in tickets.items() if t is not None and t.grammar is not None}
        return step_needs(requests, grammars, self.stages.runner.model.vocab_size)

    def _land(self, drain: bool) -> None:
        for landed in self._ring.pop(drain):
            self._scheduler.commit(landed.outcome.planned, landed.results)
            self._scheduler.pace.see_step(landed.draft_ms + landed.verify_ms)
            self._accounting.count(landed, self._tickets)
            for result in landed.results:
                self.stages.drafters.unread.landed(result.slot, len(result.token_ids))
                ticket = self._tickets.get(result.sequence_id)
                if ticket is not None and result.token_ids and self._follow(ticket, result):
                    ticket.sink(StepNews(result))

    def _follow(self, ticket: Ticket, result: SlotResult) -> bool:
        """Move a request's grammar over its new tokens; where it gives up, the request ends with an error."""
        if ticket.grammar is not None:
            ticket.grammar.advance(result.token_ids)
        if ticket.failure is not None and ticket.sequence is not None:
            self._scheduler.cancel(ticket.sequence)
        return ticket.failure is None

    def _retire(self) -> None:
        ended = [s for s in self._scheduler.active if s.stage is Stage.FINISHED or s.cancelled]
        if ended:
            self._land(drain=True)
        for sequence in ended:
            self._keep(sequence)
            ticket = self._tickets.get(sequence.id)
            failure = ticket.failure if ticket is not None else None
            self._end(sequence, "error" if failure else sequence.finish or "cancelled", failure)

    def _keep(self, sequence: Sequence) -> None:
        """Put the sequence's tokens and, where the model has one, its state into the prefix tree; free the slot."""
        scheduler, runner = self._scheduler, self.stages.runner
        prefilling = sequence.stage is Stage.PREFILL
        if not sequence.outgrown:
            self.stages.drafters.leave(sequence.slot, sequence.length_bound_tokens, runner.state)
        snapshot = self._states.save(sequence) if scheduler.needs_state and not prefilling else None
        ids = sequence.known_ids[: sequence.prefilled_tokens] if prefilling else sequence.known_ids[:-1]
        scheduler.retire(sequence, keep=True)
        states = self._states.pop(sequence)
        if snapshot is not None:
            scheduler.prefix.add_snapshot(ids, snapshot, sequence.request.cache_salt)
            states.append((len(ids), snapshot))
        if sequence.outgrown:
            scheduler.park_states(list(states))
        runner.release(sequence.slot)
        self.stages.drafters.release(sequence.slot)
        self.tiers.retired(sequence, ids, states)

    def _remember_prompt(self, sequence: Sequence, num_tokens: int) -> None:
        scheduler, request = self._scheduler, sequence.request
        ids = request.prompt_ids[:num_tokens]
        scheduler.remember(sequence, ids)
        if scheduler.needs_state:
            self._states.remember(sequence, ids)

    def _end(self, sequence: Sequence, finish: str, error: EngineError | None = None) -> None:
        ticket = self._tickets.pop(sequence.id, None)
        self._accounting.forget(sequence)
        self._states.pop(sequence)
        if ticket is not None:
            timings = ticket.clock.timings(sequence.cached_tokens, sequence.miss_reason)
            ticket.sink(EndNews(finish, timings, error))

    def _send_prefill_news(self, sequence: Sequence) -> None:
        ticket = self._tickets[sequence.id]
        done, total = sequence.prefilled_tokens, sequence.prefill_target_tokens
        ticket.sink(PrefillNews(done, total, sequence.cached_tokens, sequence.miss_reason))
        self._metrics.update(prefill_done_tokens=done, prefill_total_tokens=total)

    def _report(self) -> None:
        active = self._scheduler.active
        used = max((sequence.prompt_tokens + len(sequence.emitted_ids) for sequence in active), default=None)
        plain = self._tuner.plain_ms_per_token(max(1, len(active)), used or 0)
        tickets = [self._tickets[s.id] for s in active if s.id in self._tickets]
        busy = sum(t.clock.draft_ms + t.clock.verify_ms for t in tickets)
        gained = sum(t.clock.plain_ms for t in tickets)
        changes: dict[str, object] = {
            "active_requests": len(active),
            "queued_requests": len(self._scheduler.waiting),
            "plain_tok_per_s": round(1e3 / plain, 2) if plain else None,
            "drafter_reason": self._tuner.reason,
        }
        if used is not None:
            changes["context_used_tokens"] = used
        if not any(sequence.stage is Stage.PREFILL for sequence in active):
            # A prompt that was given up would stay half read for whoever asks.
            changes |= {"prefill_done_tokens": 0, "prefill_total_tokens": 0}
        if busy and gained:
            changes["speedup_vs_plain"] = round(gained / busy, 3)
        self._metrics.update(**changes)

    def _begin_stop(self) -> None:
        self._stopping = True

    def _fail_all(self, error: EngineError | None) -> None:
        """End every request; with an error also drop all caches, whose contents are in doubt. Who asked is told first:
        the device may be what failed."""
        active, waiting = self._scheduler.active, self._scheduler.waiting
        for sequence in (*active, *waiting):
            self._end(sequence, "error" if error else "cancelled", error)
        self._ring.pop(drain=True)
        for sequence in active:
            self._scheduler.retire(sequence, keep=False)
            self.stages.runner.release(sequence.slot)
            self.stages.drafters.release(sequence.slot)
        for sequence in waiting:
            self._scheduler.cancel(sequence)
        self._scheduler.admit()
        if error is not None:
            self._scheduler.clear()
            self.tiers.reset()

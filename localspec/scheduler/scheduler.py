"""Requests in, step plans out: admission by pages, alternation of prefill chunks and verify steps.

Torch-free. Promises: an admitted sequence never runs out of pages (its whole bound is reserved at admission);
every verify step carries all decoding sequences; a long prompt never stops the other streams for more than some layers
of one chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from localspec.cache.miss import explain
from localspec.cache.pages import PagePool
from localspec.cache.prefix import Match, PrefixTree, Snapshot
from localspec.core.records import (
    MAX_ROWS,
    MAX_SLOTS,
    PAGE_TOKENS,
    SEGMENT_TOKENS,
    PrefillPlan,
    Request,
    SlotPlan,
    SlotResult,
    StepPlan,
    VerifyPlan,
)
from localspec.scheduler.chunks import LayerPace
from localspec.scheduler.depth_policy import DepthPolicy
from localspec.scheduler.overflow import OverflowLimits, Parked, share_for
from localspec.scheduler.sequence import Sequence, Stage

WITHOUT_PLANES = ("off", "ngram", "ngram_disk")
"""Drafters that read tokens only."""
PROMPT_TAIL_TOKENS = 16
"""Templates write the last tokens of a prompt (who speaks next, an opened thought) otherwise once they are history."""


@dataclass(frozen=True)
class Limits:
    """`chunk_tokens` bounds a prefill chunk. Beside streams as many of its `num_layers`, the drafters' pass counted as
    one, run at once as were measured to take, with a step, `target_step_ms`."""

    context_tokens: int
    max_queued: int = 64
    chunk_tokens: int = SEGMENT_TOKENS
    num_layers: int = 1
    target_step_ms: float = 40.0
    overflow: OverflowLimits = field(default_factory=OverflowLimits)
    steady_depth: bool = False
    """Keep the depth at the end of an answer, where a new shape would cost more than rows in vain (captured graphs)."""
    shares_rows: bool = False
    """Sequences may together ask for more drafts than a step has rows; the likeliest get them."""


@dataclass(frozen=True)
class Admission:
    """A sequence that got a slot: what the runner must load before its first step."""

    sequence: Sequence
    match: Match
    pages: tuple[int, ...]
    copy_from_page: int | None
    num_ring: int = 0
    """Of a sequence that is larger than the device: how many of the last `pages` are used in turn."""
    goes_on: bool = False
    """It is the next turn of the last such sequence, whose pages lie where they lay."""


class QueueFull(Exception):
    """Too many requests wait."""


@dataclass
class Scheduler:
    """Owns the sequences and the pages they hold. `prefix` is None where nothing may be cached."""

    pool: PagePool
    prefix: PrefixTree
    limits: Limits
    policy: DepthPolicy
    needs_state: bool
    _waiting: list[Sequence] = field(default_factory=list)
    _slots: list[Sequence | None] = field(default_factory=lambda: [None] * MAX_SLOTS)
    _next_id: int = 1
    _last_was_prefill: bool = False
    _oldest_is_due: bool = True
    _parked: Parked | None = None
    _open: PrefillPlan | None = None
    """A chunk of which some layers have run."""

    def __post_init__(self) -> None:
        self.pace = LayerPace(self.limits.num_layers, self.limits.target_step_ms)

    def add(self, request: Request) -> Sequence:
        """Queue a request. Raises QueueFull; the caller has checked the context limit."""
        num_waiting = sum(not other.cancelled for other in self._waiting)
        if num_waiting >= self.limits.max_queued:
            raise QueueFull(f"{num_waiting} requests are waiting already")
        sequence = Sequence(self._next_id, request)
        self._next_id += 1
        self._waiting.append(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """Mark a sequence; it leaves at the next `retire`."""
        sequence.cancelled = True

    @property
    def active(self) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in self._slots if sequence is not None)

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing can be done until something arrives."""
        return not self.active and all(sequence.held for sequence in self._waiting)

    def admit(self) -> Admission | None:
        """Give the first waiting request a slot if its pages can be had; evicts cached pages for it.

        Requests whose prefix is being fetched are passed over until it is there, and those that may become larger than
        the device while another such runs.
        """
        self._waiting = [sequence for sequence in self._waiting if not sequence.cancelled]
        slot = next((i for i, held in enumerate(self._slots) if held is None), None)
        large_runs = any(other.num_ring for other in self.active)
        ready = (s for s in self._waiting if not s.held and not (large_runs and self._is_larger(s)))
        sequence = next(ready, None)
        if slot is None or sequence is None:
            return None
        request = sequence.request
        total_pages = self._bound_pages(request)
        if self._is_larger(sequence):
            return self._admit_larger(sequence, slot, total_pages)
        match = self._hold_match(request, total_pages)
        if match is None:
            return None
        return self._place(sequence, slot, match, self._fresh(match, total_pages - len(match.pages)))

    def _hold_match(self, request: Request, total_pages: int) -> Match | None:
        """What is cached of a prompt, held, with the pages free that it does not bring; None while they cannot be had.

        A page to copy from is one beside `total_pages`: where just that one is missing, the hit ends before it.
        """
        ids = request.prompt_ids[:-1]
        while True:
            match = self.prefix.match(ids, self.needs_state, request.cache_salt)
            held = [*match.pages, *([match.partial_page] if match.partial_page is not None else [])]
            self.pool.retain(held)
            wanted = total_pages - len(match.pages)
            self.prefix.evict(wanted - self.pool.num_free)
            if wanted > self.pool.num_free and self._parked is not None:
                self._drop_parked()
                self.prefix.evict(wanted - self.pool.num_free)
            if wanted <= self.pool.num_free:
                return match
            self.pool.release(held)
            if match.partial_page is None or wanted - self.pool.num_free > 1:
                return None
            ids = ids[: match.num_tokens]

    def _bound_pages(self, request: Request) -> int:
        bound = min(len(request.prompt_ids) + request.max_tokens, self.limits.context_tokens) + MAX_ROWS
        return -(-bound // PAGE_TOKENS)

    def _is_larger(self, sequence: Sequence) -> bool:
        """Whether a sequence may come to need more pages than the device has."""
        return self._bound_pages(sequence.request) > self.pool.num_pages - 1

    def _admit_larger(self, sequence: Sequence, slot: int, total_pages: int) -> Admission | None:
        """A sequence that the device cannot hold: one at a time, and only if host memory holds the rest of it."""
        parked, match = self._parked, None
        if parked is not None and total_pages - len(parked.pages) <= self.limits.overflow.cold_pages:
            match = parked.match(sequence.request, self.needs_state)
        if parked is not None and match is not None:
            self._parked = None
            sequence.num_ring, sequence.outgrown = parked.num_ring, True
            return replace(self._place(sequence, slot, match, parked.pages), goes_on=True)
        self._drop_parked()
        share = share_for(
            sequence.request, total_pages, self.pool, self.prefix, self.limits.overflow, self.needs_state
        )  # fmt: skip
        if share is None:
            return None
        sequence.num_ring = share.num_ring
        wanted = share.num_head + share.num_ring - len(share.match.pages)
        return self._place(sequence, slot, share.match, self._fresh(share.match, wanted))

    def _fresh(self, match: Match, wanted: int) -> list[int]:
        """The matched pages, which are held, and `wanted` more; a page that is only copied from is let go."""
        fresh = self.pool.allocate(wanted, after=match.pages[-1] if match.pages else None)
        if match.partial_page is not None:
            self.pool.release((match.partial_page,))
        return [*match.pages, *fresh]

    def _place(self, sequence: Sequence, slot: int, match: Match, pages: list[int]) -> Admission:
        request = sequence.request
        self._waiting.remove(sequence)
        self._slots[slot] = sequence
        sequence.slot = slot
        sequence.pages = pages
        sequence.cached_tokens = sequence.prefilled_tokens = match.total_tokens
        sequence.length_bound_tokens = sequence.prompt_tokens
        sequence.see_growth(MAX_ROWS)
        sequence.miss_reason = self._miss_reason(sequence, match)
        sequence.state_positions = self._state_positions(request, match)
        done = sequence.prefilled_tokens >= sequence.prefill_target_tokens
        sequence.stage = Stage.DECODE if done else Stage.PREFILL
        return Admission(sequence, match, tuple(sequence.pages), match.partial_page, sequence.num_ring)

    def plan(self) -> StepPlan | None:
        """The next step, or None if nothing can run. Alternates when both kinds are due."""
        prefilling = [s for s in self.active if s.stage is Stage.PREFILL]
        decoding = [s for s in self.active if s.stage is Stage.DECODE]
        if prefilling and not (decoding and self._last_was_prefill):
            self._last_was_prefill = True
            return self._open or self._prefill_plan(self._next_prompt(prefilling))
        self._last_was_prefill = False
        return self._verify_plan(decoding) if decoding else None

    def layers_now(self, plan: PrefillPlan) -> int | None:
        """How many layers of a chunk to run before the next step of the streams; None: nobody waits."""
        if not any(sequence.stage is Stage.DECODE for sequence in self.active):
            return None
        return self.pace.beside_streams(plan.end_tokens - plan.start_tokens)

    def prefill_paused(self, plan: PrefillPlan) -> None:
        """Some layers of a chunk have run: it is planned again until it is done."""
        self._open = plan

    def prefill_done(self, plan: PrefillPlan) -> Sequence | None:
        """A chunk was run. Returns the sequence when its whole prompt is in the cache."""
        self._open = None
        sequence = self._slots[plan.slot]
        if sequence is None or sequence.id != plan.sequence_id:
            return None
        sequence.prefilled_tokens = plan.end_tokens
        if plan.end_tokens < sequence.prefill_target_tokens:
            return None
        sequence.stage = Stage.DECODE
        return sequence

    def commit(self, plan: VerifyPlan, results: tuple[SlotResult, ...]) -> None:
        """Results of a planned verify step: bounds become exact again, finished sequences are marked."""
        planned = {slot.sequence_id: slot for slot in plan.slots}
        for result in results:
            sequence = self._slots[result.slot]
            if sequence is None or sequence.id != result.sequence_id:
                continue
            sequence.length_bound_tokens -= 1 + planned[result.sequence_id].num_drafts - len(result.token_ids)
            sequence.emitted_ids.extend(result.token_ids)
            sequence.see_phase(result.token_ids)
            if result.finish:
                sequence.finish = result.finish
                sequence.stage = Stage.FINISHED

    def retire(self, sequence: Sequence, keep: bool) -> None:
        """Take a finished or cancelled sequence from its slot; `keep` remembers its tokens in the prefix tree.

        The last token is not in the cache. Private requests are kept in memory like others: nothing here is written.
        """
        ids = sequence.known_ids[:-1]
        if sequence.stage is Stage.PREFILL:
            ids = ids[: sequence.prefilled_tokens]
        keep = keep and bool(ids) and not sequence.forgotten
        if keep:
            self.remember(sequence, ids)
        if keep and sequence.outgrown:
            request = sequence.request
            self._parked = Parked(ids, sequence.pages, sequence.num_ring, request.cache_salt, request.chat_id)
        else:
            self.pool.release(sequence.pages)
        if self._open is not None and self._open.sequence_id == sequence.id:
            self._open = None
        self._slots[sequence.slot] = None
        sequence.stage = Stage.FINISHED

    def remember(self, sequence: Sequence, ids: tuple[int, ...]) -> None:
        """Put the first tokens of a sequence into the tree, of one that is larger than the device those that stay, of a
        forgotten chat none."""
        if sequence.forgotten:
            return
        request = sequence.request
        if sequence.outgrown:
            ids = ids[: (len(sequence.pages) - sequence.num_ring) * PAGE_TOKENS]
        self.prefix.insert(ids, sequence.pages, request.chat_id, request.cache_salt)

    def park_states(self, states: list[tuple[int, Snapshot]]) -> None:
        """Snapshots of the sequence that was just retired, if it was larger than the device."""
        if self._parked is not None and not self._parked.states:
            self._parked.states = states

    def forget_chat(self, chat_id: str) -> None:
        """Drop everything that only this chat left; of its sequences that wait or run nothing will be kept."""
        for sequence in (*self.active, *self._waiting):
            sequence.forgotten = sequence.forgotten or sequence.request.chat_id == chat_id
        self.prefix.forget_chat(chat_id)
        if self._parked is not None and self._parked.chat_id == chat_id:
            self._drop_parked()

    def clear(self) -> None:
        """Drop everything that finished sequences left."""
        self.prefix.clear()
        self._drop_parked()

    def give_up_parked(self) -> bool:
        """Let go of the last sequence that was larger than the device, if it holds states; False if none does."""
        if self._parked is None or not self._parked.states:
            return False
        self._drop_parked()
        return True

    def _drop_parked(self) -> None:
        if self._parked is not None:
            self.pool.release(self._parked.pages)
            self._parked = None

    def _miss_reason(self, sequence: Sequence, match: Match) -> str:
        """Asked after the pages were taken, so that what was evicted for this very request counts as evicted."""
        request = sequence.request
        ids = request.prompt_ids[:-1]
        evidence = self.prefix.evidence(ids, match.total_tokens, request.chat_id, request.cache_salt)
        thought = request.thinking.start_ids if request.thinking is not None else ()
        tolerance = PAGE_TOKENS + PROMPT_TAIL_TOKENS if self.needs_state else 0
        return explain(evidence, thought, sequence.tier_problem, tolerance)

    def _state_positions(self, request: Request, match: Match) -> tuple[int, ...]:
        """Where a state will be wanted again: after system message and tools, where this prompt departs from others,
        and just before its end."""
        if not self.needs_state:
            return ()
        ids = request.prompt_ids[:-1]
        departs = self.prefix.match(ids, False, request.cache_salt).total_tokens
        borders = (request.shared_tokens, departs, len(ids) - PROMPT_TAIL_TOKENS)
        wanted = (tokens // PAGE_TOKENS * PAGE_TOKENS for tokens in borders)
        return tuple(sorted({tokens for tokens in wanted if match.total_tokens < tokens < len(ids)}))

    def _next_prompt(self, prefilling: list[Sequence]) -> Sequence:
        """By turns the one that has waited longest and the one that is done soonest: a short question beside a long
        text begins early, and neither waits for ever."""
        self._oldest_is_due = not self._oldest_is_due
        if self._oldest_is_due:
            return min(prefilling, key=lambda sequence: sequence.id)
        return min(prefilling, key=lambda sequence: sequence.prefill_target_tokens - sequence.prefilled_tokens)

    def _prefill_plan(self, sequence: Sequence) -> PrefillPlan:
        size = self.limits.chunk_tokens
        start = sequence.prefilled_tokens
        border = start // size * size + size
        border = min([border, *(tokens for tokens in sequence.state_positions if tokens > start)])
        return PrefillPlan(
            slot=sequence.slot,
            sequence_id=sequence.id,
            start_tokens=start,
            end_tokens=min(border, sequence.prefill_target_tokens),
            drafter=sequence.request.drafter,
        )

    def _verify_plan(self, decoding: list[Sequence]) -> VerifyPlan:
        spare_rows = MAX_ROWS - len(decoding)
        for sequence in decoding:
            sequence.see_growth(2 * MAX_ROWS)
        choices = [self._choice(sequence, len(decoding)) for sequence in decoding]
        shared = self.limits.shares_rows and all(self._may_share(sequence) for sequence in decoding)
        slots = []
        for index, (sequence, (drafter, wanted)) in enumerate(zip(decoding, choices, strict=True)):
            share = MAX_ROWS - len(decoding) if shared else spare_rows // (len(decoding) - index)
            room = sequence.prompt_tokens + sequence.request.max_tokens - sequence.length_bound_tokens - 1
            depth = max(0, min(wanted, share) if self.limits.steady_depth else min(wanted, share, room))
            spare_rows -= depth
            slots.append(SlotPlan(sequence.slot, sequence.id, drafter, depth, sequence.length_bound_tokens))
            sequence.length_bound_tokens += 1 + depth
        wanted = sum(1 + slot.num_drafts for slot in slots)
        return VerifyPlan(tuple(slots), self.policy.row_budget(len(slots), wanted) if shared else None)

    def _choice(self, sequence: Sequence, num_active: int) -> tuple[str, int]:
        """(drafter, depth). Drafters' own planes do not follow a sequence that is larger than the device."""
        drafter, depth = self.policy.choose(sequence, num_active)
        if sequence.outgrown and not all(name in WITHOUT_PLANES for name in drafter.split("+")):
            return "off", 0
        return drafter, depth

    def _may_share(self, sequence: Sequence) -> bool:
        """Drafts that a thinking budget dictates need their rows, and so do those that somebody asked for."""
        rule = sequence.request.thinking
        return (rule is None or rule.budget_tokens is None) and not self.policy.wants_all(sequence)

"""Runs plans on the device: owns the slot state, the cache buffers and the model. Knows no requests' owners.

One verify path for every width, zero drafts included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from localspec.cache.cold import ColdPages, OverflowPages, OverflowSlot
from localspec.cache.pool import CachePool, StateSnapshot
from localspec.core.records import Draft, Forward, HiddenNeeds, PrefillPlan, Request, Rows
from localspec.core.state import Cache, SequenceState
from localspec.kernels.ops import Ops
from localspec.layers.decoder import ForwardPass
from localspec.models import Model
from localspec.runner.inputs import Layout, prefill_rows, verify_rows
from localspec.runner.slots import fill_slot, make_state, release_slot


@dataclass(frozen=True)
class VerifyOutput:
    """Rows that ran, their hiddens, and logits [R, V] float32."""

    rows: Rows
    forward: Forward
    logits: torch.Tensor


@dataclass
class Reading:
    """A chunk of a prompt on its way through the layers. Whoever advances it sets forward, once all have run, and seen,
    once the drafters were shown it."""

    plan: PrefillPlan
    rows: Rows
    under_way: ForwardPass
    forward: Forward | None = None
    seen: bool = False

    @property
    def num_done(self) -> int:
        """Layers that have run; what drafters make of the chunk counts as one more."""
        return self.under_way.num_done + int(self.seen)


class Runner:
    """The device side of a loaded model. `needs` is the union of what all drafters read of the target."""

    def __init__(self, model: Model, ops: Ops, pool: CachePool, context_limit_tokens: int, needs: HiddenNeeds) -> None:
        self.model = model
        self.ops = ops
        self.pool = pool
        self.state: SequenceState = make_state(context_limit_tokens, model.vocab_size, ops.device)
        self._needs = needs
        self._target_cache = pool.cache("target")
        self.cold: ColdPages | None = None
        """Set where contexts may be larger than the device's pages."""
        self._overflow: OverflowSlot | None = None

    def admit(
        self,
        slot: int,
        request: Request,
        pages: list[int],
        snapshot: StateSnapshot | None,
        num_ring: int = 0,
        goes_on: bool = False,
    ) -> None:
        """Give a slot to a request; its first `cached` tokens are already in `pages` (and in `snapshot`).

        num_ring: so many of the last pages are used in turn, as the request may outgrow them; one slot at a time.
        goes_on: it is the next turn of the last such request.
        """
        fill_slot(self.state, slot, request)
        if num_ring and self.cold is not None:
            if not goes_on or self._overflow is None:
                self.cold.clear()
                self._overflow = OverflowSlot(slot, OverflowPages(tuple(pages[:-num_ring]), tuple(pages[-num_ring:])))
            pages = self._overflow.go_on(slot, self.cold)
        self.set_pages(slot, 0, pages)
        if snapshot is None:
            self.pool.reset_states(slot)
        else:
            self.pool.restore_states(slot, snapshot)

    def set_pages(self, slot: int, first_index: int, pages: list[int]) -> None:
        """Write page numbers into the slot's block table from `first_index` on."""
        if pages:
            numbers = torch.tensor(pages, dtype=torch.int32, device=self.ops.device)
            self.state.block_tables[slot, first_index : first_index + len(pages)] = numbers

    def release(self, slot: int) -> None:
        """The sequence of this slot ended."""
        release_slot(self.state, slot)
        self.state.block_tables[slot].zero_()
        if self.cold is not None and self._overflow is not None and self._overflow.slot == slot:
            self.cold.leave(slot)
            self._overflow.slot = -1

    @property
    def overflows(self) -> bool:
        """Whether a running sequence has pages in host memory."""
        return self._overflow is not None and self.overflows_in((self._overflow.slot,))

    def overflows_in(self, slots: Iterable[int]) -> bool:
        """Whether one of these slots has pages in host memory, which captured graphs do not fetch. Passes of others
        neither need nor fetch them."""
        held = self._overflow
        return self.cold is not None and self.cold.count > 0 and held is not None and 0 <= held.slot in slots

    def make_room(self, slot: int, end_tokens: int) -> None:
        """Before a step that may write a slot's tokens below `end_tokens`."""
        if self.cold is not None and self._overflow is not None and self._overflow.slot == slot:
            self._overflow.advance(end_tokens, self.cold, self.state.block_tables)

    def _cache(self, with_cold: bool) -> Cache:
        return replace(self._target_cache, cold=self.cold) if with_cold else self._target_cache

    @torch.inference_mode()
    def prefill(self, plan: PrefillPlan) -> tuple[Rows, Forward]:
        """Read a chunk of a prompt into the cache."""
        reading = self.begin_prefill(plan)
        forward = self.advance_prefill(reading, self.model.num_layers)
        assert forward is not None
        return reading.rows, forward

    @torch.inference_mode()
    def begin_prefill(self, plan: PrefillPlan) -> Reading:
        """A chunk of which no layer has run yet."""
        self.make_room(plan.slot, plan.end_tokens)
        rows = prefill_rows(plan, self.state, self.ops.prefill_row_multiple)
        cache = self._cache(self.overflows_in((plan.slot,)))
        return Reading(plan, rows, self.model.begin(rows, cache, self._needs))

    @torch.inference_mode()
    def advance_prefill(self, reading: Reading, num_layers: int) -> Forward | None:
        """Run the next layers of a chunk; its hiddens once all have run and the chunk is in the cache. Verify steps of
        other slots may run in between."""
        forward = self.model.advance(reading.under_way, num_layers)
        if forward is not None:
            self.state.pending_rows[reading.plan.slot].fill_(0)
        return forward

    @torch.inference_mode()
    def verify(self, layout: Layout, draft: Draft, max_position_bound: int, with_cold: bool = False) -> VerifyOutput:
        """Run every decoding sequence's window. Nothing is committed before acceptance. with_cold: some sequence of the
        step has pages in host memory."""
        rows = verify_rows(self.ops, layout, draft, self.state, max_position_bound)
        forward = self.model.forward(rows, self._cache(with_cold), self._needs)
        return VerifyOutput(rows, forward, self.model.logits(forward.hidden))

    @torch.inference_mode()
    def save_states(self, slot: int, give_up: Callable[[], bool]) -> StateSnapshot | None:
        """Fold what is pending, then copy the states of a slot, if there is room: see `CachePool.room`."""
        self.fold()
        return self.pool.save_states(slot, give_up)

    @torch.inference_mode()
    def fold(self) -> None:
        """Commit pending rows of every slot, as every consumer of recurrent state must do first."""
        self.model.fold(self._target_cache, self.state.pending_rows)
        self.state.pending_rows.zero_()

"""All drafters of an engine behind one call: each slot gets the drafts of the method that its plan names.

A `+` chain asks its drafters in order; the first that has anything for a slot speaks, and those that can go on behind
another's words then fill what is left of the window.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localspec.cache.pool import CachePool
from localspec.core.records import MAX_SLOTS, Draft, Forward, HiddenNeeds, Request, Rows, SlotPlan, VerifyPlan
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter, Extender, pass_rows
from localspec.engine.keeping_up import UnreadRows
from localspec.engine.verify_schedule import VerifySchedule, chosen

NO_CACHE = Cache({}, {})
SMALLEST_CORPUS_TOKENS = 512
CORPUS_STEP = 4
UNKNOWN_CONFIDENCE = 0.5
"""Of drafts whose drafter gives none."""


@dataclass(frozen=True)
class _Role:
    """The chain that a drafter speaks in, whether only sure drafts count, and whether noise is drawn."""

    chain: str
    only_sure: bool
    sampled: bool


def union_of_needs(drafters: Mapping[str, Drafter]) -> HiddenNeeds:
    """What the target must hand out for all of these drafters."""
    layers = sorted({layer for drafter in drafters.values() for layer in drafter.needs.layer_outputs})
    return HiddenNeeds(any(drafter.needs.final_norm for drafter in drafters.values()), tuple(layers))


class DrafterSet:
    """Loaded drafters by name. `off` needs no drafter."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        pool: CachePool,
        device: torch.device,
        schedule: VerifySchedule | None = None,
    ) -> None:
        """schedule: chooses among the drafts of plans with a row budget; None: nobody does, and there are none."""
        self.schedule = schedule
        self._drafters = dict(drafters)
        self._pool = pool
        self._device = device
        self._depth_tensors: dict[tuple[int, ...], Tensor] = {}
        self._corpus_tokens = [0] * MAX_SLOTS
        self._nothing = _empty_draft(0, device)
        """Read where it is by captured steps without drafts."""
        self.unread = UnreadRows.of(drafters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._drafters)

    def max_depth(self, name: str) -> int:
        """Depth that a method or chain can reach; 0 for `off`."""
        return max((self._drafters[part].max_depth for part in name.split("+") if part in self._drafters), default=0)

    def knows(self, name: str) -> bool:
        """Whether every part of a method or chain is loaded."""
        return all(part == "off" or part in self._drafters for part in name.split("+"))

    def propose(self, plan: VerifyPlan, state: SequenceState, sampled: bool) -> Draft:
        """Drafts for every slot of the plan; slots with depth 0 get none. Width is the plan's greatest depth.

        `sampled`: whether some slot draws with a temperature.
        """
        width = max(slot.num_drafts for slot in plan.slots)
        if not width:
            return self._nothing
        draft: Draft | None = None
        for chain in sorted({slot.drafter for slot in plan.slots if slot.num_drafts}):
            parts = [part for part in chain.split("+") if part in self._drafters]
            for part in parts:
                # Before another method a drafter speaks only where it is sure, or the other would never be heard.
                role = _Role(chain, only_sure=part != parts[-1], sampled=sampled)
                draft = self._speak(self._drafters[part], role, plan, state, draft, width)
            if len(parts) > 1 and draft is not None:
                draft = self._go_on(parts, _Role(chain, only_sure=True, sampled=sampled), plan, state, draft)
        if draft is None:
            return _empty_draft(width, self._device)
        if plan.row_budget is not None and self.schedule is not None:
            draft = chosen(draft, [slot.slot for slot in plan.slots], plan.row_budget, self.schedule)
        return draft

    def corpus_bound(self) -> int:
        """Host bound of the lengths of the predictions that came with requests, in steps; 0 where there is none.

        Part of what a captured proposal depends on.
        """
        longest, bound = max(self._corpus_tokens), SMALLEST_CORPUS_TOKENS
        while 0 < bound < longest:
            bound *= CORPUS_STEP
        return bound if longest else 0

    def depths_of(self, plan: VerifyPlan) -> Tensor:
        """[S] int64 drafts that the plan has room for. Kept like every tensor of depths."""
        by_slot = [0] * MAX_SLOTS
        for slot in plan.slots:
            by_slot[slot.slot] = slot.num_drafts
        return self._depth_tensor(tuple(by_slot))

    def observe(self, rows: Rows, forward: Forward, state: SequenceState) -> None:
        """Show all drafters the rows that the target ran, so that any of them may be chosen next."""
        for drafter in self._drafters.values():
            drafter.observe(rows, forward, state, self._cache(drafter))

    def count_plan(self, plan: VerifyPlan) -> None:
        """The drafts of a plan are made, by a call or by a replay: its drafters ran what waited."""
        for chain in sorted({slot.drafter for slot in plan.slots if slot.num_drafts}):
            wanted = [slot for slot in plan.slots if slot.drafter == chain and slot.num_drafts]
            for name in self.unread.waiters.keys() & chain.split("+"):
                self.unread.ran(name, [slot.slot for slot in wanted], _pass_rows(wanted))

    def keep_up(self, bounds: Mapping[int, int], state: SequenceState) -> None:
        """Between two steps: run what a drafter that is not in use would lose. bounds: of the lengths, by slot."""
        for name in self.unread.due() if bounds else ():
            self._run_unread(name, tuple(sorted(bounds)), bounds, state)

    def leave(self, slot: int, length_bound_tokens: int, state: SequenceState) -> None:
        """A sequence ends: its next turn takes whole what its cache holds."""
        for name in self.unread.last_passes(slot):
            self._run_unread(name, (slot,), {slot: length_bound_tokens}, state)

    def _run_unread(self, name: str, slots: tuple[int, ...], bounds: Mapping[int, int], state: SequenceState) -> None:
        by_slot = tuple(int(slot in slots) for slot in range(MAX_SLOTS))
        depths = Depths(self._depth_tensor(by_slot), 1, slots, tuple(bounds[slot] for slot in slots))
        self.unread.waiters[name].catch_up(depths, state, self._cache(self._drafters[name]))
        self.unread.ran(name, slots, depths.pass_rows)

    def admit(self, slot: int, request: Request) -> None:
        """A slot was given to a request."""
        self.unread.admit(slot)
        self._corpus_tokens[slot] = len(request.prediction_ids)
        for drafter in self._drafters.values():
            drafter.forget(slot)

    def release(self, slot: int) -> None:
        """No request holds the slot any more: what came with it counts for no step."""
        self._corpus_tokens[slot] = 0

    def _speak(
        self,
        drafter: Drafter,
        role: _Role,
        plan: VerifyPlan,
        state: SequenceState,
        so_far: Draft | None,
        width: int,
    ) -> Draft | None:
        """What was said before, and for slots where that is nothing what this drafter says."""
        depths = self._depths(plan, role, drafter.max_depth)
        if not depths.max_depth:
            return so_far
        said = _widened(drafter.propose(depths, state, self._cache(drafter)), width)
        return said if so_far is None else _first_that_speaks(so_far, said)

    def _go_on(self, parts: list[str], role: _Role, plan: VerifyPlan, state: SequenceState, so_far: Draft) -> Draft:
        """Fill the rest of the chain's windows, where its last part leaves any."""
        width = so_far.token_ids.shape[1]
        depths = self._depths(plan, role, width)
        last = self._drafters[parts[-1]]
        if not isinstance(last, Extender) and last.max_depth >= depths.max_depth:
            return so_far
        for drafter in (self._drafters[part] for part in parts):
            if isinstance(drafter, Extender):
                return drafter.extend(so_far, replace(depths, max_depth=width), state)
        return so_far

    def _depths(self, plan: VerifyPlan, role: _Role, limit: int) -> Depths:
        """What the chain's slots may be given, at most `limit` each."""
        wanted = [slot for slot in plan.slots if slot.drafter == role.chain and slot.num_drafts]
        by_slot = [0] * MAX_SLOTS
        for slot in wanted:
            by_slot[slot.slot] = min(slot.num_drafts, limit)
        return Depths(
            depths=self._depth_tensor(tuple(by_slot)),
            max_depth=max(by_slot),
            slots=tuple(slot.slot for slot in wanted),
            length_bounds=tuple(slot.length_bound_tokens for slot in wanted),
            sampled=role.sampled,
            only_sure=role.only_sure,
            corpus_bound=self.corpus_bound(),
            pass_rows=_pass_rows(wanted),
        )

    def _depth_tensor(self, by_slot: tuple[int, ...]) -> Tensor:
        """[S] int64. Kept, because a captured graph reads it again and may not copy from the host."""
        if by_slot not in self._depth_tensors:
            self._depth_tensors[by_slot] = torch.tensor(by_slot, dtype=torch.int64, device=self._device)
        return self._depth_tensors[by_slot]

    def _cache(self, drafter: Drafter) -> Cache:
        spec = drafter.cache_spec
        return self._pool.cache(spec.owner) if spec.planes or spec.states else NO_CACHE


def _pass_rows(slots: Iterable[SlotPlan]) -> int:
    """Of a chain's slots: their windows are what a step leaves to be run."""
    return pass_rows(1 + slot.num_drafts for slot in slots)


def _empty_draft(width: int, device: torch.device) -> Draft:
    return Draft(
        token_ids=torch.full((MAX_SLOTS, width), -1, dtype=torch.int64, device=device),
        origins=torch.zeros(MAX_SLOTS, width, dtype=torch.int64, device=device),
        num_drafts=torch.zeros(MAX_SLOTS, dtype=torch.int64, device=device),
        origin_names=(),
        confidence=torch.zeros(MAX_SLOTS, width, device=device),
    )


def _widened(draft: Draft, width: int) -> Draft:
    """With as many columns as the step's windows have."""
    missing = width - draft.token_ids.shape[1]
    if not missing:
        return replace(draft, confidence=_confidence(draft))
    return replace(
        draft,
        token_ids=torch.nn.functional.pad(draft.token_ids, (0, missing), value=-1),
        origins=torch.nn.functional.pad(draft.origins, (0, missing)),
        confidence=torch.nn.functional.pad(_confidence(draft), (0, missing)),
    )


def _first_that_speaks(first: Draft, second: Draft) -> Draft:
    """Per slot: `first` if it has a draft there, else `second`; both are equally wide."""
    speaks = first.num_drafts > 0  # [S]
    return Draft(
        token_ids=torch.where(speaks[:, None], first.token_ids, second.token_ids),
        origins=torch.where(speaks[:, None], first.origins, second.origins + len(first.origin_names)),
        num_drafts=torch.where(speaks, first.num_drafts, second.num_drafts),
        origin_names=(*first.origin_names, *second.origin_names),
        confidence=torch.where(speaks[:, None], _confidence(first), _confidence(second)),
    )


def _confidence(draft: Draft) -> Tensor:
    """[S, K] float32 of a draft."""
    if draft.confidence is not None:
        return draft.confidence
    return torch.where(draft.token_ids >= 0, UNKNOWN_CONFIDENCE, 0.0)

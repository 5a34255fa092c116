"""All drafters of an engine behind one call: each slot gets the drafts of the method that its plan names.

A `+` chain asks its drafters in order; the first that has anything for a slot speaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.cache.pool import CachePool
from localspec.core.records import MAX_SLOTS, Draft, Forward, HiddenNeeds, Rows, VerifyPlan
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter

NO_CACHE = Cache({}, {})


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

    def __init__(self, drafters: Mapping[str, Drafter], pool: CachePool, device: torch.device) -> None:
        self._drafters = dict(drafters)
        self._pool = pool
        self._device = device
        self._depth_tensors: dict[tuple[int, ...], Tensor] = {}

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
        draft = _empty_draft(width, self._device)
        if not width:
            return draft
        for chain in sorted({slot.drafter for slot in plan.slots if slot.num_drafts}):
            parts = [part for part in chain.split("+") if part in self._drafters]
            for part in parts:
                # Before another method a drafter speaks only where it is sure, or the other would never be heard.
                role = _Role(chain, only_sure=part != parts[-1], sampled=sampled)
                draft = self._speak(self._drafters[part], role, plan, state, draft)
        return draft

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

    def forget(self, slot: int) -> None:
        for drafter in self._drafters.values():
            drafter.forget(slot)

    def _speak(self, drafter: Drafter, role: _Role, plan: VerifyPlan, state: SequenceState, so_far: Draft) -> Draft:
        wanted = [slot for slot in plan.slots if slot.drafter == role.chain and slot.num_drafts]
        by_slot = [0] * MAX_SLOTS
        for slot in wanted:
            by_slot[slot.slot] = min(slot.num_drafts, drafter.max_depth)
        if not any(by_slot):
            return so_far
        depths = Depths(
            depths=self._depth_tensor(tuple(by_slot)),
            max_depth=max(by_slot),
            slots=tuple(slot.slot for slot in wanted),
            length_bounds=tuple(slot.length_bound_tokens for slot in wanted),
            sampled=role.sampled,
            only_sure=role.only_sure,
        )
        draft = drafter.propose(depths, state, self._cache(drafter))
        return _first_that_speaks(so_far, draft)

    def _depth_tensor(self, by_slot: tuple[int, ...]) -> Tensor:
        """[S] int64. Kept, because a captured graph reads it again and may not copy from the host."""
        if by_slot not in self._depth_tensors:
            self._depth_tensors[by_slot] = torch.tensor(by_slot, dtype=torch.int64, device=self._device)
        return self._depth_tensors[by_slot]

    def _cache(self, drafter: Drafter) -> Cache:
        spec = drafter.cache_spec
        return self._pool.cache(spec.owner) if spec.planes or spec.states else NO_CACHE


def _empty_draft(width: int, device: torch.device) -> Draft:
    return Draft(
        token_ids=torch.full((MAX_SLOTS, width), -1, dtype=torch.int64, device=device),
        origins=torch.zeros(MAX_SLOTS, width, dtype=torch.int64, device=device),
        num_drafts=torch.zeros(MAX_SLOTS, dtype=torch.int64, device=device),
        origin_names=(),
    )


def _first_that_speaks(first: Draft, second: Draft) -> Draft:
    """Per slot: `first` if it has a draft there, else `second` (which may be narrower)."""
    width = first.token_ids.shape[1]
    missing = width - second.token_ids.shape[1]
    token_ids = torch.nn.functional.pad(second.token_ids, (0, missing), value=-1)
    origins = torch.nn.functional.pad(second.origins, (0, missing)) + len(first.origin_names)
    speaks = first.num_drafts > 0  # [S]
    return Draft(
        token_ids=torch.where(speaks[:, None], first.token_ids, token_ids),
        origins=torch.where(speaks[:, None], first.origins, origins),
        num_drafts=torch.where(speaks, first.num_drafts, second.num_drafts),
        origin_names=(*first.origin_names, *second.origin_names),
    )

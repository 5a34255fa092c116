"""A result ring that also tells a drafter on the host what landed, for tables that the device cannot reach."""

from __future__ import annotations

from typing import Protocol

from localspec.engine.ring import Landed, ResultRing
from localspec.scheduler.scheduler import Scheduler

TAIL_TOKENS = 16


class Follow(Protocol):
    """Takes what landed; returns at once."""

    def __call__(
        self,
        sequence_id: int,
        tail: tuple[int, ...],
        came: tuple[int, ...],
        ended: bool,
        drafted_by: tuple[str, ...],
        num_accepted: int,
    ) -> None:
        """tail: last known tokens; came: those of the step; ended: no step follows; drafted_by: origins of the drafts
        that were verified, of which the first `num_accepted` stood."""
        ...


class FeedingRing(ResultRing):
    """What it pops is not yet committed to the scheduler's sequences, so their last tokens are put together here."""

    def __init__(self, lag: int, scheduler: Scheduler, follow: Follow) -> None:
        super().__init__(lag)
        self._scheduler = scheduler
        self._follow = follow

    def pop(self, drain: bool = False) -> list[Landed]:
        landed = super().pop(drain)
        for step in landed:
            by_id = {sequence.id: sequence for sequence in self._scheduler.active}
            for result in step.results:
                sequence = by_id.get(result.sequence_id)
                if sequence is not None and result.token_ids:
                    known = (*sequence.emitted_ids[-TAIL_TOKENS:], *result.token_ids)
                    lead = sequence.request.prompt_ids[-TAIL_TOKENS:] if len(known) < TAIL_TOKENS else ()
                    self._follow(
                        result.sequence_id,
                        (*lead, *known)[-TAIL_TOKENS:],
                        result.token_ids,
                        bool(result.finish),
                        result.drafted_by,
                        result.num_accepted,
                    )
        return landed

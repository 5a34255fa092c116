"""No drafting: every step verifies the last token alone."""

from __future__ import annotations

import torch

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths, Drafter, DrafterSetup

needs_weights = False


class OffDrafter:
    """Proposes nothing, whatever depth is asked for."""

    name = "off"
    origins: tuple[str, ...] = ()
    max_depth = 0
    needs = HiddenNeeds()
    cache_spec = CacheSpec(owner="off", fingerprint="off")

    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """An empty Draft of the asked-for width."""
        shape = (state.lengths.shape[0], depths.max_depth)
        return Draft(
            token_ids=state.lengths.new_full(shape, -1),
            origins=state.lengths.new_zeros(shape),
            num_drafts=torch.zeros_like(state.lengths),
            origin_names=self.origins,
        )

    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Nothing is kept."""

    def forget(self, slot: int) -> None:
        """Nothing is kept."""


def build(setup: DrafterSetup) -> Drafter:
    """The same for every model."""
    return OffDrafter()


def tiny(setup: DrafterSetup) -> Drafter:
    """The same for every model."""
    return OffDrafter()

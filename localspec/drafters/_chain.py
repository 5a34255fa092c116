"""The loop of drafters that guess one token after the other from a hidden of their own (MTP, EAGLE-3).

The network's row at position p reads the token at p + 1 and the target's hidden at p, and its output predicts the
token at p + 2. Committed rows are run in `observe`, with the target's hiddens, so that every committed token has a
true entry in the network's cache; `propose` goes on from the newest row with the network's own output as hidden. Those
rows are provisional: the same places are written again before anything reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Draft, Forward, HiddenNeeds, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import Depths
from localspec.drafters._drawing import Drawer, DrawnRows, all_certainties, finished_draft
from localspec.kernels.ops import Paging
from localspec.layers.step import LayerStep


class ChainNetwork(Protocol):
    """What differs between methods. D: width of the hidden that goes around."""

    hidden_size: int

    def first_hidden(self, forward: Forward) -> Tensor:
        """[R, D] from what the target handed out."""
        ...

    def run(self, token_ids: Tensor, hidden: Tensor, step: LayerStep) -> Tensor:
        """token_ids [R], hidden [R, D] -> [R, D], the hidden for the next row and for `logits`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, n] float32 over the draft's vocabulary."""
        ...


class ChainDrafter:
    """Meets `Drafter`. A slot whose newest row was not observed (just restored, just switched on) waits one step."""

    def __init__(
        self,
        network: ChainNetwork,
        needs: HiddenNeeds,
        cache_spec: CacheSpec,
        drawer: Drawer,
        max_depth: int,
        num_slots: int,
        placement: tuple[torch.device, torch.dtype],
    ) -> None:
        """placement: device and dtype of the hidden."""
        self.name = cache_spec.owner
        self.origins: tuple[str, ...] = (self.name,)
        self.max_depth = max_depth
        self.needs = needs
        self.cache_spec = cache_spec
        self._network = network
        self._drawer = drawer
        device, dtype = placement
        # One place more than slots: rows that are nobody's newest are sent there.
        self._hidden = torch.zeros(num_slots + 1, network.hidden_size, device=device, dtype=dtype)
        self._position = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Go on from the newest observed row, one token a round for all slots."""
        num_slots = state.lengths.shape[0]
        ready = (self._position[:num_slots] == state.lengths - 2) & (state.lengths >= 2)
        hidden = self._hidden[:num_slots]
        rounds = _Rounds.of(state, torch.where(ready, depths.depths, 0), depths, cache)
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        for column in range(min(depths.max_depth, self.max_depth)):
            if column:
                hidden = self._network.run(tokens[-1], hidden, rounds.step(column))
            logits.append(self._network.logits(hidden))
            positions = state.lengths + column if depths.sampled else state.lengths
            tokens.append(self._drawer.draw(logits[-1], DrawnRows(state, positions, depths.sampled)))
        confidence = all_certainties(self._drawer, logits, state, depths.sampled) if logits else []
        return finished_draft(tokens, confidence, ready, depths, self.origins)

    @torch.inference_mode()
    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Run the committed rows and keep the output of each slot's newest."""
        slots = rows.slots.clamp(min=0)
        following = rows.positions + 1
        committed = (rows.slots >= 0) & (following < state.lengths[slots])
        token_ids = state.history[slots, following.clamp(max=state.history.shape[1] - 1)]
        kept = replace(rows, slots=torch.where(committed, rows.slots, -1))
        step = LayerStep.of(kept, cache)
        hidden = self._network.run(token_ids, self._network.first_hidden(forward), step)
        newest = committed & (following == state.lengths[slots] - 1)
        place = torch.where(newest, slots, self._position.shape[0] - 1)
        self._hidden[place] = hidden.to(self._hidden.dtype)
        self._position[place] = rows.positions

    def forget(self, slot: int) -> None:
        """The kept row belongs to another text."""
        self._position[slot] = -1


@dataclass(frozen=True)
class _Rounds:
    """What the rounds of a proposal share: one row a slot, at most as many rounds as its depth."""

    rows: Rows
    cache: Cache
    depths: Tensor
    key_begin: Tensor

    @classmethod
    def of(cls, state: SequenceState, allowed: Tensor, depths: Depths, cache: Cache) -> _Rounds:
        """allowed: [S] int64 depth of each slot, 0 for slots that are not drafted for."""
        slots = torch.arange(allowed.shape[0], device=allowed.device)
        rows = Rows(
            kind="verify",
            token_ids=slots,
            positions=(state.lengths - 2).clamp(min=0),
            slots=slots,
            block_tables=state.block_tables,
            lengths=state.lengths,
            window_starts=slots,
            window_rows=torch.ones_like(slots),
            pending_rows=state.pending_rows,
            max_position_bound=max(depths.length_bounds, default=1) + depths.max_depth,
        )
        return cls(rows, cache, allowed, torch.zeros_like(slots))

    def step(self, column: int) -> LayerStep:
        """Rows of the round that guesses `column`; slots that are done become padding."""
        positions = self.rows.positions + column
        slots = torch.where(self.depths > column, self.rows.slots, -1)
        rows = replace(self.rows, positions=positions, slots=slots)
        paging = Paging(rows.block_tables, slots, rows.max_position_bound + 1)
        return LayerStep(rows, self.cache, paging, self.key_begin, positions + 1)

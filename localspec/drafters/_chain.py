"""The loop of drafters that guess one token after the other from a hidden of their own (MTP, EAGLE-3).

The network's row at position p reads the token at p + 1 and the target's hidden at p, and its output predicts the
token at p + 2. Committed rows are run with the target's hiddens, so that every committed token has a true entry in the
network's cache; `propose` goes on from the newest row with the network's own output as hidden. Those rows are
provisional: the same places are written again before anything reads them.
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
from localspec.drafters._waiting import WaitingRows
from localspec.kernels.ops import Paging
from localspec.layers.step import LayerStep


class ChainNetwork(Protocol):
    """What differs between methods. D: width of the hidden that goes around; source_size: of what is kept of a row."""

    hidden_size: int
    source_size: int

    def source(self, forward: Forward) -> Tensor:
        """[R, source_size] of what the target handed out, as it is."""
        ...

    def first_hidden(self, source: Tensor) -> Tensor:
        """[R, source_size] -> [R, D]."""
        ...

    def run(self, token_ids: Tensor, hidden: Tensor, step: LayerStep) -> Tensor:
        """token_ids [R], hidden [R, D] -> [R, D], the hidden for the next row and for `logits`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, D] -> [R, n] float32 over the draft's vocabulary."""
        ...


class ChainDrafter:
    """Meets `Drafter`. `observe` only stores the rows of verify steps, which costs next to nothing while another method
    drafts; `propose` runs what has waited, at most 16 rows, before it goes on. A slot that is not caught up waits.
    """

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
        self._waiting = WaitingRows(num_slots, network.source_size, placement)
        # Output of each slot's newest row and its position; one place more takes rows that are not the newest.
        self._hidden = torch.zeros(num_slots + 1, network.hidden_size, device=placement[0], dtype=placement[1])
        self._position = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=placement[0])

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Catch up, then go on from the newest row, one token a round for all slots."""
        num_slots = state.lengths.shape[0]
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        if depths.max_depth:
            self._catch_up(depths, state, cache)
        ready = (self._position[:num_slots] == state.lengths - 2) & (state.lengths >= 2)
        hidden = self._hidden[:num_slots]
        rounds = _Rounds.of(state, torch.where(ready, depths.depths, 0), depths, cache, self._waiting.valid_from)
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
        """Run the rows of a prompt at once; store the committed rows of a verify step."""
        source = self._network.source(forward)
        if rows.kind == "verify":
            self._waiting.store(rows, source, state)
            return
        kept = replace(rows, slots=torch.where(self._waiting.committed(rows, state), rows.slots, -1))
        self._run(LayerStep.of(kept, cache), source, state)
        self._waiting.mark_run(rows, state)

    def forget(self, slot: int) -> None:
        """What is kept belongs to another text."""
        self._position[slot] = -1
        self._waiting.forget(slot)

    def _catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> None:
        """Run rows that wait, oldest first."""
        taken = self._waiting.take(depths, state)
        rounds = _Rounds.of(state, depths.depths, depths, cache, self._waiting.valid_from)
        rows = replace(rounds.rows, positions=taken.positions, slots=taken.slots)
        paging = Paging.up_to(rows.block_tables, rows.slots, rows.max_position_bound)
        self._run(LayerStep(rows, cache, paging, taken.key_begin, taken.positions + 1), taken.sources, state)

    def _run(self, step: LayerStep, source: Tensor, state: SequenceState) -> None:
        """Run rows with the target's hiddens and keep the output of each slot's newest."""
        slots, following = step.rows.slots.clamp(min=0), step.rows.positions + 1
        token_ids = state.history[slots, following.clamp(max=state.history.shape[1] - 1)]
        hidden = self._network.run(token_ids, self._network.first_hidden(source), step)
        newest = (step.rows.slots >= 0) & (following == state.lengths[slots] - 1)
        place = torch.where(newest, slots, self._position.shape[0] - 1)
        self._hidden[place] = hidden.to(self._hidden.dtype)
        self._position[place] = step.rows.positions


@dataclass(frozen=True)
class _Rounds:
    """What the rounds of a proposal share: one row a slot, at most as many rounds as its depth."""

    rows: Rows
    cache: Cache
    depths: Tensor
    key_begin: Tensor

    @classmethod
    def of(cls, state: SequenceState, allowed: Tensor, depths: Depths, cache: Cache, key_begin: Tensor) -> _Rounds:
        """allowed: [S] int64 depth of each slot, 0 for slots that are not drafted for; key_begin: [S] int64."""
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
        return cls(rows, cache, allowed, key_begin)

    def step(self, column: int) -> LayerStep:
        """Rows of the round that guesses `column`; slots that are done become padding."""
        positions = self.rows.positions + column
        slots = torch.where(self.depths > column, self.rows.slots, -1)
        rows = replace(self.rows, positions=positions, slots=slots)
        paging = Paging.up_to(rows.block_tables, slots, rows.max_position_bound)
        return LayerStep(rows, self.cache, paging, self.key_begin, positions + 1)

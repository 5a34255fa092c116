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
from localspec.drafters._block_backbone import MAX_PASS_ROWS, Block
from localspec.drafters._drawing import Drawer, DrawnRows, all_certainties, finished_draft
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


KEPT_ROWS = 64
"""Rows of a sequence that wait for a proposal. After a longer pause the older ones are lost to the drafter."""


class _Memory:
    """What a drafter keeps of each slot outside the pages; one place more than slots takes rows that are nobody's.

    sources: [S + 1, KEPT_ROWS, N] rows that were committed but not run, at position modulo KEPT_ROWS; done: [S + 1]
    int64 rows that were run or were in the cache before, -1 for a new sequence; valid_from: [S + 1] int64 first row
    behind the last gap; hidden: [S + 1, D] output of the newest row; position: [S + 1] int64 its place, -1 for none.
    """

    def __init__(self, num_slots: int, network: ChainNetwork, placement: tuple[torch.device, torch.dtype]) -> None:
        device, dtype = placement
        self.nobody = num_slots
        self.sources = torch.zeros(num_slots + 1, KEPT_ROWS, network.source_size, device=device, dtype=dtype)
        self.hidden = torch.zeros(num_slots + 1, network.hidden_size, device=device, dtype=dtype)
        self.position = torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device)
        self.done = self.position.clone()
        self.valid_from = torch.zeros_like(self.position)

    def forget(self, slot: int) -> None:
        """The slot was given to another sequence."""
        self.position[slot] = -1
        self.done[slot] = -1
        self.valid_from[slot] = 0

    def keep_newest(self, slots: Tensor, newest: Tensor, positions: Tensor, hidden: Tensor) -> None:
        """Remember the output of rows that are the newest of their slot. newest: [R] bool."""
        place = torch.where(newest, slots, self.nobody)
        self.hidden[place] = hidden.to(self.hidden.dtype)
        self.position[place] = positions


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
        self._memory = _Memory(num_slots, network, placement)

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Catch up, then go on from the newest row, one token a round for all slots."""
        memory, num_slots = self._memory, state.lengths.shape[0]
        tokens: list[Tensor] = []
        logits: list[Tensor] = []
        if depths.max_depth:
            self._catch_up(depths, state, cache)
        ready = (memory.position[:num_slots] == state.lengths - 2) & (state.lengths >= 2)
        hidden = memory.hidden[:num_slots]
        rounds = _Rounds.of(state, torch.where(ready, depths.depths, 0), depths, cache, memory.valid_from[:num_slots])
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
        memory, source = self._memory, self._network.source(forward)
        slots = rows.slots.clamp(min=0)
        following = rows.positions + 1
        committed = (rows.slots >= 0) & (following < state.lengths[slots])
        place = torch.where(committed, slots, memory.nobody)
        if rows.kind == "verify":
            memory.sources[place, rows.positions % KEPT_ROWS] = source.to(memory.sources.dtype)
            # What lies before the first window of a sequence was in the cache already.
            done = memory.done[: rows.window_rows.shape[0]]
            first = rows.positions[rows.window_starts.clamp(max=rows.positions.shape[0] - 1)]
            done.copy_(torch.where((done < 0) & (rows.window_rows > 0), first, done))
            return
        token_ids = state.history[slots, following.clamp(max=state.history.shape[1] - 1)]
        step = LayerStep.of(replace(rows, slots=torch.where(committed, rows.slots, -1)), cache)
        hidden = self._network.run(token_ids, self._network.first_hidden(source), step)
        memory.keep_newest(slots, committed & (following == state.lengths[slots] - 1), rows.positions, hidden)
        memory.done.scatter_reduce_(0, place, following, "amax")

    def forget(self, slot: int) -> None:
        """What is kept belongs to another text."""
        self._memory.forget(slot)

    def _catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> None:
        """Run rows that wait, oldest first, of the slots that are drafted for."""
        memory, num_slots = self._memory, state.lengths.shape[0]
        done, ends = memory.done[:num_slots], state.lengths - 1
        begin = torch.maximum(done, ends - KEPT_ROWS)
        valid_from = memory.valid_from[:num_slots]
        valid_from.copy_(torch.where((done >= 0) & (begin > done), begin, valid_from))
        block = Block.of(torch.where((depths.depths > 0) & (done >= 0), (ends - begin).clamp(min=0), 0), MAX_PASS_ROWS)
        slots = block.slots.clamp(min=0)
        positions = (begin[slots] + block.offsets).clamp(min=0)
        token_ids = state.history[slots, (positions + 1).clamp(max=state.history.shape[1] - 1)]
        bound = max(depths.length_bounds, default=1)
        rounds = _Rounds.of(state, depths.depths, depths, cache, valid_from)
        rows = replace(rounds.rows, positions=positions, slots=block.slots, token_ids=token_ids)
        paging = Paging(state.block_tables, block.slots, bound + 1)
        step = LayerStep(rows, cache, paging, valid_from[slots], positions + 1)
        hidden = self._network.run(
            token_ids, self._network.first_hidden(memory.sources[slots, positions % KEPT_ROWS]), step
        )
        memory.keep_newest(slots, (block.slots >= 0) & (positions == ends[slots] - 1), positions, hidden)
        done.copy_(torch.where(block.counts > 0, begin + block.counts, done))


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
        paging = Paging(rows.block_tables, slots, rows.max_position_bound + 1)
        return LayerStep(rows, self.cache, paging, self.key_begin, positions + 1)

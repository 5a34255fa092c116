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
from localspec.drafters._drawing import Drawer, DrawnRows, finished_draft
from localspec.drafters._waiting import WaitingRows, texts_of
from localspec.kernels.draft_rows import DraftColumns, JoinedNorms, NewestRows, Rounds, TakenRows
from localspec.kernels.ops import Norm, Ops, Paging
from localspec.layers.step import LayerStep


class ChainNetwork(Protocol):
    """What differs between methods. D: width of the hidden that goes around; source_size: of what is kept of a row;
    last_norm: what the output of `run` goes through to be such a hidden, left to whoever reads it next; joined: how
    rows that waited are taken."""

    hidden_size: int
    source_size: int
    last_norm: Norm | None
    joined: JoinedNorms | None

    def source(self, forward: Forward) -> Tensor:
        """[R, source_size] of what the target handed out, as it is."""
        ...

    def first_hidden(self, source: Tensor) -> Tensor:
        """[R, source_size] -> [R, D]."""
        ...

    def run(self, token_ids: Tensor, hidden: Tensor, step: LayerStep, normed: bool) -> Tensor:
        """token_ids [R], hidden [R, D] -> [R, D]. normed: whether the hidden went through `last_norm`."""
        ...

    def run_taken(self, taken: TakenRows, step: LayerStep) -> Tensor:
        """The same of rows that waited, with the target's hiddens."""
        ...

    def logits(self, hidden: Tensor, normed: bool) -> Tensor:
        """[R, D] -> [R, n] float32 over the draft's vocabulary. normed: as for `run`."""
        ...


class ChainDrafter:
    """Meets `Drafter` and `Waiter`. `observe` only stores the rows of verify steps, which costs next to nothing while
    another method drafts; `propose` runs what has waited, at most 16 rows, before it goes on. A slot that is not caught
    up waits.
    """

    def __init__(
        self,
        network: ChainNetwork,
        needs: HiddenNeeds,
        cache_spec: CacheSpec,
        drawer: Drawer,
        max_depth: int,
        num_slots: int,
        ops: Ops,
    ) -> None:
        self.name = cache_spec.owner
        self.loses_rows = True
        self.origins: tuple[str, ...] = (self.name,)
        self.max_depth = max_depth
        self.needs = needs
        self.cache_spec = cache_spec
        self._network = network
        self._drawer = drawer
        self._ops = ops
        placement = ops.device, ops.activation_dtype
        self._waiting = WaitingRows(num_slots, network.source_size, placement, network.joined)
        self._newest = NewestRows(
            torch.zeros(num_slots + 1, network.hidden_size, device=ops.device, dtype=ops.activation_dtype),
            torch.full((num_slots + 1,), -1, dtype=torch.int64, device=ops.device),
        )
        """With a place beyond the slots for rows of prompts that are nobody's newest."""

    @torch.inference_mode()
    def propose(self, depths: Depths, state: SequenceState, cache: Cache) -> Draft:
        """Catch up, then go on from the newest row, one token a round for all slots."""
        count = min(depths.max_depth, self.max_depth)
        if not count:
            return finished_draft([], [], state.lengths > 0, depths, self.origins)
        frame = _Frame.of(state, depths, cache)
        rounds = self._pass(frame, depths, state, count)
        hidden = self._newest.hidden[frame.slots]
        shape = depths.depths.shape[0], depths.max_depth
        columns = DraftColumns.empty(shape, count, rounds.ready, depths.depths[frame.slots], frame.slots.start)
        token = depths.depths
        for column in range(count):
            if column:
                step = frame.step(rounds, column, self._waiting.valid_from(frame.slots))
                hidden = self._network.run(token, hidden, step, normed=column == 1)
            logits = self._network.logits(hidden, normed=column == 0)
            drawn = frame.drawn(state, rounds.positions[column], depths.sampled)
            token, _ = self._drawer.draw(self._ops, logits, drawn, columns, column)
        return Draft(columns.token_ids, columns.origins, columns.num_drafts, self.origins, columns.confidence)

    @torch.inference_mode()
    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Run the rows of a prompt at once; store the committed rows of a verify step."""
        source = self._network.source(forward)
        if rows.kind == "verify":
            self._waiting.store(self._ops, rows, source, state)
            return
        kept = replace(rows, slots=torch.where(self._waiting.committed(rows, state), rows.slots, -1))
        self._run_prompt(kept, source, state, cache)
        self._waiting.mark_run(rows, state)

    def forget(self, slot: int) -> None:
        """What is kept belongs to another text."""
        self._newest.position[slot].fill_(-1)
        self._waiting.forget(slot)

    @torch.inference_mode()
    def catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> None:
        """See `Waiter`."""
        self._pass(_Frame.of(state, depths, cache), depths, state, 1)

    def _pass(self, frame: _Frame, depths: Depths, state: SequenceState, num_rounds: int) -> Rounds:
        """Run rows that wait, oldest first, with the target's hiddens."""
        taken = self._waiting.take(self._ops, depths, state, frame.slots)
        hidden = self._network.run_taken(taken, frame.pass_of(taken))
        texts = texts_of(depths, state, frame.slots)
        newest = NewestRows(self._newest.hidden[frame.slots], self._newest.position[frame.slots])
        return self._ops.keep_newest(taken, hidden, newest, texts, num_rounds, self._network.last_norm)

    def _run_prompt(self, rows: Rows, source: Tensor, state: SequenceState, cache: Cache) -> None:
        """Run rows with the target's hiddens and keep the output of each slot's newest."""
        slots, following = rows.slots.clamp(min=0), rows.positions + 1
        token_ids = state.history[slots, following.clamp(max=state.history.shape[1] - 1)]
        hidden = self._network.first_hidden(source)
        hidden = self._network.run(token_ids, hidden, LayerStep.of(rows, cache), normed=True)
        if self._network.last_norm is not None:
            hidden = self._ops.rms_norm(hidden, self._network.last_norm)
        newest = (rows.slots >= 0) & (following == state.lengths[slots] - 1)
        place = torch.where(newest, slots, self._newest.position.shape[0] - 1)
        self._newest.hidden[place] = hidden.to(self._newest.hidden.dtype)
        self._newest.position[place] = rows.positions


@dataclass(frozen=True)
class _Frame:
    """What all passes of a proposal share; each has rows of its own.

    slots: those that hold all slots in question. Rows count from the first of them: kernels then look at no others.
    """

    rows: Rows
    cache: Cache
    slots: slice

    @classmethod
    def of(cls, state: SequenceState, depths: Depths, cache: Cache) -> _Frame:
        slots = slice(0, state.lengths.shape[0])
        # Tables of pages that lie in host memory are made for all slots.
        if depths.slots and cache.cold is None:
            slots = slice(min(depths.slots), max(depths.slots) + 1)
        # A chain's layers read positions, slots and tables only; the rest stands for itself.
        rows = Rows(
            kind="verify",
            token_ids=state.lengths,
            positions=state.lengths,
            slots=state.lengths,
            block_tables=state.block_tables[slots],
            lengths=state.lengths,
            window_starts=state.lengths,
            window_rows=state.lengths,
            pending_rows=state.pending_rows,
            max_position_bound=max(depths.length_bounds, default=1) + depths.max_depth,
            slot_rows_bound=1,
        )
        return cls(rows, cache, slots)

    def drawn(self, state: SequenceState, positions: Tensor, sampled: bool) -> DrawnRows:
        """Rows at these positions, which guess what follows the token behind them."""
        if not sampled:
            # Nothing is drawn, and every position has the same noise: none.
            return DrawnRows(state, positions, sampled)
        slots = torch.arange(self.slots.start, self.slots.stop, device=positions.device)
        return DrawnRows(state, positions + 2, sampled, slots)

    def pass_of(self, taken: TakenRows) -> LayerStep:
        """Rows that waited."""
        return self._step(taken.slots, taken.positions, taken.key_begin, taken.key_end, taken.slots.shape[0])

    def step(self, rounds: Rounds, column: int, key_begin: Tensor) -> LayerStep:
        """The round that guesses `column`, a row a slot; slots that are done are padding."""
        return self._step(rounds.slots[column], rounds.positions[column], key_begin, rounds.key_end[column], 1)

    def _step(
        self, slots: Tensor, positions: Tensor, key_begin: Tensor, key_end: Tensor, slot_rows_bound: int
    ) -> LayerStep:
        rows = replace(self.rows, positions=positions, slots=slots, slot_rows_bound=slot_rows_bound)
        paging = Paging.up_to(rows.block_tables, slots, rows.max_position_bound, slot_rows_bound)
        return LayerStep(rows, self.cache, paging, key_begin, key_end)

"""Rows of verify steps that a drafter has seen but not run: stored when observed, taken when it is asked to propose.

So a drafter costs next to nothing while another method drafts, and catches up when it is switched on again. Knows
nothing of networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.records import Rows
from localspec.core.state import SequenceState
from localspec.drafters import MAX_PASS_ROWS, Depths
from localspec.kernels.draft_rows import JoinedNorms, KeptRows, SeenRows, SlotTexts, TakenRows
from localspec.kernels.ops import Ops

ALL_SLOTS = slice(None)
KEPT_ROWS = 64
"""Rows of a sequence that can wait. After a longer pause the older ones are lost to the drafter."""


@dataclass(frozen=True)
class Block:
    """Rows of a pass, slot after slot. slots: [R] int64, -1 for padding; offsets: [R] int64 place in the slot's rows;
    starts: [S] int64 first row of each slot; counts: [S] int64 its rows. All on the device."""

    slots: Tensor
    offsets: Tensor
    starts: Tensor
    counts: Tensor

    @classmethod
    def of(cls, wanted: Tensor, num_rows: int) -> Block:
        """wanted: [S] int64 rows of each slot, at most num_rows slots; what goes beyond num_rows in all is cut from the
        longest, so that a slot far behind does not hold the others up."""
        cap = torch.arange(1, num_rows + 1, device=wanted.device)
        fits = torch.minimum(wanted, cap[:, None]).sum(dim=1) <= num_rows
        ends = torch.minimum(wanted, fits.sum()).cumsum(dim=0)
        starts = torch.cat([torch.zeros_like(ends[:1]), ends[:-1]])
        row = torch.arange(num_rows, device=wanted.device)
        slot = (row[:, None] >= ends).sum(dim=1)
        inside = slot < wanted.shape[0]
        offsets = row - starts[slot.clamp(max=wanted.shape[0] - 1)]
        return cls(torch.where(inside, slot, -1), torch.where(inside, offsets, 0), starts, ends - starts)

    def by_slot(self, values: Tensor, first: int, count: int) -> Tensor:
        """values [R, ...] -> [S, count, ...]: rows first .. first + count - 1 of each slot, any row beyond its end."""
        column = torch.arange(first, first + count, device=values.device)
        return values[(self.starts[:, None] + column).clamp(max=values.shape[0] - 1)]


class WaitingRows:
    """Rows of all slots, see `KeptRows`."""

    def __init__(
        self,
        num_slots: int,
        source_size: int,
        placement: tuple[torch.device, torch.dtype],
        joined: JoinedNorms | None = None,
    ) -> None:
        """source_size: width of what is stored of a row; placement: device and dtype of it; joined: how it is taken."""
        device, dtype = placement
        self._num_slots = num_slots
        # What was in the cache before the drafter saw a sequence counts as run.
        self._kept = KeptRows(
            sources=torch.zeros(num_slots + 1, KEPT_ROWS, source_size, device=device, dtype=dtype),
            done=torch.full((num_slots + 1,), -1, dtype=torch.int64, device=device),
            valid_from=torch.zeros(num_slots, dtype=torch.int64, device=device),
            joined=joined,
        )

    def valid_from(self, slots: slice) -> Tensor:
        """[W] int64 first position behind the last gap, which no row behind it may attend to the front of."""
        return self._kept.valid_from[slots]

    def forget(self, slot: int) -> None:
        """The slot was given to another sequence."""
        self._kept.done[slot].fill_(-1)
        self._kept.valid_from[slot].fill_(0)

    def committed(self, rows: Rows, state: SequenceState) -> Tensor:
        """[R] bool: rows whose token stands and whose next token is known."""
        return (rows.slots >= 0) & (rows.positions + 1 < state.lengths[rows.slots.clamp(min=0)])

    def store(self, ops: Ops, rows: Rows, source: Tensor, state: SequenceState) -> None:
        """Keep the committed rows of a verify step. source: [R, N]."""
        seen = SeenRows(rows.slots, rows.positions, rows.window_starts, rows.window_rows, source)
        ops.store_rows(self._kept, seen, state.lengths)

    def mark_run(self, rows: Rows, state: SequenceState) -> None:
        """The committed rows of a prompt were run at once."""
        place = torch.where(self.committed(rows, state), rows.slots, self._num_slots)
        self._kept.done.scatter_reduce_(0, place, rows.positions + 1, "amax")

    def take(self, ops: Ops, depths: Depths, state: SequenceState, slots: slice = ALL_SLOTS) -> TakenRows:
        """The oldest waiting rows of the slots that are drafted for; they count as run. At most `depths.pass_rows`, or
        where the host knows how many there are, all of them up to MAX_PASS_ROWS.

        slots: among these, whose numbers the rows then count from.
        """
        every = self._kept
        kept = KeptRows(every.sources[slots], every.done[slots], every.valid_from[slots], every.joined)
        texts = texts_of(depths, state, slots)
        num_rows = depths.pass_rows
        if ops.waits:
            asked = (texts.depths > 0) & (kept.done[: len(texts.depths)] >= 0)
            waiting = torch.where(asked, texts.lengths - 1 - kept.done[: len(asked)], 0).clamp(0, MAX_PASS_ROWS)
            num_rows = min(max(int(waiting.sum()), 1), MAX_PASS_ROWS)
        return ops.take_rows(kept, texts, num_rows)

    def caught_up(self, state: SequenceState) -> Tensor:
        """[S] bool: nothing of the slot waits."""
        return self._kept.done[: self._num_slots] == state.lengths - 1


def texts_of(depths: Depths, state: SequenceState, slots: slice = ALL_SLOTS) -> SlotTexts:
    """The sequences as the back end's operations see them."""
    return SlotTexts(state.history[slots], state.lengths[slots], depths.depths[slots])

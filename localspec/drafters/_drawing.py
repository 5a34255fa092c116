"""How drafters turn logits into drafts: greedily, or with the noise that the target will draw with.

A draft need not follow the target's law exactly, so only the best few candidates are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.records import Draft
from localspec.core.state import SequenceState
from localspec.drafters import Depths
from localspec.kernels.draft_rows import DraftColumns, DraftNote
from localspec.kernels.ops import Ops
from localspec.sampling.candidates import RowParameters, kept_candidates
from localspec.sampling.noise import gumbel, row_keys

NUM_CANDIDATES = 256


@dataclass(frozen=True)
class Candidates:
    """The best few tokens of each row. scores: [R, n] float32 logits; ids: [R, n] int64 target ids.

    in_order: scores fall from column to column.
    """

    scores: Tensor
    ids: Tensor
    in_order: bool = False


@dataclass(frozen=True)
class DrawnRows:
    """Whose rows are drawn for. positions: [R] int64, index in the history of the token being drawn; slots: [R] int64,
    None: row r is slot r; sampled: whether some slot draws with a temperature."""

    state: SequenceState
    positions: Tensor
    sampled: bool
    slots: Tensor | None = None

    @property
    def divisor(self) -> Tensor:
        """[R, 1] float32: the temperature, 1 for greedy rows."""
        temperature = self.parameters.temperature
        return torch.where(temperature <= 0, 1.0, temperature)[:, None]

    @property
    def parameters(self) -> RowParameters:
        """Sampling parameters of each row."""
        table = self.state.sampling
        if self.slots is None:
            return RowParameters(table.temperature, table.top_k, table.top_p, table.min_p)
        return RowParameters.gather(table, self.slots)

    @property
    def keys(self) -> Tensor:
        """[R, 2] int32 keys of the noise."""
        seeds = self.state.sampling.seeds
        return row_keys(seeds if self.slots is None else seeds[self.slots], self.positions)


@dataclass(frozen=True)
class Drawer:
    """Draws one token a row. id_map: [n] int64 target id of each draft id, None: the same ids; has_holes: some are -1,
    tokens that the target does not have.

    `greedy` takes the best token whatever the request's temperature; otherwise the request's temperature and filters
    apply and the noise is that of the target's own draw, so that equal laws give equal tokens.
    """

    id_map: Tensor | None = None
    greedy: bool = False
    has_holes: bool = False

    def draw(
        self, ops: Ops, logits: Tensor, rows: DrawnRows, columns: DraftColumns | None = None, column: int = 0
    ) -> tuple[Tensor, Tensor]:
        """logits [R, n] float32 -> target ids [R] int64, and [R] float32 the draft's own probability of its best token,
        at the temperature. columns: where they are written too; then rows are slots."""
        divisor = rows.divisor[:, 0] if rows.sampled else None
        chosen = self.choose(self.candidates(logits), rows)[0] if rows.sampled and not self.greedy else None
        note = None if columns is None else DraftNote(columns, column, chosen)
        best, certainty = ops.best_tokens(logits, divisor, self.id_map, note)
        return best if chosen is None else chosen, certainty

    def candidates(self, logits: Tensor, count: int = NUM_CANDIDATES) -> Candidates:
        """The `count` best of each row of logits [R, n] float32."""
        scores, places = self._sayable(logits).topk(min(count, logits.shape[1]), dim=1)
        return Candidates(scores, self._target_ids(places), in_order=True)

    def choose(self, found: Candidates, rows: DrawnRows) -> tuple[Tensor, Tensor]:
        """Target ids [R] int64, and [R] float32 the probability of the best among the candidates alone."""
        if self.greedy or not rows.sampled:
            best, place = found.scores.max(dim=1)
            share = (best - found.scores.logsumexp(dim=1)).exp()
            return found.ids.gather(1, place[:, None])[:, 0], share
        scaled, ids = found.scores / rows.divisor, found.ids
        if not found.in_order:
            scaled, order = scaled.sort(dim=1, descending=True)
            ids = ids.gather(1, order)
        share = (scaled[:, 0] - scaled.logsumexp(dim=1)).exp()
        parameters = rows.parameters
        noisy = scaled + gumbel(rows.keys, ids)
        noisy = noisy.masked_fill(~kept_candidates(scaled, parameters, NUM_CANDIDATES), -torch.inf)
        drawn = ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(parameters.temperature <= 0, ids[:, 0], drawn), share

    def _sayable(self, logits: Tensor) -> Tensor:
        """Without the tokens that the target does not have."""
        if self.id_map is None or not self.has_holes:
            return logits
        return logits.masked_fill(self.id_map < 0, -torch.inf)

    def _target_ids(self, places: Tensor) -> Tensor:
        return places if self.id_map is None else self.id_map[places].clamp(min=0)


def finished_draft(
    tokens: list[Tensor], confidence: list[Tensor], can_draft: Tensor, depths: Depths, origin_names: tuple[str, ...]
) -> Draft:
    """A Draft from one [S] tensor a column: -1 beyond each slot's depth and where the slot cannot be drafted for.

    can_draft: [S] bool.
    """
    num_slots = can_draft.shape[0]
    columns = torch.stack(tokens, dim=1) if tokens else depths.depths.new_zeros(num_slots, 0)
    scores = torch.stack(confidence, dim=1) if confidence else columns.to(torch.float32)
    num_drafts = torch.where(can_draft, depths.depths.clamp(0, len(tokens)), 0)
    missing = depths.max_depth - len(tokens)
    columns = torch.nn.functional.pad(columns, (0, missing))
    scores = torch.nn.functional.pad(scores, (0, missing))
    inside = torch.arange(depths.max_depth, device=columns.device) < num_drafts[:, None]
    return Draft(
        token_ids=torch.where(inside, columns, -1),
        origins=torch.zeros_like(columns),
        num_drafts=num_drafts,
        origin_names=origin_names,
        confidence=torch.where(inside, scores, 0.0),
    )

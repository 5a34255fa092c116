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
from localspec.sampling.candidates import RowParameters, kept_candidates
from localspec.sampling.noise import gumbel, row_keys

NUM_CANDIDATES = 256


@dataclass(frozen=True)
class Candidates:
    """The best few tokens of each row. scores: [R, n] float32 logits; ids: [R, n] int64 target ids.

    total: [R, 1] float32 logsumexp at the request's temperature over everything, candidates or not; None: over these.
    """

    scores: Tensor
    ids: Tensor
    total: Tensor | None


@dataclass(frozen=True)
class Drawer:
    """Draws one token a row. id_map: [n] int64 target id of each draft id (-1: no counterpart), None: the same ids.

    `greedy` takes the best token whatever the request's temperature; otherwise the request's temperature and filters
    apply and the noise is that of the target's own draw, so that equal laws give equal tokens.
    """

    id_map: Tensor | None = None
    greedy: bool = False

    def draw(
        self, logits: Tensor, positions: Tensor, state: SequenceState, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """logits [R, n] float32; positions [R] int64, index in the history of the token being drawn.

        slots: [R] int64, None: row r is slot r. Returns the target ids [R] int64 and the draft's own probability [R]
        float32 of its best token.
        """
        return self.choose(self.candidates(logits, state, slots), positions, state, slots)

    def candidates(
        self, logits: Tensor, state: SequenceState, slots: Tensor | None = None, count: int = NUM_CANDIDATES
    ) -> Candidates:
        """The `count` best of each row of logits [R, n] float32."""
        if self.id_map is not None:
            logits = logits.masked_fill(self.id_map < 0, -torch.inf)
        scores, places = logits.topk(min(count, logits.shape[1]), dim=1)
        ids = places if self.id_map is None else self.id_map[places].clamp(min=0)
        return Candidates(scores, ids, (logits / _divisor(state, slots)).logsumexp(dim=1, keepdim=True))

    def choose(
        self, found: Candidates, positions: Tensor, state: SequenceState, slots: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As `draw`, from candidates in any order."""
        table = state.sampling
        scaled, order = (found.scores / _divisor(state, slots)).sort(dim=1, descending=True)
        ids = found.ids.gather(1, order)
        total = scaled.logsumexp(dim=1, keepdim=True) if found.total is None else found.total
        confidence = (scaled[:, 0] - total[:, 0]).exp().clamp(max=1.0)
        if self.greedy:
            return ids[:, 0], confidence
        parameters = RowParameters(table.temperature, table.top_k, table.top_p, table.min_p)
        if slots is not None:
            parameters = RowParameters.gather(table, slots)
        seeds = table.seeds if slots is None else table.seeds[slots]
        noisy = scaled + gumbel(row_keys(seeds, positions), ids)
        noisy = noisy.masked_fill(~kept_candidates(scaled, parameters, NUM_CANDIDATES), -torch.inf)
        drawn = ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(parameters.temperature <= 0, ids[:, 0], drawn), confidence


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


def _divisor(state: SequenceState, slots: Tensor | None) -> Tensor:
    """[R, 1] float32: the temperature, 1 for greedy rows."""
    temperature = state.sampling.temperature if slots is None else state.sampling.temperature[slots]
    return torch.where(temperature <= 0, 1.0, temperature)[:, None]

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
from localspec.sampling.noise import gumbel, row_keys
from localspec.sampling.processors import RowParameters, kept_candidates

NUM_CANDIDATES = 64


@dataclass(frozen=True)
class Drawer:
    """Draws one token a slot. id_map: [n] int64 target id of each draft id (-1: no counterpart), None: the same ids.

    `greedy` takes the best token whatever the request's temperature; otherwise the request's temperature and filters
    apply and the noise is that of the target's own draw, so that equal laws give equal tokens.
    """

    id_map: Tensor | None = None
    greedy: bool = False

    def draw(self, logits: Tensor, positions: Tensor, state: SequenceState) -> tuple[Tensor, Tensor]:
        """logits [S, n] float32, one row a slot; positions [S] int64, index in the history of the token being drawn.

        Returns the target ids [S] int64 and the draft's own probability [S] float32 of its best token.
        """
        if self.id_map is not None:
            logits = logits.masked_fill(self.id_map < 0, -torch.inf)
        best, places = logits.topk(min(NUM_CANDIDATES, logits.shape[1]), dim=1)
        ids = places if self.id_map is None else self.id_map[places].clamp(min=0)
        table = state.sampling
        parameters = RowParameters(table.temperature, table.top_k, table.top_p, table.min_p)
        is_greedy = parameters.temperature <= 0
        temperature = torch.where(is_greedy, 1.0, parameters.temperature)[:, None]
        confidence = (best[:, :1] / temperature - (logits / temperature).logsumexp(dim=1, keepdim=True)).exp()
        if self.greedy:
            return ids[:, 0], confidence[:, 0]
        scaled = best / temperature
        noisy = scaled + gumbel(row_keys(table.seeds, positions), ids)
        noisy = noisy.masked_fill(~kept_candidates(scaled, parameters, logits.shape[1]), -torch.inf)
        drawn = ids.gather(1, noisy.argmax(dim=1, keepdim=True))[:, 0]
        return torch.where(is_greedy, ids[:, 0], drawn), confidence[:, 0]


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

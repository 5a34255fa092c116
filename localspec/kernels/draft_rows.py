"""What drafters that guess token after token hand to a back end for the small things between their matmuls.

Letters: S slots, R rows of a pass, C rounds of a proposal, n tokens of the draft's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from localspec.kernels.ops import Norm


@dataclass(frozen=True)
class SlotTexts:
    """Of the sequences. history: [S, H] int64; lengths: [S] int64 committed tokens; depths: [S] int64, 0: not asked."""

    history: Tensor
    lengths: Tensor
    depths: Tensor


@dataclass(frozen=True)
class JoinedNorms:
    """What a block reads of a row: the embedding of the token behind it, from table [V, N], beside what was kept of the
    row, each normed, as `Ops.joined_norms` makes it."""

    table: Tensor
    embedding: Norm
    source: Norm


@dataclass(frozen=True)
class KeptRows:
    """Rows that were seen and not run: the row of position p lies at p modulo K. sources: [S + 1, K, N].

    done: [S + 1] int64 positions that were run, -1: none was ever seen. valid_from: [S] int64 first position behind the
    last gap. The place beyond the slots takes rows that are nobody's; who only takes rows needs none. joined: how rows
    are handed out, None: as they were kept.
    """

    sources: Tensor
    done: Tensor
    valid_from: Tensor
    joined: JoinedNorms | None = None


@dataclass(frozen=True)
class SeenRows:
    """Rows of a verify step after acceptance. slots (-1: padding), positions: [R] int64; sources: [R, N].

    window_starts, window_rows: [S] int64 first row and number of rows of each slot.
    """

    slots: Tensor
    positions: Tensor
    window_starts: Tensor
    window_rows: Tensor
    sources: Tensor


@dataclass(frozen=True)
class TakenRows:
    """Rows that are run now. slots (-1: padding), positions, key_begin, key_end: [R] int64; sources: [R, N], or
    [R, 2 N] where they are joined; token_ids: [R] int64, the token behind each row's."""

    slots: Tensor
    positions: Tensor
    key_begin: Tensor
    key_end: Tensor
    token_ids: Tensor
    sources: Tensor


@dataclass(frozen=True)
class NewestRows:
    """Of each slot's newest row that was run. hidden: [S, D]; position: [S] int64, -1: none."""

    hidden: Tensor
    position: Tensor


@dataclass(frozen=True)
class DraftColumns:
    """Drafts of all slots, written column by column. token_ids (-1: none), origins: [S, K] int64; confidence: [S, K]
    float32; num_drafts: [S] int64. num_columns: that are guessed, at most K; first: slot of the first of W rows that
    are drafted for; ready: [W] bool, those of them that can be; depths: [W] int64."""

    token_ids: Tensor
    origins: Tensor
    confidence: Tensor
    num_drafts: Tensor
    num_columns: int
    first: int
    ready: Tensor
    depths: Tensor

    @classmethod
    def empty(
        cls, shape: tuple[int, int], num_columns: int, ready: Tensor, depths: Tensor, first: int = 0
    ) -> DraftColumns:
        """Nothing is written yet; shape: slots, columns."""
        numbers = torch.empty(2, *shape, dtype=torch.int64, device=ready.device)
        confidence = torch.empty(shape, dtype=torch.float32, device=ready.device)
        counts = torch.empty(shape[:1], dtype=torch.int64, device=ready.device)
        return cls(numbers[0], numbers[1], confidence, counts, num_columns, first, ready, depths)


@dataclass(frozen=True)
class DraftNote:
    """The column that a draft of every row is written to. chosen: [W] int64 tokens to note instead of the best."""

    columns: DraftColumns
    column: int
    chosen: Tensor | None = None


@dataclass(frozen=True)
class Rounds:
    """What the rounds of a proposal run. ready: [S] bool, slots that are caught up; positions, slots (-1 where a slot's
    depth is reached), key_end: [C, S] int64, of which the first round is the newest row itself."""

    ready: Tensor
    positions: Tensor
    slots: Tensor
    key_end: Tensor

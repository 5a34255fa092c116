"""What drafters that guess token after token hand to a back end for the small things between their matmuls.

Letters: S slots, R rows of a pass, C rounds of a proposal, n tokens of the draft's vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SlotTexts:
    """Of the sequences. history: [S, H] int64; lengths: [S] int64 committed tokens; depths: [S] int64, 0: not asked."""

    history: Tensor
    lengths: Tensor
    depths: Tensor


@dataclass(frozen=True)
class KeptRows:
    """Rows that were seen and not run: the row of position p lies at p modulo K. sources: [S + 1, K, N].

    done: [S + 1] int64 positions that were run, -1: none was ever seen. valid_from: [S] int64 first position behind the
    last gap. The place beyond the slots takes rows that are nobody's.
    """

    sources: Tensor
    done: Tensor
    valid_from: Tensor


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
    """Rows that are run now. slots (-1: padding), positions, key_begin, key_end: [R] int64; sources: [R, N];
    token_ids: [R] int64, the token behind each row's."""

    slots: Tensor
    positions: Tensor
    key_begin: Tensor
    key_end: Tensor
    token_ids: Tensor
    sources: Tensor


@dataclass(frozen=True)
class NewestRows:
    """Of each slot's newest row that was run, and a place beyond for nobody's: hidden [S + 1, D], position [S + 1]."""

    hidden: Tensor
    position: Tensor


@dataclass(frozen=True)
class Rounds:
    """What the rounds of a proposal run. ready: [S] bool, slots that are caught up; positions, slots (-1 where a slot's
    depth is reached), key_end: [C, S] int64, of which the first round is the newest row itself."""

    ready: Tensor
    positions: Tensor
    slots: Tensor
    key_end: Tensor

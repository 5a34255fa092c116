"""The budget of thinking tokens, exact at every row of a window.

Whether a row lies inside the thought, and how many tokens of it came before, follows from the committed text and the
drafts before the row; where the budget is used up the row must say the next token of the end marker, whatever the law
says. Those forced tokens are known beforehand, so they are also the best drafts. Knows nothing of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localspec.core.records import Draft, Rows, StepResult, ThinkingRule
from localspec.core.state import SequenceState

FORCED_ORIGIN = "thinking_budget"
"""Origin of drafts that the budget dictates."""
_NOTHING = -2


@dataclass(frozen=True)
class ThinkingState:
    """One row for each slot, changed in place. M: tokens of the longest marker.

    budgets: [S] int64, -1 without one; start_ids, end_ids, close_ids: [S, M] int64 markers that open the thought, end
    it, and end it without being the end marker (a tool call), aligned to the right with -2 before them, all -2 where
    there is none; end_lengths: [S] int64; is_open: [S] bool; run: [S] int64 tokens since the thought opened;
    count: [S] int64 thinking tokens of the whole answer.
    """

    budgets: Tensor
    start_ids: Tensor
    end_ids: Tensor
    close_ids: Tensor
    end_lengths: Tensor
    is_open: Tensor
    run: Tensor
    count: Tensor

    @classmethod
    def make(cls, num_slots: int, max_marker_tokens: int, device: torch.device) -> ThinkingState:
        """State in which no slot has a rule."""

        def markers() -> Tensor:
            return torch.full((num_slots, max_marker_tokens), _NOTHING, dtype=torch.int64, device=device)

        def numbers() -> Tensor:
            return torch.zeros(num_slots, dtype=torch.int64, device=device)

        closed = torch.zeros(num_slots, dtype=torch.bool, device=device)
        return cls(numbers() - 1, markers(), markers(), markers(), numbers(), closed, numbers(), numbers())

    def fill(self, slot: int, rule: ThinkingRule | None) -> None:
        """Give a slot to a new answer. Raises ValueError for a marker that is too long, or a budget without an end."""
        width = self.end_ids.shape[1]
        markers = [] if rule is None else [rule.start_ids, rule.end_ids, rule.close_ids]
        if any(len(marker) > width for marker in markers):
            raise ValueError(f"a marker of thinking is longer than {width} tokens")
        if rule is not None and rule.budget_tokens is not None and not rule.end_ids:
            raise ValueError("a thinking budget needs the tokens that end a thought")
        for table in (self.start_ids, self.end_ids, self.close_ids):
            table[slot].fill_(_NOTHING)
        for table, marker in zip((self.start_ids, self.end_ids, self.close_ids), markers, strict=False):
            if marker:
                table[slot, width - len(marker) :] = torch.tensor(marker, device=table.device)
        budget = rule.budget_tokens if rule is not None else None
        self.budgets[slot].fill_(-1 if budget is None else budget)
        self.end_lengths[slot].fill_(0 if rule is None else len(rule.end_ids))
        self.is_open[slot].fill_(rule is not None and rule.open_at_start)
        self.run[slot].fill_(0)
        self.count[slot].fill_(0)


@dataclass(frozen=True)
class _Place:
    """The rule's state between two tokens. tail: [S, M] int64 last tokens; the rest as in ThinkingState."""

    tail: Tensor
    is_open: Tensor
    run: Tensor
    count: Tensor


def forced_rows(thinking: ThinkingState, rows: Rows, draft: Draft, state: SequenceState) -> Tensor:
    """[R] int64: the token that each row must say, -1 where it is free."""
    place = _committed_place(thinking, state)
    columns = [_forced(thinking, place)]
    for column in range(draft.token_ids.shape[1]):
        place = _after(thinking, place, draft.token_ids[:, column])
        columns.append(_forced(thinking, place))
    slots = rows.slots.clamp(min=0)
    offset = torch.arange(rows.slots.shape[0], device=slots.device) - rows.window_starts[slots]
    return torch.stack(columns, dim=1)[slots, offset.clamp(0, len(columns) - 1)]


def commit(thinking: ThinkingState, result: StepResult, state: SequenceState) -> None:
    """Move the rule's state over the emitted tokens. `state` already holds them."""
    place = _committed_place(thinking, state, result.num_emitted)
    for column in range(result.token_ids.shape[1]):
        after = _after(thinking, place, result.token_ids[:, column])
        emitted = column < result.num_emitted
        place = _Place(
            torch.where(emitted[:, None], after.tail, place.tail),
            torch.where(emitted, after.is_open, place.is_open),
            torch.where(emitted, after.run, place.run),
            torch.where(emitted, after.count, place.count),
        )
    thinking.is_open.copy_(place.is_open)
    thinking.run.copy_(place.run)
    thinking.count.copy_(place.count)


def with_forced_drafts(thinking: ThinkingState, draft: Draft, depths: Tensor, state: SequenceState) -> Draft:
    """The draft with every place that the budget dictates filled in, also behind its last token.

    depths: [S] int64, places that each slot may use (at most the draft's width).
    """
    place = _committed_place(thinking, state)
    going = depths > 0
    tokens, origins = draft.token_ids.clone(), draft.origins.clone()
    for column in range(tokens.shape[1]):
        forced = _forced(thinking, place)
        going &= (column < depths) & ((forced >= 0) | (tokens[:, column] >= 0))
        origins[:, column] = torch.where(forced >= 0, len(draft.origin_names), origins[:, column])
        tokens[:, column] = torch.where(going, torch.where(forced >= 0, forced, tokens[:, column]), -1)
        place = _after(thinking, place, tokens[:, column])
    return replace(
        draft,
        token_ids=tokens,
        origins=origins,
        num_drafts=(tokens >= 0).sum(dim=1),
        origin_names=(*draft.origin_names, FORCED_ORIGIN),
    )


def _committed_place(thinking: ThinkingState, state: SequenceState, back: Tensor | None = None) -> _Place:
    """The place behind the committed text, or `back` [S] tokens before its end."""
    width = thinking.end_ids.shape[1]
    end = state.lengths if back is None else state.lengths - back
    index = end[:, None] - width + torch.arange(width, device=end.device)
    # A number that no marker holds stands before the start of the text.
    tail = torch.where(index >= 0, state.history.gather(1, index.clamp(min=0)), _NOTHING - 1)
    return _Place(tail, thinking.is_open, thinking.run, thinking.count)


def _after(thinking: ThinkingState, place: _Place, token: Tensor) -> _Place:
    """The place behind one more token. token: [S] int64."""
    tail = torch.cat([place.tail[:, 1:], token[:, None]], dim=1)
    run = torch.where(place.is_open, place.run + 1, place.run)
    ends = _complete(tail, thinking.end_ids) & (run >= thinking.end_lengths)
    closes = place.is_open & (ends | _complete(tail, thinking.close_ids))
    opens = ~place.is_open & _complete(tail, thinking.start_ids)
    count = place.count + place.is_open.to(torch.int64)
    # The end marker is no thought.
    count = torch.where(place.is_open & ends, count - thinking.end_lengths, count)
    return _Place(tail, (place.is_open & ~closes) | opens, torch.where(opens, 0, run), count)


def _complete(tail: Tensor, marker: Tensor) -> Tensor:
    """[S] bool: whether the text ends with the marker, which is aligned to the right."""
    unused = marker == _NOTHING
    return ((tail == marker) | unused).all(dim=1) & ~unused[:, -1]


def _forced(thinking: ThinkingState, place: _Place) -> Tensor:
    """[S] int64: the next token of the end marker where the budget is used up, else -1.

    A marker whose first tokens were said already is completed, not begun again.
    """
    width = thinking.end_ids.shape[1]
    lengths = thinking.end_lengths
    column = torch.arange(width, device=lengths.device)
    first = (width - lengths)[:, None]
    forward = thinking.end_ids.gather(1, (first + column).clamp(max=width - 1))  # [S, M], aligned to the left
    # said[s, k, i]: token i of the last k tokens equals token i of the marker, for k = 0 .. M - 1.
    place_of = (width - column[:, None] + column).clamp(max=width - 1)
    said = (place.tail[:, place_of] == forward[:, None, :]) | (column >= column[:, None])
    fits = said.all(dim=2) & (column < lengths[:, None]) & (column <= place.run[:, None])
    progress = torch.where(fits, column, 0).amax(dim=1)
    token = forward.gather(1, progress[:, None])[:, 0]
    due = place.is_open & (thinking.budgets >= 0) & (place.count >= thinking.budgets)
    return torch.where(due, token, -1)

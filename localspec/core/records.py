"""The records of one step, from plan to result.

Torch-free: tensors appear only as annotations. A stage fills the fields it owns and never changes a record that
it was given. Letters in shapes: R rows of a verify step, S slots, K drafted tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from localspec.api.types import Grammar, Sampling

if TYPE_CHECKING:
    from torch import Tensor

MAX_SLOTS = 4
MAX_ROWS = 16
PAGE_TOKENS = 64
SEGMENT_TOKENS = 256
"""Prefill tiles start at absolute multiples of this; a segment of the cache is as long."""
GRAPH_ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
GRAPH_SLOTS = (1, 2, 4)


@dataclass(frozen=True)
class GraphKey:
    """Shape of a verify step. Which rows belong to which slot is device data, not part of the key."""

    num_rows: int
    num_slots: int

    @classmethod
    def for_shape(cls, num_rows: int, num_slots: int) -> GraphKey:
        """The smallest key that holds the rows. Raises ValueError above 16 rows or 4 slots."""
        if not (1 <= num_rows <= MAX_ROWS and 1 <= num_slots <= MAX_SLOTS):
            raise ValueError(f"a verify step holds 1 to {MAX_ROWS} rows over 1 to {MAX_SLOTS} slots")
        rows = next(size for size in GRAPH_ROWS if size >= num_rows)
        return cls(rows, next(size for size in GRAPH_SLOTS if size >= num_slots))


@dataclass(frozen=True)
class Request:
    """A generation in tokens, made by `engine/text.py` from an api request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int
    stop_ids: tuple[int, ...]
    drafter: str = "auto"
    depth: int | None = None
    prediction_ids: tuple[int, ...] = ()
    thinking: ThinkingRule | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    chat_id: str | None = None
    private: bool = False
    client: str = ""
    cache_salt: str = ""
    shared_tokens: int = 0
    """Of the prompt's beginning, that other conversations have too: system message and tools."""
    call_ids: tuple[int, int] | None = None
    """Tokens that open and close a tool call, where the model has such."""


@dataclass(frozen=True)
class ThinkingRule:
    """Budget of thinking tokens and the tokens that end it; `open_at_start` if the prompt opened the thought.

    `close_ids` end a thought without being its end marker: a tool call that begins inside it.
    """

    budget_tokens: int | None
    start_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    open_at_start: bool
    close_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SlotPlan:
    """One sequence of a verify step. The window is its last token and `num_drafts` drafts after it.

    `length_bound_tokens` is the host's upper bound of the committed length, as if every draft were accepted.
    """

    slot: int
    sequence_id: int
    drafter: str
    num_drafts: int
    length_bound_tokens: int


@dataclass(frozen=True)
class VerifyPlan:
    """A step that carries every decoding sequence, zero drafts included.

    row_budget: rows of the whole step, which the likeliest drafts of all slots get; None: every draft has its row.
    """

    slots: tuple[SlotPlan, ...]
    row_budget: int | None = None

    @property
    def num_rows(self) -> int:
        wanted = sum(1 + slot.num_drafts for slot in self.slots)
        return wanted if self.row_budget is None else min(wanted, self.row_budget)

    @property
    def graph_key(self) -> GraphKey:
        return GraphKey.for_shape(self.num_rows, len(self.slots))


@dataclass(frozen=True)
class PrefillPlan:
    """A step that reads prompt tokens [start, end) of one sequence. A chunk never crosses the tile rule's border.

    `tile_start` is the multiple of SEGMENT_TOKENS at or below `start`: rows keep their place in the tile.
    """

    slot: int
    sequence_id: int
    start_tokens: int
    end_tokens: int
    drafter: str

    @property
    def tile_start_tokens(self) -> int:
        return self.start_tokens // SEGMENT_TOKENS * SEGMENT_TOKENS


StepPlan = VerifyPlan | PrefillPlan


@dataclass(frozen=True)
class Draft:
    """What drafters propose for a verify step.

    token_ids: [S, K] int64, device; -1 where there is no draft (such a row is refused by construction).
    origins: [S, K] int64, device; index into `origin_names`.
    num_drafts: [S] int64, device; leading drafts of each slot that are not -1.
    confidence: [S, K] float32, device, or None: estimated probability of acceptance given the ones before.
    num_offered: [S] int64, device: drafts before some were cut as not worth a row; None: none were.
    """

    token_ids: Tensor
    origins: Tensor
    num_drafts: Tensor
    origin_names: tuple[str, ...]
    confidence: Tensor | None = None
    num_offered: Tensor | None = None


@dataclass(frozen=True)
class Rows:
    """Rows of a forward pass in device terms. Rows of one slot are contiguous and in order of position.

    token_ids: [R] int64; positions: [R] int64; slots: [R] int64, -1 for padding rows;
    block_tables: [S, P] int32 page numbers; lengths: [S] int64 committed tokens (the last is not in the cache yet).
    window_starts: [S] int64 first row of each slot; window_rows: [S] int64 rows of each slot (0: slot not in step).
    pending_rows: [S] int64 rows of the slot's previous window that were committed and wait in its record rings; a
    consumer of recurrent state folds them first (lazy fold).
    max_position_bound: host integer at or above every position, for sizing reads. slot_rows_bound: host integer at or
    above the rows of any slot.
    """

    kind: Literal["verify", "prefill"]
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_tables: Tensor
    lengths: Tensor
    window_starts: Tensor
    window_rows: Tensor
    pending_rows: Tensor
    max_position_bound: int
    slot_rows_bound: int


@dataclass(frozen=True)
class HiddenNeeds:
    """What a drafter reads of the target: the output of the final norm, and residual streams after layers.

    `layer_outputs` counts from 0: id L is the residual stream after decoder layer L (the input of layer L + 1).
    """

    final_norm: bool = False
    layer_outputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forward:
    """Output of a model: hidden after the final norm [R, D] and the asked-for layer outputs, each [R, D]."""

    hidden: Tensor
    layer_outputs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class StepResult:
    """What a verify step decided, on the device until the ring brings it to the host one step late.

    token_ids: [S, K + 1] int64, the emitted tokens, -1 beyond; num_emitted: [S] int64, 0 for frozen slots;
    origins: [S, K + 1] int64 into `origin_names`, whose entry 0 is the target itself;
    num_accepted: [S] int64 drafts that were accepted (also those cut off behind a stop);
    finish: [S] int64, 0 running, 1 stop id, 2 length; logprobs: [S, K + 1] float32 or None;
    top_ids, top_logprobs: [S, K + 1, n] or None.
    """

    token_ids: Tensor
    num_emitted: Tensor
    origins: Tensor
    num_accepted: Tensor
    finish: Tensor
    origin_names: tuple[str, ...]
    logprobs: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


@dataclass(frozen=True)
class SlotResult:
    """The host's copy of a step's result for one slot, as the scheduler and the text stage read it.

    drafted_by: the origin of each verified draft, accepted or not; num_offered: drafts before some were cut as not
    worth a row, None: none were; offered_by, confidence: origin of each of those, and what its drafter said of it.
    """

    slot: int
    sequence_id: int
    token_ids: tuple[int, ...]
    origins: tuple[str, ...]
    num_drafted: int
    num_accepted: int
    drafter: str
    finish: Literal["", "stop", "length"]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    drafted_by: tuple[str, ...] = ()
    offered_by: tuple[str, ...] = ()
    confidence: tuple[float, ...] = ()
    num_offered: int | None = None

"""The operations that models, layers and drafters call, as one Protocol that every back end meets.

Letters: R rows of the step, N x K a weight, H query heads, Hkv key heads, D head size, S slots, P pages of a sequence.
Row invariance: for R = 1..16 a row's output bits depend on that row and its own cache only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from localspec.kernels.draft_rows import DraftNote, KeptRows, NewestRows, Rounds, SeenRows, SlotTexts, TakenRows
from localspec.kernels.ngram_probe import NgramProbe, TableDrafts
from localspec.kernels.weights import LogicalWeight

PAGE_TOKENS = 64
"""Tokens of a cache page."""
MAX_STEP_ROWS = 16
"""Rows of a verify step."""
Epilogue = Literal["none", "silu_mul", "residual"]


@dataclass(frozen=True)
class Norm:
    """RMS norm: x * rsqrt(mean(x^2) + eps) * (w + 1 if plus_one else w), float32 inside. weight: [K]."""

    weight: Tensor
    eps: float
    plus_one: bool = False


class PackedWeight(Protocol):
    """A weight in the form that one back end reads; opaque to everybody else."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def read_bytes(self) -> int:
        """Bytes that one pass over the weight reads."""
        ...


@dataclass(frozen=True)
class Paging:
    """Where each row finds its keys. block_tables: [S, P] int32; slots: [R] int64 (-1: padding row, output unused).

    max_key_bound: host integer at or above every `key_end`, for sizing reads. slot_rows_bound: host integer at or above
    the rows of any slot; speed only.
    """

    block_tables: Tensor
    slots: Tensor
    max_key_bound: int
    slot_rows_bound: int = MAX_STEP_ROWS

    @classmethod
    def up_to(
        cls, block_tables: Tensor, slots: Tensor, max_position_bound: int, slot_rows_bound: int = MAX_STEP_ROWS
    ) -> Paging:
        """For rows at positions up to a host bound. The tables bound positions too: a bound that was rounded up for
        graphs, with drafts behind it, may lie beyond what they hold."""
        keys = min(max_position_bound + 1, block_tables.shape[1] * PAGE_TOKENS)
        return cls(block_tables, slots, keys, slot_rows_bound)


class Ops(Protocol):
    """One back end. `activation_dtype` is the dtype of x between operations; `device` where tensors live.

    `cache_dtype` is that of keys and values in pages (float8_e4m3fn, bfloat16 or float32); models read it as they load.
    `waits` says whether the host knows device values at once (CPU): then a step may be cut to what was drafted.
    `prefill_row_multiple`: rows of a prefill chunk are padded to a multiple of this, at their place in the tile.
    `arithmetic` says in words what the bits of results depend on beside weights, device and PyTorch's version.
    """

    name: str
    arithmetic: str
    device: torch.device
    activation_dtype: torch.dtype
    cache_dtype: torch.dtype
    waits: bool
    prefill_row_multiple: int

    def pack(self, parts: Sequence[LogicalWeight], gated: bool = False) -> PackedWeight:
        """Stack parts along N into one packed weight. `gated`: two equal parts (gate, up) for `silu_mul`."""
        ...

    def linear(
        self,
        x: Tensor,
        weight: PackedWeight,
        norm: Norm | None = None,
        epilogue: Epilogue = "none",
        residual: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        then: Norm | None = None,
    ) -> Tensor:
        """x [R, K] -> [R, N]: optional norm of x first; `silu_mul`: silu(gate) * up, [R, N/2];
        `residual`: + residual [R, N]. `then`: the norm of the `linear` that reads this very result next, which a back
        end may prepare; the result is the same with and without.

        Accumulates in float32 and rounds once to `out_dtype` (default: activation dtype).
        """
        ...

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """token_ids [R] int64, table [V, K] (may lie in host memory) -> [R, K] in the activation dtype."""
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x [..., K] -> same shape and dtype."""
        ...

    def norm_rope(self, x: Tensor, norm: Norm | None, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """x [R, H, D]: optional per-head norm over D, then NeoX rotate-half of the first 2 * len(inv_freq) dims.

        positions [R] int64; inv_freq [rot / 2] float32. Returns the same shape and dtype.
        """
        ...

    def store_kv(self, values: Tensor, pages: Tensor, paging: Paging, positions: Tensor) -> None:
        """Write values [R, Hkv, D] to pages [num_pages, 64, Hkv, D] at each row's position, rounded to their dtype.

        Padding rows (slot -1) write nothing that is read.
        """
        ...

    def norm_rope_store(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        norms: tuple[Norm, Norm] | None,
        inv_freq: Tensor,
        pages: tuple[Tensor, Tensor],
        paging: Paging,
        positions: Tensor,
    ) -> Tensor:
        """`norm_rope` of q and k, and `store_kv` of the turned k and of v, with the bits of those. Returns q [R, H, D].

        norms: of q and k, of one eps and kind; pages: of keys and of values.
        """
        ...

    def attention(
        self,
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        paging: Paging,
        key_begin: Tensor,
        key_end: Tensor,
        scale: float,
        gate: Tensor | None = None,
    ) -> Tensor:
        """q [R, H, D] over keys [key_begin, key_end) of each row's slot -> [R, H, D]. key_begin, key_end: [R] int64.

        gate: [R, H, D], whose sigmoid multiplies the output before it is rounded. Keys are summed in fixed splits of
        256 positions merged in order, so a row's bits do not depend on the others
        nor on how many keys lie beyond its own.
        """
        ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up in float32, rounded once."""
        ...

    def summands(self, weight: LogicalWeight, beside: LogicalWeight) -> tuple[LogicalWeight, ...]:
        """Weights of `weight`'s shape whose sum it is, as exactly as activations can tell, in a form that `pack` stacks
        with `beside`: for small projections that should not cost a pass of their own. Just `weight` where none is."""
        ...

    def gdn(self, inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> Tensor:
        """Gated DeltaNet mixer between its projections: conv, SiLU, l2 norm, recurrence, gated norm.

        Folds `pending_rows` of the record rings into the state first, then runs the window from there and records it
        (verify) or runs all rows and stores the state (prefill). Returns [R, HV * V] in the activation dtype.
        Source of the formulas: Gated DeltaNet (arXiv 2412.06464) and the Qwen3.5 configuration.
        """
        ...

    def gdn_fold(self, state: GdnState, pending_rows: Tensor) -> None:
        """Apply the pending rows of every slot to the state, so that it can be saved. pending_rows: [S] int64."""
        ...

    def window_rows(self, places: WindowPlaces, drafts: Tensor, slots: SlotCounters) -> tuple[Tensor, Tensor]:
        """Token ids and positions [R] int64 of a verify step: each slot's last token, then its drafts [S, K].

        A draft of -1 runs as token 0; positions count from 0; rows of no slot get something in range.
        """
        ...

    def settle(self, window: Window, slots: SlotCounters) -> Settled:
        """Accept drafts while they equal what was drawn, cut at stop ids and limits, and commit to `slots` in place.

        Slots without rows keep everything. The stop token itself is emitted.
        """
        ...

    def joined_norms(
        self, token_ids: Tensor, table: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], before: Norm | None = None
    ) -> Tensor:
        """token_ids [R], table [V, K] as for `embed`, hidden [R, K] -> [R, 2 K]: both normed, side by side.

        `before`: what hiddens go through before their norm, rounded in between.
        """
        ...

    def best_tokens(
        self, logits: Tensor, divisor: Tensor | None, ids: Tensor | None, note: DraftNote | None = None
    ) -> tuple[Tensor, Tensor]:
        """The best token of each row, [R] int64, and its probability, [R] float32; of equals the lowest place.

        logits: [R, n] float32; divisor: [R] float32 temperature; ids: [n] int64 target id of each place, -1 where the
        target has no such token, which is then never taken. `note`: what was found, or the token chosen instead,
        becomes a column of the rows' drafts; the first one also writes what no column will, of all slots.
        """
        ...

    def store_rows(self, kept: KeptRows, seen: SeenRows, lengths: Tensor) -> None:
        """Keep the rows whose token stands and whose next token is known. lengths: [S] int64 committed tokens.

        What lies before the first window of a slot that was never seen counts as run.
        """
        ...

    def take_rows(self, kept: KeptRows, texts: SlotTexts, num_rows: int) -> TakenRows:
        """The oldest rows that wait, of slots with a depth; `kept` counts them as run.

        What goes beyond num_rows in all is cut from the longest, so that a slot far behind does not hold the others up.
        Rows older than what is kept are lost: `valid_from` moves behind them.
        """
        ...

    def keep_newest(
        self,
        taken: TakenRows,
        hidden: Tensor,
        newest: NewestRows,
        texts: SlotTexts,
        num_rounds: int,
        norm: Norm | None = None,
    ) -> Rounds:
        """Keep what came of each slot's newest row, normed, and lay the rounds out. hidden: [R, D]."""
        ...

    def table_drafts(
        self, probe: NgramProbe, history: Tensor, lengths: Tensor, depths: Tensor, width: int
    ) -> TableDrafts:
        """What the best record for each slot's last tokens says. history: [S, H] int64; lengths, depths: [S] int64.

        The longest agreement speaks, of equals the larger share, then the count, then the first. width: columns.
        """
        ...


@dataclass(frozen=True)
class GdnInputs:
    """Projections of the rows. qkv: [R, 2*HK*DK + HV*DV]; z: [R, HV*DV]; the rest as in core Rows.

    a, b: [R, P, HV], to be summed over P (see `Ops.summands`). slot_rows_bound: host integer at or above the rows of
    any slot; speed only.
    """

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    kind: Literal["verify", "prefill"]
    slots: Tensor
    window_starts: Tensor
    window_rows: Tensor
    pending_rows: Tensor
    slot_rows_bound: int = MAX_STEP_ROWS


@dataclass(frozen=True)
class GdnWeights:
    """conv: [C, taps]; a_log, dt_bias: [HV] float32; norm: [DV] (plain w); head counts and sizes."""

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int


@dataclass(frozen=True)
class GdnState:
    """Per-slot state of one layer, changed in place.

    recurrent: [S, HV, DV, DK] float32 (K contiguous); conv: [S, C, taps - 1 + ring] pre-activation columns, oldest
    first; ring_k: [S, ring, HK, DK] float32 normalised keys; ring_u: [S, ring, HV, DV] float32; ring_decay:
    [S, ring, HV] float32 exp(g). ring = 16 rows, the widest window.
    """

    recurrent: Tensor
    conv: Tensor
    ring_k: Tensor
    ring_u: Tensor
    ring_decay: Tensor


class WindowPlaces(Protocol):
    """Where the rows of a verify step belong. slots: [R] int64 (-1: padding); offsets: [R] int64 in the window."""

    @property
    def slots(self) -> Tensor: ...

    @property
    def offsets(self) -> Tensor: ...


@dataclass(frozen=True)
class Window:
    """What a verify step drew. drawn: [R] int64; drafts, origins: [S, K] int64; starts, counts: [S] int64 rows of each
    slot. A draft of -1 equals no token."""

    drawn: Tensor
    drafts: Tensor
    origins: Tensor
    starts: Tensor
    counts: Tensor


class SlotCounters(Protocol):
    """What the slots hold, changed in place. history: [S, C] int64; lengths, remaining, pending_rows: [S] int64;
    frozen: [S] bool; stop_ids: [S, n] int64, -1 beyond."""

    @property
    def history(self) -> Tensor: ...

    @property
    def lengths(self) -> Tensor: ...

    @property
    def remaining(self) -> Tensor: ...

    @property
    def frozen(self) -> Tensor: ...

    @property
    def stop_ids(self) -> Tensor: ...

    @property
    def pending_rows(self) -> Tensor: ...


RUNNING, STOPPED, LENGTH = 0, 1, 2
"""Values of `Settled.finish`."""


@dataclass(frozen=True)
class Settled:
    """token_ids: [S, K + 1] int64, -1 beyond what was emitted; num_emitted, num_accepted, finish: [S] int64; origins:
    [S, K + 1] int64, 1 + the draft's where one was accepted, else 0."""

    token_ids: Tensor
    num_emitted: Tensor
    origins: Tensor
    num_accepted: Tensor
    finish: Tensor

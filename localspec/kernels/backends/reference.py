"""Every operation in plain PyTorch on any device: the specification of the other back ends, and the back end for CPUs.

Computes in float32. A row's bits are the same in all windows and chunks; how that is reached stands in the files
`reference_linear`, `reference_attention`, `reference_gdn` and `elementwise`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from localspec.kernels import ngram_probe, reference_drafting, reference_gdn, reference_settle
from localspec.kernels.draft_rows import DraftNote, KeptRows, NewestRows, Rounds, SeenRows, SlotTexts, TakenRows
from localspec.kernels.elementwise import sigmoid, silu
from localspec.kernels.ngram_probe import NgramProbe, TableDrafts
from localspec.kernels.ops import (
    PAGE_TOKENS,
    Epilogue,
    GdnInputs,
    GdnState,
    GdnWeights,
    Norm,
    PackedWeight,
    Paging,
    Settled,
    SlotCounters,
    Window,
    WindowPlaces,
)
from localspec.kernels.reference_attention import Attend, paged_attention
from localspec.kernels.reference_attention_fused import choose_attend
from localspec.kernels.reference_linear import ROW_MULTIPLE, Matrix, Way, choose_way, multiply, prepare
from localspec.kernels.weights import LogicalWeight

PRIORITY = 0
FLOAT32_BYTES = 4
E4M3_MAX = 448.0


def supports(device: str) -> str | None:
    """Reason why this back end cannot run on `device` ("cpu", "cuda", "cuda:1"), or None. It runs everywhere."""
    del device
    return None


def create(device: str) -> ReferenceOps:
    """The back end on a device, computing in float32."""
    return ReferenceOps(torch.device(device))


@dataclass(frozen=True)
class ReferenceWeight:
    """[N, K] float32 rows on the back end's device."""

    matrix: Matrix
    gated: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.matrix.num_rows, self.matrix.num_columns

    @property
    def read_bytes(self) -> int:
        return self.matrix.num_rows * self.matrix.num_columns * FLOAT32_BYTES


@functools.cache
def _fastest(device: torch.device, num_threads: int) -> tuple[Way, Attend]:
    """What keeps a row's bits here with so many threads; probing takes 40 ms."""
    assert device.type != "cpu" or num_threads == torch.get_num_threads()
    return choose_way(device), choose_attend(device)


class ReferenceOps:
    """Meets `Ops`. `activation_dtype` other than float32 rounds between operations as a card would."""

    name = "reference"
    prefill_row_multiple = ROW_MULTIPLE

    def __init__(self, device: torch.device, activation_dtype: torch.dtype = torch.float32) -> None:
        self.device = device
        self.activation_dtype = activation_dtype
        self.cache_dtype = activation_dtype
        self.waits = device.type == "cpu"
        self.way, self.attend = _fastest(device, torch.get_num_threads())
        processor = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else device.type
        self.arithmetic = f"reference, {self.way.value}, {self.attend.__name__}, {processor}"

    def pack(self, parts: Sequence[LogicalWeight], gated: bool = False) -> PackedWeight:
        """Dequantise, stack and reorder for the CPU."""
        if gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
            raise ValueError("a gated weight is made of two parts of equal shape, gate and up")
        matrices = [part.dequantise().to(self.device) for part in parts]
        matrix = matrices[0] if len(matrices) == 1 else torch.cat(matrices)
        return ReferenceWeight(prepare(matrix, self.way), gated)

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
        """See `Ops.linear`. Raises ValueError where epilogue, weight and residual do not fit each other."""
        if not isinstance(weight, ReferenceWeight):
            raise ValueError(f"a {type(weight).__name__} was packed by another back end")
        if (epilogue == "silu_mul") != weight.gated or (epilogue == "residual") != (residual is not None):
            raise ValueError("silu_mul needs a gated weight, and the residual epilogue a residual")
        num_rows, x = x.shape[0], x.float()
        if num_rows % ROW_MULTIPLE:
            x = functional.pad(x, (0, 0, 0, -num_rows % ROW_MULTIPLE))
        if norm is not None:
            x = _rms_norm(x, norm)
        out = multiply(x, weight.matrix)[:num_rows]
        if bias is not None:
            out = out + bias.float()
        if epilogue == "silu_mul":
            gate, up = out.chunk(2, dim=1)
            out = silu(gate) * up
        elif residual is not None:
            out = out + residual.float()
        return out.to(out_dtype or self.activation_dtype)

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Ops.embed`. Ids below zero (rows without a draft) read row 0."""
        found = table[token_ids.clamp_min(0).to(table.device)]
        return found.to(self.device, self.activation_dtype)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.rms_norm`."""
        return _rms_norm(x.float(), norm).to(x.dtype)

    def norm_rope(self, x: Tensor, norm: Norm | None, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """See `Ops.norm_rope`."""
        out = x.float() if norm is None else _rms_norm(x.float(), norm)
        angles = positions.view(-1, 1, 1).float() * inv_freq  # [R, 1, rot / 2]
        cos, sin = angles.cos(), angles.sin()
        half = inv_freq.shape[0]
        first, second, rest = out[..., :half], out[..., half : 2 * half], out[..., 2 * half :]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
        return turned.to(x.dtype)

    def store_kv(self, values: Tensor, pages: Tensor, paging: Paging, positions: Tensor) -> None:
        """See `Ops.store_kv`. Padding rows write nothing."""
        if pages.dtype == torch.float8_e4m3fn:
            # By hand, as PyTorch versions differ in what becomes of larger values.
            values = values.clamp(-E4M3_MAX, E4M3_MAX)
        slots, places = paging.slots.tolist(), positions.tolist()
        for first, last in _page_runs(slots, places):
            page = int(paging.block_tables[slots[first], places[first] // PAGE_TOKENS])
            offset = places[first] % PAGE_TOKENS
            pages[page, offset : offset + last - first].copy_(values[first:last])

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
        """See `Ops.norm_rope_store`."""
        of_q, of_k = norms or (None, None)
        self.store_kv(self.norm_rope(k, of_k, positions, inv_freq), pages[0], paging, positions)
        self.store_kv(v, pages[1], paging, positions)
        return self.norm_rope(q, of_q, positions, inv_freq)

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
        """See `Ops.attention`; output rows of padding are zero."""
        slots = paging.slots.tolist()
        pools = (k_pages, v_pages)
        mixed = paged_attention(q, pools, paging.block_tables, slots, key_begin, key_end, scale, self.attend)
        return mixed if gate is None else (mixed.float() * sigmoid(gate.float())).to(mixed.dtype)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        return (silu(gate.float()) * up.float()).to(gate.dtype)

    def summands(self, weight: LogicalWeight, beside: LogicalWeight) -> tuple[LogicalWeight, ...]:
        """See `Ops.summands`. Everything is float32 here, so all weights stack."""
        del beside
        return (weight,)

    def gdn(self, inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> Tensor:
        """See `Ops.gdn`. Rows run one after the other, in prefill too."""
        return reference_gdn.gdn(inputs, weights, state).to(self.activation_dtype)

    def gdn_fold(self, state: GdnState, pending_rows: Tensor) -> None:
        """See `Ops.gdn_fold`."""
        reference_gdn.gdn_fold(state, pending_rows)

    def window_rows(self, places: WindowPlaces, drafts: Tensor, slots: SlotCounters) -> tuple[Tensor, Tensor]:
        """See `Ops.window_rows`."""
        return reference_settle.window_rows(places, drafts, slots)

    def settle(self, window: Window, slots: SlotCounters) -> Settled:
        """See `Ops.settle`."""
        return reference_settle.settle(window, slots)

    def joined_norms(
        self, token_ids: Tensor, table: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], before: Norm | None = None
    ) -> Tensor:
        """See `Ops.joined_norms`."""
        if before is not None:
            hidden = self.rms_norm(hidden, before)
        parts = self.embed(token_ids, table), hidden
        return torch.cat([self.rms_norm(part, norm) for part, norm in zip(parts, norms, strict=True)], dim=1)

    def best_tokens(
        self, logits: Tensor, divisor: Tensor | None, ids: Tensor | None, note: DraftNote | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.best_tokens`."""
        return reference_drafting.best_tokens(logits, divisor, ids, note)

    def table_drafts(
        self, probe: NgramProbe, history: Tensor, lengths: Tensor, depths: Tensor, width: int
    ) -> TableDrafts:
        """See `Ops.table_drafts`."""
        return ngram_probe.table_drafts(probe, history, lengths, depths, width)

    def store_rows(self, kept: KeptRows, seen: SeenRows, lengths: Tensor) -> None:
        """See `Ops.store_rows`."""
        reference_drafting.store_rows(kept, seen, lengths)

    def take_rows(self, kept: KeptRows, texts: SlotTexts, num_rows: int) -> TakenRows:
        """See `Ops.take_rows`."""
        return reference_drafting.take_rows(kept, texts, num_rows)

    def keep_newest(
        self,
        taken: TakenRows,
        hidden: Tensor,
        newest: NewestRows,
        texts: SlotTexts,
        num_rounds: int,
        norm: Norm | None = None,
    ) -> Rounds:
        """See `Ops.keep_newest`."""
        hidden = hidden if norm is None else self.rms_norm(hidden, norm)
        return reference_drafting.keep_newest(taken, hidden, newest, texts, num_rounds)


def _page_runs(slots: Sequence[int], positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of rows that lie one after the other in one page of one slot; padding rows are left out."""
    first = 0
    for row in range(1, len(slots) + 1):
        goes_on = row < len(slots) and slots[row] == slots[first] and positions[row] == positions[row - 1] + 1
        if goes_on and positions[row] % PAGE_TOKENS:
            continue
        if slots[first] >= 0:
            yield first, row
        first = row


def _rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """x [..., K] float32 -> float32."""
    scaled = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm.eps)
    weight = norm.weight.float()
    return scaled * (weight + 1.0 if norm.plus_one else weight)

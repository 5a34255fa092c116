"""The back end for NVIDIA cards from sm_80 on: Triton kernels for up to 16 rows, and for prefill of one slot.

Exists because a decoding step must read each weight once at full memory speed, and no library does that for NVFP4 with
a few rows. Differences between cards (shared memory, register pressure) are settled in the kernels' modules. Above 16
rows weights are unpacked to bf16 and multiplied by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from localspec.kernels.compat import version_problem
from localspec.kernels.draft_rows import DraftNote, KeptRows, NewestRows, Rounds, SeenRows, SlotTexts, TakenRows
from localspec.kernels.fp8_pack import Fp8Weight, PackedFp8, pack_fp8, stackable
from localspec.kernels.ngram_probe import NgramProbe, TableDrafts
from localspec.kernels.nvfp4_pack import BLOCK, Nvfp4Weight, PackedNvfp4, pack_small_m
from localspec.kernels.nvfp4_summands import nvfp4_summands
from localspec.kernels.ops import (
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
from localspec.kernels.packed_forms import PackedForm, WeightStore
from localspec.kernels.triton import attention as decode
from localspec.kernels.triton import (
    drafting,
    elementwise,
    gdn_fold,
    gdn_prefill,
    gdn_window,
    ngram_probe,
    norm_rope,
    settle,
    waiting_rows,
)
from localspec.kernels.triton.attention_prefill import prefill_attention
from localspec.kernels.triton.cards import multiprocessors
from localspec.kernels.triton.dense_linear import DenseMatrix, dense_linear
from localspec.kernels.triton.stream_launch import Fusion, Prepared, StreamWorkspace, stream_linear
from localspec.kernels.triton.tilings import tile_rows_for
from localspec.kernels.triton.unpack_weights import tile_slices, tiles_of, unpack_bfloat16
from localspec.kernels.weights import LogicalWeight

PRIORITY = 10
SMALL_ROWS = 16
PREFILL_ROW_MULTIPLE = 256
OLDEST_CAPABILITY = (8, 0)
MAX_TICKETS = 4096
"""Slots times heads of values and keys of a GDN layer; each kernel leaves its tickets at zero."""


def supports(device: str) -> str | None:
    """Reason why this back end cannot run on `device` ("cpu", "cuda", "cuda:1"), or None."""
    if torch.device(device).type != "cuda":
        return f"it needs an NVIDIA card, and the device asked for is {device}"
    if not torch.cuda.is_available():
        return "PyTorch finds no NVIDIA card or driver"
    capability = torch.cuda.get_device_capability(torch.device(device))
    if capability < OLDEST_CAPABILITY:
        return f"the card has compute capability {capability[0]}.{capability[1]}; 8.0 or later is needed"
    return version_problem()


def create(device: str) -> TritonOps:
    """The back end on a card, with bf16 activations."""
    index = torch.device(device).index
    return TritonOps(torch.device("cuda", torch.cuda.current_device() if index is None else index))


class TritonOps:
    """Meets `Ops`. Packing grows the workspace of the weight-stream kernels, so pack before capturing graphs."""

    name = "triton_sm80"
    activation_dtype = torch.bfloat16
    waits = False
    arithmetic = "triton_sm80"
    prefill_row_multiple = PREFILL_ROW_MULTIPLE

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cache_dtype = torch.bfloat16
        self.store: WeightStore | None = None
        """Where weights lie packed already, while a model is loaded from there."""
        self._workspace: StreamWorkspace | None = None
        self._following: tuple[Tensor, Prepared] | None = None
        """The last result that was prepared for a norm."""
        self._most_unpacked = 0
        self._unpacked: Tensor | None = None
        """Where prompts unpack weights, one after the other: made once, as large pieces of many sizes would leave holes
        in the memory that PyTorch keeps."""
        self._tickets = torch.zeros(MAX_TICKETS, dtype=torch.int32, device=device)

    def pack(self, parts: Sequence[LogicalWeight], gated: bool = False) -> PackedWeight:
        """Stack NVFP4 or FP8 parts in their format, anything else in bf16. Raises ValueError for unlike gated parts."""
        packed = self.store.find(parts, gated) if self.store is not None else None
        if packed is None:
            packed = self.packed_form(parts, gated)
        if not isinstance(packed, DenseMatrix):
            self._grow_workspace(packed)
            most = max(last - first for first, last in tile_slices(packed, multiprocessors(self.device)))
            self._most_unpacked = max(self._most_unpacked, most * packed.tile_rows * packed.shape[1])
        return packed

    def packed_form(self, parts: Sequence[LogicalWeight], gated: bool) -> PackedForm:
        """What `pack` makes of parts with values, without room to run it."""
        if gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
            raise ValueError("a gated weight is made of two parts of equal shape, gate and up")
        nvfp4 = [part for part in parts if isinstance(part, Nvfp4Weight)]
        fp8 = [part for part in parts if isinstance(part, Fp8Weight)]
        if len(nvfp4) == len(parts):
            return self._pack_nvfp4(nvfp4, gated)
        if len(fp8) == len(parts) and stackable(fp8):
            return self._pack_fp8(fp8, gated)
        matrices = [part.dequantise().to(self.device, torch.bfloat16) for part in parts]
        return DenseMatrix(torch.cat(matrices).contiguous(), gated)

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
        """See `Ops.linear`. A normed x is rounded to bf16, as the matmul's operand; one that was prepared before it is
        divided by its rms.

        Above 16 rows the two halves of `silu_mul` are rounded to bf16 before they are multiplied.
        """
        if not isinstance(weight, PackedNvfp4 | PackedFp8 | DenseMatrix):
            raise ValueError(f"a {type(weight).__name__} was packed by another back end")
        if (epilogue == "silu_mul") != weight.gated or (epilogue == "residual") != (residual is not None):
            raise ValueError("silu_mul needs a gated weight, and the residual epilogue a residual")
        dtype = out_dtype or self.activation_dtype
        if x.shape[0] > SMALL_ROWS:
            return self._many_rows(x, weight, norm, residual, bias, dtype)
        width = weight.shape[0] // 2 if weight.gated else weight.shape[0]
        out = torch.empty(x.shape[0], width, dtype=dtype, device=self.device)
        if isinstance(weight, DenseMatrix):
            rows = self._operand(x, norm)
            return dense_linear(rows, weight, residual, bias, out)
        if x.dtype != torch.bfloat16 and norm is None:
            x = x.to(torch.bfloat16)
        prepared = self._prepared_for(x, norm)
        following = None
        if then is not None and not weight.gated and dtype == torch.bfloat16:
            following = Prepared.empty(then, x.shape[0], width, self.device)
        fusion = Fusion(norm if prepared is None else None, epilogue, residual, bias, prepared, following)
        stream_linear(x, weight, fusion, self._grow_workspace(weight), out)
        if following is not None:
            self._following = out, following
        return out

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `Ops.embed`. Raises ValueError for a table in host memory that is not pinned."""
        return elementwise.embed(token_ids, table, self.device, self.activation_dtype)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """See `Ops.rms_norm`."""
        return elementwise.rms_norm(x, norm)

    def norm_rope(self, x: Tensor, norm: Norm | None, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """See `Ops.norm_rope`."""
        return norm_rope.norm_rope(x, norm, positions, inv_freq)

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
        """See `Ops.norm_rope_store`: one launch."""
        return norm_rope.norm_rope_store(q, k, v, norms, inv_freq, pages, paging, positions)

    def store_kv(self, values: Tensor, pages: Tensor, paging: Paging, positions: Tensor) -> None:
        """See `Ops.store_kv`. Padding rows write nothing."""
        norm_rope.store_kv(values, pages, paging, positions)

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
        """See `Ops.attention`; output rows of padding are zero.

        A multiple of 256 rows is a prefill chunk of one slot; other counts above 16 run as windows of 16 rows.
        """
        num_rows = q.shape[0]
        if num_rows <= SMALL_ROWS:
            return decode.paged_attention(q, k_pages, v_pages, paging, (key_begin, key_end), scale, gate)
        if num_rows % PREFILL_ROW_MULTIPLE == 0:
            mixed = prefill_attention(q, k_pages, v_pages, paging, (key_begin, key_end), scale)
            return mixed if gate is None else elementwise.gated(mixed, gate, silu=False)
        windows = []
        for first in range(0, num_rows, SMALL_ROWS):
            rows = slice(first, first + SMALL_ROWS)
            window = Paging(paging.block_tables, paging.slots[rows], paging.max_key_bound)
            bounds = key_begin[rows], key_end[rows]
            own_gate = None if gate is None else gate[rows]
            windows.append(decode.paged_attention(q[rows], k_pages, v_pages, window, bounds, scale, own_gate))
        return torch.cat(windows)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        """See `Ops.silu_mul`."""
        return elementwise.gated(up, gate, silu=True)

    def summands(self, weight: LogicalWeight, beside: LogicalWeight) -> tuple[LogicalWeight, ...]:
        """See `Ops.summands`: three NVFP4 weights where `beside` is NVFP4 and `weight` is not."""
        if not isinstance(beside, Nvfp4Weight) or isinstance(weight, Nvfp4Weight) or weight.shape[1] % BLOCK:
            return (weight,)
        matrix = weight.dequantise()
        return nvfp4_summands(matrix if matrix.is_meta else matrix.to(self.device))

    def gdn(self, inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> Tensor:
        """See `Ops.gdn`. Prefill multiplies in tf32 with float32 sums; the state stays float32."""
        out = torch.empty(inputs.z.shape, dtype=self.activation_dtype, device=self.device)
        if inputs.kind == "verify":
            return gdn_window.gdn_window(inputs, weights, state, self._tickets, out)
        return gdn_prefill.gdn_prefill(inputs, weights, state, out, "tf32")

    def gdn_fold(self, state: GdnState, pending_rows: Tensor) -> None:
        """See `Ops.gdn_fold`."""
        gdn_fold.gdn_fold(state, pending_rows)

    def window_rows(self, places: WindowPlaces, drafts: Tensor, slots: SlotCounters) -> tuple[Tensor, Tensor]:
        """See `Ops.window_rows`."""
        return settle.window_rows(places, drafts, slots)

    def settle(self, window: Window, slots: SlotCounters) -> Settled:
        """See `Ops.settle`."""
        return settle.settle(window, slots)

    def joined_norms(
        self, token_ids: Tensor, table: Tensor, hidden: Tensor, norms: tuple[Norm, Norm], before: Norm | None = None
    ) -> Tensor:
        """See `Ops.joined_norms`: one launch."""
        return drafting.joined_norms(token_ids, table, hidden, norms, before)

    def best_tokens(
        self, logits: Tensor, divisor: Tensor | None, ids: Tensor | None, note: DraftNote | None = None
    ) -> tuple[Tensor, Tensor]:
        """See `Ops.best_tokens`: one launch."""
        return drafting.best_tokens(logits, divisor, ids, self._tickets, note)

    def store_rows(self, kept: KeptRows, seen: SeenRows, lengths: Tensor) -> None:
        """See `Ops.store_rows`: one launch."""
        waiting_rows.store_rows(kept, seen, lengths)

    def take_rows(self, kept: KeptRows, texts: SlotTexts, num_rows: int) -> TakenRows:
        """See `Ops.take_rows`: one launch."""
        return waiting_rows.take_rows(kept, texts, num_rows, self._tickets)

    def keep_newest(
        self,
        taken: TakenRows,
        hidden: Tensor,
        newest: NewestRows,
        texts: SlotTexts,
        num_rounds: int,
        norm: Norm | None = None,
    ) -> Rounds:
        """See `Ops.keep_newest`: one launch."""
        return waiting_rows.keep_newest(taken, hidden, newest, texts, num_rounds, norm)

    def table_drafts(
        self, probe: NgramProbe, history: Tensor, lengths: Tensor, depths: Tensor, width: int
    ) -> TableDrafts:
        """See `Ops.table_drafts`: one launch."""
        return ngram_probe.table_drafts(probe, history, lengths, depths, width)

    def _prepared_for(self, x: Tensor, norm: Norm | None) -> Prepared | None:
        """What the kernel that made x left for this norm, if it was the last one that left anything."""
        if norm is None or self._following is None:
            return None
        rows, prepared = self._following
        return prepared if rows is x and prepared.norm is norm else None

    def _operand(self, x: Tensor, norm: Norm | None) -> Tensor:
        rows = x if norm is None else elementwise.rms_norm(x, norm)
        return rows.to(torch.bfloat16)

    def _many_rows(
        self,
        x: Tensor,
        weight: PackedNvfp4 | PackedFp8 | DenseMatrix,
        norm: Norm | None,
        residual: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """cuBLAS on the weight in bf16; a residual is added before the one rounding."""
        rows = self._operand(x, norm)
        slices = tile_slices(weight, multiprocessors(self.device)) if bias is None and residual is None else []
        if len(slices) > 1 and isinstance(weight, PackedNvfp4 | PackedFp8):
            return self._by_slices(rows, weight, slices, dtype)
        matrix = weight.matrix if isinstance(weight, DenseMatrix) else self._unpack(weight)
        if residual is not None and bias is None and residual.dtype == dtype == torch.bfloat16:
            return torch.addmm(residual, rows, matrix.t())
        if weight.gated:
            both = functional.linear(rows, matrix, None if bias is None else bias.to(torch.bfloat16))
            gate, up = both.chunk(2, dim=1)
            return elementwise.gated(up, gate, silu=True).to(dtype)
        if residual is None and bias is None and dtype == torch.bfloat16:
            return functional.linear(rows, matrix)
        out = torch.mm(rows, matrix.t(), out_dtype=torch.float32)
        if bias is not None:
            out = out + bias.float()
        if residual is not None:
            out = out + residual.float()
        return out.to(dtype)

    def _by_slices(
        self, rows: Tensor, weight: PackedNvfp4 | PackedFp8, slices: list[tuple[int, int]], dtype: torch.dtype
    ) -> Tensor:
        """The same a slice of tiles at a time, so that a wide weight need not lie unpacked as a whole."""
        share = 2 if weight.gated else 1
        out = torch.empty(rows.shape[0], weight.shape[0] // share, dtype=dtype, device=self.device)
        for first, last in slices:
            part = self._product(rows, tiles_of(weight, first, last))
            begin = first * weight.tile_rows // share
            target = out[:, begin : begin + part.shape[1] // share]
            if weight.gated:
                gate, up = part.chunk(2, dim=1)
                elementwise.gated(up, gate, silu=True, out=target)
                # Else it would still be held while the next one is made.
                del gate, up
            else:
                target.copy_(part)
            del part
        return out

    def _product(self, rows: Tensor, weight: PackedNvfp4 | PackedFp8) -> Tensor:
        """rows [R, K] bf16 -> [R, N] bf16."""
        return functional.linear(rows, self._unpack(weight))

    def _unpack(self, weight: PackedNvfp4 | PackedFp8) -> Tensor:
        """[N, K] bf16 in logical row order, valid until the next call."""
        return unpack_bfloat16(weight, self._room(weight.shape[0] * weight.shape[1]).view(weight.shape))

    def _room(self, values: int) -> Tensor:
        """So many bf16 values where weights are unpacked."""
        if self._unpacked is None or self._unpacked.numel() < values:
            self._unpacked = torch.empty(max(values, self._most_unpacked), dtype=torch.bfloat16, device=self.device)
        return self._unpacked[:values]

    def _pack_nvfp4(self, parts: list[Nvfp4Weight], gated: bool) -> PackedNvfp4:
        whole = Nvfp4Weight(
            torch.cat([part.codes.to(self.device) for part in parts]),
            torch.cat([part.block_scale.view(torch.uint8).to(self.device) for part in parts]).view(torch.float8_e4m3fn),
            torch.cat([part.row_scale.to(self.device) for part in parts]),
        )
        return pack_small_m(whole, tile_rows_for(*whole.shape), gated)

    def _pack_fp8(self, parts: list[Fp8Weight], gated: bool) -> PackedFp8:
        scales = [part.block_scale for part in parts if part.block_scale is not None]
        whole = Fp8Weight(
            torch.cat([part.codes.view(torch.uint8).to(self.device) for part in parts]).view(torch.float8_e4m3fn),
            torch.cat([part.row_scale.to(self.device) for part in parts]),
            torch.cat([scale.to(self.device) for scale in scales]) if scales else None,
        )
        return pack_fp8(whole, tile_rows_for(*whole.shape), gated)

    def _grow_workspace(self, packed: PackedNvfp4 | PackedFp8) -> StreamWorkspace:
        """The workspace, made anew where a weight needs more. Raises RuntimeError from PyTorch inside a capture."""
        have = self._workspace
        if have is not None and have.tickets.numel() >= packed.tiles and have.normed.shape[1] >= packed.shape[1]:
            return have
        tiles, columns = packed.tiles, packed.shape[1]
        if have is not None:
            tiles, columns = max(tiles, have.tickets.numel()), max(columns, have.normed.shape[1])
        self._workspace = StreamWorkspace.create(self.device, tiles, columns)
        return self._workspace

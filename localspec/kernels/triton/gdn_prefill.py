"""Gated DeltaNet over a prefill chunk of one slot, 64 rows at a time, from a folded state.

Knows rows and the chunked form; does not know record rings (`gdn_fold.py` folds them first). Inside 64 rows the
recurrence is a triangular system: with G the running sum of log decays, D[i, j] = exp(G[i] - G[j]) for i >= j, and A
the strictly lower part of beta[i] (k_i . k_j) D[i, j], the corrections are U - W S with U = (I + A)^-1 beta V and
W = (I + A)^-1 beta exp(G) K, and the state moves on by S <- exp(G_last) S + K^T exp(G_last - G) (U - W S)
(arXiv 2412.06464). Tiles start at multiples of 64 rows of the chunk; padding rows have k = v = 0 and no decay, which
leaves the state as it is.

q, k, W and Q K^T are never longer than 1 (W is k behind a product of contractions), so float16 holds them with the
mantissa that tf32 matmuls read, at half the traffic. Values, corrections and the state stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton.cards import capability_major
from localspec.kernels.triton.gdn import L2_EPS, check_gdn, convolve, norm_and_gate, softplus
from localspec.kernels.triton.gdn_fold import gdn_fold

CHUNK = 64
VALUE_BLOCK = 32


@triton.jit
def chunk_slot(counts_ptr, starts_ptr, num_slots, SLOTS: tl.constexpr):
    """The one slot that has rows, its first row and its count."""
    slots = tl.arange(0, SLOTS)
    present = slots < num_slots
    counts = tl.load(counts_ptr + slots, mask=present, other=0)
    starts = tl.load(starts_ptr + slots, mask=present, other=0)
    active = counts > 0
    slot = tl.max(tl.where(active, slots, 0), axis=0)
    start = tl.max(tl.where(active, starts, 0), axis=0)
    return slot.to(tl.int64), start.to(tl.int32), tl.max(counts, axis=0).to(tl.int32)


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def gdn_chunk_prepare_kernel(
    qkv_ptr, a_ptr, b_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, conv_ptr, starts_ptr, counts_ptr, q_ptr, k_ptr,
    v_ptr, beta_ptr, log_decay_ptr, num_rows, num_slots, qkv_stride, a_stride, b_stride, HK: tl.constexpr,
    HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles, 2 * HK + HV). q, k [R, HK, DK] float16; v [R, HV, DV], beta [R, HV] and the running log decay
    of each tile [R, HV] float32; padding rows are zero, without decay.
    """
    head = tl.program_id(1)
    slot, start, count = chunk_slot(counts_ptr, starts_ptr, num_slots, SLOTS)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    conv = conv_ptr + slot * (C * COLUMNS)
    qkv = qkv_ptr + start.to(tl.int64) * qkv_stride
    # Few rows at a time, so that the tile stays in registers.
    for first in range(tl.program_id(0) * TILE, tl.program_id(0) * TILE + TILE, PART):
        row = first + tl.arange(0, PART)
        stored = (row < num_rows)[:, None]
        near_start = first < start + TAPS
        if head < 2 * HK:
            channels = head * DK + tl.arange(0, DK)
            if near_start:
                mixed = convolve(
                    qkv, conv, conv_weight_ptr, channels, row - start, count, 0, qkv_stride, TAPS, COLUMNS, True
                )
            else:
                mixed = convolve(
                    qkv, conv, conv_weight_ptr, channels, row - start, count, 0, qkv_stride, TAPS, COLUMNS, False
                )
            mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=1) + EPS)[:, None]
            target = (row.to(tl.int64) * (HK * DK))[:, None] + ((head % HK) * DK + tl.arange(0, DK))[None, :]
            if head < HK:
                tl.store(q_ptr + target, (mixed * (1.0 / tl.sqrt(DK * 1.0))).to(q_ptr.dtype.element_ty), mask=stored)
            else:
                tl.store(k_ptr + target, mixed.to(k_ptr.dtype.element_ty), mask=stored)
        else:
            columns = (head - 2 * HK) * DV + tl.arange(0, DV)
            shifted = 2 * HK * DK + columns
            if near_start:
                value = convolve(
                    qkv, conv, conv_weight_ptr, shifted, row - start, count, 0, qkv_stride, TAPS, COLUMNS, True
                )
            else:
                value = convolve(
                    qkv, conv, conv_weight_ptr, shifted, row - start, count, 0, qkv_stride, TAPS, COLUMNS, False
                )
            tl.store(v_ptr + (row.to(tl.int64) * (HV * DV))[:, None] + columns[None, :], value, mask=stored)
    if head >= 2 * HK:
        value_head = head - 2 * HK
        row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
        inside = (row >= start) & (row < start + count)
        a = tl.load(a_ptr + row * a_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + row * b_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(a_log_ptr + value_head).to(tl.float32))
        log_decay = -rate * softplus(a + tl.load(dt_bias_ptr + value_head).to(tl.float32))
        log_decay = tl.cumsum(tl.where(inside, log_decay, 0.0), axis=0)
        beta = tl.where(inside, 1.0 / (1.0 + tl.exp(-b)), 0.0)
        tl.store(log_decay_ptr + row * HV + value_head, log_decay, mask=row < num_rows)
        tl.store(beta_ptr + row * HV + value_head, beta, mask=row < num_rows)


@triton.jit
def inverse_of_unit_lower(strictly_lower, N: tl.constexpr, SIDE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 for strictly lower A [N, N], where N / SIDE = 4.

    Diagonal blocks by forward substitution of rows, all four at once; then with B the inverse of the block diagonal and
    M = B (A outside it), M^4 = 0 and (I + A)^-1 = (I - M + M^2 - M^3) B. No higher powers, which could grow.
    """
    BLOCKS: tl.constexpr = N // SIDE
    block = tl.arange(0, BLOCKS)
    side = tl.arange(0, SIDE)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    tiles = tl.reshape(strictly_lower, [BLOCKS, SIDE, BLOCKS, SIDE])
    inverse = -tl.sum(tl.where(on_diagonal, tiles, 0.0), axis=2)  # [block, row, column]
    for i in range(1, SIDE):
        is_row = (side == i)[None, :, None]
        row = tl.sum(tl.where(is_row, inverse, 0.0), axis=1)
        row = row + tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(is_row, row[:, None, :], inverse)
    inverse += tl.where(side[:, None] == side[None, :], 1.0, 0.0)[None, :, :]
    wide = tl.where(on_diagonal, inverse[:, :, None, :] + tl.zeros([BLOCKS, SIDE, BLOCKS, SIDE], tl.float32), 0.0)
    diagonal = tl.reshape(wide, [N, N])
    outside = tl.reshape(tl.where(on_diagonal, 0.0, tiles), [N, N])
    first = tl.dot(diagonal, outside, input_precision=PRECISION)
    second = tl.dot(first, first, input_precision=PRECISION)
    third = tl.dot(first, second, input_precision=PRECISION)
    return diagonal + tl.dot(second - first - third, diagonal, input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def gdn_chunk_solve_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, log_decay_ptr, w_ptr, scores_ptr, num_rows, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (chunks, HV). v_ptr: V becomes U in place; w_ptr [R, HV, DK]; scores_ptr [R, HV, N]: (Q K^T) D.

    Operands pass BLOCK columns at a time and are loaded again rather than held: [N, 128] tiles would spill.
    """
    head = tl.program_id(1)
    index = tl.arange(0, N)
    row = (tl.program_id(0) * N + index).to(tl.int64)
    inside = row < num_rows
    key_base = (row * (HK * DK) + head // (HV // HK) * DK)[:, None] + tl.arange(0, BLOCK)[None, :]
    beta = tl.load(beta_ptr + row * HV + head, mask=inside, other=0.0)
    log_decay = tl.load(log_decay_ptr + row * HV + head, mask=inside, other=0.0)
    products = tl.zeros([N, N], tl.float32)
    scores = tl.zeros([N, N], tl.float32)
    for key in range(0, DK, BLOCK):
        k = tl.load(k_ptr + key_base + key, mask=inside[:, None], other=0.0).to(tl.float32)
        q = tl.load(q_ptr + key_base + key, mask=inside[:, None], other=0.0).to(tl.float32)
        turned = tl.trans(k)
        products = tl.dot(k, turned, products, input_precision=PRECISION)
        scores = tl.dot(q, turned, scores, input_precision=PRECISION)
    lower = index[:, None] >= index[None, :]
    # Masked before exp: above the diagonal the difference is positive and may overflow.
    decay = tl.exp(tl.where(lower, log_decay[:, None] - log_decay[None, :], float("-inf")))
    score_offsets = ((row * HV + head) * N)[:, None] + index[None, :]
    tl.store(scores_ptr + score_offsets, (scores * decay).to(scores_ptr.dtype.element_ty), mask=inside[:, None])
    strictly_lower = tl.where(index[:, None] > index[None, :], products * decay * beta[:, None], 0.0)
    inverse = inverse_of_unit_lower(strictly_lower, N, N // 4, PRECISION)
    value_base = (row * (HV * DV) + head * DV)[:, None] + tl.arange(0, BLOCK)[None, :]
    for value in range(0, DV, BLOCK):
        v = tl.load(v_ptr + value_base + value, mask=inside[:, None], other=0.0)
        u = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        # Every thread must have read its part of V before U replaces it.
        tl.debug_barrier()
        tl.store(v_ptr + value_base + value, u, mask=inside[:, None])
    factor = beta * tl.exp(log_decay)
    w_base = (row * (HV * DK) + head * DK)[:, None] + tl.arange(0, BLOCK)[None, :]
    for key in range(0, DK, BLOCK):
        k = tl.load(k_ptr + key_base + key, mask=inside[:, None], other=0.0).to(tl.float32)
        w = tl.dot(inverse, k * factor[:, None], input_precision=PRECISION)
        tl.store(w_ptr + w_base + key, w.to(w_ptr.dtype.element_ty), mask=inside[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_slots"])
def gdn_chunk_scan_kernel(
    q_ptr, k_ptr, u_ptr, w_ptr, scores_ptr, log_decay_ptr, recurrent_ptr, starts_ptr, counts_ptr, num_rows, num_slots,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, BLOCK_V: tl.constexpr,
    SLOTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (DV / BLOCK_V, HV). Chunk after chunk: outputs replace u_ptr, the state is read and written once."""
    head = tl.program_id(1)
    slot, start, count = chunk_slot(counts_ptr, starts_ptr, num_slots, SLOTS)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    # Two halves of the keys, one after the other: whole [N, DK] operands would spill.
    HALF: tl.constexpr = DK // 2
    keys = tl.arange(0, HALF)
    index = tl.arange(0, N)
    key_head = head // (HV // HK)
    tile = recurrent_ptr + (slot * HV + head) * (DV * DK) + values[:, None] * DK + keys[None, :]
    state0 = tl.load(tile)
    state1 = tl.load(tile + HALF)
    for chunk in range(start // N, tl.cdiv(start + count, N)):
        row = chunk * N + index
        inside = (row < num_rows)[:, None]
        # Rows behind the end carry no decay, so the last row's running sum is the chunk's.
        log_decay = tl.load(log_decay_ptr + row * HV + head, mask=row < num_rows, other=0.0)
        whole = tl.load(log_decay_ptr + tl.minimum(chunk * N + N - 1, num_rows - 1) * HV + head)
        w_tile = w_ptr + ((row * HV + head) * DK)[:, None] + keys[None, :]
        u_tile = u_ptr + ((row * HV + head) * DV)[:, None] + values[None, :]
        q_tile = q_ptr + ((row * HK + key_head) * DK)[:, None] + keys[None, :]
        k_tile = k_ptr + ((row * HK + key_head) * DK)[:, None] + keys[None, :]
        u = tl.load(u_tile, mask=inside, other=0.0)
        u -= times_state(w_tile, inside, state0, PRECISION)
        u -= times_state(w_tile + HALF, inside, state1, PRECISION)
        out = times_state(q_tile, inside, state0, PRECISION)
        out += times_state(q_tile + HALF, inside, state1, PRECISION)
        score_tile = scores_ptr + ((row * HV + head) * N)[:, None] + index[None, :]
        scores = tl.load(score_tile, mask=inside, other=0.0).to(tl.float32)
        out = tl.dot(scores, u, out * tl.exp(log_decay)[:, None], input_precision=PRECISION)
        # Every thread must have read its part of u_ptr before outputs replace it.
        tl.debug_barrier()
        tl.store(u_tile, out, mask=inside)
        turned = tl.trans(u * tl.exp(whole - log_decay)[:, None])
        k = tl.load(k_tile, mask=inside, other=0.0).to(tl.float32)
        state0 = tl.dot(turned, k, state0 * tl.exp(whole), input_precision=PRECISION)
        k = tl.load(k_tile + HALF, mask=inside, other=0.0).to(tl.float32)
        state1 = tl.dot(turned, k, state1 * tl.exp(whole), input_precision=PRECISION)
    tl.store(tile, state0)
    tl.store(tile + HALF, state1)


@triton.jit
def times_state(tile, inside, state, PRECISION: tl.constexpr):
    """Rows [N, K] at `tile` times the state [V, K], transposed -> [N, V]."""
    rows = tl.load(tile, mask=inside, other=0.0).to(tl.float32)
    return tl.dot(rows, tl.trans(state), input_precision=PRECISION)


@triton.jit(do_not_specialize=["num_rows"])
def gdn_chunk_norm_kernel(
    mixed_ptr, z_ptr, norm_ptr, out_ptr, num_rows, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid: (row tiles, HV). Gated norm of mixed [R, HV, DV] float32 -> out [R, HV * DV]."""
    head = tl.program_id(1)
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)
    inside = (row < num_rows)[:, None]
    values = tl.arange(0, DV)
    columns = head * DV + values
    mixed = tl.load(mixed_ptr + (row * (HV * DV))[:, None] + columns[None, :], mask=inside, other=0.0)
    gate = tl.load(z_ptr + (row * z_stride)[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    out = norm_and_gate(mixed, gate, tl.load(norm_ptr + values).to(tl.float32), eps, DV)
    target = out_ptr + (row * (HV * DV))[:, None] + columns[None, :]
    tl.store(target, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots"])
def gdn_chunk_columns_kernel(
    qkv_ptr, conv_ptr, starts_ptr, counts_ptr, num_slots, qkv_stride, C, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of channels,). The last TAPS - 1 of history and chunk become the history."""
    slot, start, count = chunk_slot(counts_ptr, starts_ptr, num_slots, SLOTS)
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    present = (channels < C)[None, :]
    keep = tl.arange(0, triton.next_power_of_2(TAPS))
    kept = (keep < TAPS - 1)[:, None] & present
    source = count - (TAPS - 1) + keep
    target = conv_ptr + slot * C * COLUMNS + channels[None, :] * COLUMNS
    in_chunk = (source >= 0)[:, None]
    history = tl.load(target + (TAPS - 1 + source)[:, None], mask=kept & ~in_chunk, other=0.0)
    qkv_offsets = (start + source).to(tl.int64)[:, None] * qkv_stride + channels[None, :]
    recent = tl.load(qkv_ptr + qkv_offsets, mask=kept & in_chunk, other=0.0)
    tl.debug_barrier()
    columns = tl.where(in_chunk, recent.to(tl.float32), history.to(tl.float32))
    tl.store(target + keep[:, None], columns.to(conv_ptr.dtype.element_ty), mask=kept)


@dataclass(frozen=True)
class _Scratch:
    """q, k: [R, HK, DK], w: [R, HV, DK], scores: [R, HV, CHUNK] float16; mixed: [R, HV, DV] (values, corrections, then
    outputs), beta, log_decay: [R, HV] float32.
    """

    q: Tensor
    k: Tensor
    w: Tensor
    scores: Tensor
    mixed: Tensor
    beta: Tensor
    log_decay: Tensor

    @classmethod
    def for_rows(cls, num_rows: int, weights: GdnWeights, device: torch.device) -> _Scratch:
        hv, key_width = weights.num_value_heads, weights.num_key_heads * weights.key_head_dim
        halves = (key_width, key_width, hv * weights.key_head_dim, hv * CHUNK)
        wholes = (hv * weights.value_head_dim, hv, hv)
        return cls(
            *(torch.empty(num_rows, width, dtype=torch.float16, device=device) for width in halves),
            *(torch.empty(num_rows, width, dtype=torch.float32, device=device) for width in wholes),
        )


def gdn_prefill(inputs: GdnInputs, weights: GdnWeights, state: GdnState, out: Tensor, precision: str) -> Tensor:
    """A prefill chunk; see `Ops.gdn`. out: [R, HV * DV], finite in rows of no slot too.

    precision: of the matmuls, as Triton names it ("tf32" or "ieee").
    """
    check_gdn(inputs, weights, state)
    if weights.key_head_dim < 32:
        raise ValueError(f"key_head_dim is {weights.key_head_dim}; prefill needs 32 or more")
    num_rows, num_slots = inputs.qkv.shape[0], state.ring_k.shape[0]
    a, b = (gate.sum(dim=1, dtype=torch.float32) for gate in (inputs.a, inputs.b))
    channels, columns = state.conv.shape[1:]
    taps = weights.conv.shape[1]
    gdn_fold(state, torch.where(inputs.window_rows > 0, inputs.pending_rows, 0))
    scratch = _Scratch.for_rows(num_rows, weights, inputs.qkv.device)
    hk, hv, dk, dv = weights.num_key_heads, weights.num_value_heads, weights.key_head_dim, weights.value_head_dim
    heads = {"HK": hk, "HV": hv, "DK": dk, "DV": dv}
    window = (inputs.window_starts, inputs.window_rows)
    chunks, slots = triton.cdiv(num_rows, CHUNK), triton.next_power_of_2(num_slots)
    gdn_chunk_prepare_kernel[(chunks, 2 * hk + hv)](
        *(inputs.qkv, a, b, weights.conv, weights.a_log, weights.dt_bias, state.conv, *window),
        *(scratch.q, scratch.k, scratch.mixed, scratch.beta, scratch.log_decay, num_rows, num_slots),
        *(inputs.qkv.stride(0), a.stride(0), b.stride(0)),
        **heads,
        **{"TAPS": taps, "COLUMNS": columns, "SLOTS": slots, "TILE": CHUNK, "PART": 16, "EPS": L2_EPS},
        num_warps=4,
    )
    gdn_chunk_solve_kernel[(chunks, hv)](
        *(scratch.q, scratch.k, scratch.mixed, scratch.beta, scratch.log_decay, scratch.w, scratch.scores, num_rows),
        **heads,
        N=CHUNK,
        BLOCK=min(16 if capability_major(inputs.qkv.device) == 8 else 32, dk, dv),
        PRECISION=precision,
        num_warps=4,
        num_stages=1,
    )
    value_block = min(VALUE_BLOCK, dv)
    gdn_chunk_scan_kernel[(dv // value_block, hv)](
        *(scratch.q, scratch.k, scratch.mixed, scratch.w, scratch.scores, scratch.log_decay, state.recurrent),
        *(*window, num_rows, num_slots),
        **heads,
        **{"N": CHUNK, "BLOCK_V": value_block, "SLOTS": slots, "PRECISION": precision},
        num_warps=4,
        num_stages=1,
    )
    gdn_chunk_norm_kernel[(triton.cdiv(num_rows, 16), hv)](
        *(scratch.mixed, inputs.z, weights.norm, out, num_rows, inputs.z.stride(0), weights.eps),
        **{"HV": hv, "DV": dv, "TILE": 16},
        num_warps=4,
    )
    gdn_chunk_columns_kernel[(triton.cdiv(channels, 128),)](
        *(inputs.qkv, state.conv, *window, num_slots, inputs.qkv.stride(0), channels),
        **{"TAPS": taps, "COLUMNS": columns, "SLOTS": slots, "BLOCK": 128},
        num_warps=4,
    )
    return out

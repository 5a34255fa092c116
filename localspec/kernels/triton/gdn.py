"""Gated DeltaNet for a verify step: two launches, one read and one write of the recurrent state.

Knows rows, record rings and the lazy fold. Does not know prompts (`gdn_prefill.py`) nor projections. Specification:
`reference_gdn.py`.

`gdn_prepare_kernel` does what is shared between value heads: convolution, SiLU, l2 norm, gates, and the record rings.
It saves the pending records first, so that `gdn_window_kernel`, where each block owns part of one value head's state,
may fold them. Fold and window update the state through the same function with an explicit FMA, so a folded state has
the bits of the running one. A block holds its state tile in registers as [value, key / 16, 16]: with that shape four
lanes share a row of the state and sums over keys take two shuffles. The block of a head that ends last norms and gates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton.cards import dependent_launch

L2_EPS = 1e-6
KEY_INNER = 16
VALUE_BLOCK = 32
"""Values of a head that one block holds: four blocks a head fill a card better than one."""


@triton.jit
def convolve(
    qkv_ptr, conv_ptr, weight_ptr, channels, rows, num_rows, history_begin, qkv_stride, TAPS: tl.constexpr,
    COLUMNS: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """SiLU of the causal convolution -> [T, D] float32, zero where rows are outside [0, num_rows).

    rows: [T] counted from the window's first row, where qkv_ptr points; channels: [D]; conv_ptr: the slot's columns,
    of which TAPS - 1 from `history_begin` on precede the window. Without HISTORY no row lies that near the start.
    """
    inside = (rows >= 0) & (rows < num_rows)
    total = tl.zeros([rows.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = rows + (tap - (TAPS - 1))
        in_window = inside & (source >= 0)
        column = tl.load(
            qkv_ptr + source.to(tl.int64)[:, None] * qkv_stride + channels[None, :], mask=in_window[:, None], other=0.0
        ).to(tl.float32)
        if HISTORY and tap < TAPS - 1:
            in_history = inside & (source < 0)
            history_column = history_begin + (TAPS - 1) + source
            history = tl.load(
                conv_ptr + channels[None, :] * COLUMNS + history_column[:, None], mask=in_history[:, None], other=0.0
            ).to(tl.float32)
            column = tl.where(in_window[:, None], column, history)
        weight = tl.load(weight_ptr + channels * TAPS + tap).to(tl.float32)
        total += column * weight[None, :]
    return total / (1.0 + tl.exp(-total))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), linear above 20."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def update_state(state, decay, keys, update):
    """S <- decay * S + update * keys. The one place where the recurrence changes the state.

    state: [V, KO, KI]; keys: [KO, KI]; update: [V]. The FMA is explicit: no context may contract it in another way.
    """
    columns = tl.broadcast_to(update[:, None, None], state.shape)
    return tl.fma(columns, tl.broadcast_to(keys[None, :, :], state.shape), state * decay)


@triton.jit
def read_state(state, vector):
    """S vector -> [V]. state: [V, KO, KI]; vector: [KO, KI]. KO lies within a thread, so its sum goes first."""
    return tl.sum(tl.sum(state * vector[None, :, :], axis=1), axis=1)


@triton.jit
def fold_rows(
    state, keys_ptr, updates_ptr, decay_ptr, pending, key_offsets, value_offsets, key_stride, value_stride,
    decay_stride,
):  # fmt: skip
    """Apply the first `pending` (at least one) records of one slot and value head, loading one record ahead."""
    keys = tl.load(keys_ptr + key_offsets)
    update = tl.load(updates_ptr + value_offsets)
    decay = tl.load(decay_ptr)
    for row in range(pending):
        following = tl.minimum(row + 1, pending - 1)
        next_keys = tl.load(keys_ptr + following * key_stride + key_offsets)
        next_update = tl.load(updates_ptr + following * value_stride + value_offsets)
        next_decay = tl.load(decay_ptr + following * decay_stride)
        state = update_state(state, decay, keys, update)
        keys, update, decay = next_keys, next_update, next_decay
    return state


@triton.jit
def kept_columns(conv_ptr, channels, begin, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The TAPS - 1 conv columns of a slot from `begin` on -> [TAPS padded, D]."""
    keep = tl.arange(0, triton.next_power_of_2(TAPS))
    kept = (keep < TAPS - 1)[:, None]
    return tl.load(conv_ptr + channels[None, :] * COLUMNS + (begin + keep)[:, None], mask=kept, other=0.0)


@triton.jit
def store_columns(
    qkv_ptr, conv_ptr, history, channels, rows, count, qkv_stride, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put the kept columns to the front of a slot's conv columns and the window behind them."""
    keep = tl.arange(0, triton.next_power_of_2(TAPS))
    target = conv_ptr + channels[None, :] * COLUMNS
    tl.store(target + keep[:, None], history, mask=(keep < TAPS - 1)[:, None])
    inside = (rows < count)[:, None]
    window = tl.load(qkv_ptr + rows.to(tl.int64)[:, None] * qkv_stride + channels[None, :], mask=inside, other=0.0)
    tl.store(target + (TAPS - 1 + rows)[:, None], window.to(conv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_parts(pointers, inside, stride, PARTS: tl.constexpr):
    """Values given as a sum of PARTS, `stride` apart -> [T] float32, added in order."""
    total = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(pointers + part * stride, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def gdn_prepare_kernel(
    qkv_ptr, a_ptr, b_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, conv_ptr, ring_k_ptr, ring_decay_ptr, starts_ptr,
    counts_ptr, pending_ptr, q_ptr, v_ptr, beta_ptr, old_k_ptr, old_decay_ptr, qkv_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, RING: tl.constexpr,
    GATE_PARTS: tl.constexpr, EPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (2 * HK + HV, S): a query, key or value head of a slot.

    Writes q_ptr [R, HK, DK], v_ptr [R, HV, DV], beta_ptr [R, HV] float32 and the rings; what was pending moves to
    old_k_ptr, old_decay_ptr, shaped as the rings. Reads of what is overwritten precede the one barrier.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    head, slot = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + slot).to(tl.int32)
    start = tl.load(starts_ptr + slot)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    if count == 0:
        return
    COLUMNS: tl.constexpr = TAPS - 1 + RING
    rows = tl.arange(0, RING)
    inside, waiting = rows < count, rows < pending
    conv = conv_ptr + slot * ((2 * HK * DK + HV * DV) * COLUMNS)
    qkv = qkv_ptr + start * qkv_stride
    if head < 2 * HK:
        key_channels = head * DK + tl.arange(0, DK)
        key_history = kept_columns(conv, key_channels, pending, TAPS, COLUMNS)
        ring = (slot * RING + rows)[:, None] * (HK * DK) + ((head % HK) * DK + tl.arange(0, DK))[None, :]
        old = tl.load(ring_k_ptr + ring, mask=waiting[:, None] & (head >= HK), other=0.0)
        mixed = convolve(
            qkv, conv, conv_weight_ptr, key_channels, rows, count, pending, qkv_stride, TAPS, COLUMNS, True
        )
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=1) + EPS)[:, None]
        tl.debug_barrier()
        if head >= HK:
            tl.store(old_k_ptr + ring, old, mask=waiting[:, None])
            tl.store(ring_k_ptr + ring, mixed, mask=inside[:, None])
        else:
            target = q_ptr + (start + rows)[:, None] * (HK * DK) + key_channels[None, :]
            tl.store(target, mixed * (1.0 / tl.sqrt(DK * 1.0)), mask=inside[:, None])
        store_columns(qkv, conv, key_history, key_channels, rows, count, qkv_stride, TAPS, COLUMNS)
    else:
        value_head = head - 2 * HK
        b = sum_parts(b_ptr + (start + rows) * b_stride + value_head, inside, HV, GATE_PARTS)
        tl.store(beta_ptr + (start + rows) * HV + value_head, 1.0 / (1.0 + tl.exp(-b)), mask=inside)
        values = value_head * DV + tl.arange(0, DV)
        channels = 2 * HK * DK + values
        history = kept_columns(conv, channels, pending, TAPS, COLUMNS)
        gates = (slot * RING + rows) * HV + value_head
        old_decay = tl.load(ring_decay_ptr + gates, mask=waiting, other=0.0)
        a = sum_parts(a_ptr + (start + rows) * a_stride + value_head, inside, HV, GATE_PARTS)
        rate = tl.exp(tl.load(a_log_ptr + value_head).to(tl.float32))
        decay = tl.exp(-rate * softplus(a + tl.load(dt_bias_ptr + value_head).to(tl.float32)))
        value = convolve(qkv, conv, conv_weight_ptr, channels, rows, count, pending, qkv_stride, TAPS, COLUMNS, True)
        tl.debug_barrier()
        tl.store(v_ptr + (start + rows)[:, None] * (HV * DV) + values[None, :], value, mask=inside[:, None])
        tl.store(old_decay_ptr + gates, old_decay, mask=waiting)
        tl.store(ring_decay_ptr + gates, decay, mask=inside)
        store_columns(qkv, conv, history, channels, rows, count, qkv_stride, TAPS, COLUMNS)


@triton.jit
def run_rows(
    state, k_ptr, q_ptr, v_ptr, decay_ptr, beta_ptr, update_ptr, mixed_ptr, count, key_offsets, value_offsets,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """The window of one slot and value head from its folded state: update_ptr and mixed_ptr get a row of values each.

    The next row's inputs are loaded before this row's sums, so that only arithmetic lies between two rows.
    """
    keys = tl.load(k_ptr + key_offsets)
    queries = tl.load(q_ptr + key_offsets)
    value = tl.load(v_ptr + value_offsets)
    decay = tl.load(decay_ptr)
    beta = tl.load(beta_ptr)
    for row in range(count):
        following = tl.minimum(row + 1, count - 1)
        next_keys = tl.load(k_ptr + following * (HK * DK) + key_offsets)
        next_queries = tl.load(q_ptr + following * (HK * DK) + key_offsets)
        next_value = tl.load(v_ptr + following * (HV * DV) + value_offsets)
        next_decay = tl.load(decay_ptr + following * HV)
        next_beta = tl.load(beta_ptr + following * HV)
        update = beta * (value - decay * read_state(state, keys))
        state = update_state(state, decay, keys, update)
        tl.store(update_ptr + row * (HV * DV) + value_offsets, update)
        tl.store(mixed_ptr + row * (HV * DV) + value_offsets, read_state(state, queries))
        keys, queries, value, decay, beta = next_keys, next_queries, next_value, next_decay, next_beta


@triton.jit(do_not_specialize=["num_rows"])
def gdn_window_kernel(
    q_ptr, v_ptr, beta_ptr, z_ptr, norm_ptr, old_k_ptr, old_decay_ptr, recurrent_ptr, ring_k_ptr, ring_u_ptr,
    ring_decay_ptr, starts_ptr, counts_ptr, pending_ptr, slots_ptr, mixed_ptr, tickets_ptr, out_ptr, num_rows,
    z_stride, eps, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr,
    KI: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (HV * DV / BLOCK_V, S + 1). Fold, store the state, run the rows from it, norm and gate them.

    mixed_ptr [R, HV, DV] float32 is scratch; tickets_ptr [S, HV] int32 is zero before and after; out_ptr [R, HV * DV].
    The last of the second axis clears padding rows. The state is read before the kernel before this one has ended:
    that one does not write it.
    """
    PARTS: tl.constexpr = DV // BLOCK_V
    KO: tl.constexpr = DK // KI
    head = tl.program_id(0) // PARTS
    padding_program = tl.program_id(1) == tl.num_programs(1) - 1
    slot = tl.where(padding_program, 0, tl.program_id(1)).to(tl.int64)
    values = (tl.program_id(0) % PARTS) * BLOCK_V + tl.arange(0, BLOCK_V)
    keys_in_head = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    tile = recurrent_ptr + (slot * HV + head) * (DV * DK) + values[:, None, None] * DK + keys_in_head[None, :, :]
    count = tl.load(counts_ptr + slot).to(tl.int32)
    start = tl.load(starts_ptr + slot)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    state = tl.load(tile)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.arange(0, RING)
    if padding_program:
        padding = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0) < 0
        cleared = out_ptr + rows[:, None] * (HV * DV) + (head * DV + values)[None, :]
        tl.store(cleared, tl.zeros([RING, BLOCK_V], out_ptr.dtype.element_ty), mask=padding[:, None])
        return
    if count == 0:
        return
    key_offsets = head // (HV // HK) * DK + keys_in_head
    value_offsets = head * DV + values
    updates = ring_u_ptr + slot * (RING * HV * DV)
    if pending > 0:
        state = fold_rows(
            state, old_k_ptr + slot * (RING * HK * DK), updates, old_decay_ptr + slot * (RING * HV) + head,
            pending, key_offsets, value_offsets, HK * DK, HV * DV, HV,
        )  # fmt: skip
        tl.store(tile, state)
    # The window's records replace the folded ones in ring_u: every thread must have read those.
    tl.debug_barrier()
    run_rows(
        state, ring_k_ptr + slot * (RING * HK * DK), q_ptr + start * (HK * DK), v_ptr + start * (HV * DV),
        ring_decay_ptr + slot * (RING * HV) + head, beta_ptr + start * HV + head, updates,
        mixed_ptr + start * (HV * DV), count, key_offsets, value_offsets, HK, HV, DK, DV,
    )  # fmt: skip
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets_ptr + slot * HV + head, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        tl.store(tickets_ptr + slot * HV + head, 0)
        finish_head(mixed_ptr, z_ptr, norm_ptr, out_ptr, start + rows, rows < count, head, z_stride, eps, HV, DV)


@triton.jit
def finish_head(
    mixed_ptr, z_ptr, norm_ptr, out_ptr, rows, inside, head, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Norm and gate all values of one head for some rows; other blocks wrote parts of them, hence past the L1 cache."""
    values = tl.arange(0, DV)
    mask = inside[:, None]
    offsets = rows[:, None] * (HV * DV) + (head * DV + values)[None, :]
    mixed = tl.load(mixed_ptr + offsets, mask=mask, other=0.0, cache_modifier=".cg")
    gate = tl.load(z_ptr + rows[:, None] * z_stride + (head * DV + values)[None, :], mask=mask, other=0.0)
    out = norm_and_gate(mixed, gate.to(tl.float32), norm_ptr, values, eps, DV)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def norm_and_gate(mixed, gate, norm_ptr, values, eps, DV: tl.constexpr):
    """rms(mixed) * w * silu(gate). mixed, gate: [T, DV] float32; w is plain here."""
    weight = tl.load(norm_ptr + values).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mixed * mixed, axis=1) / DV + eps)
    return mixed * scale[:, None] * weight[None, :] * (gate / (1.0 + tl.exp(-gate)))


def state_warps(key_dim: int, value_dim: int) -> int:
    """Warps of a block that holds this much of a head's state in registers."""
    return 8 if key_dim * value_dim > 128 * 64 else 4


def check_gdn(inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> None:
    """Shapes and strides that the kernels rely on. Raises ValueError naming what does not fit."""
    for name, size in (("key_head_dim", weights.key_head_dim), ("value_head_dim", weights.value_head_dim)):
        if size < KEY_INNER or size & (size - 1):
            raise ValueError(f"{name} is {size}; the kernels need a power of two from {KEY_INNER} up")
    channels = 2 * weights.num_key_heads * weights.key_head_dim + weights.num_value_heads * weights.value_head_dim
    if inputs.qkv.shape[1] != channels or state.conv.shape[1] != channels:
        raise ValueError(f"qkv and the conv columns must have {channels} channels, by the head counts")
    strided = {"qkv": inputs.qkv, "z": inputs.z, "a": inputs.a, "b": inputs.b}
    for name, tensor in strided.items():
        if tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous in its last dimension")
    for name, tensor in (("a", inputs.a), ("b", inputs.b)):
        if tensor.ndim != 3 or tensor.stride(1) != weights.num_value_heads or tensor.shape[1] != inputs.a.shape[1]:
            raise ValueError(f"{name} must be [R, parts, value heads], equally many parts as a, one after the other")
    packed = {
        "recurrent": state.recurrent,
        "conv": state.conv,
        "ring_k": state.ring_k,
        "ring_u": state.ring_u,
        "ring_decay": state.ring_decay,
        "conv weight": weights.conv,
    }
    for name, tensor in packed.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")


def gdn_window(inputs: GdnInputs, weights: GdnWeights, state: GdnState, tickets: Tensor, out: Tensor) -> Tensor:
    """A verify step; see `Ops.gdn`. out: [R, HV * DV], zero for padding rows.

    tickets: int32, zero, at least one for each slot and value head; launches of one stream may share them.
    """
    check_gdn(inputs, weights, state)
    num_rows, num_slots, ring = inputs.qkv.shape[0], state.ring_k.shape[0], state.ring_k.shape[1]
    hk, hv, dk, dv = weights.num_key_heads, weights.num_value_heads, weights.key_head_dim, weights.value_head_dim
    if num_rows > ring:
        raise ValueError(f"a verify step has at most {ring} rows, not {num_rows}")
    if tickets.numel() < num_slots * hv or tickets.dtype != torch.int32:
        raise ValueError(f"tickets must be {num_slots * hv} int32 zeros or more")
    scratch = torch.empty(  # q, v, the unnormed output, saved keys, beta, saved decays
        num_rows * (hk * dk + 2 * hv * dv + hv) + num_slots * ring * (hk * dk + hv),
        dtype=torch.float32,
        device=inputs.qkv.device,
    )
    sizes = (num_rows * hk * dk, num_rows * hv * dv, num_rows * hv * dv, num_slots * ring * hk * dk, num_rows * hv)
    q, v, mixed, old_k, beta, old_decay = scratch.split((*sizes, num_slots * ring * hv))
    pdl = dependent_launch(inputs.qkv.device)
    shared = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "RING": ring, "PDL": pdl, "launch_pdl": pdl}
    window = (inputs.window_starts, inputs.window_rows, inputs.pending_rows)
    gdn_prepare_kernel[(2 * hk + hv, num_slots)](
        *(inputs.qkv, inputs.a, inputs.b, weights.conv, weights.a_log, weights.dt_bias),
        *(state.conv, state.ring_k, state.ring_decay, *window, q, v, beta, old_k, old_decay),
        *(inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0)),
        **{"TAPS": weights.conv.shape[1], "GATE_PARTS": inputs.a.shape[1], "EPS": L2_EPS, "num_warps": 4},
        **shared,
    )
    block_v = min(VALUE_BLOCK, dv)
    gdn_window_kernel[(hv * (dv // block_v), num_slots + 1)](
        *(q, v, beta, inputs.z, weights.norm, old_k, old_decay, state.recurrent, state.ring_k, state.ring_u),
        *(state.ring_decay, *window, inputs.slots, mixed, tickets, out, num_rows, inputs.z.stride(0), weights.eps),
        **{"KI": KEY_INNER, "BLOCK_V": block_v, "num_warps": state_warps(dk, block_v)},
        **shared,
    )
    return out

"""Gated DeltaNet for a verify step: two launches, one read and one write of the recurrent state.

Knows rows, record rings and the lazy fold. Does not know prompts (`gdn_prefill.py`) nor projections. Specification:
`reference_gdn.py`.

`gdn_prepare_kernel` does what is shared between value heads: convolution, SiLU, l2 norm, gates, and the record rings.
It saves the pending records first, so that `gdn_window_kernel`, where each block owns one value head, may fold them.
Fold and window update the state through the same function with an explicit FMA, so a folded state has the bits of the
running one. A block holds its state tile in registers as [value, key / 16, 16]: with that shape four lanes share a row
of the state and sums over keys take two shuffles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights

L2_EPS = 1e-6
KEY_INNER = 16


@triton.jit
def convolve(
    qkv_ptr,
    conv_ptr,
    weight_ptr,
    channels,
    rows,
    num_rows,
    history_begin,
    qkv_stride,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """SiLU of the causal convolution -> [T, D] float32, zero where rows are outside [0, num_rows).

    rows: [T] counted from the window's first row, where qkv_ptr points; channels: [D]; conv_ptr: the slot's columns,
    of which TAPS - 1 from `history_begin` on precede the window.
    """
    inside = (rows >= 0) & (rows < num_rows)
    total = tl.zeros([rows.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = rows + (tap - (TAPS - 1))
        in_window = inside & (source >= 0)
        window = tl.load(
            qkv_ptr + source.to(tl.int64)[:, None] * qkv_stride + channels[None, :], mask=in_window[:, None], other=0.0
        ).to(tl.float32)
        in_history = inside & (source < 0)
        history_column = history_begin + (TAPS - 1) + source
        history = tl.load(
            conv_ptr + channels[None, :] * COLUMNS + history_column[:, None], mask=in_history[:, None], other=0.0
        ).to(tl.float32)
        weight = tl.load(weight_ptr + channels * TAPS + tap).to(tl.float32)
        total += tl.where(in_window[:, None], window, history) * weight[None, :]
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
    return tl.fma(update[:, None, None] + tl.zeros_like(state), keys[None, :, :] + tl.zeros_like(state), state * decay)


@triton.jit
def read_state(state, vector):
    """S vector -> [V]. state: [V, KO, KI]; vector: [KO, KI]. KO lies within a thread, so its sum goes first."""
    return tl.sum(tl.sum(state * vector[None, :, :], axis=1), axis=1)


@triton.jit
def fold_rows(
    state, keys_ptr, updates_ptr, decay_ptr, pending, key_offsets, value_offsets, key_stride, value_stride, decay_stride
):
    """Apply the first `pending` records of one slot and value head."""
    for row in range(pending):
        keys = tl.load(keys_ptr + row * key_stride + key_offsets)
        update = tl.load(updates_ptr + row * value_stride + value_offsets)
        decay = tl.load(decay_ptr + row * decay_stride)
        state = update_state(state, decay, keys, update)
    return state


@triton.jit
def gdn_prepare_kernel(
    qkv_ptr,
    a_ptr,
    b_ptr,
    conv_weight_ptr,
    a_log_ptr,
    dt_bias_ptr,
    conv_ptr,
    ring_k_ptr,
    ring_decay_ptr,
    starts_ptr,
    counts_ptr,
    pending_ptr,
    q_ptr,
    v_ptr,
    beta_ptr,
    old_k_ptr,
    old_decay_ptr,
    qkv_stride,
    a_stride,
    b_stride,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    RING: tl.constexpr,
    EPS: tl.constexpr,
):
    """Grid: (2 * HK + HV, S): a query, key or value head of a slot.

    Writes q_ptr [R, HK, DK], v_ptr [R, HV, DV], beta_ptr [R, HV] float32 and the rings, and moves what was pending in
    the rings to old_k_ptr [S, RING, HK, DK] and old_decay_ptr [S, RING, HV].
    """
    head = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + slot).to(tl.int32)
    if count == 0:
        return
    start = tl.load(starts_ptr + slot)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    COLUMNS: tl.constexpr = TAPS - 1 + RING
    rows = tl.arange(0, RING)
    inside = rows < count
    slot_conv = conv_ptr + slot * (C * COLUMNS)
    slot_qkv = qkv_ptr + start * qkv_stride
    if head < 2 * HK:
        channels = head * DK + tl.arange(0, DK)
        mixed = convolve(
            slot_qkv, slot_conv, conv_weight_ptr, channels, rows, count, pending, qkv_stride, TAPS, COLUMNS
        )
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=1) + EPS)[:, None]
        if head < HK:
            columns = head * DK + tl.arange(0, DK)
            target = q_ptr + (start + rows)[:, None] * (HK * DK) + columns[None, :]
            tl.store(target, mixed * (1.0 / tl.sqrt(DK * 1.0)), mask=inside[:, None])
        else:
            offsets = (slot * RING + rows)[:, None] * (HK * DK) + ((head - HK) * DK + tl.arange(0, DK))[None, :]
            waiting = (rows < pending)[:, None]
            old = tl.load(ring_k_ptr + offsets, mask=waiting, other=0.0)
            tl.store(old_k_ptr + offsets, old, mask=waiting)
            tl.debug_barrier()
            tl.store(ring_k_ptr + offsets, mixed, mask=inside[:, None])
        shift_columns(slot_qkv, slot_conv, channels, rows, count, pending, qkv_stride, TAPS, COLUMNS)
    else:
        value_head = head - 2 * HK
        columns = value_head * DV + tl.arange(0, DV)
        channels = 2 * HK * DK + columns
        mixed = convolve(
            slot_qkv, slot_conv, conv_weight_ptr, channels, rows, count, pending, qkv_stride, TAPS, COLUMNS
        )
        tl.store(v_ptr + (start + rows)[:, None] * (HV * DV) + columns[None, :], mixed, mask=inside[:, None])
        a = tl.load(a_ptr + (start + rows) * a_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(b_ptr + (start + rows) * b_stride + value_head, mask=inside, other=0.0).to(tl.float32)
        rate = tl.exp(tl.load(a_log_ptr + value_head).to(tl.float32))
        decay = tl.exp(-rate * softplus(a + tl.load(dt_bias_ptr + value_head).to(tl.float32)))
        tl.store(beta_ptr + (start + rows) * HV + value_head, 1.0 / (1.0 + tl.exp(-b)), mask=inside)
        offsets = (slot * RING + rows) * HV + value_head
        old_decay = tl.load(ring_decay_ptr + offsets, mask=rows < pending, other=0.0)
        tl.store(old_decay_ptr + offsets, old_decay, mask=rows < pending)
        tl.debug_barrier()
        tl.store(ring_decay_ptr + offsets, decay, mask=inside)
        shift_columns(slot_qkv, slot_conv, channels, rows, count, pending, qkv_stride, TAPS, COLUMNS)


@triton.jit
def shift_columns(
    qkv_ptr, conv_ptr, channels, rows, count, pending, qkv_stride, TAPS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Drop `pending` columns from the front of a slot's conv columns and put the window behind the history.

    The caller has read what it needs; other threads of the block may still be reading, hence the barriers.
    """
    keep = tl.arange(0, triton.next_power_of_2(TAPS))
    kept = (keep < TAPS - 1)[:, None]
    target = conv_ptr + channels[None, :] * COLUMNS
    history = tl.load(target + (pending + keep)[:, None], mask=kept, other=0.0)
    tl.debug_barrier()
    tl.store(target + keep[:, None], history, mask=kept)
    inside = (rows < count)[:, None]
    window = tl.load(qkv_ptr + rows.to(tl.int64)[:, None] * qkv_stride + channels[None, :], mask=inside, other=0.0)
    tl.store(target + (TAPS - 1 + rows)[:, None], window.to(conv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gdn_window_kernel(
    q_ptr,
    v_ptr,
    beta_ptr,
    z_ptr,
    norm_ptr,
    old_k_ptr,
    old_decay_ptr,
    recurrent_ptr,
    ring_k_ptr,
    ring_u_ptr,
    ring_decay_ptr,
    starts_ptr,
    counts_ptr,
    pending_ptr,
    slots_ptr,
    mixed_ptr,
    out_ptr,
    num_rows,
    z_stride,
    eps,
    HK: tl.constexpr,
    HV: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    RING: tl.constexpr,
    KI: tl.constexpr,
):
    """Grid: (HV, S + 1). Fold, store the state, run the rows from it, norm and gate them.

    mixed_ptr [R, HV, DV] float32 is scratch; out_ptr [R, HV * DV]. The last of the second axis clears padding rows.
    """
    head = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    if slot == tl.num_programs(1) - 1:
        all_rows = tl.arange(0, RING)
        padding = tl.load(slots_ptr + all_rows, mask=all_rows < num_rows, other=0) < 0
        cleared = out_ptr + all_rows[:, None] * (HV * DV) + (head * DV + tl.arange(0, DV))[None, :]
        tl.store(cleared, tl.zeros([RING, DV], out_ptr.dtype.element_ty), mask=padding[:, None])
        return
    count = tl.load(counts_ptr + slot).to(tl.int32)
    if count == 0:
        return
    start = tl.load(starts_ptr + slot)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    KO: tl.constexpr = DK // KI
    values = tl.arange(0, DV)
    keys_in_head = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    key_head = head // (HV // HK)
    key_offsets = key_head * DK + keys_in_head
    value_offsets = head * DV + values
    tile = recurrent_ptr + (slot * HV + head) * (DV * DK) + values[:, None, None] * DK + keys_in_head[None, :, :]
    state = tl.load(tile)
    slot_updates = ring_u_ptr + slot * (RING * HV * DV)
    if pending > 0:
        state = fold_rows(
            state,
            old_k_ptr + slot * (RING * HK * DK),
            slot_updates,
            old_decay_ptr + slot * (RING * HV) + head,
            pending,
            key_offsets,
            value_offsets,
            HK * DK,
            HV * DV,
            HV,
        )
        tl.store(tile, state)
    # The window's records replace the folded ones in ring_u: every thread must have read those.
    tl.debug_barrier()
    slot_keys = ring_k_ptr + slot * (RING * HK * DK)
    slot_decay = ring_decay_ptr + slot * (RING * HV) + head
    for row in range(count):
        keys = tl.load(slot_keys + row * (HK * DK) + key_offsets)
        queries = tl.load(q_ptr + (start + row) * (HK * DK) + key_offsets)
        value = tl.load(v_ptr + (start + row) * (HV * DV) + value_offsets)
        decay = tl.load(slot_decay + row * HV)
        beta = tl.load(beta_ptr + (start + row) * HV + head)
        update = beta * (value - decay * read_state(state, keys))
        state = update_state(state, decay, keys, update)
        tl.store(slot_updates + row * (HV * DV) + value_offsets, update)
        tl.store(mixed_ptr + (start + row) * (HV * DV) + value_offsets, read_state(state, queries))
    tl.debug_barrier()
    rows = tl.arange(0, RING)
    inside = (rows < count)[:, None]
    offsets = (start + rows)[:, None] * (HV * DV) + value_offsets[None, :]
    gate = tl.load(z_ptr + (start + rows)[:, None] * z_stride + value_offsets[None, :], mask=inside, other=0.0)
    mixed = tl.load(mixed_ptr + offsets, mask=inside, other=0.0)
    out = norm_and_gate(mixed, gate.to(tl.float32), norm_ptr, values, eps, DV)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_and_gate(mixed, gate, norm_ptr, values, eps, DV: tl.constexpr):
    """rms(mixed) * w * silu(gate). mixed, gate: [T, DV] float32; w is plain here."""
    weight = tl.load(norm_ptr + values).to(tl.float32)
    scale = tl.rsqrt(tl.sum(mixed * mixed, axis=1) / DV + eps)
    return mixed * scale[:, None] * weight[None, :] * (gate / (1.0 + tl.exp(-gate)))


def state_warps(key_dim: int, value_dim: int) -> int:
    """Warps of a block that holds one head's state in registers; the same wherever states change."""
    return 8 if key_dim * value_dim >= 64 * 64 else 4


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


def gdn_window(inputs: GdnInputs, weights: GdnWeights, state: GdnState, out: Tensor) -> Tensor:
    """A verify step; see `Ops.gdn`. out: [R, HV * DV], zero for padding rows."""
    check_gdn(inputs, weights, state)
    num_rows, num_slots, ring = inputs.qkv.shape[0], state.ring_k.shape[0], state.ring_k.shape[1]
    if num_rows > ring:
        raise ValueError(f"a verify step has at most {ring} rows, not {num_rows}")
    hk, hv, dk, dv = (
        weights.num_key_heads,
        weights.num_value_heads,
        weights.key_head_dim,
        weights.value_head_dim,
    )
    taps = weights.conv.shape[1]
    scratch = torch.empty(  # q, v, the unnormed output, saved keys, beta, saved decays
        num_rows * (hk * dk + 2 * hv * dv + hv) + num_slots * ring * (hk * dk + hv),
        dtype=torch.float32,
        device=inputs.qkv.device,
    )
    sizes = (num_rows * hk * dk, num_rows * hv * dv, num_rows * hv * dv, num_slots * ring * hk * dk, num_rows * hv)
    q, v, mixed, old_k, beta, old_decay = scratch.split((*sizes, num_slots * ring * hv))
    heads = {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "RING": ring}
    window = (inputs.window_starts, inputs.window_rows, inputs.pending_rows)
    gdn_prepare_kernel[(2 * hk + hv, num_slots)](
        *(inputs.qkv, inputs.a, inputs.b, weights.conv, weights.a_log, weights.dt_bias),
        *(state.conv, state.ring_k, state.ring_decay, *window, q, v, beta, old_k, old_decay),
        *(inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0)),
        **heads,
        TAPS=taps,
        EPS=L2_EPS,
        num_warps=4,
    )
    gdn_window_kernel[(hv, num_slots + 1)](
        *(q, v, beta, inputs.z, weights.norm, old_k, old_decay, state.recurrent, state.ring_k, state.ring_u),
        *(state.ring_decay, *window, inputs.slots, mixed, out, num_rows, inputs.z.stride(0), weights.eps),
        **heads,
        KI=KEY_INNER,
        num_warps=state_warps(dk, dv),
    )
    return out

"""Gated DeltaNet for a verify step in one launch: one read and one write of the recurrent state.

Knows rows, record rings and the lazy fold. Does not know prompts (`gdn_prefill.py`) nor projections. Specification:
`reference_gdn.py`.

A program owns part of one value head's state, in registers as [value, key / 32, 32]: with that shape eight lanes share
a row of the state and sums over keys take three shuffles. What does not depend on the rows comes before the wait for
the kernel that makes them: reading the state, folding the pending records into it, storing it, conv columns, weights.
Then the rows follow one by one; each program makes the keys and queries of its head for itself, which costs less than a
launch.

Records and columns that several programs read are overwritten by one of them, the keeper, which is the last of those
that share a key head and waits until all have read. The others began before it, so it never waits for one that cannot
start. The program of a head that ends last norms and gates the head's values.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton.cards import dependent_launch
from localspec.kernels.triton.gdn import (
    L2_EPS,
    check_gdn,
    fold_rows,
    norm_and_gate,
    read_state,
    softplus,
    store_values,
    update_state,
    window_registers,
    window_shape,
)

KEY_INNER = 32
"""Of a key, what eight lanes share."""
MAX_TAPS = 4
PADDING_PROGRAMS = tl.constexpr(8)


@triton.jit
def load_taps(weight_ptr, channels, TAPS: tl.constexpr):
    """Convolution weights of some channels, oldest column first; four, the first ones zero where there are fewer.

    channels: of any shape. weight_ptr: [C, TAPS].
    """
    tap0 = tl.zeros(channels.shape, tl.float32)
    tap1 = tl.zeros(channels.shape, tl.float32)
    if TAPS > 3:
        tap0 = tl.load(weight_ptr + channels * TAPS + (TAPS - 4)).to(tl.float32)
    if TAPS > 2:
        tap1 = tl.load(weight_ptr + channels * TAPS + (TAPS - 3)).to(tl.float32)
    tap2 = tl.load(weight_ptr + channels * TAPS + (TAPS - 2)).to(tl.float32)
    tap3 = tl.load(weight_ptr + channels * TAPS + (TAPS - 1)).to(tl.float32)
    return tap0, tap1, tap2, tap3


@triton.jit
def load_columns(conv_ptr, channels, begin, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """The TAPS - 1 conv columns before a window; three, the first ones zero where there are fewer."""
    base = conv_ptr + channels * COLUMNS + begin
    column0 = tl.zeros(channels.shape, tl.float32)
    column1 = tl.zeros(channels.shape, tl.float32)
    if TAPS > 3:
        column0 = tl.load(base + (TAPS - 4)).to(tl.float32)
    if TAPS > 2:
        column1 = tl.load(base + (TAPS - 3)).to(tl.float32)
    column2 = tl.load(base + (TAPS - 2)).to(tl.float32)
    return column0, column1, column2


@triton.jit
def store_columns(conv_ptr, channels, column0, column1, column2, TAPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Put what `load_columns` found to the front."""
    base = conv_ptr + channels * COLUMNS
    if TAPS > 3:
        tl.store(base + (TAPS - 4), column0.to(conv_ptr.dtype.element_ty))
    if TAPS > 2:
        tl.store(base + (TAPS - 3), column1.to(conv_ptr.dtype.element_ty))
    tl.store(base + (TAPS - 2), column2.to(conv_ptr.dtype.element_ty))


@triton.jit
def convolve_row(column0, column1, column2, newest, tap0, tap1, tap2, tap3):
    """SiLU of the convolution at the newest column, in explicit FMAs."""
    total = tl.fma(newest, tap3, tl.fma(column2, tap2, tl.fma(column1, tap1, column0 * tap0)))
    return total / (1.0 + tl.exp(-total))


@triton.jit
def gate_logits(a_ptr, row, stride, heads, inside, HV: tl.constexpr, PARTS: tl.constexpr):
    """A gate's input, given as a sum of PARTS: float32, added in order. heads: of any shape."""
    base = a_ptr + row * stride + heads
    total = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(base + part * HV, mask=inside, other=0.0).to(tl.float32)
    return total


@triton.jit
def wait_for_readers(ticket_ptr, readers):
    """Until all programs that share a key head have read; leaves the ticket at zero."""
    seen = tl.atomic_cas(ticket_ptr, readers, 0, sem="acq_rel", scope="gpu")
    while seen != readers:
        seen = tl.atomic_cas(ticket_ptr, readers, 0, sem="acq_rel", scope="gpu")
    tl.debug_barrier()


@triton.jit
def keep_decays(
    ring_decay_ptr, a_ptr, a_log_ptr, dt_bias_ptr, start, count, first_head, a_stride, GROUP: tl.constexpr,
    HV: tl.constexpr, RING: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Record the decays of all rows and of the GROUP value heads of a key head. ring_decay_ptr: the slot's."""
    rows = tl.arange(0, RING)[:, None]
    member = tl.arange(0, triton.next_power_of_2(GROUP))[None, :]
    heads = first_head + member
    inside = (rows < count) & (member < GROUP)
    a = gate_logits(a_ptr, start + rows, a_stride, heads, inside, HV, PARTS)
    rate = tl.exp(tl.load(a_log_ptr + heads, mask=member < GROUP, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias_ptr + heads, mask=member < GROUP, other=0.0).to(tl.float32)
    tl.store(ring_decay_ptr + rows * HV + heads, tl.exp(-rate * softplus(a + bias)), mask=inside)


@triton.jit
def keep_columns(
    conv_ptr, qkv_ptr, key_head, count, qkv_stride, HK: tl.constexpr, DK: tl.constexpr, RING: tl.constexpr,
    TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Put the window's rows of a key head's queries and keys behind the columns before them."""
    rows = tl.arange(0, RING)[None, :]
    for which in tl.static_range(2):
        channels = (which * HK * DK + key_head * DK + tl.arange(0, DK))[:, None]
        row = tl.load(qkv_ptr + rows * qkv_stride + channels, mask=rows < count, other=0.0)
        target = conv_ptr + channels * COLUMNS + (TAPS - 1) + rows
        tl.store(target, row.to(conv_ptr.dtype.element_ty), mask=rows < count)


@triton.jit
def run_rows(
    state, qkv_ptr, a_ptr, b_ptr, conv_ptr, ring_k_ptr, update_ptr, mixed_ptr, count, head, values, keeper, rate, bias,
    qk_columns, qk_taps, v_columns, v_taps, qkv_stride, a_stride, b_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr,
    COLUMNS: tl.constexpr, GATE_PARTS: tl.constexpr, KI: tl.constexpr, EPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The window of one slot from its folded state; pointers lead to the window's first row or the slot's own part.

    qk_columns ([K, 2] each), v_columns ([V] each): the three columns before the window; qk_taps, v_taps: the four taps.
    update_ptr and mixed_ptr get a row of values each, the rings and the conv columns what the next step folds. The next
    row's inputs are loaded before this row's sums."""
    key_head = head // (HV // HK)
    dims, which = tl.arange(0, DK)[:, None], tl.arange(0, 2)[None, :]
    qk_channels = which * (HK * DK) + key_head * DK + dims
    v_channels = 2 * HK * DK + head * DV + values
    qk0, qk1, qk2 = qk_columns
    v0, v1, v2 = v_columns
    qk = tl.load(qkv_ptr + qk_channels).to(tl.float32)
    v = tl.load(qkv_ptr + v_channels).to(tl.float32)
    a = gate_logits(a_ptr, 0, a_stride, head, True, HV, GATE_PARTS)
    b = gate_logits(b_ptr, 0, b_stride, head, True, HV, GATE_PARTS)
    for row in range(count):
        following = tl.minimum(row + 1, count - 1)
        next_qk = tl.load(qkv_ptr + following * qkv_stride + qk_channels).to(tl.float32)
        next_v = tl.load(qkv_ptr + following * qkv_stride + v_channels).to(tl.float32)
        next_a = gate_logits(a_ptr, following, a_stride, head, True, HV, GATE_PARTS)
        next_b = gate_logits(b_ptr, following, b_stride, head, True, HV, GATE_PARTS)
        mixed = convolve_row(qk0, qk1, qk2, qk, qk_taps[0], qk_taps[1], qk_taps[2], qk_taps[3])
        mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, axis=0) + EPS)[None, :]
        flat_queries, flat_keys = tl.split(mixed)
        queries = tl.reshape(flat_queries * (1.0 / tl.sqrt(DK * 1.0)), [DK // KI, KI])
        keys = tl.reshape(flat_keys, [DK // KI, KI])
        value = convolve_row(v0, v1, v2, v, v_taps[0], v_taps[1], v_taps[2], v_taps[3])
        decay = tl.exp(-rate * softplus(a + bias))
        beta = 1.0 / (1.0 + tl.exp(-b))
        update = beta * (value - decay * read_state(state, keys))
        state = update_state(state, decay, keys, update)
        store_values(update_ptr + row * (HV * DV) + head * DV + values, update, ASM)
        store_values(mixed_ptr + row * (HV * DV) + head * DV + values, read_state(state, queries), ASM)
        tl.store(conv_ptr + v_channels * COLUMNS + (TAPS - 1) + row, v.to(conv_ptr.dtype.element_ty))
        if keeper:
            tl.store(ring_k_ptr + row * (HK * DK) + key_head * DK + tl.arange(0, DK), flat_keys)
        qk0, qk1, qk2, qk = qk1, qk2, qk, next_qk
        v0, v1, v2, v = v1, v2, v, next_v
        a, b = next_a, next_b


@triton.jit
def fold_slot(
    tile, conv, conv_weight_ptr, ring_k, updates, ring_decay, a_log_ptr, dt_bias_ptr, norm_ptr, pending, head, key_head,
    values, keys_in_head, qk_channels, v_channels, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, TAPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """All that does not wait for the launch before: the state with its pending rows folded in and stored, the three
    columns before the window, the taps, and the head's rate, bias and norm. tile: pointers to the state, [V, K/KI, KI];
    qk_channels [K, 2], v_channels [V]. Returns state, columns and taps in the channels' shapes, scalars, norm [DV].
    """
    state = tl.load(tile)
    qk0, qk1, qk2 = load_columns(conv, qk_channels, pending, TAPS, COLUMNS)
    v0, v1, v2 = load_columns(conv, v_channels, pending, TAPS, COLUMNS)
    qk_tap0, qk_tap1, qk_tap2, qk_tap3 = load_taps(conv_weight_ptr, qk_channels, TAPS)
    v_tap0, v_tap1, v_tap2, v_tap3 = load_taps(conv_weight_ptr, v_channels, TAPS)
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    norm = tl.load(norm_ptr + tl.arange(0, DV)).to(tl.float32)
    if pending > 0:
        state = fold_rows(
            state, ring_k, updates, ring_decay + head, pending, key_head * DK + keys_in_head, head * DV + values,
            HK * DK, HV * DV, HV,
        )  # fmt: skip
        tl.store(tile, state)
    qk_taps = (qk_tap0, qk_tap1, qk_tap2, qk_tap3)
    v_taps = (v_tap0, v_tap1, v_tap2, v_tap3)
    return state, (qk0, qk1, qk2), (v0, v1, v2), qk_taps, v_taps, rate, bias, norm


@triton.jit
def run_window(
    state, qkv_ptr, a_ptr, b_ptr, z_ptr, conv, ring_k, updates, ring_decay, a_log_ptr, dt_bias_ptr, tickets, mixed_ptr,
    out_ptr, start, count, head, key_head, values, keeper, rate, bias, norm, qk_columns, qk_taps, v_columns, v_taps,
    qkv_stride, a_stride, b_stride, z_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
    GATE_PARTS: tl.constexpr, KI: tl.constexpr, PARTS: tl.constexpr, EPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The part of one program after the wait: records, rows, and for the last program of a head its norm and gate.

    state [V, K/KI, KI]; columns, taps, norm: as `fold_slot` gives them; conv, rings, tickets: the slot's own part.
    """
    COLUMNS: tl.constexpr = TAPS - 1 + RING
    if keeper:
        keep_decays(
            ring_decay, a_ptr, a_log_ptr, dt_bias_ptr, start, count, key_head * (HV // HK), a_stride, HV // HK, HV,
            RING, GATE_PARTS,
        )  # fmt: skip
    run_rows(
        state, qkv_ptr + start * qkv_stride, a_ptr + start * a_stride, b_ptr + start * b_stride, conv, ring_k, updates,
        mixed_ptr + start * (HV * DV), count, head, values, keeper, rate, bias, qk_columns, qk_taps, v_columns, v_taps,
        qkv_stride, a_stride, b_stride,
        HK, HV, DK, DV, TAPS, COLUMNS, GATE_PARTS, KI, EPS, ASM,
    )  # fmt: skip
    tl.debug_barrier()
    arrived = tl.atomic_add(tickets + head, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        tl.store(tickets + head, 0)
        finish_head(mixed_ptr, z_ptr, norm, out_ptr, start, count, head, z_stride, eps, HV, DV, RING)
    if keeper:
        # Last, since nobody waits for it.
        keep_columns(conv, qkv_ptr + start * qkv_stride, key_head, count, qkv_stride, HK, DK, RING, TAPS, COLUMNS)


@triton.jit(do_not_specialize=["num_rows"])
def gdn_window_kernel(
    qkv_ptr, a_ptr, b_ptr, z_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, recurrent_ptr, conv_ptr,
    ring_k_ptr, ring_u_ptr, ring_decay_ptr, starts_ptr, counts_ptr, pending_ptr, slots_ptr, mixed_ptr, tickets_ptr,
    out_ptr, num_rows, qkv_stride, a_stride, b_stride, z_stride, eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
    GATE_PARTS: tl.constexpr, KI: tl.constexpr, BLOCK_V: tl.constexpr, EPS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid: (HV * DV / BLOCK_V, S + 1). Fold, store the state, run the rows from it, norm and gate them.

    mixed_ptr [R, HV, DV] float32 is scratch; tickets_ptr [S, HV + HK] int32 is zero before and after; out_ptr
    [R, HV * DV]. The last of the second axis clears padding rows. What is read and written before the wait belongs to
    this layer alone, so no kernel that may still run touches it.
    """
    PARTS: tl.constexpr = DV // BLOCK_V
    GROUP: tl.constexpr = HV // HK
    COLUMNS: tl.constexpr = TAPS - 1 + RING
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    padding_program = tl.program_id(1) == tl.num_programs(1) - 1
    slot = tl.where(padding_program, 0, tl.program_id(1)).to(tl.int64)
    values = part * BLOCK_V + tl.arange(0, BLOCK_V)
    if padding_program:
        if tl.program_id(0) < PADDING_PROGRAMS:
            clear_padding(out_ptr, slots_ptr, num_rows, HV * DV, RING, PDL)
        return
    count = tl.load(counts_ptr + slot).to(tl.int32)
    if count == 0:
        return
    start = tl.load(starts_ptr + slot)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    key_head = head // GROUP
    keeper = (head % GROUP == GROUP - 1) & (part == PARTS - 1)
    conv = conv_ptr + slot * ((2 * HK * DK + HV * DV) * COLUMNS)
    tickets = tickets_ptr + slot * (HV + HK)
    ring_k, ring_decay = ring_k_ptr + slot * (RING * HK * DK), ring_decay_ptr + slot * (RING * HV)
    updates = ring_u_ptr + slot * (RING * HV * DV)
    keys_in_head = tl.arange(0, DK // KI)[:, None] * KI + tl.arange(0, KI)[None, :]
    tile = recurrent_ptr + (slot * HV + head) * (DV * DK) + values[:, None, None] * DK + keys_in_head[None, :, :]
    qk_channels = tl.arange(0, 2)[None, :] * (HK * DK) + key_head * DK + tl.arange(0, DK)[:, None]
    v_channels = 2 * HK * DK + head * DV + values
    state, qk_columns, v_columns, qk_taps, v_taps, rate, bias, norm = fold_slot(
        tile, conv, conv_weight_ptr, ring_k, updates, ring_decay, a_log_ptr, dt_bias_ptr, norm_ptr, pending, head,
        key_head, values, keys_in_head, qk_channels, v_channels, HK, HV, DK, DV, TAPS, COLUMNS,
    )  # fmt: skip
    # Every thread has read what this or another program overwrites.
    tl.debug_barrier()
    tl.atomic_add(tickets + HV + key_head, 1, sem="release", scope="gpu")
    store_columns(conv, v_channels, v_columns[0], v_columns[1], v_columns[2], TAPS, COLUMNS)
    if keeper:
        wait_for_readers(tickets + HV + key_head, GROUP * PARTS)
        store_columns(conv, qk_channels, qk_columns[0], qk_columns[1], qk_columns[2], TAPS, COLUMNS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    run_window(
        state, qkv_ptr, a_ptr, b_ptr, z_ptr, conv, ring_k, updates, ring_decay, a_log_ptr, dt_bias_ptr, tickets,
        mixed_ptr, out_ptr, start, count, head, key_head, values, keeper, rate, bias, norm, qk_columns, qk_taps,
        v_columns, v_taps, qkv_stride, a_stride, b_stride, z_stride, eps,
        HK, HV, DK, DV, RING, TAPS, GATE_PARTS, KI, PARTS, EPS, ASM,
    )  # fmt: skip


@triton.jit
def clear_padding(out_ptr, slots_ptr, num_rows, width, RING: tl.constexpr, PDL: tl.constexpr):
    """Zero the rows of no slot; every program takes blocks of 64 columns in turn.

    These programs alone wait in a launch without rows; those of idle slots give their places away at once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    rows = tl.arange(0, RING)
    padding = tl.load(slots_ptr + rows, mask=rows < num_rows, other=0) < 0
    for first in range(tl.program_id(0) * 64, width, tl.minimum(tl.num_programs(0), PADDING_PROGRAMS) * 64):
        columns = first + tl.arange(0, 64)
        mask = padding[:, None] & (columns < width)[None, :]
        cleared = out_ptr + rows[:, None] * width + columns[None, :]
        tl.store(cleared, tl.zeros([RING, 64], out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def finish_head(
    mixed_ptr, z_ptr, norm, out_ptr, start, count, head, z_stride, eps, HV: tl.constexpr, DV: tl.constexpr,
    RING: tl.constexpr,
):  # fmt: skip
    """Norm and gate all values of one head, all rows at once; other programs wrote parts of them, hence past L1."""
    values = tl.arange(0, DV)
    inside = (tl.arange(0, RING) < count)[:, None]
    rows = start + tl.arange(0, RING)
    offsets = rows[:, None] * (HV * DV) + (head * DV + values)[None, :]
    mixed = tl.load(mixed_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    gate = tl.load(z_ptr + rows[:, None] * z_stride + (head * DV + values)[None, :], mask=inside, other=0.0)
    out = norm_and_gate(mixed, gate.to(tl.float32), norm, eps, DV)
    tl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


def gdn_window(inputs: GdnInputs, weights: GdnWeights, state: GdnState, tickets: Tensor, out: Tensor) -> Tensor:
    """A verify step; see `Ops.gdn`. out: [R, HV * DV], zero for padding rows.

    tickets: int32, zero, at least one for each slot and head of values or keys; launches of one stream may share them.
    """
    check_gdn(inputs, weights, state)
    num_rows, num_slots, ring = inputs.qkv.shape[0], state.ring_k.shape[0], state.ring_k.shape[1]
    hk, hv, dk, dv = weights.num_key_heads, weights.num_value_heads, weights.key_head_dim, weights.value_head_dim
    if num_rows > ring:
        raise ValueError(f"a verify step has at most {ring} rows, not {num_rows}")
    if not 2 <= weights.conv.shape[1] <= MAX_TAPS:
        raise ValueError(f"the convolution has {weights.conv.shape[1]} taps; the kernel takes 2 to {MAX_TAPS}")
    if tickets.numel() < num_slots * (hv + hk) or tickets.dtype != torch.int32:
        raise ValueError(f"tickets must be {num_slots * (hv + hk)} int32 zeros or more")
    mixed = torch.empty(num_rows, hv, dv, dtype=torch.float32, device=inputs.qkv.device)
    pdl = dependent_launch(inputs.qkv.device)
    block_v, num_warps = window_shape(hv, dv, inputs.qkv.device)
    gdn_window_kernel[(hv * (dv // block_v), num_slots + 1)](
        *(inputs.qkv, inputs.a, inputs.b, inputs.z, weights.conv, weights.a_log, weights.dt_bias, weights.norm),
        *(state.recurrent, state.conv, state.ring_k, state.ring_u, state.ring_decay),
        *(inputs.window_starts, inputs.window_rows, inputs.pending_rows, inputs.slots, mixed, tickets, out, num_rows),
        *(inputs.qkv.stride(0), inputs.a.stride(0), inputs.b.stride(0), inputs.z.stride(0), weights.eps),
        **{
            "HK": hk,
            "HV": hv,
            "DK": dk,
            "DV": dv,
            "RING": ring,
            "TAPS": weights.conv.shape[1],
            "KI": min(KEY_INNER, dk),
        },
        **{
            "GATE_PARTS": inputs.a.shape[1],
            "BLOCK_V": block_v,
            "EPS": L2_EPS,
            "ASM": inputs.qkv.is_cuda,
            "PDL": pdl,
            "launch_pdl": pdl,
        },
        num_warps=num_warps,
        maxnreg=window_registers(num_rows, inputs.slot_rows_bound, num_warps),
    )
    return out

"""Gated DeltaNet for a verify step in one launch: one read and one write of the recurrent state.

Knows record rings, the lazy fold and what programs owe each other. What happens to the rows is in `gdn_rows.py`. Does
not know prompts (`gdn_prefill.py`) nor projections. Specification: `reference_gdn.py`.

A program owns part of one value head's state, in registers. What does not depend on the rows comes before the wait for
the kernel that makes them: reading the state, folding the pending records into it, storing it, conv columns, weights.
Then come the rows; each program makes the keys and queries of its head for itself, which costs less than a launch.

Records and columns that several programs read are overwritten by one of them, the keeper, which is the last of those
that share a key head and waits until all have read. The others began before it, so it never waits for one that cannot
start. The program of a head that ends last norms and gates the head's values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.compat import block_barrier, gdc_launch_dependents, gdc_wait, gl, gluon, view_shared
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton.cards import dependent_launch
from localspec.kernels.triton.gdn import L2_EPS, check_gdn, norm_and_gate, window_shape
from localspec.kernels.triton.gdn_rows import (
    allocate_rows,
    fold_state,
    load_channels,
    load_state,
    plain_layout,
    prepare_rows,
    row_layout,
    run_rows,
    stage_channels,
    store_state,
    tile_layout,
)

KEY_INNER = 32
"""Of a key, what eight lanes share."""
MAX_TAPS = 4
PADDING_PROGRAMS = gl.constexpr(8)


@gluon.jit
def store_columns(conv, channels, columns, COLUMNS: gl.constexpr):
    """Put what `load_channels` found of the conv columns to the front."""
    for column in gl.static_range(len(columns)):
        gl.store(conv + channels * COLUMNS + column, columns[column])


@gluon.jit
def keep_columns(
    conv, qkv_ptr, first_channel, count, qkv_stride,
    WIDTH: gl.constexpr, RING: gl.constexpr, COLUMNS: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Put the window's rows of WIDTH channels behind the columns before them. qkv_ptr: the first row, which the
    first-level cache mostly has."""
    # Lanes along the rows, which are neighbours in the columns; four channels a thread, which are neighbours in a row.
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [32 // RING, RING], [NW, 1], [0, 1])
    channels = first_channel + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))[:, None]
    rows = gl.arange(0, RING, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (rows < count) & (channels >= 0)
    row = gl.load(qkv_ptr + rows * qkv_stride + channels, mask=inside, other=0.0)
    gl.store(conv + channels * COLUMNS + (COLUMNS - RING) + rows, row.to(conv.dtype.element_ty), mask=inside)


@gluon.jit
def wait_for_readers(ticket_ptr, readers):
    """Until all programs that share a key head have read; leaves the ticket at zero."""
    seen = gl.atomic_cas(ticket_ptr, readers, 0, sem="acq_rel", scope="gpu")
    while seen != readers:
        seen = gl.atomic_cas(ticket_ptr, readers, 0, sem="acq_rel", scope="gpu")
    block_barrier()


@gluon.jit
def keep_decays(decay_ptr, decays, count, HV: gl.constexpr, RING: gl.constexpr, NW: gl.constexpr):
    """Record a head's decays. decay_ptr: the head's of the slot's first row; decays: of `allocate_rows`."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    rows = gl.arange(0, RING, layout=lanes)
    values = view_shared(decays, gl.float32, [RING], plain_layout(1)).load(lanes)
    gl.store(decay_ptr + rows * HV, values, mask=rows < count)


@gluon.jit
def finish_head(
    mixed_ptr, z_ptr, norm, out_ptr, count, head, z_stride, eps, HV: gl.constexpr, DV: gl.constexpr,
    RING: gl.constexpr, NW: gl.constexpr,
):  # fmt: skip
    """Norm and gate all values of one head, all rows at once; other programs wrote parts of them, hence past L1.

    Pointers lead to the window's first row.
    """
    layout: gl.constexpr = row_layout(DV, NW)
    values = head * DV + gl.arange(0, DV, layout=gl.SliceLayout(0, layout))[None, :]
    rows = gl.arange(0, RING, layout=gl.SliceLayout(1, layout))[:, None]
    inside = (rows < count) & (values >= 0)
    offsets = rows * (HV * DV) + values
    mixed = gl.load(mixed_ptr + offsets, mask=inside, other=0.0, cache_modifier=".cg")
    gate = gl.load(z_ptr + rows * z_stride + values, mask=inside, other=0.0)
    out = norm_and_gate(mixed, gate.to(gl.float32), norm, eps, DV)
    gl.store(out_ptr + offsets, out.to(out_ptr.dtype.element_ty), mask=inside)


@gluon.jit
def clear_padding(out_ptr, slots_ptr, num_rows, width, RING: gl.constexpr, PDL: gl.constexpr, NW: gl.constexpr):
    """Zero the rows of no slot; every program takes blocks of 64 columns in turn.

    These programs alone wait in a launch without rows; those of idle slots give their places away at once.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    layout: gl.constexpr = row_layout(64, NW)
    rows = gl.arange(0, RING, layout=gl.SliceLayout(1, layout))
    padding = (gl.load(slots_ptr + rows, mask=rows < num_rows, other=0) < 0)[:, None]
    for first in range(gl.program_id(0) * 64, width, gl.minimum(gl.num_programs(0), PADDING_PROGRAMS) * 64):
        columns = first + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :]
        cleared = out_ptr + rows[:, None] * width + columns
        zeros = gl.zeros([RING, 64], out_ptr.dtype.element_ty, layout=layout)
        gl.store(cleared, zeros, mask=padding & (columns < width))


@gluon.jit
def run_slot(
    qkv_ptr, a_ptr, b_ptr, z_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, recurrent, conv, ring_k, updates,
    ring_decay, tickets, mixed_ptr, out_ptr, count, pending, head, part, qkv_stride, a_stride, b_stride, z_stride, eps,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, RING: gl.constexpr, TAPS: gl.constexpr,
    GATE_PARTS: gl.constexpr, KI: gl.constexpr, BLOCK_V: gl.constexpr, EPS: gl.constexpr, PDL: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """One program's part of one slot. Pointers of rows lead to the window's first, those of the state to the slot's."""
    PARTS: gl.constexpr = DV // BLOCK_V
    GROUP: gl.constexpr = HV // HK
    COLUMNS: gl.constexpr = TAPS - 1 + RING
    tile: gl.constexpr = tile_layout(BLOCK_V, KI, NW)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [NW], [0])
    key_head = head // GROUP
    keeper = (head % GROUP == GROUP - 1) & (part == PARTS - 1)
    values = part * BLOCK_V + gl.arange(0, BLOCK_V, layout=gl.SliceLayout(1, tile))
    inner = gl.arange(0, KI, layout=gl.SliceLayout(0, tile))
    own = recurrent + (head * (DV * DK) + values[:, None] * DK + inner[None, :])
    state = load_state(own, DK, KI)
    both = gl.arange(0, 2 * DK, layout=flat)
    qk_channels = both // DK * (HK * DK) + key_head * DK + both % DK
    v_first = 2 * HK * DK + head * DV + part * BLOCK_V
    v_channels = v_first + gl.arange(0, BLOCK_V, layout=flat)
    qk_columns, qk_taps = load_channels(conv, conv_weight_ptr, qk_channels, pending, TAPS, COLUMNS)
    v_columns, v_taps = load_channels(conv, conv_weight_ptr, v_channels, pending, TAPS, COLUMNS)
    rate = gl.exp(gl.load(a_log_ptr + head).to(gl.float32))
    bias = gl.load(dt_bias_ptr + head).to(gl.float32)
    norm = gl.load(norm_ptr + gl.arange(0, DV, layout=gl.SliceLayout(0, row_layout(DV, NW)))).to(gl.float32)
    prepared = allocate_rows(RING, DK, BLOCK_V)
    if pending > 0:
        state = fold_state(
            state, prepared, ring_k + key_head * DK, updates + (head * DV + part * BLOCK_V), ring_decay + head, pending,
            HK * DK, HV * DV, HV, DK, BLOCK_V, KI, RING, NW,
        )  # fmt: skip
        store_state(own, state, KI)
    staged_qk, staged_v = stage_channels(qk_columns, qk_taps), stage_channels(v_columns, v_taps)
    # Every thread has read what this or another program overwrites.
    block_barrier()
    gl.atomic_add(tickets + HV + key_head, 1, sem="release", scope="gpu")
    store_columns(conv, v_channels, v_columns, COLUMNS)
    if keeper:
        wait_for_readers(tickets + HV + key_head, GROUP * PARTS)
        store_columns(conv, qk_channels, qk_columns, COLUMNS)
    # Lets the next kernel start, not before the readers' tickets are at zero: another layer counts in the same words.
    prepare_rows(
        prepared, qkv_ptr, a_ptr, b_ptr, ring_k, staged_qk, staged_v, count, head, key_head, part, keeper, rate, bias,
        qkv_stride, a_stride, b_stride, HK, HV, DK, DV, BLOCK_V, RING, TAPS, GATE_PARTS, EPS, PDL, NW,
    )  # fmt: skip
    keep_columns(conv, qkv_ptr, v_first, count, qkv_stride, BLOCK_V, RING, COLUMNS, NW)
    if keeper:
        keep_columns(conv, qkv_ptr, key_head * DK, count, qkv_stride, DK, RING, COLUMNS, NW)
        keep_columns(conv, qkv_ptr, (HK + key_head) * DK, count, qkv_stride, DK, RING, COLUMNS, NW)
    run_rows(state, prepared, updates + head * DV, mixed_ptr + head * DV, count, values, HV, DK, DV, BLOCK_V, KI, NW)
    block_barrier()
    arrived = gl.atomic_add(tickets + head, 1, sem="acq_rel", scope="gpu")
    if arrived == PARTS - 1:
        gl.store(tickets + head, 0)
        # All that read the head's records have done so.
        keep_decays(ring_decay + head, prepared[2], count, HV, RING, NW)
        finish_head(mixed_ptr, z_ptr, norm, out_ptr, count, head, z_stride, eps, HV, DV, RING, NW)


@gluon.jit(do_not_specialize=["num_rows"])
def gdn_window_kernel(
    qkv_ptr, a_ptr, b_ptr, z_ptr, conv_weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr, recurrent_ptr, conv_ptr,
    ring_k_ptr, ring_u_ptr, ring_decay_ptr, starts_ptr, counts_ptr, pending_ptr, slots_ptr, mixed_ptr, tickets_ptr,
    out_ptr, num_rows, qkv_stride, a_stride, b_stride, z_stride, eps,
    HK: gl.constexpr, HV: gl.constexpr, DK: gl.constexpr, DV: gl.constexpr, RING: gl.constexpr, TAPS: gl.constexpr,
    GATE_PARTS: gl.constexpr, KI: gl.constexpr, BLOCK_V: gl.constexpr, EPS: gl.constexpr, PDL: gl.constexpr,
    NW: gl.constexpr,
):  # fmt: skip
    """Grid: (HV * DV / BLOCK_V, S + 1). Fold, store the state, run the rows from it, norm and gate them.

    mixed_ptr [R, HV, DV] float32 is scratch; tickets_ptr [S, HV + HK] int32 is zero before and after; out_ptr
    [R, HV * DV]. The last of the second axis clears padding rows. What is read and written before the wait belongs to
    this layer alone, so no kernel that may still run touches it.
    """
    PARTS: gl.constexpr = DV // BLOCK_V
    if gl.program_id(1) == gl.num_programs(1) - 1:
        if gl.program_id(0) < PADDING_PROGRAMS:
            clear_padding(out_ptr, slots_ptr, num_rows, HV * DV, RING, PDL, NW)
    else:
        slot = gl.program_id(1).to(gl.int64)
        count = gl.load(counts_ptr + slot).to(gl.int32)
        start = gl.load(starts_ptr + slot)
        pending = gl.load(pending_ptr + slot).to(gl.int32)
        if count > 0:
            run_slot(
                qkv_ptr + start * qkv_stride, a_ptr + start * a_stride, b_ptr + start * b_stride,
                z_ptr + start * z_stride, conv_weight_ptr, a_log_ptr, dt_bias_ptr, norm_ptr,
                recurrent_ptr + slot * (HV * DV * DK), conv_ptr + slot * ((2 * HK * DK + HV * DV) * (TAPS - 1 + RING)),
                ring_k_ptr + slot * (RING * HK * DK), ring_u_ptr + slot * (RING * HV * DV),
                ring_decay_ptr + slot * (RING * HV), tickets_ptr + slot * (HV + HK), mixed_ptr + start * (HV * DV),
                out_ptr + start * (HV * DV), count, pending, gl.program_id(0) // PARTS, gl.program_id(0) % PARTS,
                qkv_stride, a_stride, b_stride, z_stride, eps,
                HK, HV, DK, DV, RING, TAPS, GATE_PARTS, KI, BLOCK_V, EPS, PDL, NW,
            )  # fmt: skip


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
    block_v, num_warps = window_shape(hv, dv, inputs.qkv.device, num_rows > inputs.slot_rows_bound)
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
            "PDL": pdl,
            "NW": num_warps,
            "launch_pdl": pdl,
        },
        num_warps=num_warps,
        enable_fp_fusion=False,
    )
    return out

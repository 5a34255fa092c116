"""The lazy fold of Gated DeltaNet states by itself: before a state is saved, and before a prefill chunk.

Knows states and record rings. Uses the same update as the verify step (`gdn.py`), so the bits are the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import GdnState
from localspec.kernels.triton.gdn import KEY_INNER, fold_rows, state_warps


@triton.jit
def gdn_fold_kernel(
    recurrent_ptr, ring_k_ptr, ring_u_ptr, ring_decay_ptr, pending_ptr, HK: tl.constexpr, HV: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, RING: tl.constexpr, KI: tl.constexpr,
):  # fmt: skip
    """Grid: (HV, S). The fold alone, for states that are about to be saved."""
    head = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    if pending == 0:
        return
    KO: tl.constexpr = DK // KI
    values = tl.arange(0, DV)
    keys_in_head = tl.arange(0, KO)[:, None] * KI + tl.arange(0, KI)[None, :]
    tile = recurrent_ptr + (slot * HV + head) * (DV * DK) + values[:, None, None] * DK + keys_in_head[None, :, :]
    state = fold_rows(
        tl.load(tile),
        ring_k_ptr + slot * (RING * HK * DK),
        ring_u_ptr + slot * (RING * HV * DV),
        ring_decay_ptr + slot * (RING * HV) + head,
        pending,
        head // (HV // HK) * DK + keys_in_head,
        head * DV + values,
        HK * DK,
        HV * DV,
        HV,
    )
    tl.store(tile, state)


@triton.jit
def gdn_shift_kernel(
    conv_ptr,
    pending_ptr,
    C,
    TAPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid: (blocks of channels, S). Drop the pending columns, for states that are about to be saved."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.program_id(1).to(tl.int64)
    pending = tl.load(pending_ptr + slot).to(tl.int32)
    if pending == 0:
        return
    keep = tl.arange(0, triton.next_power_of_2(TAPS))
    mask = (keep < TAPS - 1)[:, None] & (channels < C)[None, :]
    target = conv_ptr + slot * C * COLUMNS + channels[None, :] * COLUMNS
    history = tl.load(target + (pending + keep)[:, None], mask=mask, other=0.0)
    tl.debug_barrier()
    tl.store(target + keep[:, None], history, mask=mask)


def gdn_fold(state: GdnState, pending_rows: Tensor) -> None:
    """See `Ops.gdn_fold`."""
    num_slots, ring, hk, dk = state.ring_k.shape
    hv, dv = state.ring_u.shape[2:]
    channels, columns = state.conv.shape[1:]
    gdn_fold_kernel[(hv, num_slots)](
        *(state.recurrent, state.ring_k, state.ring_u, state.ring_decay, pending_rows),
        **{"HK": hk, "HV": hv, "DK": dk, "DV": dv, "RING": ring, "KI": KEY_INNER},
        num_warps=state_warps(dk, dv),
    )
    gdn_shift_kernel[(triton.cdiv(channels, 128), num_slots)](
        state.conv, pending_rows, channels, TAPS=columns - ring + 1, COLUMNS=columns, BLOCK=128, num_warps=4
    )

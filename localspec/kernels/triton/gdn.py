"""What the kernels of Gated DeltaNet share: convolution, the recurrence's one update, the fold, norm and gate, checks.

Knows the math and the shapes; the launches are in `gdn_window.py` (verify steps), `gdn_fold.py` and `gdn_prefill.py`.
Specification: `reference_gdn.py`. Fold and window update the state through the same function with an explicit FMA, so a
folded state has the bits of the running one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights
from localspec.kernels.triton.cards import multiprocessors

L2_EPS = 1e-6
KEY_INNER = 16


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

    keys and update broadcast to the state. The FMA is explicit: no context may contract it in another way.
    """
    return tl.fma(tl.broadcast_to(update, state.shape), tl.broadcast_to(keys, state.shape), state * decay)


@triton.jit
def fold_rows(
    state, keys_ptr, updates_ptr, decay_ptr, pending, key_offsets, value_offsets, key_stride, value_stride,
    decay_stride,
):  # fmt: skip
    """Apply the first `pending` (at least one) records of one slot and value head, loading one record ahead.

    state: [V, KO, KI]; key_offsets: [KO, KI]; value_offsets: [V].
    """
    keys = tl.load(keys_ptr + key_offsets)
    update = tl.load(updates_ptr + value_offsets)
    decay = tl.load(decay_ptr)
    for row in range(pending):
        following = tl.minimum(row + 1, pending - 1)
        next_keys = tl.load(keys_ptr + following * key_stride + key_offsets)
        next_update = tl.load(updates_ptr + following * value_stride + value_offsets)
        next_decay = tl.load(decay_ptr + following * decay_stride)
        state = update_state(state, decay, keys[None, :, :], update[:, None, None])
        keys, update, decay = next_keys, next_update, next_decay
    return state


@triton.jit
def norm_and_gate(mixed, gate, weight, eps, DV: tl.constexpr):
    """rms(mixed) * w * silu(gate). mixed, gate: [T, DV] float32; weight: [DV] float32, plain here."""
    scale = tl.rsqrt(tl.sum(mixed * mixed, axis=1) / DV + eps)
    return mixed * scale[:, None] * weight[None, :] * (gate / (1.0 + tl.exp(-gate)))


def window_shape(value_heads: int, value_dim: int, device: torch.device, several: bool) -> tuple[int, int]:
    """Values of a head that one program of a window holds, and its warps. several: rows are of more than one slot.

    On an H200 64 values make a step shorter than 32 (27B shapes), with eight warps where each program has a
    multiprocessor for itself, with four where several slots' programs share them. On smaller cards, where a sequence's
    programs would take turns, 32.
    """
    large = value_heads * max(1, value_dim // 64) <= multiprocessors(device)
    return (min(64, value_dim), 4 if several else 8) if large else (min(32, value_dim), 4)


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

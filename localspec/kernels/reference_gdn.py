"""Gated DeltaNet between its projections, in plain PyTorch: the specification of every GDN kernel.

Runs one row after the other, in prefill too, so a row's bits do not depend on where chunks or windows begin. Folding
uses the same two operations in the same order as the running window, so folded state equals sequential state bit for
bit. Formulas: Gated DeltaNet (arXiv 2412.06464); the state is kept as [value head, value dim, key dim].
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.elementwise import sigmoid, silu, softplus
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights

L2_EPS = 1e-6


def gdn(inputs: GdnInputs, weights: GdnWeights, state: GdnState) -> Tensor:
    """All slots of a step; see `Ops.gdn`. Returns [R, HV * DV] float32, zero for rows of no slot."""
    out = inputs.z.new_zeros(inputs.z.shape, dtype=torch.float32)
    starts, counts = inputs.window_starts.tolist(), inputs.window_rows.tolist()
    pending = inputs.pending_rows.tolist()
    for slot, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if count:
            _fold_slot(state, slot, pending[slot])
            rows = slice(start, start + count)
            out[rows] = _run_slot(inputs, weights, state, slot, rows)
    return out


def gdn_fold(state: GdnState, pending_rows: Tensor) -> None:
    """Commit the pending rows of every slot; the caller then sets its counts to zero. pending_rows: [S] int64."""
    for slot, pending in enumerate(pending_rows.tolist()):
        _fold_slot(state, slot, pending)


def _fold_slot(state: GdnState, slot: int, pending: int) -> None:
    if not pending:
        return
    recurrent = state.recurrent[slot]
    for row in range(pending):
        _decay(recurrent, state.ring_decay[slot, row])
        _write(recurrent, state.ring_k[slot, row], state.ring_u[slot, row])
    ring = state.ring_k.shape[1]
    kept = state.conv.shape[2] - ring
    state.conv[slot, :, :kept] = state.conv[slot, :, pending : pending + kept].clone()


def _decay(recurrent: Tensor, decay: Tensor) -> None:
    """S <- exp(g) S. recurrent: [HV, DV, DK] float32, in place; decay: [HV]."""
    recurrent.mul_(decay.view(-1, 1, 1))


def _write(recurrent: Tensor, key: Tensor, update: Tensor) -> None:
    """S <- S + u k^T. key: [HK, DK] normalised; update: [HV, DV]."""
    recurrent.addcmul_(update.unsqueeze(2), _per_value_head(key, recurrent.shape[0]).unsqueeze(1))


def _read(recurrent: Tensor, heads: Tensor) -> Tensor:
    """S k for each value head: [HV, DV]. heads: [HK, DK]. A product and a sum: batched matvecs are 5 times slower."""
    return (recurrent * _per_value_head(heads, recurrent.shape[0]).unsqueeze(1)).sum(dim=-1)


def _per_value_head(heads: Tensor, num_value_heads: int) -> Tensor:
    """[HK, DK] -> [HV, DK]: value head j uses key head j // (HV / HK)."""
    return heads.repeat_interleave(num_value_heads // heads.shape[0], dim=0)


def _run_slot(inputs: GdnInputs, weights: GdnWeights, state: GdnState, slot: int, rows: slice) -> Tensor:
    """The rows of one slot from its folded state -> [r, HV * DV] float32."""
    num_key, num_value = weights.num_key_heads, weights.num_value_heads
    key_dim, value_dim = weights.key_head_dim, weights.value_head_dim
    mixed = _convolve(inputs.qkv[rows], weights.conv, state, slot, inputs.kind == "prefill")
    q, k, v = torch.split(mixed, [num_key * key_dim, num_key * key_dim, num_value * value_dim], dim=1)
    q = _l2_norm(q.reshape(-1, num_key, key_dim)) * key_dim**-0.5
    k = _l2_norm(k.reshape(-1, num_key, key_dim))
    v = v.reshape(-1, num_value, value_dim)
    beta = sigmoid(inputs.b[rows].float().sum(dim=1))  # [r, HV]
    decay = torch.exp(-torch.exp(weights.a_log) * softplus(inputs.a[rows].float().sum(dim=1) + weights.dt_bias))
    prefill = inputs.kind == "prefill"
    recurrent = state.recurrent[slot] if prefill else state.recurrent[slot].clone()
    mixed_out = torch.empty_like(v)
    for row in range(v.shape[0]):
        _decay(recurrent, decay[row])
        update = beta[row].unsqueeze(1) * (v[row] - _read(recurrent, k[row]))
        _write(recurrent, k[row], update)
        mixed_out[row] = _read(recurrent, q[row])
        if not prefill:
            state.ring_k[slot, row], state.ring_u[slot, row], state.ring_decay[slot, row] = k[row], update, decay[row]
    return _gated_norm(mixed_out, inputs.z[rows].float().view_as(mixed_out), weights).flatten(1)


def _convolve(qkv: Tensor, weight: Tensor, state: GdnState, slot: int, prefill: bool) -> Tensor:
    """Depthwise causal convolution and SiLU: qkv [r, C] -> [r, C] float32. Keeps the columns for what comes next."""
    kept = state.conv.shape[2] - state.ring_k.shape[1]
    columns = torch.cat((state.conv[slot, :, :kept], qkv.t().to(state.conv.dtype)), dim=1)  # [C, kept + r]
    if prefill:
        state.conv[slot, :, :kept] = columns[:, -kept:]
    else:
        state.conv[slot, :, : columns.shape[1]] = columns
    # Row-major, as sums over a row take another order in a transposed tensor.
    columns = columns.t().float().contiguous()
    num_rows = qkv.shape[0]
    total = columns[:num_rows] * weight[:, 0]
    for tap in range(1, weight.shape[1]):
        total = total + columns[tap : tap + num_rows] * weight[:, tap]
    return silu(total)


def _l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last dim (sum, not mean)."""
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + L2_EPS)


def _gated_norm(x: Tensor, gate: Tensor, weights: GdnWeights) -> Tensor:
    """rms(x) * w * silu(gate) over the value dim; w is plain here. x, gate: [r, HV, DV] float32."""
    normed = x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + weights.eps) * weights.norm
    return normed * silu(gate)

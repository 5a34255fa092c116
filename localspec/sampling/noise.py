"""Gumbel noise that is a function of (seed, position, vocabulary id) and of nothing else.

No generator and no state: the same key gives the same number in every window, batch and process, which is what lets a
draft and the target draw the same token. Knows nothing of logits or requests.
"""

from __future__ import annotations

import torch
from torch import Tensor

_SEED_STEP = 0x9E3779B97F4A7C15 - 2**64
_POSITION_STEP = 0xD1B54A32D192ED03 - 2**64
_MIX_A = 0xBF58476D1CE4E5B9 - 2**64
_MIX_B = 0x94D049BB133111EB - 2**64
_ID_STEP = 0x9E3779B1 - 2**32
_ROUND_A = 0x7FEB352D
_ROUND_B = 0x846CA68B - 2**32
# Under this, log(1 - v) stays finite in float32.
_LARGEST_FLOAT32_BELOW_ONE = 1.0 - 2.0**-24


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds [R] int64, positions [R] int64 (index in the history of the token being drawn) -> [R, 2] int32 keys."""
    mixed = _mix64(_mix64(seeds + _SEED_STEP) ^ (positions * _POSITION_STEP))
    return mixed.contiguous().view(torch.int32).view(-1, 2)


def gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    """keys [R, 2] int32, ids [R, n] or [n] integer vocabulary ids -> [R, n] float32 standard Gumbel noise.

    -log(-log(1 - v)) for a 31-bit v: the winning end (small v) is resolved down to 2^-32, so that rare tokens keep
    their probability. On the CPU the logarithms run in float64: there a float32 logarithm may differ in its last bit
    between the vector loop and its tail, and a row's noise would depend on its neighbours.
    """
    if keys.device.type == "cpu":
        # Row by row: the temporaries of one row stay in the cache.
        rows = [_gumbel64(keys[row : row + 1], ids if ids.ndim == 1 else ids[row]) for row in range(keys.shape[0])]
        return torch.cat(rows)
    bits = _hash32(keys, ids) & 0x7FFFFFFF
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_FLOAT32_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _gumbel64(keys: Tensor, ids: Tensor) -> Tensor:
    """keys [1, 2], ids [n] -> [1, n] float32, computed in float64."""
    wide = (_hash32(keys, ids) & 0x7FFFFFFF).to(torch.float64).add_(0.5).mul_(-(2.0**-31))
    return wide.log1p_().neg_().log_().neg_().to(torch.float32)


def _mix64(x: Tensor) -> Tensor:
    """Finaliser of splitmix64 on int64 (products wrap)."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_A
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_B
    return x ^ ((x >> 31) & (2**33 - 1))


def _hash32(keys: Tensor, ids: Tensor) -> Tensor:
    """One multiply-xorshift pass over id and key (the second key word enters half way). [R, n] int32."""
    x = ids.to(torch.int32) * _ID_STEP + keys[:, :1]
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_ROUND_A).add_(keys[:, 1:])
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_ROUND_B)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))

"""Formulas of the draft networks in float64 over whole sequences, without caches: what the drafters must compute."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6, plus_one: bool = False) -> Tensor:
    scale = weight.double() + (1.0 if plus_one else 0.0)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * scale


def rope(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """x [T, H, D]; rotate-half of the first 2 * len(inv_freq) dims."""
    angles = positions.double()[:, None, None] * inv_freq.double()
    half = inv_freq.shape[0]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """q [T, H, D], k and v [U, Hkv, D], visible [T, U] bool -> [T, H * D]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("thd,uhd->htu", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("htu,uhd->thd", weights, v).flatten(1)


def gated_mlp(x: Tensor, weights: Weights, prefix: str) -> Tensor:
    gate, up = x @ weights[f"{prefix}gate_proj.weight"].double().T, x @ weights[f"{prefix}up_proj.weight"].double().T
    return (gate * gate.sigmoid() * up) @ weights[f"{prefix}down_proj.weight"].double().T


def project(x: Tensor, weights: Weights, name: str, head_dim: int) -> Tensor:
    """[T, heads, head_dim]"""
    return (x @ weights[name].double().T).unflatten(-1, (-1, head_dim))

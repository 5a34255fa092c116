"""Sigmoid, SiLU and softplus whose bits do not depend on where an element lies in its tensor.

PyTorch's own kernels of these take another exponential for the last few elements of a CPU tensor, so a value changes
with the number of rows. `torch.exp` and `torch.log1p` do not, and plain arithmetic is exact to the last bit anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

SOFTPLUS_LINEAR_ABOVE = 20.0


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), float32."""
    return x / torch.neg(x).exp_().add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), float32; x itself above 20, where the difference is below float32's last bit."""
    return torch.where(x > SOFTPLUS_LINEAR_ABOVE, x, x.clamp_max(SOFTPLUS_LINEAR_ABOVE).exp_().log1p_())

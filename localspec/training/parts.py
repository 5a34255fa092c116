"""Differentiable parts of draft networks. Parameters carry the names of the checkpoint layouts that they are saved in.

Matrices can be rounded to NVFP4 in the forward pass with gradients passed straight through, so that a drafter that is
stored in four bits is trained in four bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.kernels.nvfp4_pack import BLOCK, E4M3_MAX

START_DEVIATION = 0.02
SMALLEST_SCALE = 2.0**-9
"""Of a block, the least that e4m3 holds."""


class Matrix(nn.Module):
    """`weight` [N, K] float32. `rounded`: multiply by its nearest NVFP4 values."""

    weight: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))
        self.rounded = False
        self._nearest: tuple[bool, Tensor] | None = None

    @property
    def can_round(self) -> bool:
        """Whether the form holds such a matrix."""
        return self.weight.shape[1] % BLOCK == 0

    def value(self) -> Tensor:
        """[N, K]: what is multiplied by."""
        if not (self.rounded and self.can_round):
            return self.weight
        # A chain multiplies by the same matrix at every step, which is rounded once between two `set_rounding`. The
        # weight's version does not tell when it changed: fused optimisers write past it.
        learns = torch.is_grad_enabled()
        if self._nearest is None or self._nearest[0] != learns:
            self._nearest = learns, _Rounded.apply(self.weight)  # type: ignore[no-untyped-call]
        return self._nearest[1]

    def multiply(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return functional.linear(x, self.value())

    def look_up(self, ids: Tensor) -> Tensor:
        """Rows by id: [...] int64 -> [..., K]."""
        return functional.embedding(ids, self.value())


class ScaledMatrix(Matrix):
    """A matrix whose columns are trained in units of their inputs: it multiplies by weight * scale.

    A few dims of a target's residual stream are hundreds of times larger than the others; trained as they are, they
    would drown the rest, and rounded to four bits they would lose what they carry. So these are never rounded.
    """

    scale: Tensor

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.register_buffer("scale", torch.ones(columns), persistent=False)
        self.filled = False
        """Whether the weight comes from a file and must go on to mean what it means."""

    @property
    def can_round(self) -> bool:
        """Never."""
        return False

    def value(self) -> Tensor:
        """[N, K]."""
        return self.weight * self.scale

    def fit_inputs(self, inputs: Tensor) -> None:
        """inputs: [..., K] examples; from now on the weight is in units of each column's root mean square."""
        mean_square = inputs.detach().float().flatten(0, -2).square().mean(dim=0)
        scale = mean_square.clamp(min=1e-8).rsqrt()
        if self.filled:
            with torch.no_grad():
                self.weight.mul_(self.scale / scale)
        self.scale.copy_(scale)


class _Rounded(torch.autograd.Function):
    """Nearest NVFP4 values; the gradient is that of the identity."""

    @staticmethod
    def forward(ctx: object, weight: Tensor) -> Tensor:
        del ctx
        return nearest_nvfp4(weight.detach())

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        del ctx
        return gradients[0]


def nearest_nvfp4(weight: Tensor) -> Tensor:
    """[N, K] float32 -> the values that `quantise_nvfp4(weight, "max")` stands for, without waiting for the device."""
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    whole = blocks.abs().amax() / (6.0 * E4M3_MAX)
    whole = torch.where(whole > 0, whole, torch.ones_like(whole))
    blocks = blocks / whole
    scale = blocks.abs().amax(dim=-1, keepdim=True) / 6.0
    scale = scale.clamp(SMALLEST_SCALE, E4M3_MAX).to(torch.float8_e4m3fn).float()
    ratio = (blocks / scale).abs()
    # Steps of 0.5 below 2, of 1 below 4, then of 2; ties go to the even code as in the stored form.
    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    nearest = ((ratio / step).round_() * step).clamp_(max=6.0).copysign(blocks)
    return (nearest * scale * whole).view_as(weight)


class RmsNorm(nn.Module):
    """x / rms(x) * w, or * (1 + w) with `plus_one`; in float32."""

    weight: Tensor

    def __init__(self, size: int, eps: float, plus_one: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if plus_one else torch.ones(size))
        self.eps, self.plus_one = eps, plus_one

    def norm(self, x: Tensor) -> Tensor:
        """[..., size] -> the same."""
        scale = self.weight + 1.0 if self.plus_one else self.weight
        return functional.rms_norm(x.float(), (x.shape[-1],), scale, self.eps).to(x.dtype)


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Matrix(inner, hidden), Matrix(inner, hidden)
        self.down_proj = Matrix(hidden, inner)

    def run(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        return self.down_proj.multiply(functional.silu(self.gate_proj.multiply(x)) * self.up_proj.multiply(x))


def rotate(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """x [B, T, H, D], positions [B, T] or [1, T] -> the first 2 * len(inv_freq) dims turned to their positions."""
    return turn(x, rotation(positions, inv_freq, x.dtype))


def rotation(positions: Tensor, inv_freq: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [B, T] or [1, T] -> cosines and sines [B, T, 1, len(inv_freq)]."""
    angles = positions.float()[:, :, None, None] * inv_freq
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turn(x: Tensor, by: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, T, H, D] rotated by what `rotation` gave."""
    cos, sin = by
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def in_heads(x: Tensor, head_dim: int) -> Tensor:
    """[..., H * D] -> [..., H, D]."""
    return x.reshape(*x.shape[:-1], -1, head_dim)


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Tensor:
    """q [B, T, H, D]; k, v [B, U, Hkv, D]; visible [B or 1, T, U] bool, None: causal (T = U) -> [B, T, H * D]."""
    group = q.shape[2] // k.shape[2]
    k, v = (each.repeat_interleave(group, dim=2).transpose(1, 2) for each in (k, v))
    mask = None if visible is None else visible[:, None]
    mixed = functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=visible is None)
    return mixed.transpose(1, 2).flatten(2)


def initialise(module: nn.Module, seed: int) -> None:
    """Fill the matrices from a seed; the last one of each sublayer starts small, so that a layer starts as a no-op."""
    generator = torch.Generator().manual_seed(seed)
    for name, part in module.named_modules():
        if isinstance(part, Matrix):
            small = name.endswith(("o_proj", "down_proj", "out_proj"))
            values = torch.randn(part.weight.shape, generator=generator) * START_DEVIATION
            with torch.no_grad():
                part.weight.copy_(values * 0.1 if small else values)


def set_rounding(module: nn.Module, rounded: bool) -> None:
    """Switch rounding to NVFP4 of every matrix; to be called after every change of the weights."""
    for part in module.modules():
        if isinstance(part, Matrix):
            part.rounded, part._nearest = rounded, None

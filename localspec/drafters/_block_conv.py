"""DFlash2's dynamic convolution over the rows of a block: each row mixes in the rows before it, never across blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.drafters._block_shape import BlockShape
from localspec.formats import Checkpoint
from localspec.kernels.ops import Ops
from localspec.layers.linear import check_shape, load_vector


class GroupedConv:
    """Wraps one sublayer: `before` it and `behind` it, with coefficients that the input alone decides.

    y_t = sum over taps of (base[side, tap] + delta_t[side, tap, group]) * x_{t - tap}, zero before the block.
    """

    def __init__(self, shape: BlockShape, ops: Ops, checkpoint: Checkpoint, prefix: str) -> None:
        """Raises ValueError for missing or misshapen tensors."""
        hidden, taps = shape.hidden_size, shape.conv_taps
        self._groups, self._taps, self._ops = hidden // shape.conv_group_size, taps, ops
        self._base = load_vector(ops, checkpoint, f"{prefix}base_kernel", (2, taps, hidden))
        name = f"{prefix}kernel_projection.weight"
        self._projection = ops.pack([check_shape(checkpoint.weight(name), name, (2 * taps * self._groups, hidden))])

    def before(self, x: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        """x [R, D], offsets [R] int64 places in the block -> the sublayer's input [R, D], coefficients for `behind`."""
        delta = self._ops.linear(x, self._projection, out_dtype=torch.float32)
        delta = delta.view(-1, 2, self._taps, self._groups)
        return self._convolve(x, delta[:, 0], 0, offsets), delta[:, 1]

    def behind(self, y: Tensor, delta: Tensor, offsets: Tensor) -> Tensor:
        """y [R, D], the sublayer's output -> [R, D]."""
        return self._convolve(y, delta, 1, offsets)

    def _convolve(self, x: Tensor, delta: Tensor, side: int, offsets: Tensor) -> Tensor:
        """delta: [R, taps, groups] float32. Rows of a block follow each other, so a tap looks that many rows back."""
        rows = x.to(torch.float32).view(x.shape[0], self._groups, -1)
        base = self._base[side].view(self._taps, self._groups, -1)
        total = (base[0] + delta[:, 0, :, None]) * rows
        for tap in range(1, min(self._taps, x.shape[0])):
            inside = (offsets[tap:] >= tap)[:, None, None]
            kernel = base[tap] + delta[tap:, tap, :, None]
            total[tap:] += torch.where(inside, kernel * rows[: x.shape[0] - tap], 0.0)
        return total.view(x.shape).to(x.dtype)

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

    def before(self, x: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
        """x [R, D], blocks of num_rows rows -> the sublayer's input [R, D] and coefficients for `behind`."""
        delta = self._ops.linear(x, self._projection, out_dtype=torch.float32)
        delta = delta.view(-1, num_rows, 2, self._taps, self._groups)
        return self._convolve(x, delta[:, :, 0], 0, num_rows), delta[:, :, 1]

    def behind(self, y: Tensor, delta: Tensor, num_rows: int) -> Tensor:
        """y [R, D], the sublayer's output -> [R, D]."""
        return self._convolve(y, delta, 1, num_rows)

    def _convolve(self, x: Tensor, delta: Tensor, side: int, num_rows: int) -> Tensor:
        """delta: [blocks, num_rows, taps, groups] float32."""
        blocks = x.to(torch.float32).view(delta.shape[0], num_rows, self._groups, -1)
        base = self._base[side].view(self._taps, self._groups, -1)
        total = (base[0] + delta[:, :, 0, :, None]) * blocks
        for tap in range(1, min(self._taps, num_rows)):
            kernel = base[tap] + delta[:, tap:, tap, :, None]
            total[:, tap:] += kernel * blocks[:, : num_rows - tap]
        return total.view(x.shape).to(x.dtype)

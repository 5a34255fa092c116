"""The float32 matmul of the reference back end: which of PyTorch's ways is fast here and keeps a row's bits.

On CPUs the weight is reordered once for oneDNN, measured 2 to 3 times faster at 4 rows than the plain product. Rows are
padded to a multiple of 4: for 1 to 3 rows both ways sum in another order. The choice is probed on the machine, because
another CPU may run other code.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

ROW_MULTIPLE = 4
_PROBE_SHAPES = ((192, 576), (64, 1536), (90, 56))


@dataclass(frozen=True)
class Matrix:
    """[N, K] float32 for `multiply`; `tensor` is opaque where it was reordered."""

    tensor: Tensor
    num_rows: int
    num_columns: int
    reordered: bool


def prepare(matrix: Tensor, reorder: bool) -> Matrix:
    """matrix: [N, K] float32. Without `reorder` the tensor itself is kept, not a copy."""
    n, k = matrix.shape
    if not reorder:
        return Matrix(matrix.contiguous(), n, k, reordered=False)
    return Matrix(torch.ops.mkldnn._reorder_linear_weight(matrix.contiguous(), ROW_MULTIPLE), n, k, reordered=True)


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x [R, K] float32, R a multiple of 4 -> x matrix^T [R, N] float32."""
    if matrix.reordered:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), matrix.tensor, None, "none", [], "")
        return found
    return functional.linear(x, matrix.tensor)


def reordering_pays(device: torch.device) -> bool:
    """Whether reordered weights can be used: a CPU with oneDNN on which they keep a row's bits."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    try:
        return row_bits_are_kept(reorder=True)
    except RuntimeError:
        # Built without the operation, or for a CPU that it does not support.
        return False


def row_bits_are_kept(reorder: bool) -> bool:
    """Whether a row has the same bits alone, in a window and in a chunk, at any place, on this machine now."""
    generator = torch.Generator().manual_seed(7)
    x64 = torch.randn(64, max(k for _, k in _PROBE_SHAPES), generator=generator)
    for n, k in _PROBE_SHAPES:
        matrix = prepare(torch.randn(n, k, generator=generator), reorder)
        x = x64[:, :k].contiguous()
        chunk = multiply(x, matrix)
        for rows in (4, 8, 12, 16):
            for start in (0, 13):
                if not torch.equal(multiply(x[start : start + rows].contiguous(), matrix), chunk[start : start + rows]):
                    return False
    return True

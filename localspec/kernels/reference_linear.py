"""The float32 matmul of the reference back end: which of PyTorch's ways is fast here and keeps a row's bits.

On CPUs the weight is reordered once for oneDNN, measured 2 to 3 times faster at 4 rows than the plain product. Rows are
padded to a multiple of 4: for 1 to 3 rows both ways sum in another order. The choice is probed on the machine, because
another CPU may run other code; where neither keeps a row's bits, products are made in blocks of one fixed size.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

ROW_MULTIPLE = 4
BLOCK_ROWS = 16
_PROBE_SHAPES = ((960, 576), (192, 1536), (90, 56))


class Way(Enum):
    """How a product is made."""

    REORDERED = "weights reordered for oneDNN"
    PLAIN = "plain products"
    BLOCKS = "plain products of 16 rows each"


@dataclass(frozen=True)
class Matrix:
    """[N, K] float32 for `multiply`; `tensor` is opaque where it was reordered."""

    tensor: Tensor
    num_rows: int
    num_columns: int
    way: Way


def prepare(matrix: Tensor, way: Way) -> Matrix:
    """matrix: [N, K] float32. Unless it is reordered the tensor itself is kept, not a copy."""
    n, k = matrix.shape
    tensor = matrix.contiguous()
    if way is Way.REORDERED:
        tensor = torch.ops.mkldnn._reorder_linear_weight(tensor, ROW_MULTIPLE)
    return Matrix(tensor, n, k, way)


def multiply(x: Tensor, matrix: Matrix) -> Tensor:
    """x [R, K] float32, R a multiple of 4 -> x matrix^T [R, N] float32."""
    if matrix.way is Way.REORDERED:
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), matrix.tensor, None, "none", [], "")
        return found
    if matrix.way is Way.PLAIN:
        return functional.linear(x, matrix.tensor)
    blocks = functional.pad(x, (0, 0, 0, -len(x) % BLOCK_ROWS)).split(BLOCK_ROWS)  # type: ignore[no-untyped-call]
    return torch.cat([functional.linear(block, matrix.tensor) for block in blocks])[: len(x)]


def choose_way(device: torch.device) -> Way:
    """The fastest way that keeps a row's bits here. Cards get plain products: there this is no back end for speed."""
    if device.type != "cpu":
        return Way.PLAIN
    if torch._C._has_mkldnn and row_bits_are_kept(Way.REORDERED):
        return Way.REORDERED
    return Way.PLAIN if row_bits_are_kept(Way.PLAIN) else Way.BLOCKS


def row_bits_are_kept(way: Way) -> bool:
    """Whether a row has the same bits alone, in a window and in a chunk, at any place, on this machine now."""
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(256, max(k for _, k in _PROBE_SHAPES), generator=generator)
    try:
        for n, k in _PROBE_SHAPES:
            matrix = prepare(torch.randn(n, k, generator=generator), way)
            chunk = multiply(rows[:, :k].contiguous(), matrix)
            for count in (4, 8, 12, 16, 64):
                for start in (0, 13):
                    part = slice(start, start + count)
                    if not torch.equal(multiply(rows[part, :k].contiguous(), matrix), chunk[part]):
                        return False
    except RuntimeError:
        # Built without the operation, or for a CPU that it does not support.
        return False
    return True

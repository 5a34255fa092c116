"""Where an embedding lies: it is only gathered from, one row a token, so a card keeps it in pinned host memory.

A card reads such rows over the bus by their host address. Where the driver gives no pinned memory the table goes onto
the card. Nothing of a mapped checkpoint file stays alive behind a table for a card.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.formats._pinned import pinned_memory
from localspec.formats.compact import rows_of
from localspec.kernels.ops import Ops
from localspec.kernels.weights import DenseWeight, LogicalWeight

Fill = Callable[[Tensor], None]
SLAB_VALUES = 1 << 24
SLAB_ROW_MULTIPLE = 128


@dataclass(frozen=True)
class StoredTable(DenseWeight):
    """A table whose values lie elsewhere in the activation dtype: `tensor` has none, `fill` reads them into memory."""

    fill: Fill


def place_table(ops: Ops, weight: LogicalWeight) -> Tensor:
    """[V, D] in the activation dtype, where `ops.embed` may gather from it."""
    if ops.device.type == "cpu" and not isinstance(weight, StoredTable):
        if isinstance(weight, DenseWeight) and weight.tensor.dtype == ops.activation_dtype:
            return weight.tensor
        return weight.dequantise().to(ops.activation_dtype)
    rows, columns = weight.shape
    size_bytes = rows * columns * ops.activation_dtype.itemsize
    memory = None if ops.device.type == "cpu" else pinned_memory(size_bytes)
    if memory is None:
        table = torch.empty(rows, columns, dtype=ops.activation_dtype, device=ops.device)
    else:
        table = memory.view(ops.activation_dtype).view(rows, columns)
    if isinstance(weight, StoredTable):
        weight.fill(table)
        return table
    step = max(SLAB_ROW_MULTIPLE, SLAB_VALUES // columns // SLAB_ROW_MULTIPLE * SLAB_ROW_MULTIPLE)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        table[part].copy_(rows_of(weight, part).dequantise())
    return table

"""Where an embedding lies: it is only gathered from, one row a token, so a card keeps it in pinned host memory.

A card reads such rows over the bus by their host address. Where the driver gives no pinned memory the table goes onto
the card. Nothing of a mapped checkpoint file stays alive behind a table for a card.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

from localspec.formats.compact import rows_of
from localspec.kernels.ops import Ops
from localspec.kernels.weights import LogicalWeight
from localspec.storage.buffers import aligned_memory

log = logging.getLogger(__name__)
REGISTER_PORTABLE_AND_MAPPED = 1 | 2
SLAB_VALUES = 1 << 24
SLAB_ROW_MULTIPLE = 128


def place_table(ops: Ops, weight: LogicalWeight) -> Tensor:
    """[V, D] in the activation dtype, where `ops.embed` may gather from it."""
    if ops.device.type == "cpu":
        return weight.dequantise().to(ops.activation_dtype)
    rows, columns = weight.shape
    memory = pinned_memory(rows * columns * ops.activation_dtype.itemsize)
    if memory is None:
        table = torch.empty(rows, columns, dtype=ops.activation_dtype, device=ops.device)
    else:
        table = memory.view(ops.activation_dtype).view(rows, columns)
    step = max(SLAB_ROW_MULTIPLE, SLAB_VALUES // columns // SLAB_ROW_MULTIPLE * SLAB_ROW_MULTIPLE)
    for begin in range(0, rows, step):
        part = slice(begin, min(begin + step, rows))
        table[part].copy_(rows_of(weight, part).dequantise())
    return table


def pinned_memory(num_bytes: int) -> Tensor | None:
    """Page-aligned, page-locked host memory [num_bytes] uint8, or None where the driver refuses so much.

    PyTorch rounds its own pinned memory up to a power of two, which would waste gigabytes here.
    """
    memory = aligned_memory(num_bytes)
    address = int(memory.__array_interface__["data"][0])
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(cudart.cudaHostRegister(address, num_bytes, REGISTER_PORTABLE_AND_MAPPED)) == 0:
        # The array dies before its mapping, so the pages are given back to the driver first.
        weakref.finalize(memory, cudart.cudaHostUnregister, address).atexit = False
        return torch.from_numpy(memory)
    _forget_error()
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        # WSL refuses beyond a few GiB.
        log.warning("no pinned memory for the embedding, which goes onto the card: %s", error)
        return None


def _forget_error() -> None:
    """A refused registration is reported again by the next launch unless somebody takes it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        log.info("the driver registers no host memory: %s", error)

"""Host memory that a card reads directly: page-locked, of exactly the size that was asked for."""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor

from localspec.storage.buffers import aligned_memory

log = logging.getLogger(__name__)
REGISTER_PORTABLE_AND_MAPPED = 1 | 2


def pinned_memory(num_bytes: int) -> Tensor | None:
    """Page-aligned, page-locked host memory [num_bytes] uint8, or None where the driver refuses so much.

    PyTorch rounds its own pinned memory up to a power of two, which would waste gigabytes of a large table.
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
        log.warning("the driver gives no %d bytes of pinned memory: %s", num_bytes, error)
        return None


def _forget_error() -> None:
    """A refused registration is reported again by the next launch unless somebody takes it."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        log.info("the driver registers no host memory: %s", error)

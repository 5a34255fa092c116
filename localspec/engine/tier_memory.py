"""Host memory for cached blocks: grown in pieces, each registered with the card's driver where it allows that.

Knows sizes and the driver; nothing of what the memory holds. Pieces are mapped by us and registered, because the
pinned allocator of PyTorch rounds every size up to a power of two. A driver that refuses (WSL does beyond a few GiB)
ends the growth of registered memory; where it refuses from the start the memory is plain, and copies go through a
small pinned buffer of the caller's.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from localspec.storage.buffers import BufferArena

log = logging.getLogger(__name__)
PIECE_BYTES = 256 << 20
"""Registered in about 50 ms; the driver has failed on far larger ones."""
TOUCHED_BYTES = 4 << 20
Register = Callable[[int, int], bool]
"""(address, bytes) -> whether the driver took it."""


class HostMemory:
    """Up to `cap_bytes` of memory, lent as uint8 tensors that go back when their last reference does."""

    def __init__(self, cap_bytes: int, register: Register | None, unregister: Callable[[int], object] | None) -> None:
        """`register` None: nothing to register with."""
        self.cap_bytes = cap_bytes
        self._register = register
        self._unregister = unregister
        self.needs_ring = False
        """The driver refused from the start: copies between the card and this memory go through a pinned buffer."""
        self._pieces: list[BufferArena] = []
        self._registered: dict[int, weakref.finalize[Any, Any]] = {}
        self._lock = threading.Lock()

    @property
    def pinned_bytes(self) -> int:
        """Memory that the card copies to and from on its own."""
        return sum(piece.cap_bytes for piece in self._pieces if piece.address in self._registered)

    @property
    def grown_bytes(self) -> int:
        return sum(piece.cap_bytes for piece in self._pieces)

    def prepare(self, num_bytes: int) -> None:
        """Grow to so much at once: registering holds the driver up, which a step would feel later."""
        with self._lock:
            while self._register is not None and self.grown_bytes < min(num_bytes, self.cap_bytes):
                if not self._grow(min(PIECE_BYTES, self.cap_bytes - self.grown_bytes)):
                    return

    def take(self, num_bytes: int, large: bool) -> Tensor | None:
        """[num_bytes] uint8, page-aligned, or None while there is no room. Large and small ones keep to their ends."""
        with self._lock:
            for piece in self._pieces:
                array = piece.lend(num_bytes, urgent=not large)
                if array is not None:
                    return torch.from_numpy(array)[:num_bytes]
            if not self._grow(num_bytes):
                return None
            array = self._pieces[-1].lend(num_bytes, urgent=not large)
            return torch.from_numpy(array)[:num_bytes] if array is not None else None

    def close(self) -> None:
        """Unregister; nobody may use the memory with the card any more. Happens by itself with the last reference."""
        with self._lock:
            for unregister in self._registered.values():
                unregister()
            self._registered.clear()

    def _grow(self, num_bytes: int) -> bool:
        size = min(max(PIECE_BYTES, -(-num_bytes // 4096) * 4096), self.cap_bytes - self.grown_bytes)
        if size < num_bytes:
            return False
        piece = BufferArena(size // 4096 * 4096, 0)
        if piece.cap_bytes < num_bytes:
            return False
        if self._register is not None:
            # The kernel finds the pages without the driver's lock; registering them then holds up steps far less.
            for start in range(0, piece.cap_bytes, TOUCHED_BYTES):
                piece.memory[start : start + TOUCHED_BYTES : 4096] = 0
            if self._register(piece.address, piece.cap_bytes):
                unregister = self._unregister or (lambda address: None)
                self._registered[piece.address] = weakref.finalize(piece.memory, unregister, piece.address)
            elif self._registered:
                self.cap_bytes = self.grown_bytes
                log.info("the driver pins no more than %.1f GB of memory; that much is used", self.cap_bytes / 1e9)
                return False
            else:
                log.info("the driver pins no memory here; copies of conversations go through a small buffer")
                self._register, self.needs_ring = None, True
        self._pieces.append(piece)
        return True


def host_memory_for(device: torch.device, cap_bytes: int) -> HostMemory:
    """Memory to hold copies of what lies on `device`."""
    if device.type != "cuda":
        return HostMemory(cap_bytes, None, None)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def register(address: int, num_bytes: int) -> bool:
        if int(runtime.cudaHostRegister(address, num_bytes, 0)) == 0:
            return True
        # The error stays with the thread until a launch reports it; better this one than a step's.
        try:
            torch.zeros(1, device=device)
        except RuntimeError as error:
            log.debug("pinning failed: %s", error)
        return False

    return HostMemory(cap_bytes, register, runtime.cudaHostUnregister)

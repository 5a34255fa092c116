"""Reads the tensors of a packed file straight into device memory, through a ring of pinned buffers.

Pieces are read ahead in the order of the file by worker threads, past the page cache; each is checked as it arrives and
copied on the device's current stream. Host memory is the ring, whatever the file's size. Knows no weights.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import xxhash
from torch import Tensor

from localspec.formats._packed_file import PIECE_BYTES, PackedHeader
from localspec.formats._pinned import pinned_memory
from localspec.formats.checkpoint import TORCH_DTYPES
from localspec.storage.aio import AsyncReader, Priority, Ticket
from localspec.storage.buffers import ALIGNMENT_BYTES, aligned_memory
from localspec.storage.errors import DamagedFile
from localspec.storage.open_file import OpenFile

RING_BUFFERS = 32
READ_THREADS = 4


@dataclass(frozen=True)
class _Piece:
    """Where a piece lies: the number of its tensor, its place in that and in the file, its checksum."""

    tensor: int
    begin_bytes: int
    offset_bytes: int
    length_bytes: int
    checksum: int


@dataclass
class _Buffer:
    """One place of the ring. `copied`: the event after the last copy out of it."""

    memory: Tensor
    copied: Any = None


class PackedRing:
    """Use as a context manager; tensors are best asked for in the order of the file, others cost a new start."""

    def __init__(self, path: Path, header: PackedHeader, device: torch.device, buffers: int = RING_BUFFERS) -> None:
        """Raises OSError where the file cannot be opened."""
        self._path, self._header, self._device = path, header, device
        self._file = OpenFile(path)
        self._pieces = [
            _Piece(
                number,
                index * PIECE_BYTES,
                tensor.offset_bytes + index * PIECE_BYTES,
                min(PIECE_BYTES, tensor.length_bytes - index * PIECE_BYTES),
                checksum,
            )
            for number, tensor in enumerate(header.tensors)
            for index, checksum in enumerate(tensor.pieces)
        ]
        self._first: dict[int, int] = {}
        for index, piece in enumerate(self._pieces):
            self._first.setdefault(piece.tensor, index)
        self._free = deque(_Buffer(memory) for memory in _ring_memory(device, buffers))
        self._ahead: deque[tuple[Ticket, _Buffer]] = deque()
        self._next_piece = self._next_read = 0
        self._reader = AsyncReader(threads=READ_THREADS, buffer_cap_bytes=4 * PIECE_BYTES)

    def tensor(self, number: int) -> Tensor:
        """A tensor of the file, on the device. Raises DamagedFile for bytes that are not what was written."""
        stored = self._header.tensors[number]
        target = torch.empty(stored.shape, dtype=TORCH_DTYPES[stored.dtype], device=self._device)
        self.read_into(number, target)
        return target

    def read_into(self, number: int, target: Tensor) -> None:
        """The same into a contiguous tensor of the right size, anywhere. Raises as `tensor`."""
        stored = self._header.tensors[number]
        if target.nbytes != stored.length_bytes or not target.is_contiguous():
            raise ValueError(f"a tensor of {stored.length_bytes} bytes does not go into {tuple(target.shape)}")
        if not target.nbytes:
            return
        flat = target.view(-1).view(torch.uint8)
        first = self._first[number]
        if first != self._next_piece:
            self._seek(first)
        for _ in range(len(stored.pieces)):
            self._take(flat)

    def close(self) -> None:
        """End the threads; copies under way are waited for."""
        self._seek(len(self._pieces))
        self._reader.close()
        self._file.close()

    def __enter__(self) -> PackedRing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, flat: Tensor) -> None:
        self._read_ahead()
        ticket, buffer = self._ahead.popleft()
        piece = self._pieces[self._next_piece]
        self._next_piece += 1
        try:
            data = ticket.result()[: piece.length_bytes]
            if xxhash.xxh3_64_intdigest(data) != piece.checksum:
                raise DamagedFile(f"{self._path}: bytes at {piece.offset_bytes} are not what was written.")
            target = flat[piece.begin_bytes : piece.begin_bytes + piece.length_bytes]
            target.copy_(buffer.memory[: piece.length_bytes], non_blocking=True)
            if target.is_cuda:
                buffer.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                buffer.copied.record()
        finally:
            self._free.append(buffer)

    def _read_ahead(self) -> None:
        """Post reads for all buffers that are free; the first one is waited for if a copy still reads it."""
        while self._free and self._next_read < len(self._pieces):
            if self._ahead and self._free[0].copied is not None and not self._free[0].copied.query():
                return
            buffer = self._free.popleft()
            if buffer.copied is not None:
                buffer.copied.synchronize()
                buffer.copied = None
            piece = self._pieces[self._next_read]
            self._next_read += 1
            # Tensors begin at whole blocks and the header follows the last one, so whole blocks can be read.
            length = -(-piece.length_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            into = buffer.memory[:length].numpy().data
            ticket = self._reader.submit(self._file, piece.offset_bytes, length, priority=Priority.BULK, into=into)
            self._ahead.append((ticket, buffer))

    def _seek(self, piece: int) -> None:
        while self._ahead:
            ticket, buffer = self._ahead.popleft()
            if not ticket.cancel():
                self._reader.wait_for(ticket, None)
            self._free.append(buffer)
        for buffer in self._free:
            if buffer.copied is not None:
                buffer.copied.synchronize()
        self._next_piece = self._next_read = piece


def _ring_memory(device: torch.device, buffers: int) -> list[Tensor]:
    """Buffers of one piece each, pinned beside a card if its driver allows."""
    memory = pinned_memory(buffers * PIECE_BYTES) if device.type == "cuda" else None
    if memory is None:
        memory = torch.from_numpy(aligned_memory(buffers * PIECE_BYTES))
    return list(memory.view(buffers, PIECE_BYTES).unbind(0))

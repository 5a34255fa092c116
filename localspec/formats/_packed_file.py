"""A file of tensors in the order in which a start reads them: aligned for direct reads, each piece with a checksum.

Layout: the tensors' bytes, each beginning at a multiple of 4 KiB; a JSON header, likewise; 32 bytes at the end that
say where the header lies. Knows dtype names, shapes and bytes; nothing of weights or devices. Whatever is wrong with a
file is `DamagedFile`: the file is made again from its source.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from localspec.storage.buffers import ALIGNMENT_BYTES
from localspec.storage.errors import DamagedFile
from localspec.storage.files import AtomicFile, Buffer, as_bytes
from localspec.storage.safetensors import DTYPE_BYTES

VERSION = 1
PIECE_BYTES = 8 << 20
"""A checksum covers so much; so much is read at once."""
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 1 << 20
_MAGIC = b"lspackd\x00"
_FOOTER = struct.Struct("<8sQQQ")  # magic, offset and length of the header, its checksum


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file; `pieces` holds the checksum of every PIECE_BYTES of it."""

    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    pieces: tuple[int, ...]

    @property
    def length_bytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class PackedHeader:
    """What a file holds. `facts`: whatever its writer noted, plain JSON."""

    tensors: tuple[StoredTensor, ...]
    facts: Mapping[str, Any]


class PackedWriter:
    """Appends tensors to a file that appears whole at the end of a `with` block, or not at all."""

    def __init__(self, path: Path) -> None:
        self._file = AtomicFile(path)
        self.written_bytes = 0
        self._tensors: list[StoredTensor] = []

    def add(self, dtype: str, shape: tuple[int, ...], pieces: Iterable[Buffer]) -> int:
        """Append a tensor, given in any number of parts; returns its number.

        Raises ValueError for bytes that do not fit the shape, OSError when the disk is full.
        """
        offset, checksums, waiting = self.written_bytes, [], bytearray()
        for piece in pieces:
            rest = as_bytes(piece)
            self._file.write(rest)
            self.written_bytes += rest.nbytes
            while rest.nbytes:
                taken = min(rest.nbytes, PIECE_BYTES - len(waiting))
                if not waiting and taken == PIECE_BYTES:
                    checksums.append(xxhash.xxh3_64_intdigest(rest[:taken]))
                else:
                    waiting += rest[:taken]
                    if len(waiting) == PIECE_BYTES:
                        checksums.append(xxhash.xxh3_64_intdigest(waiting))
                        waiting = bytearray()
                rest = rest[taken:]
        if waiting:
            checksums.append(xxhash.xxh3_64_intdigest(waiting))
        tensor = StoredTensor(dtype, shape, offset, tuple(checksums))
        if self.written_bytes - offset != tensor.length_bytes:
            raise ValueError(f"a {dtype} tensor of shape {shape} was given {self.written_bytes - offset} bytes")
        self._align()
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write the header; called once, last."""
        tensors = [[t.dtype, list(t.shape), t.offset_bytes, [f"{p:016x}" for p in t.pieces]] for t in self._tensors]
        document = {"version": VERSION, "piece_bytes": PIECE_BYTES, "tensors": tensors, "facts": dict(facts)}
        text = json.dumps(document, separators=(",", ":")).encode()
        self._file.write(text)
        self._file.write(_FOOTER.pack(_MAGIC, self.written_bytes, len(text), xxhash.xxh3_64_intdigest(text)))

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, *failure: Any) -> None:
        self._file.__exit__(*failure)

    def _align(self) -> None:
        missing = -self.written_bytes % ALIGNMENT_BYTES
        self._file.write(bytes(missing))
        self.written_bytes += missing


def read_header(path: Path) -> PackedHeader:
    """Read and check the header of a file. Raises DamagedFile, or OSError where it cannot be read."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size_bytes = os.fstat(fd).st_size
        footer = os.pread(fd, _FOOTER.size, max(0, size_bytes - _FOOTER.size))
        if len(footer) != _FOOTER.size:
            raise DamagedFile(f"{path} is too short to be a file of packed weights.")
        magic, offset, length, checksum = _FOOTER.unpack(footer)
        if magic != _MAGIC or length > MAX_HEADER_BYTES or offset + length + _FOOTER.size != size_bytes:
            raise DamagedFile(f"{path} does not end as a file of packed weights does.")
        text = os.pread(fd, length, offset)
    finally:
        os.close(fd)
    if xxhash.xxh3_64_intdigest(text) != checksum:
        raise DamagedFile(f"{path}: the header is not what was written.")
    try:
        return _parsed(json.loads(text), offset)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedFile(f"{path}: the header cannot be used ({error}).") from None


def _parsed(document: Any, data_bytes: int) -> PackedHeader:
    if not isinstance(document, dict) or document["version"] != VERSION or document["piece_bytes"] != PIECE_BYTES:
        raise ValueError("it is of another version")
    facts, listed = document["facts"], document["tensors"]
    if not isinstance(facts, dict) or not isinstance(listed, list) or len(listed) > MAX_TENSORS:
        raise ValueError("it holds no list of tensors")
    return PackedHeader(tuple(_tensor(entry, data_bytes) for entry in listed), facts)


def _tensor(entry: Any, data_bytes: int) -> StoredTensor:
    dtype, shape, offset, pieces = entry
    sizes = (offset, *shape)
    if dtype not in DTYPE_BYTES or not all(type(size) is int and 0 <= size < 1 << 48 for size in sizes):
        raise ValueError(f"a tensor of {str(dtype)[:20]} and {str(shape)[:80]}")
    tensor = StoredTensor(dtype, tuple(shape), offset, tuple(int(piece, 16) for piece in pieces))
    length = tensor.length_bytes
    if offset % ALIGNMENT_BYTES or offset + length > data_bytes or len(pieces) != -(-length // PIECE_BYTES):
        raise ValueError(f"a tensor of {length} bytes at {offset} does not fit the file")
    return tensor

"""Weight files in the safetensors format: header checked as hostile, bytes handed out without a copy, streaming writer.

Knows names, dtype strings, shapes and byte ranges; does not know what a tensor means or how a framework holds it.
The format: 8 bytes little-endian header length, a JSON object, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from localspec.storage.errors import DamagedFile
from localspec.storage.files import AtomicFile, Buffer, WriteFunction, as_bytes

__all__ = ["DTYPE_BYTES", "DamagedFile", "SafetensorsFile", "TensorEntry", "TensorItem", "write_safetensors"]

DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
        "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
    }
)  # fmt: skip
"""Bytes of one element by the format's dtype string; any other string is refused."""

MAX_HEADER_BYTES = 32 << 20
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 1024
# Beyond any file: keeps the product of dimensions a small integer even when one of them is zero.
_MAX_DIMENSION = 1 << 48

TensorItem = tuple[str, str, tuple[int, ...], Buffer | Callable[[], Buffer]]
"""Name, dtype string, shape, and the bytes or a function that makes them when their turn comes."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file; filled by the header check, so every range lies inside the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset_bytes: int
    """From the start of the file, not of the data."""
    length_bytes: int


class SafetensorsFile:
    """An open weight file whose header was checked; a context manager.

    The bytes are mapped, so a file that another program truncates while it is open ends this process (SIGBUS): weight
    files are replaced by rename and never cut. `read_into` does not depend on the mapping.
    """

    def __init__(self, path: Path, fd: int, entries: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
        """Use `open`; this takes over a checked descriptor."""
        self.path = path
        self.entries = MappingProxyType(dict(entries))
        """In the order of their bytes."""
        self.metadata = MappingProxyType(dict(metadata))
        self._fd = fd
        self._map: mmap.mmap | None = None

    @classmethod
    def open(cls, path: Path | str, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsFile:
        """Open and check a file.

        Raises:
            DamagedFile: the header is too large, not JSON, nested, holds a name twice, an unknown dtype, or ranges
                that overlap, leave a gap, or do not fit the shapes and the file.
            OSError: the file cannot be opened.
        """
        path = Path(path)
        # O_NONBLOCK so that a pipe under this name cannot hold us; it means nothing for a regular file.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            entries, metadata = _read_header(path, fd, max_header_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, entries, metadata)

    def entry(self, name: str) -> TensorEntry:
        """Look up a tensor; KeyError names the file."""
        try:
            return self.entries[name]
        except KeyError:
            raise KeyError(f"{self.path.name} holds no tensor {name!r}; it has {len(self.entries)} others.") from None

    def tensor_bytes(self, name: str) -> memoryview:
        """Read-only view of a tensor's bytes in the mapped file; stays valid after `close`."""
        entry = self.entry(name)
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        return memoryview(self._map)[entry.offset_bytes : entry.offset_bytes + entry.length_bytes]

    def read_into(self, name: str, buffer: memoryview) -> None:
        """Read a tensor into a writable buffer of exactly its size, without touching the mapping.

        Raises:
            ValueError: the buffer has another size.
            DamagedFile: the file ended early, so it was cut after it was opened.
        """
        entry = self.entry(name)
        target = buffer.cast("B") if buffer.nbytes else memoryview(bytearray())
        if target.nbytes != entry.length_bytes:
            raise ValueError(f"The buffer for {name!r} must have {entry.length_bytes} bytes, not {target.nbytes}.")
        position = entry.offset_bytes
        while target.nbytes:
            read_bytes = os.preadv(self._fd, [target], position)
            if read_bytes == 0:
                raise DamagedFile(f"{self.path} ends inside tensor {name!r}; fetch the file again.")
            target = target[read_bytes:]
            position += read_bytes

    def close(self) -> None:
        """Close the descriptor; views handed out keep the mapping alive."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._map = None

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _read_header(path: Path, fd: int, max_header_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(f"{path} is not a regular file.")
    prefix = os.pread(fd, 8, 0)
    if len(prefix) < 8:
        raise DamagedFile(f"{path} is shorter than the 8 bytes that open a safetensors file.")
    header_bytes = int.from_bytes(prefix, "little")
    if header_bytes > max_header_bytes:
        raise DamagedFile(f"{path} declares a header of {header_bytes} bytes; at most {max_header_bytes} are accepted.")
    if 8 + header_bytes > status.st_size:
        raise DamagedFile(f"{path} ends inside its header; fetch the file again.")
    text = os.pread(fd, header_bytes, 8)
    try:
        return parse_header(text, status.st_size - 8 - header_bytes, 8 + header_bytes)
    except DamagedFile as error:
        raise DamagedFile(f"{path}: {error}") from None


def parse_header(text: bytes, data_bytes: int, data_offset_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Check a JSON header against the size of the data that follows it.

    Returns entries in the order of their bytes, with offsets from the start of the file, and the metadata.

    Raises:
        DamagedFile: for anything the format does not allow.
    """
    header = _load_json(text)
    metadata = _check_metadata(header.pop("__metadata__", {}))
    entries = [_check_entry(name, fields, data_bytes, data_offset_bytes) for name, fields in header.items()]
    # An empty tensor sorts before the one that starts at the same byte.
    entries.sort(key=lambda entry: (entry.offset_bytes, entry.length_bytes))
    expected = data_offset_bytes
    for entry in entries:
        if entry.offset_bytes != expected:
            problem = "overlaps the tensor before it" if entry.offset_bytes < expected else "leaves a gap before it"
            raise DamagedFile(f"tensor {entry.name!r} {problem}; fetch the file again.")
        expected += entry.length_bytes
    if expected != data_offset_bytes + data_bytes:
        raise DamagedFile("the bytes after the last tensor belong to none; fetch the file again.")
    return {entry.name: entry for entry in entries}, metadata


def _load_json(text: bytes) -> dict[str, Any]:
    # The format wants "{" as the first byte; so do parsers that guess the encoding from it.
    if not text.startswith(b"{"):
        raise DamagedFile("the header is not a JSON object.")
    try:
        header = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object_without_duplicates,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        raise DamagedFile("the header is nested too deeply.") from None
    except UnicodeDecodeError:
        raise DamagedFile("the header is not UTF-8.") from None
    except json.JSONDecodeError as error:
        raise DamagedFile(f"the header is not JSON ({error.msg} at byte {error.pos}).") from None
    except DamagedFile:
        raise
    except ValueError:
        raise DamagedFile("the header holds a number of too many digits.") from None
    if not isinstance(header, dict):
        raise DamagedFile("the header is not a JSON object.")
    return header


def _object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise DamagedFile(f"the header holds {twice[:80]!r} twice.")
    return found


def _refuse_number(text: str) -> Any:
    raise DamagedFile(f"the header holds the number {text[:40]}, only whole numbers are allowed.")


def _check_metadata(metadata: Any) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedFile("the metadata is not an object of strings.")
    return metadata


def _is_size(value: Any, limit: int) -> bool:
    # bool is an int to isinstance, and "true" is not a size.
    return type(value) is int and 0 <= value <= limit


def _check_entry(name: str, fields: Any, data_bytes: int, data_offset_bytes: int) -> TensorEntry:
    shown = name[:80]
    if len(name) > MAX_NAME_CHARACTERS:
        raise DamagedFile(f"tensor name {shown!r}... is longer than {MAX_NAME_CHARACTERS} characters.")
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedFile(f"tensor {shown!r} must have exactly dtype, shape and data_offsets.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise DamagedFile(f"tensor {shown!r} has dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPE_BYTES)}.")
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMENSIONS
        or not all(_is_size(n, _MAX_DIMENSION) for n in shape)
    ):
        raise DamagedFile(f"tensor {shown!r} must have a shape of at most {MAX_DIMENSIONS} sizes.")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n, data_bytes) for n in offsets):
        raise DamagedFile(f"tensor {shown!r} lies outside the file, which holds {data_bytes} bytes of data.")
    length_bytes = _length_bytes(dtype, shape)
    if offsets[1] - offsets[0] != length_bytes:
        raise DamagedFile(f"tensor {shown!r} needs {length_bytes} bytes but is given {offsets[1] - offsets[0]}.")
    return TensorEntry(name, dtype, tuple(shape), data_offset_bytes + offsets[0], length_bytes)


def _length_bytes(dtype: str, shape: Iterable[int]) -> int:
    length = DTYPE_BYTES[dtype]
    for size in shape:
        length *= size
    return length


def write_safetensors(
    path: Path | str,
    items: Iterable[TensorItem],
    metadata: Mapping[str, str] | None = None,
    *,
    write_function: WriteFunction = os.write,
) -> None:
    """Write a file tensor by tensor; it appears under its name whole and synced, or not at all.

    The header is planned from the declared shapes before the first byte is asked for, so an item whose bytes are a
    function costs no memory until its turn. Wider dtypes come first, which keeps each tensor aligned to its element.

    Raises:
        ValueError: a dtype is unknown, a name comes twice, or bytes do not fit their declared shape.
        OSError: the disk is full or refuses; nothing is left behind.
    """
    path = Path(path)
    # sorted() is stable: tensors of one width keep the order of the caller.
    planned = sorted(items, key=lambda item: -_element_bytes(item))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, dtype, shape, _ in planned:
        if name in header or name == "__metadata__":
            raise ValueError(f"Tensor {name!r} is given twice or reserved; each needs its own name.")
        length_bytes = _length_bytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + length_bytes]}
        position += length_bytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with AtomicFile(path, write_function=write_function) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, dtype, shape, source in planned:
            data = as_bytes(source() if callable(source) else source)
            if data.nbytes != _length_bytes(dtype, shape):
                raise ValueError(f"Tensor {name!r} declares {dtype} {shape} but its buffer has {data.nbytes} bytes.")
            file.write(data)


def _element_bytes(item: TensorItem) -> int:
    if item[1] not in DTYPE_BYTES:
        raise ValueError(f"Tensor {item[0]!r} has dtype {item[1]!r}; known are {', '.join(DTYPE_BYTES)}.")
    return DTYPE_BYTES[item[1]]

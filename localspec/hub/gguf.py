"""Reads GGUF files: a bounded header parser over a memory map, and exact dequantisers to float32.

Knows the container (versions 2 and 3, little-endian) and the block formats listed in `TENSOR_TYPES`. Knows nothing of
architectures, tokenizers or our own layout. A file is hostile until its header has passed: every count and length is
compared with the bytes that are left before anything is allocated for it. Torch-free.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes2d = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Scalar = int | float | bool | str
Value = Scalar | tuple[Scalar, ...]

MAX_TENSORS = 100_000
MAX_METADATA_KEYS = 10_000
MAX_NAME_BYTES = 512
MAX_KEY_BYTES = 65_535
MAX_STRING_BYTES = 16 << 20
MAX_ARRAY_ITEMS = 4 << 20
MAX_DIMENSIONS = 4
MAX_ALIGNMENT_BYTES = 1 << 20

_SCALAR_FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


class GgufError(ValueError):
    """The file is not a GGUF file that can be read; the message names the part that is wrong."""


@dataclass(frozen=True)
class TensorType:
    """One block format: how many values a block holds and how many bytes it takes."""

    name: str
    block_values: int
    block_bytes: int


@dataclass(frozen=True)
class GgufTensor:
    """Where one tensor lies. `shape` is in row-major order ([rows, columns]), unlike the file's own order."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    offset_bytes: int
    size_bytes: int


class GgufFile:
    """An open GGUF file: `metadata` and `tensors` are checked, tensor bytes are mapped and read on demand."""

    def __init__(self, path: Path) -> None:
        """Opens and checks the header. Raises GgufError with the offending part, OSError if it cannot be opened."""
        self.path = path
        with path.open("rb") as file:
            try:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise GgufError(f"{path.name} is empty; download it again") from error
        try:
            cursor = _Cursor(self._map, path.name)
            metadata, tensors = _read_header(cursor)
        except BaseException:
            self._map.close()
            raise
        self.metadata: Mapping[str, Value] = MappingProxyType(metadata)
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(tensors)

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file; tensors returned by `blocks` are copies and stay valid."""
        self._map.close()

    def blocks(self, tensor: GgufTensor) -> Bytes2d:
        """The tensor's raw blocks.  # [rows * blocks_per_row, block_bytes] u8, an owned copy"""
        raw = self._map[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        return np.frombuffer(raw, dtype=np.uint8).reshape(-1, tensor.type.block_bytes)

    def dequantise(self, tensor: GgufTensor) -> Float32:
        """The tensor's exact values.  # `tensor.shape` f32. Raises GgufError for a type without a dequantiser."""
        return dequantise(tensor.type.name, self.blocks(tensor)).reshape(tensor.shape)


class _Cursor:
    """Reads little-endian values forward and refuses to step over the end."""

    def __init__(self, buffer: mmap.mmap, file_name: str) -> None:
        self._buffer = buffer
        self.file_name = file_name
        self.position_bytes = 0
        self.size_bytes = len(buffer)

    @property
    def left_bytes(self) -> int:
        return self.size_bytes - self.position_bytes

    def fail(self, what: str) -> GgufError:
        return GgufError(f"{self.file_name}: {what}; download the file again or take another one")

    def take(self, n_bytes: int, what: str) -> bytes:
        if n_bytes > self.left_bytes:
            raise self.fail(f"{what} runs past the end of the file")
        start = self.position_bytes
        self.position_bytes += n_bytes
        return self._buffer[start : self.position_bytes]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, limit: int, least_bytes_each: int, what: str) -> int:
        """An u64 count, refused when it exceeds `limit` or when that many items cannot fit in the rest of the file."""
        n_items: int = self.number("<Q", what)
        if n_items > limit or n_items * least_bytes_each > self.left_bytes:
            raise self.fail(f"{what} says {n_items}, more than the file can hold")
        return n_items

    def text(self, limit_bytes: int, what: str) -> str:
        raw = self.take(self.count(limit_bytes, 1, what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error


def _read_header(cursor: _Cursor) -> tuple[dict[str, Value], dict[str, GgufTensor]]:
    if cursor.take(4, "the file magic") != b"GGUF":
        raise GgufError(f"{cursor.file_name} is not a GGUF file (its first four bytes are not 'GGUF')")
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        raise cursor.fail(f"GGUF version {version} is not supported, versions 2 and 3 are (little-endian)")
    # The least a tensor entry takes: name length, dimension count, one dimension, type, offset.
    n_tensors = cursor.count(MAX_TENSORS, 8 + 4 + 8 + 4 + 8, "the tensor count")
    n_keys = cursor.count(MAX_METADATA_KEYS, 8 + 4 + 1, "the metadata count")
    metadata: dict[str, Value] = {}
    for _ in range(n_keys):
        key = cursor.text(MAX_KEY_BYTES, "a metadata key")
        if key in metadata:
            raise cursor.fail(f"the metadata key {key!r} appears twice")
        metadata[key] = _read_value(cursor, key)
    entries = [_read_tensor_entry(cursor) for _ in range(n_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment is {alignment!r}, a power of two is needed")
    return metadata, _place_tensors(cursor, entries, alignment)


def _read_value(cursor: _Cursor, key: str) -> Value:
    what = f"the value of {key!r}"
    kind = cursor.number("<I", what)
    if kind != _ARRAY:
        return _read_scalar(cursor, kind, what)
    item_kind = cursor.number("<I", what)
    if item_kind == _STRING:
        n_items = cursor.count(MAX_ARRAY_ITEMS, 8, what)
        return tuple(cursor.text(MAX_STRING_BYTES, what) for _ in range(n_items))
    if item_kind not in _SCALAR_FORMATS:
        raise cursor.fail(f"{what} is an array of type {item_kind}, which is not supported")
    letter = _SCALAR_FORMATS[item_kind][1]
    n_items = cursor.count(MAX_ARRAY_ITEMS, struct.calcsize(letter), what)
    form = f"<{n_items}{letter}"
    return struct.unpack(form, cursor.take(struct.calcsize(form), what))


def _read_scalar(cursor: _Cursor, kind: int, what: str) -> Scalar:
    if kind == _STRING:
        return cursor.text(MAX_STRING_BYTES, what)
    if kind not in _SCALAR_FORMATS:
        raise cursor.fail(f"{what} has the unknown type {kind}")
    scalar: Scalar = cursor.number(_SCALAR_FORMATS[kind], what)
    return scalar


def _read_tensor_entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], TensorType, int]:
    name = cursor.text(MAX_NAME_BYTES, "a tensor name")
    n_dimensions = cursor.number("<I", f"the shape of {name!r}")
    if not 1 <= n_dimensions <= MAX_DIMENSIONS:
        raise cursor.fail(f"tensor {name!r} has {n_dimensions} dimensions, 1 to {MAX_DIMENSIONS} are possible")
    sizes = [cursor.number("<Q", f"the shape of {name!r}") for _ in range(n_dimensions)]
    type_id = cursor.number("<I", f"the type of {name!r}")
    if type_id not in TENSOR_TYPES:
        known = ", ".join(sorted(t.name for t in TENSOR_TYPES.values()))
        raise cursor.fail(f"tensor {name!r} has the unsupported type {type_id} (supported: {known})")
    offset_bytes = cursor.number("<Q", f"the offset of {name!r}")
    return name, tuple(reversed(sizes)), TENSOR_TYPES[type_id], offset_bytes


def _place_tensors(
    cursor: _Cursor, entries: list[tuple[str, tuple[int, ...], TensorType, int]], alignment_bytes: int
) -> dict[str, GgufTensor]:
    """Turns relative offsets into checked places: inside the file, aligned, without overlap."""
    data_bytes = -(-cursor.position_bytes // alignment_bytes) * alignment_bytes
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset_bytes in entries:
        if name in tensors:
            raise cursor.fail(f"tensor {name!r} appears twice")
        n_values = 1
        for size in shape:
            n_values *= size
        if n_values == 0 or shape[-1] % kind.block_values:
            raise cursor.fail(f"tensor {name!r} of shape {shape} cannot be cut into blocks of {kind.block_values}")
        size_bytes = n_values // kind.block_values * kind.block_bytes
        start_bytes = data_bytes + offset_bytes
        if offset_bytes % alignment_bytes or start_bytes + size_bytes > cursor.size_bytes:
            raise cursor.fail(f"tensor {name!r} does not lie inside the file")
        tensors[name] = GgufTensor(name, shape, kind, start_bytes, size_bytes)
    end_bytes = 0
    for tensor in sorted(tensors.values(), key=lambda t: t.offset_bytes):
        if tensor.offset_bytes < end_bytes:
            raise cursor.fail(f"tensor {tensor.name!r} overlaps another one")
        end_bytes = tensor.offset_bytes + tensor.size_bytes
    return tensors


# Each dequantiser below: [n_blocks, block_bytes] u8 -> [n_blocks, block_values] f32.


def f16(raw: Bytes2d) -> Float32:
    """Half-precision bytes as float32.  # [n, 2 m] u8 -> [n, m] f32"""
    return np.ascontiguousarray(raw).view("<f2").astype(np.float32)


def nibbles(raw: Bytes2d, group_bytes: int) -> Bytes2d:
    """In each group of bytes all low nibbles come first, then all high ones.  # [n, 2 * bytes] u8"""
    grouped = raw.reshape(raw.shape[0], -1, group_bytes)
    return np.concatenate([grouped & 15, grouped >> 4], axis=2).reshape(raw.shape[0], -1)


def bit_planes(raw: Bytes2d, n_planes: int, width: int) -> Bytes2d:
    """Bit planes of `width` bits: plane p holds bits p*width and up of each byte.  # [n, planes, bytes] u8"""
    shifts = np.arange(n_planes, dtype=np.uint8).reshape(1, -1, 1) * np.uint8(width)
    return (raw[:, None, :] >> shifts) & np.uint8((1 << width) - 1)


def fifth_bits(raw: Bytes2d) -> Bytes2d:
    """Four bytes hold the fifth bit of 32 values, lowest bit first.  # [n, 32] u8, 0 or 16"""
    return np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little") << np.uint8(4)


def _q4_0(raw: Bytes2d) -> Float32:
    return f16(raw[:, :2]) * (nibbles(raw[:, 2:], 16).astype(np.float32) - np.float32(8))


def _q4_1(raw: Bytes2d) -> Float32:
    return f16(raw[:, :2]) * nibbles(raw[:, 4:], 16).astype(np.float32) + f16(raw[:, 2:4])


def _q5_0(raw: Bytes2d) -> Float32:
    codes = nibbles(raw[:, 6:], 16) | fifth_bits(raw[:, 2:6])
    return f16(raw[:, :2]) * (codes.astype(np.float32) - np.float32(16))


def _q5_1(raw: Bytes2d) -> Float32:
    codes = nibbles(raw[:, 8:], 16) | fifth_bits(raw[:, 4:8])
    return f16(raw[:, :2]) * codes.astype(np.float32) + f16(raw[:, 2:4])


def _q8_0(raw: Bytes2d) -> Float32:
    return f16(raw[:, :2]) * np.ascontiguousarray(raw[:, 2:]).view(np.int8).astype(np.float32)


def k_scales(packed: Bytes2d) -> tuple[Bytes2d, Bytes2d]:
    """Eight 6-bit scales and eight 6-bit minima in 12 bytes.

    Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits; the top two bits of those bytes are the
    top bits of scales (minima) 4-7, whose low nibbles share bytes 8-11.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scales, minima


def _k_affine(raw: Bytes2d, codes: Bytes2d) -> Float32:
    """Q4_K and Q5_K: eight groups of 32 values, each with a scale and a minimum of its own."""
    scales, minima = k_scales(raw[:, 4:16])
    scale = (f16(raw[:, :2]) * scales.astype(np.float32))[:, :, None]
    minimum = (f16(raw[:, 2:4]) * minima.astype(np.float32))[:, :, None]
    values = scale * codes.reshape(-1, 8, 32).astype(np.float32) - minimum
    return values.reshape(-1, 256)


def _q4_k(raw: Bytes2d) -> Float32:
    return _k_affine(raw, nibbles(raw[:, 16:], 32))


def _q5_k(raw: Bytes2d) -> Float32:
    high = bit_planes(raw[:, 16:48], n_planes=8, width=1).reshape(-1, 256)
    return _k_affine(raw, nibbles(raw[:, 48:], 32) | (high << np.uint8(4)))


def _q6_k(raw: Bytes2d) -> Float32:
    low = nibbles(raw[:, :128], 64)
    high = bit_planes(raw[:, 128:192].reshape(-1, 32), n_planes=4, width=2).reshape(-1, 256)
    codes = (low | (high << np.uint8(4))).astype(np.float32) - np.float32(32)
    scales = np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)
    scale = (f16(raw[:, 208:210]) * scales)[:, :, None]
    return (scale * codes.reshape(-1, 16, 16)).reshape(-1, 256)


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _mxfp4(raw: Bytes2d) -> Float32:
    # The exponent byte is 2^(e-127); half of it is taken first so that the doubled codes of the format stay exact.
    half_scale = np.ldexp(np.float32(1), raw[:, :1].astype(np.int32) - 128).astype(np.float32)
    return half_scale * (_E2M1[nibbles(raw[:, 1:], 16)] * np.float32(2))


def _nvfp4(raw: Bytes2d) -> Float32:
    """Four groups of 16 values; byte i of a group holds values i and i + 8. Scale bytes 0 and 0x7F mean zero."""
    code = raw[:, :4].astype(np.int32)
    exponent, mantissa = (code >> 3) & 15, (code & 7).astype(np.float32)
    scale = np.where(
        exponent == 0,
        mantissa * np.float32(2.0**-9),
        np.ldexp(np.float32(1) + mantissa / np.float32(8), exponent - 7),
    ).astype(np.float32)
    scale = np.where((code == 0) | (code == 0x7F), np.float32(0), scale)
    values = _E2M1[nibbles(raw[:, 4:], 8)].reshape(-1, 4, 16)
    return (scale[:, :, None] * values).reshape(-1, 64)


def _bf16(raw: Bytes2d) -> Float32:
    return (np.ascontiguousarray(raw).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _f32(raw: Bytes2d) -> Float32:
    return np.ascontiguousarray(raw).view("<f4").astype(np.float32)


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("F32", 1, 4),
        1: TensorType("F16", 1, 2),
        2: TensorType("Q4_0", 32, 18),
        3: TensorType("Q4_1", 32, 20),
        6: TensorType("Q5_0", 32, 22),
        7: TensorType("Q5_1", 32, 24),
        8: TensorType("Q8_0", 32, 34),
        12: TensorType("Q4_K", 256, 144),
        13: TensorType("Q5_K", 256, 176),
        14: TensorType("Q6_K", 256, 210),
        30: TensorType("BF16", 1, 2),
        39: TensorType("MXFP4", 32, 17),
        40: TensorType("NVFP4", 64, 36),
    }
)

_DEQUANTISERS: Mapping[str, Callable[[Bytes2d], Float32]] = MappingProxyType(
    {
        "F32": _f32, "F16": f16, "BF16": _bf16, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1,
        "Q8_0": _q8_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    }
)  # fmt: skip


def dequantise(type_name: str, blocks: Bytes2d) -> Float32:
    """Exact values of raw blocks: [n_blocks, block_bytes] u8 -> [n_blocks, block_values] f32.

    The order of the float32 operations is the one the format's reference uses (scale times code, then the minimum),
    so results are equal bit for bit. Raises GgufError when the type has no dequantiser.
    """
    if type_name not in _DEQUANTISERS:
        raise GgufError(f"tensor type {type_name} cannot be read; supported are {', '.join(sorted(_DEQUANTISERS))}")
    # A scale that overflows gives inf, as the reference does; whoever loads the weights refuses it.
    with np.errstate(over="ignore", invalid="ignore"):
        return _DEQUANTISERS[type_name](blocks)

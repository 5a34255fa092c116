"""Splits GGUF blocks into codes, scales and minima of the `localspec-blocks` format, without loss. Torch-free.

`formats.blocks` documents the result and reads it back; here stands which GGUF type becomes which method. Codes of more
than four bits take a byte each. The two-level scales of the K types are multiplied out to float32, as their
dequantiser does first anyway, so the values stay equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.hub.gguf import Bytes2d, Float32, bit_planes, f16, fifth_bits, k_scales, nibbles

Array = npt.NDArray[Any]
Split = Callable[[Bytes2d], Array]


@dataclass(frozen=True)
class KeptFormat:
    """How a GGUF type is kept. Each part: [n_blocks, block_bytes] u8 -> [n_blocks, values of that part]."""

    method: str
    scale_dtype: str
    block_values: int
    packed: bool
    codes: Split
    scale: Split
    minimum: Split | None = None


def pack_consecutive(codes: Bytes2d) -> Bytes2d:
    """Two 4-bit codes a byte, low nibble first: [n, K] u8 -> [n, K/2] u8."""
    packed: Bytes2d = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    return packed


def _bytes(first: int, end: int) -> Split:
    return lambda raw: raw[:, first:end]


def _codes_4_bit(first: int, end: int, group_bytes: int) -> Split:
    return lambda raw: pack_consecutive(nibbles(raw[:, first:end], group_bytes))


def _codes_q5_0(raw: Bytes2d) -> Array:
    return (nibbles(raw[:, 6:], 16) | fifth_bits(raw[:, 2:6])).astype(np.int8) - np.int8(16)


def _codes_q5_1(raw: Bytes2d) -> Array:
    return nibbles(raw[:, 8:], 16) | fifth_bits(raw[:, 4:8])


def _codes_q5_k(raw: Bytes2d) -> Array:
    high = bit_planes(raw[:, 16:48], n_planes=8, width=1).reshape(-1, 256)
    return nibbles(raw[:, 48:], 32) | (high << np.uint8(4))


def _codes_q6_k(raw: Bytes2d) -> Array:
    high = bit_planes(raw[:, 128:192].reshape(-1, 32), n_planes=4, width=2).reshape(-1, 256)
    return (nibbles(raw[:, :128], 64) | (high << np.uint8(4))).astype(np.int8) - np.int8(32)


def _scale_k(raw: Bytes2d) -> Float32:
    return f16(raw[:, :2]) * k_scales(raw[:, 4:16])[0].astype(np.float32)


def _minimum_k(raw: Bytes2d) -> Float32:
    """The format subtracts its minimum, ours adds it."""
    return -(f16(raw[:, 2:4]) * k_scales(raw[:, 4:16])[1].astype(np.float32))


def _scale_q6_k(raw: Bytes2d) -> Float32:
    return f16(raw[:, 208:210]) * np.ascontiguousarray(raw[:, 192:208]).view(np.int8).astype(np.float32)


KEPT_FORMATS: Mapping[str, KeptFormat] = MappingProxyType(
    {
        "Q4_0": KeptFormat("q4_0", "F16", 32, True, _codes_4_bit(2, 18, 16), _bytes(0, 2)),
        "Q4_1": KeptFormat("q4_1", "F16", 32, True, _codes_4_bit(4, 20, 16), _bytes(0, 2), _bytes(2, 4)),
        "Q5_0": KeptFormat("q8_0", "F16", 32, False, _codes_q5_0, _bytes(0, 2)),
        "Q5_1": KeptFormat("q5_1", "F16", 32, False, _codes_q5_1, _bytes(0, 2), _bytes(2, 4)),
        "Q8_0": KeptFormat("q8_0", "F16", 32, False, _bytes(2, 34), _bytes(0, 2)),
        "Q4_K": KeptFormat("q4_k", "F32", 32, True, _codes_4_bit(16, 144, 32), _scale_k, _minimum_k),
        "Q5_K": KeptFormat("q5_k", "F32", 32, False, _codes_q5_k, _scale_k, _minimum_k),
        "Q6_K": KeptFormat("q6_k", "F32", 16, False, _codes_q6_k, _scale_q6_k),
    }
)

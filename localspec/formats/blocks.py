"""Our own block format `localspec-blocks`: the integer codes of a GGUF file, kept without loss.

A quantised weight `name` of shape [N, K] is stored as `name.q` and `name.scale` [N, K/block], and for an affine method
`name.min` [N, K/block]. Which method a name has stands in config.json under `quantization_config.tensors`; names not
listed there are plain tensors. Values equal those of the GGUF file bit for bit. Knows nothing of models or kernels.

| method | `name.q` | value | block | scale, min |
| --- | --- | --- | --- | --- |
| q4_0 | u8 [N, K/2], two codes a byte, low nibble first along K | scale * (code - 8) | 32 | f16 |
| q4_1 | u8 [N, K/2], likewise | scale * code + min | 32 | f16 |
| q4_k | u8 [N, K/2], likewise | scale * code + min | 32 | f32 |
| q8_0 | i8 [N, K] | scale * code | 32 | f16 |
| q5_1 | i8 [N, K] | scale * code + min | 32 | f16 |
| q5_k | i8 [N, K] | scale * code + min | 32 | f32 |
| q6_k | i8 [N, K] | scale * code | 16 | f32 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

QUANT_METHOD = "localspec-blocks"
QUANT_METHODS = (QUANT_METHOD,)
IGNORED_SUFFIXES: tuple[str, ...] = ()


@dataclass(frozen=True)
class Method:
    """How one method stores a weight; the table above."""

    packed: bool
    affine: bool
    block_values: int
    scale_dtype: torch.dtype


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "q4_0": Method(packed=True, affine=False, block_values=32, scale_dtype=torch.float16),
        "q4_1": Method(packed=True, affine=True, block_values=32, scale_dtype=torch.float16),
        "q4_k": Method(packed=True, affine=True, block_values=32, scale_dtype=torch.float32),
        "q8_0": Method(packed=False, affine=False, block_values=32, scale_dtype=torch.float16),
        "q5_1": Method(packed=False, affine=True, block_values=32, scale_dtype=torch.float16),
        "q5_k": Method(packed=False, affine=True, block_values=32, scale_dtype=torch.float32),
        "q6_k": Method(packed=False, affine=False, block_values=16, scale_dtype=torch.float32),
    }
)


def methods_by_name(quantization_config: Mapping[str, Any]) -> dict[str, str]:
    """Method of each quantised tensor. Raises ValueError for another quantisation or method."""
    if quantization_config.get("quant_method") != QUANT_METHOD:
        raise ValueError(
            f"quant_method is {quantization_config.get('quant_method')!r}, this reader takes {QUANT_METHOD}"
        )
    methods = quantization_config.get("tensors")
    if not isinstance(methods, dict):
        raise ValueError("quantization_config.tensors is missing: it names the method of each quantised tensor")
    for name, method in methods.items():
        if method not in METHODS:
            raise ValueError(f"tensor {name} has the unknown method {method!r}; known are {', '.join(METHODS)}")
    return dict(methods)


def is_quantised(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether `name` is stored as blocks (as opposed to a plain tensor)."""
    return f"{name}.q" in tensors


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, low nibble first: [N, K/2] u8 -> [N, K] u8."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).reshape(packed.shape[0], -1)


def dequantise(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Exact values of a weight: [N, K] f32, on the device of its codes.

    What is stored says how it is read: u8 codes are packed, codes without a minimum are symmetric, and the block is K
    over the number of scales. Raises KeyError when a part is missing, ValueError when parts do not fit each other.
    """
    codes, scale = tensors[f"{name}.q"], tensors[f"{name}.scale"]
    minimum = tensors.get(f"{name}.min")
    if codes.dtype == torch.int8:
        values = codes
    elif codes.dtype == torch.uint8:
        values = unpack_codes(codes)
    else:
        raise ValueError(f"{name}.q has dtype {codes.dtype}; u8 (packed) and i8 are known")
    n_rows, n_columns = values.shape
    block_values = n_columns // scale.shape[-1] if scale.ndim == 2 and scale.shape[-1] else 0
    if block_values not in (16, 32) or scale.shape != (n_rows, n_columns // block_values) or n_columns % block_values:
        raise ValueError(f"{name}: scales of shape {tuple(scale.shape)} do not fit codes of {n_rows} x {n_columns}")
    if minimum is not None and minimum.shape != scale.shape:
        raise ValueError(f"{name}.min of shape {tuple(minimum.shape)} does not fit the codes and scales")
    blocks = values.reshape(n_rows, -1, block_values).float()  # [N, K/block, block] f32
    if codes.dtype == torch.uint8 and minimum is None:
        blocks = blocks - 8
    blocks = blocks * scale.float().unsqueeze(-1)
    if minimum is not None:
        blocks = blocks + minimum.float().unsqueeze(-1)
    return blocks.reshape(n_rows, n_columns)


@dataclass(frozen=True)
class BlockWeight:
    """A logical weight [N, K]; tensors as in the table above.

    codes: [N, K/2] u8 or [N, K] i8; scale, minimum: [N, K/block] f16 or f32.
    """

    method: str
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.scale.shape[1] * METHODS[self.method].block_values

    def dequantise(self) -> torch.Tensor:
        """[N, K] f32, exact."""
        parts = {"w.q": self.codes, "w.scale": self.scale}
        return dequantise(parts if self.minimum is None else {**parts, "w.min": self.minimum}, "w")


def is_stored(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether `name` is stored as blocks."""
    return is_quantised(tensors, name)


def weight(tensors: Mapping[str, torch.Tensor], name: str, quantisation: Mapping[str, Any]) -> BlockWeight:
    """The weight `name`. Raises KeyError when a part is missing, ValueError when parts and config do not agree."""
    method_name = methods_by_name(quantisation).get(name)
    if method_name is None:
        raise ValueError(f"{name} is stored as blocks, but quantization_config.tensors does not name its method")
    method = METHODS[method_name]
    codes, scale = tensors[f"{name}.q"], tensors[f"{name}.scale"]
    minimum = tensors[f"{name}.min"] if method.affine else None
    width = codes.shape[-1] * (2 if method.packed else 1)
    codes_dtype = torch.uint8 if method.packed else torch.int8
    if codes.ndim != 2 or codes.dtype != codes_dtype or width % method.block_values:
        raise ValueError(
            f"{name}.q is a {codes.dtype} of shape {tuple(codes.shape)}, which {method_name} does not allow"
        )
    for part in (scale, minimum):
        if part is None:
            continue
        if tuple(part.shape) != (codes.shape[0], width // method.block_values) or part.dtype != method.scale_dtype:
            raise ValueError(
                f"{name}: scales of shape {tuple(part.shape)} and {part.dtype} do not fit {method_name} codes of "
                f"{tuple(codes.shape)}"
            )
    return BlockWeight(method_name, codes, scale, minimum)

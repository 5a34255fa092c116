"""Our own block format `localspec-blocks`: 4-bit and 8-bit codes of a GGUF file, kept without loss.

A quantised weight `name` of shape [N, K] is stored as `name.q` and `name.scale` [N, K/32] f16, and for an affine method
`name.min` [N, K/32] f16. Which method a name has stands in config.json under `quantization_config.tensors`; names not
listed there are plain tensors. Values equal those of the GGUF file bit for bit. Knows nothing of models or kernels.

| method | `name.q` | value |
| --- | --- | --- |
| q4_0 | u8 [N, K/2], two codes a byte, low nibble first along K | scale * (code - 8) |
| q4_1 | u8 [N, K/2], likewise | scale * code + min |
| q8_0 | i8 [N, K] | scale * code |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

QUANT_METHOD = "localspec-blocks"
QUANT_METHODS = (QUANT_METHOD,)
BLOCK_VALUES = 32
METHODS = ("q4_0", "q4_1", "q8_0")


def methods_by_name(quantization_config: Mapping[str, Any]) -> dict[str, str]:
    """Method of each quantised tensor. Raises ValueError for another quantisation, block size or method."""
    if quantization_config.get("quant_method") != QUANT_METHOD:
        raise ValueError(
            f"quant_method is {quantization_config.get('quant_method')!r}, this reader takes {QUANT_METHOD}"
        )
    if quantization_config.get("block_size") != BLOCK_VALUES:
        raise ValueError(f"block_size is {quantization_config.get('block_size')!r}, {BLOCK_VALUES} is supported")
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

    The method follows from what is stored: i8 codes are q8_0, a minimum makes it q4_1, else it is q4_0. Raises KeyError
    when a part is missing, ValueError when parts do not fit each other.
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
    if scale.shape != (n_rows, n_columns // BLOCK_VALUES) or n_columns % BLOCK_VALUES:
        raise ValueError(f"{name}: scales of shape {tuple(scale.shape)} do not fit codes of {n_rows} x {n_columns}")
    if minimum is not None and (minimum.shape != scale.shape or codes.dtype == torch.int8):
        raise ValueError(f"{name}.min of shape {tuple(minimum.shape)} does not fit the codes and scales")
    blocks = values.reshape(n_rows, -1, BLOCK_VALUES).float()  # [N, K/32, 32] f32
    if codes.dtype == torch.uint8 and minimum is None:
        blocks = blocks - 8
    blocks = blocks * scale.float().unsqueeze(-1)
    if minimum is not None:
        blocks = blocks + minimum.float().unsqueeze(-1)
    return blocks.reshape(n_rows, n_columns)


@dataclass(frozen=True)
class BlockWeight:
    """A logical weight [N, K] in blocks of 32 along K; tensors as in the table above.

    codes: [N, K/2] u8 or [N, K] i8; scale, minimum: [N, K/32] f16.
    """

    method: str
    codes: torch.Tensor
    scale: torch.Tensor
    minimum: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.scale.shape[1] * BLOCK_VALUES

    def dequantise(self) -> torch.Tensor:
        """[N, K] f32, exact."""
        parts = {"w.q": self.codes, "w.scale": self.scale}
        return dequantise(parts if self.minimum is None else {**parts, "w.min": self.minimum}, "w")


def is_stored(tensors: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether `name` is stored as blocks."""
    return is_quantised(tensors, name)


def weight(tensors: Mapping[str, torch.Tensor], name: str, quantisation: Mapping[str, Any]) -> BlockWeight:
    """The weight `name`. Raises KeyError when a part is missing, ValueError when parts and config do not agree."""
    method = methods_by_name(quantisation).get(name)
    if method is None:
        raise ValueError(f"{name} is stored as blocks, but quantization_config.tensors does not name its method")
    codes, scale = tensors[f"{name}.q"], tensors[f"{name}.scale"]
    minimum = tensors[f"{name}.min"] if method == "q4_1" else None
    width = codes.shape[-1] * (1 if method == "q8_0" else 2)
    if codes.ndim != 2 or codes.dtype != (torch.int8 if method == "q8_0" else torch.uint8) or width % BLOCK_VALUES:
        raise ValueError(f"{name}.q is a {codes.dtype} of shape {tuple(codes.shape)}, which {method} does not allow")
    for part in (scale, minimum):
        if part is not None and tuple(part.shape) != (codes.shape[0], width // BLOCK_VALUES):
            raise ValueError(f"{name}: scales of shape {tuple(part.shape)} do not fit codes of {tuple(codes.shape)}")
    return BlockWeight(method, codes, scale, minimum)

"""Logical weights from the parts that several checkpoint formats share, each part checked: NVFP4, FP8, MXFP4.

Knows number formats and shapes; does not know how a format names its parts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.fp8_pack import Fp8Weight
from localspec.kernels.nvfp4_pack import Nvfp4Weight
from localspec.kernels.weights import DenseWeight, LogicalWeight

NVFP4_BLOCK = 16
MXFP4_BLOCK = 32
FP8_BLOCK = 128
E4M3_LARGEST_FINITE = 0x7E
MAGNITUDE_BITS = 0x77
"""Of the two codes in a byte."""
E8M0_NAN = 255
E8M0_BIAS = 127
E4M3_TOP_EXPONENT = 8
E4M3_EXPONENTS = 17
"""Powers of two that e4m3 holds below its top one: 2^-9 .. 2^8."""


def nvfp4(name: str, codes: Tensor, block_scale: Tensor, tensor_scale: Tensor) -> Nvfp4Weight:
    """codes [N, K/2] u8, low nibble first; block_scale [N, K/16] e4m3; tensor_scale: one positive float, multiplied.

    Raises ValueError naming the weight where parts do not fit or hold what no scale can be.
    """
    rows, columns = _four_bit_shape(name, codes, NVFP4_BLOCK)
    if block_scale.dtype != torch.float8_e4m3fn or tuple(block_scale.shape) != (rows, columns // NVFP4_BLOCK):
        raise ValueError(f"{name}: block scales {_told(block_scale)} do not fit codes {_told(codes)}")
    if int(block_scale.view(torch.uint8).max()) > E4M3_LARGEST_FINITE:
        raise ValueError(f"{name}: a block scale is negative or no number")
    return Nvfp4Weight(codes, block_scale, _row_scales(name, tensor_scale, rows))


def mxfp4(name: str, codes: Tensor, exponents: Tensor) -> LogicalWeight:
    """codes [N, K/2] u8; exponents [N, K/32] u8 (e8m0) -> NVFP4 with the same values.

    A scale 2^k becomes the block scale 2^(k - m) of two blocks; m = largest k of a block that is not all zero, less 8.
    Weights whose scales span more powers than e4m3 holds stay exact as float32. Raises ValueError where parts do not
    fit.
    """
    rows, columns = _four_bit_shape(name, codes, MXFP4_BLOCK)
    if exponents.dtype != torch.uint8 or tuple(exponents.shape) != (rows, columns // MXFP4_BLOCK):
        raise ValueError(f"{name}: scales {_told(exponents)} do not fit codes {_told(codes)}")
    if int(exponents.max()) == E8M0_NAN:
        raise ValueError(f"{name}: a scale is no number")
    # A block of zeros is zero at any scale; exporters give it the smallest one, which would spread the scales.
    used = ((codes.view(rows, -1, MXFP4_BLOCK // 2) & MAGNITUDE_BITS) != 0).any(dim=-1)
    top = int(exponents[used].max()) if bool(used.any()) else int(exponents.max())
    exponents = torch.where(used, exponents, torch.full_like(exponents, top))
    spread = exponents.int() - (top - E4M3_TOP_EXPONENT)
    scales = torch.exp2(spread.float()).repeat_interleave(2, dim=1)
    tensor_scale = torch.exp2(torch.tensor(float(top - E4M3_TOP_EXPONENT - E8M0_BIAS)))
    if top - int(exponents.min()) <= E4M3_EXPONENTS and tensor_scale > 0:
        return Nvfp4Weight(codes, scales.to(torch.float8_e4m3fn), tensor_scale.expand(rows).contiguous())
    ones = torch.ones(rows, columns // NVFP4_BLOCK).to(torch.float8_e4m3fn)
    plain = Nvfp4Weight(codes, ones, torch.ones(rows)).dequantise()
    exact = torch.exp2(exponents.double() - E8M0_BIAS).float().repeat_interleave(MXFP4_BLOCK, dim=1)
    return DenseWeight(plain * exact)


def fp8(name: str, codes: Tensor, scale: Tensor) -> Fp8Weight:
    """codes [N, K] e4m3; scale, multiplied: one, one a row ([N] or [N, 1]), or one a block of 128 x 128.

    Raises ValueError naming the weight where parts do not fit.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.ndim != 2:
        raise ValueError(f"{name} is {_told(codes)}; a matrix of e4m3 is needed")
    rows, columns = codes.shape
    grid = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    # Some exports keep the singleton dims of their blocks.
    shape = tuple(scale.shape[::2]) if scale.ndim == 4 else tuple(scale.shape)
    if scale.numel() == 1 or shape in ((rows,), (rows, 1)):
        return Fp8Weight(codes, _row_scales(name, scale, rows))
    if shape != grid:
        raise ValueError(f"{name}: scales {_told(scale)} fit neither rows nor 128 x 128 blocks of {_told(codes)}")
    blocks = _finite(name, scale.float().reshape(grid))
    return Fp8Weight(codes, torch.ones(rows), blocks)


def _four_bit_shape(name: str, codes: Tensor, block: int) -> tuple[int, int]:
    if codes.dtype != torch.uint8 or codes.ndim != 2 or (2 * codes.shape[1]) % block or not codes.numel():
        raise ValueError(f"{name} is {_told(codes)}; two 4-bit codes a byte in blocks of {block} are needed")
    return codes.shape[0], 2 * codes.shape[1]


def _row_scales(name: str, scale: Tensor, rows: int) -> Tensor:
    """[N] float32 from one scale or one a row."""
    if scale.numel() not in (1, rows):
        raise ValueError(f"{name}: {scale.numel()} scales do not fit {rows} rows")
    return _finite(name, scale.float().reshape(-1)).expand(rows).contiguous()


def _finite(name: str, scale: Tensor) -> Tensor:
    if not bool((scale.isfinite() & (scale >= 0)).all()):
        raise ValueError(f"{name}: a scale is negative or no finite number")
    return scale


def _told(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"

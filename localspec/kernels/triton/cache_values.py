"""How keys and values lie in the cache: bf16, fp16, fp32, or fp8 e4m3 bytes that kernels convert in registers.

Everything works on the bytes of e4m3 with integer arithmetic, because Triton has no such type before sm_89.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from localspec.kernels.ops import PAGE_TOKENS

E4M3_SCALE = tl.constexpr(256.0)
"""e4m3 bits moved into a float16 read as value / 256; whoever multiplies them puts this on the sum."""

# Four bytes to two float16 pairs: bytes to the upper halves, sign kept, magnitude one place down.
E4M3_ASM = tl.constexpr(
    """{ .reg .b32 r, m;
    prmt.b32 r, $2, 0, 0x1404; shr.b32 m, r, 1; and.b32 m, m, 0x3F803F80; lop3.b32 $0, r, 0x80008000, m, 0xEA;
    prmt.b32 r, $2, 0, 0x3424; shr.b32 m, r, 1; and.b32 m, m, 0x3F803F80; lop3.b32 $1, r, 0x80008000, m, 0xEA; }"""
)

FRAGMENT_CONSTRAINTS = tl.constexpr("=r,=r,=r,=r,r,r")


def fragment_asm(values: bool, convert: bool) -> str:
    """PTX that decodes the words $4, $5 to four pairs of float16, $0..$3, each the operand of another matmul.

    Keys: the words are neighbours in one key, bytes 0..7, and a pair is any two of them: `_store_queries` follows.
    Values: the words are the same four dimensions of two keys; pair j is byte j of either. `convert`: by the card's
    conversion (sm_89 and later), exact; else by integers, as value / 256.
    """
    lines = []
    if convert:
        words = ("$4", "$5")
        if values:
            lines.append("prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;")
            words = ("x", "y")
        lines.append(f"mov.b32 {{a, b}}, {words[0]}; mov.b32 {{c, d}}, {words[1]};")
        lines += [f"cvt.rn.f16x2.e4m3x2 ${pair}, {half};" for pair, half in enumerate("abcd")]
        return "{ .reg .b16 a, b, c, d; .reg .b32 x, y;\n" + "\n".join(lines) + " }"
    # The sign stays, the magnitude goes one place down from the byte in the upper half of each 16 bits.
    for pair in range(4):
        if values:
            lines.append(f"prmt.b32 x, $4, $5, 0x{4 + pair}{pair}{pair}{pair}; shr.b32 y, x, 1;")
        elif pair % 2:
            lines.append(f"mov.b32 x, ${4 + pair // 2}; shr.b32 y, x, 1;")
        else:
            lines.append(f"shl.b32 x, ${4 + pair // 2}, 8; shl.b32 y, ${4 + pair // 2}, 7;")
        lines.append(f"and.b32 y, y, 0x3F803F80; lop3.b32 ${pair}, x, 0x80008000, y, 0xEA;")
    return "{ .reg .b32 x, y;\n" + "\n".join(lines) + " }"


@triton.jit
def load_cached(pointers, mask, FP8: tl.constexpr, ASM: tl.constexpr, dtype: tl.constexpr):
    """Values of the cache as a matmul operand: `dtype`, or float16 of value / 256 for e4m3 bytes."""
    raw = tl.load(pointers, mask=mask, other=0)
    if FP8:
        if ASM:
            values = tl.inline_asm_elementwise(E4M3_ASM, "=r,=r,r", [raw], dtype=tl.float16, is_pure=True, pack=4)
        else:
            values = e4m3_as_float16(raw)
    else:
        values = raw.to(dtype)
    return values


@triton.jit
def e4m3_as_float16(raw):
    """e4m3 bytes -> float16 of value / 256, exact, subnormals too: sign to bit 15, the rest to bits 13..7."""
    wide = raw.to(tl.uint16)
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True)


@triton.jit
def e4m3_from_float32(x):
    """float32 -> e4m3 bytes, rounded to nearest even, clamped to +-448."""
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = tl.minimum(tl.abs(x), 448.0)
    # Normal: round off 20 mantissa bits, then move the exponent bias from 127 to 7.
    whole = magnitude.to(tl.uint32, bitcast=True)
    normal = ((whole + 0x7FFFF + ((whole >> 20) & 1)) >> 20) - 960
    # Subnormal: multiples of 2^-9, rounded by adding 2^23.
    small = (magnitude * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) & 0xF
    code = tl.where(magnitude < 0.015625, small, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


def cache_bytes(pages: Tensor) -> tuple[Tensor, bool]:
    """The pages as kernels see them, and whether they are fp8: e4m3 pages become a view of bytes.

    Raises ValueError for a dtype that no kernel reads, or for pages of another size than 64 tokens.
    """
    if pages.ndim != 4 or pages.shape[1] != PAGE_TOKENS or not pages.is_contiguous():
        raise ValueError(f"cache pages must be contiguous [pages, {PAGE_TOKENS}, heads, head size]")
    if pages.dtype == torch.float8_e4m3fn:
        return pages.view(torch.uint8), True
    if pages.dtype in (torch.bfloat16, torch.float16, torch.float32):
        return pages, False
    raise ValueError(f"cache pages of {pages.dtype} are not supported; use bfloat16 or float8_e4m3fn")

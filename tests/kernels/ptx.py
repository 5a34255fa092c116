"""A small interpreter for the straight-line PTX of the decoders: enough to run them on a CPU, bit for bit.

Registers are int64 arrays holding 32-bit patterns, so that one pass decodes many words.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


def _bf16_halves(bits: Tensor) -> tuple[Tensor, Tensor]:
    low = (bits & 0xFFFF) << 16
    high = bits & 0xFFFF0000
    signed = [torch.where(b >= 1 << 31, b - (1 << 32), b).to(torch.int32).view(torch.float32) for b in (low, high)]
    return signed[0], signed[1]


def _bf16_bits(low: Tensor, high: Tensor) -> Tensor:
    parts = [v.to(torch.bfloat16).view(torch.int16).to(torch.int64) & 0xFFFF for v in (low, high)]
    return parts[0] | parts[1] << 16


def run_ptx(text: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Execute and return all registers. Raises KeyError for an instruction it does not know."""
    registers: dict[str, Tensor] = {name: value.to(torch.int64) & MASK for name, value in inputs.items()}
    some = next(iter(registers.values()))

    def value(operand: str) -> Tensor:
        if operand in registers:
            return registers[operand]
        return torch.full_like(some, int(operand, 0))

    for statement in re.sub(r"[{}\n]", " ", text).split(";"):
        words = statement.replace(",", " ").split()
        if not words or words[0] == ".reg":
            continue
        name, target, operands = words[0], words[1], [value(w) for w in words[2:]]
        registers[target] = _apply(name, operands) & MASK
    return registers


def _apply(name: str, o: list[Tensor]) -> Tensor:
    if name == "mov.b32":
        return o[0]
    if name == "and.b32":
        return o[0] & o[1]
    if name == "shl.b32":
        return o[0] << o[1]
    if name == "shr.b32":
        return o[0] >> o[1]
    if name == "shf.l.wrap.b32":
        assert torch.equal(o[0], o[1])
        return (o[0] << o[2]) | (o[0] >> (32 - o[2]))
    if name == "mad.lo.u32":
        return o[0] * o[1] + o[2]
    if name == "lop3.b32":
        table = int(o[3].flatten()[0])
        out = torch.zeros_like(o[0])
        for index in range(8):
            if table >> index & 1:
                terms = [v if index >> (2 - place) & 1 else ~v & MASK for place, v in enumerate(o[:3])]
                out |= terms[0] & terms[1] & terms[2]
        return out
    if name == "prmt.b32":
        pool, selector = o[0] | o[1] << 32, o[2]
        out = torch.zeros_like(pool)
        for byte in range(4):
            out |= (pool >> (8 * (selector >> 4 * byte & 7)) & 0xFF) << 8 * byte
        return out
    if name in ("mul.rn.bf16x2", "fma.rn.bf16x2"):
        a, b = _bf16_halves(o[0]), _bf16_halves(o[1])
        return _bf16_bits(a[0].double().mul(b[0].double()).float(), a[1].double().mul(b[1].double()).float())
    raise KeyError(name)

"""Integer decoding of e4m3 fragments, run as PTX on the CPU: exact for every byte, in the order that is promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localspec.kernels.triton.cache_values import fragment_asm
from tests.kernels.ptx import run_ptx

pytestmark = pytest.mark.torch


def _words(codes: Tensor) -> Tensor:
    """[N, 4] bytes -> [N] words, the first byte lowest."""
    return (codes.long() << torch.tensor([0, 8, 16, 24])).sum(1)


def _halves(register: Tensor) -> Tensor:
    """[N] words -> [N, 2] float16 values, times 256."""
    bits = torch.stack([register & 0xFFFF, register >> 16], 1)
    return bits.to(torch.int32).to(torch.int16).view(torch.float16).double() * 256


@pytest.mark.parametrize("values", [False, True], ids=["keys", "values"])
def test_every_byte_is_decoded_at_every_place(values: bool) -> None:
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    generator = torch.Generator().manual_seed(3)
    codes = torch.stack([finite[torch.randperm(len(finite), generator=generator)] for _ in range(8)], 1)  # [254, 8]
    found = run_ptx(fragment_asm(values, convert=False), {"$4": _words(codes[:, :4]), "$5": _words(codes[:, 4:])})
    exact = codes.view(torch.float8_e4m3fn).double()
    for pair in range(4):
        # Values: byte `pair` of either word. Keys: bytes 0 and 2, then 1 and 3, of one word.
        first = pair if values else 4 * (pair // 2) + pair % 2
        expected = exact[:, [first, first + (4 if values else 2)]]
        assert torch.equal(_halves(found[f"${pair}"]), expected), f"pair {pair}"

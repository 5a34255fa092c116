"""Prompts in FP4 on a card that multiplies it: near the specification, rows alone as among others."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.backends import triton_sm100
from localspec.kernels.fp4_prompts import fp4_product
from localspec.kernels.nvfp4_pack import quantise_nvfp4

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(triton_sm100.supports("cuda") is not None, reason="no card that multiplies FP4"),
]


@pytest.mark.parametrize(("rows", "outputs", "columns"), [(40, 144, 272), (300, 512, 1024)])
def test_prompts_are_near_the_specification(rows: int, outputs: int, columns: int) -> None:
    torch.manual_seed(rows)
    ops = triton_sm100.create("cuda")
    ops.fp4_prompts = True
    weight = quantise_nvfp4(torch.randn(outputs, columns) / columns**0.5)
    packed = ops.pack([weight])
    x, residual = torch.randn(rows, columns).bfloat16(), torch.randn(rows, outputs).bfloat16()
    wanted = fp4_product(x, weight)
    found = ops.linear(x.cuda(), packed)
    assert float((found.cpu().float() - wanted).norm() / wanted.norm()) < 6e-3
    part = ops.linear(x[-17:].cuda(), packed)
    assert torch.equal(part, found[-17:])
    added = ops.linear(x.cuda(), packed, epilogue="residual", residual=residual.cuda()).cpu().float()
    wanted = wanted + residual.float()
    assert float((added - wanted).norm() / wanted.norm()) < 6e-3

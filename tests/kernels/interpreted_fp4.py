"""The kernels around FP4 prompts, interpreted: the bits of their specification. The product itself is compiled only."""

from __future__ import annotations

import tests.helpers.interpreter  # noqa: F401  # isort: skip

import pytest
import torch

from localspec.kernels.fp4_prompts import quantise_rows
from localspec.kernels.nvfp4_pack import pack_small_m
from localspec.kernels.triton import fp4_prompts
from tests.kernels.test_nvfp4_pack import random_weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [48, 1040])
def test_rows_have_the_bits_of_the_specification(dtype: torch.dtype, columns: int) -> None:
    x = torch.randn(6, columns, generator=torch.Generator().manual_seed(columns)) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0.0
    x[3, :16] = 0.0
    x[4] *= torch.logspace(-9, 0, columns)
    x = x.to(dtype)
    wanted, found = quantise_rows(x), fp4_prompts.quantised_rows(x)
    assert torch.equal(found.codes, wanted.codes) and torch.equal(found.row_scale, wanted.row_scale)
    assert torch.equal(found.scales, wanted.block_scale.view(torch.uint8))


@pytest.mark.parametrize(("rows", "columns", "gated"), [(48, 272, False), (160, 528, True)])
def test_packed_weights_come_back_as_plain_codes(rows: int, columns: int, gated: bool) -> None:
    weight = random_weight(rows, columns, seed=rows)
    empty = fp4_prompts.PlainNvfp4.empty(rows, columns, torch.device("cpu"))
    found = fp4_prompts.plain_codes(pack_small_m(weight, 32, gated), empty)
    scales = weight.block_scale.view(torch.uint8)
    assert bool(((scales > 0) & (scales < 8)).any()), "no scale below the normal ones is tested"
    codes = weight.codes.reshape(rows, columns // 16, 8) * (scales != 0)[..., None]
    assert torch.equal(found.codes, codes.reshape(rows, columns // 2)) and torch.equal(found.scales, scales)
    assert torch.equal(found.row_scale, weight.row_scale)

"""Rows in NVFP4: near what they were, alone as among others; and back ends that cannot multiply them say so."""

from __future__ import annotations

import pytest
import torch

from localspec.api.types import EngineError
from localspec.engine.build import EngineOptions, load_model
from localspec.kernels.fp4_prompts import Fp4Prompts, fp4_product, quantise_rows
from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.kernels.table import choose
from tests.helpers.models import random_checkpoint

pytestmark = pytest.mark.torch


def rows_of(count: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes, one of them zero."""
    x = (
        torch.randn(count, columns, generator=torch.Generator().manual_seed(count))
        * torch.logspace(-6, 6, count)[:, None]
    )
    x[count // 2] = 0.0
    return x


def test_rows_come_back_within_a_block_s_steps() -> None:
    x = rows_of(7, 272)
    back = quantise_rows(x).dequantise()
    blocks = x.reshape(7, 17, 16)
    # The largest step of e2m1 is 2 of 6, half of which is lost at most; the block's scale is off by 1 / 16 at most.
    bound = blocks.abs().amax(dim=2, keepdim=True) * (1 / 6 + 1 / 16) + 1e-30
    assert bool(((back.reshape(7, 17, 16) - blocks).abs() <= bound).all())
    assert not back[3].any()


def test_a_row_has_the_same_bits_alone() -> None:
    x = rows_of(9, 64)
    whole = quantise_rows(x)
    for row in range(9):
        alone = quantise_rows(x[row : row + 1])
        assert torch.equal(alone.codes[0], whole.codes[row]) and torch.equal(alone.row_scale[0], whole.row_scale[row])
        assert torch.equal(alone.block_scale[0].view(torch.uint8), whole.block_scale[row].view(torch.uint8))


def test_the_product_is_that_of_the_values() -> None:
    x, matrix = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)), torch.randn(48, 256) / 16
    weight = quantise_nvfp4(matrix)
    exact = x.double() @ weight.dequantise().double().t()
    error = (fp4_product(x, weight) - exact).norm() / exact.norm()
    assert 0.02 < float(error) < 0.15, "rows in FP4 are off by about a tenth"
    kept = quantise_rows(x).dequantise().double() @ weight.dequantise().double().t()
    assert torch.allclose(fp4_product(x, weight).double(), kept, rtol=1e-4, atol=1e-4)


def test_where_it_cannot_be_had_it_is_refused(tmp_path) -> None:  # type: ignore[no-untyped-def]
    ops, _ = choose("cpu")
    assert not isinstance(ops, Fp4Prompts)
    random_checkpoint("llama", 1, tmp_path)
    with pytest.raises(EngineError, match="cannot be read in FP4 here: it needs an NVIDIA card") as refused:
        load_model(tmp_path, "cpu", EngineOptions("cpu", fp4_prompts=True))
    assert refused.value.code == "machine_cannot"

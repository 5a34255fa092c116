"""The kernels around FP4 prompts, interpreted: the bits of their specification. The product itself is compiled only."""

from __future__ import annotations

import tests.helpers.interpreter  # noqa: F401  # isort: skip

import pytest
import torch

from localspec.kernels.backends import triton_sm80, triton_sm100
from localspec.kernels.fp4_prompts import fp4_product, quantise_rows
from localspec.kernels.nvfp4_pack import Nvfp4Weight, pack_small_m
from localspec.kernels.ops import Epilogue
from localspec.kernels.triton import fp4_prompts, unpack_weights
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


def _dequantised(plain: fp4_prompts.PlainNvfp4) -> torch.Tensor:
    scales = plain.scales.view(torch.float8_e4m3fn)
    return Nvfp4Weight(plain.codes, scales, plain.row_scale).dequantise()


def _product(x: fp4_prompts.PlainNvfp4, weight: fp4_prompts.PlainNvfp4, out: torch.Tensor) -> torch.Tensor:
    """In the place of the card's own product, which is not interpreted rightly."""
    return out.copy_(_dequantised(x) @ _dequantised(weight).t())


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize(
    ("gated", "extra"), [(False, "none"), (False, "bias"), (False, "residual"), (True, "none"), (True, "bias")]
)
def test_the_back_end_puts_prompts_together(
    gated: bool, slices: int, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gated weights, slices, biases and residuals, all padded to whole tiles; the steps of few rows are not its own."""
    columns, half = 272, 48 if slices == 1 else 80
    monkeypatch.setattr(triton_sm100, "fp4_matmul", _product)
    monkeypatch.setattr(triton_sm80, "tile_rows_for", lambda *_: 32)
    if slices > 1:
        monkeypatch.setattr(unpack_weights, "MOST_UNPACKED_BYTES", 2 * 32 * columns * 4)
    parts = [random_weight(half, columns, seed) for seed in range(1 + gated)]
    ops = triton_sm100.Sm100Ops(torch.device("cpu"))
    monkeypatch.setattr(ops, "_grow_workspace", lambda packed: None)
    packed = ops.pack(parts, gated)
    ops.fp4_prompts = True
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, columns, generator=generator).bfloat16()
    rows = half * (1 + gated)
    # As large as the products, so that one that is left out shows.
    bias = torch.randn(rows, generator=generator) * 4000 if extra == "bias" else None
    residual = (torch.randn(40, rows, generator=generator) * 4000).bfloat16() if extra == "residual" else None
    epilogue: Epilogue = "silu_mul" if gated else "residual" if residual is not None else "none"
    found = ops.linear(x, packed, epilogue=epilogue, residual=residual, bias=bias).float()
    wanted = torch.cat([fp4_product(x, part) for part in parts], dim=1)
    wanted = wanted if bias is None else wanted + bias
    wanted = wanted if residual is None else wanted + residual.float()
    if gated:
        gate, up = wanted.bfloat16().float().chunk(2, dim=1)
        wanted = torch.nn.functional.silu(gate) * up
    assert found.shape == wanted.shape
    assert float((found - wanted).norm() / wanted.norm()) < 5e-3
    assert ops.arithmetic != triton_sm80.TritonOps.arithmetic
    ops.fp4_prompts = False
    assert ops.arithmetic == triton_sm80.TritonOps.arithmetic

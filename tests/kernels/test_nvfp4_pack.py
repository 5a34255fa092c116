"""The NVFP4 format on the CPU: quantiser, packed layout, and the decoder's PTX run bit for bit."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.nvfp4_feedback import feedback_of, quantise_nvfp4_with_feedback
from localspec.kernels.nvfp4_pack import (
    E2M1_VALUES,
    Nvfp4Weight,
    dequantise_nvfp4,
    pack_small_m,
    quantise_nvfp4,
    random_packed,
    unpack,
)
from tests.kernels.ptx import run_ptx

pytestmark = pytest.mark.torch


def random_weight(rows: int, columns: int, seed: int) -> Nvfp4Weight:
    """All codes and all finite e4m3 scales, with different row scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(1, 127, (rows, columns // 16), generator=generator, dtype=torch.uint8)
    row_scale = torch.rand(rows, generator=generator) + 0.5
    return Nvfp4Weight(codes, scale.view(torch.float8_e4m3fn), row_scale)


@pytest.mark.parametrize(("rows", "columns", "tile_rows"), [(128, 256, 128), (200, 272, 64), (33, 1040, 32)])
@pytest.mark.parametrize("gated", [False, True])
def test_unpack_inverts_pack(rows: int, columns: int, tile_rows: int, gated: bool) -> None:
    rows = rows // 16 * 16 if gated else rows
    weight = random_weight(rows, columns, seed=rows)
    back = unpack(pack_small_m(weight, tile_rows, gated))
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.block_scale.view(torch.uint8), weight.block_scale.view(torch.uint8))
    assert torch.equal(back.row_scale, weight.row_scale)


def test_nibbles_are_low_first() -> None:
    codes = torch.zeros(1, 8, dtype=torch.uint8)
    codes[0, 0] = 0x7 | 0xA << 4
    weight = Nvfp4Weight(codes, torch.full((1, 1), 2.0).to(torch.float8_e4m3fn), torch.tensor([0.5]))
    assert dequantise_nvfp4(weight)[0, :3].tolist() == [6.0, -1.0, 0.0]


def test_zero_scale_means_zero() -> None:
    weight = random_weight(16, 256, seed=1)
    weight.block_scale.view(torch.uint8)[3, 5] = 0
    back = unpack(pack_small_m(weight, 32))
    assert torch.equal(dequantise_nvfp4(back), dequantise_nvfp4(weight))


@pytest.mark.parametrize("code", [0x7F, 0x80, 0xBB])
def test_refuses_scales_that_are_nan_or_negative(code: int) -> None:
    weight = random_weight(16, 256, seed=1)
    weight.block_scale.view(torch.uint8)[0, 0] = code
    with pytest.raises(ValueError, match="block scales"):
        pack_small_m(weight)


@pytest.mark.parametrize("native_multiply", [True, False])
def test_decoder_ptx_is_exact(native_multiply: bool) -> None:
    """Read the units as a lane does, decode with the kernel's own PTX, and compare every weight."""
    weight_decode = pytest.importorskip("localspec.kernels.triton.weight_decode")
    rows, columns, tile_rows = 64, 512, 32
    weight = random_weight(rows, columns, seed=2)
    weight.row_scale.fill_(1.0)
    packed = pack_small_m(weight, tile_rows)
    expected = dequantise_nvfp4(weight)
    units = packed.data.reshape(packed.tiles, packed.pairs, tile_rows * 144)
    words = units[..., : tile_rows * 128].contiguous().view(torch.int32)
    words = words.reshape(packed.tiles, packed.pairs, 2, tile_rows, 4, 4)
    scales = units[..., tile_rows * 128 :].contiguous().view(torch.int32)
    scales = scales.reshape(packed.tiles, packed.pairs, tile_rows, 4)
    for chunk in range(2):
        inputs = {f"${16 + i}": words[:, :, chunk, ..., i] for i in range(4)}
        inputs["$20"] = scales
        out = run_ptx(weight_decode.nvfp4_decode_asm(chunk == 1, native_multiply), inputs)
        for r in range(8):
            for h in range(2):
                for p in range(2):
                    bits = (out[f"${2 * r + h}"] >> 16 * p & 0xFFFF).to(torch.int32) << 16
                    value = bits.view(torch.float32) * 256.0  # [tile, pair, row, quad]
                    k = 64 * (r // 4) + 4 * (r % 4) + 2 * h + p
                    want = expected.reshape(packed.tiles, tile_rows, packed.pairs, 2, 128)[:, :, :, chunk]
                    want = want[..., [k + 16 * quad for quad in range(4)]].permute(0, 2, 1, 3)
                    assert torch.equal(value, want), (chunk, r, h, p)


def test_quantise_takes_the_best_scale_of_the_sweep() -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 256, generator=generator)
    errors = {}
    for method in ("max", "mse"):
        back = dequantise_nvfp4(quantise_nvfp4(weight, method))  # type: ignore[arg-type]
        errors[method] = float((back - weight).square().sum() / weight.square().sum())
    # 20.4 and 21.8 dB on Gaussian weights.
    assert errors["max"] == pytest.approx(10**-2.04, rel=0.05)
    assert errors["mse"] == pytest.approx(10**-2.18, rel=0.05)


def test_sweep_is_exhaustive_on_one_block() -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(1, 16, generator=generator)
    got = quantise_nvfp4(weight)
    error = float((dequantise_nvfp4(got) - weight).square().sum())
    grid = torch.tensor(E2M1_VALUES)
    grid = torch.cat([-grid, grid])
    best = min(
        float((scale * grid[None, :] - weight[0, :, None]).abs().amin(dim=1).square().sum())
        for scale in torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * got.row_scale[0]
    )
    assert error == pytest.approx(best, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, 1e-30, 3e4])
def test_quantise_degenerate_blocks(value: float) -> None:
    weight = torch.full((2, 32), value)
    weight[1, 16:] = 0
    back = dequantise_nvfp4(quantise_nvfp4(weight))
    assert torch.allclose(back, weight, rtol=0.02, atol=0)


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] + [0.0] * 8)
    weight = torch.cat([ties, torch.tensor([6.0 * 448] + [0.0] * 15)]).reshape(1, 32)
    back = dequantise_nvfp4(quantise_nvfp4(weight, "max"))
    assert back[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_quantise_refuses_what_it_cannot_store() -> None:
    with pytest.raises(ValueError, match="multiple of 16"):
        quantise_nvfp4(torch.zeros(1, 24))
    with pytest.raises(ValueError, match="finite"):
        quantise_nvfp4(torch.full((1, 16), float("nan")))


@pytest.mark.parametrize("gated", [False, True])
def test_random_weights_are_valid(gated: bool) -> None:
    packed = random_packed(96, 320, "cpu", seed=5, tile_rows=32, gated=gated)
    values = dequantise_nvfp4(unpack(packed))
    assert torch.isfinite(values).all()
    assert float(values.std()) == pytest.approx(320**-0.5, rel=0.1)
    again = random_packed(96, 320, "cpu", seed=5, tile_rows=32, gated=gated)
    assert torch.equal(again.data, packed.data)


def weighted_error(weight: torch.Tensor, got: Nvfp4Weight, importance: torch.Tensor) -> float:
    return float(((dequantise_nvfp4(got) - weight).square() * importance).sum())


def test_importance_lowers_the_weighted_error() -> None:
    generator = torch.Generator().manual_seed(6)
    weight = torch.randn(48, 208, generator=generator)
    importance = torch.rand(208, generator=generator) ** 6
    plain, weighted = quantise_nvfp4(weight), quantise_nvfp4(weight, importance=importance)
    # Gains 19% here; the unweighted error rises in return.
    assert weighted_error(weight, weighted, importance) < 0.9 * weighted_error(weight, plain, importance)
    assert weighted_error(weight, weighted, torch.ones(208)) > weighted_error(weight, plain, torch.ones(208))


@pytest.mark.parametrize("value", [0.0, 3e-5, 1.0, 7e4])
def test_equal_importance_changes_nothing(value: float) -> None:
    weight = torch.randn(5, 48, generator=torch.Generator().manual_seed(7))
    plain, weighted = quantise_nvfp4(weight), quantise_nvfp4(weight, importance=torch.full((48,), value))
    assert torch.equal(plain.codes, weighted.codes)
    assert torch.equal(plain.block_scale.view(torch.uint8), weighted.block_scale.view(torch.uint8))


def test_refuses_an_importance_that_does_not_fit() -> None:
    weight = torch.zeros(2, 32)
    for importance in (torch.ones(16), -torch.ones(32), torch.full((32,), float("inf"))):
        with pytest.raises(ValueError, match="importance must be 32 finite values"):
            quantise_nvfp4(weight, importance=importance)


def test_parts_with_the_scale_of_the_whole_are_its_parts() -> None:
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(8))
    whole = quantise_nvfp4(weight)
    parts = [quantise_nvfp4(weight[rows], tensor_scale=whole.row_scale[0]) for rows in (slice(0, 7), slice(7, 40))]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([part.row_scale for part in parts]), whole.row_scale)


def test_feedback_lowers_the_error_of_the_output() -> None:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(24, 80, generator=generator)
    x = torch.randn(400, 12, generator=generator) @ torch.randn(12, 80, generator=generator)
    x += 0.3 * torch.randn(400, 80, generator=generator)
    moments = x.T @ x / len(x)
    plain = quantise_nvfp4(weight, importance=moments.diagonal())
    fed = quantise_nvfp4_with_feedback(weight, feedback_of(moments))
    assert fed.block_scale.shape == plain.block_scale.shape and fed.codes.shape == plain.codes.shape
    errors = [float((x @ (dequantise_nvfp4(got) - weight).T).square().sum()) for got in (plain, fed)]
    # Correlated inputs leave much to make up for: half of the error goes.
    assert errors[1] < 0.5 * errors[0]


def test_feedback_without_correlation_is_plain_rounding() -> None:
    weight = torch.randn(9, 64, generator=torch.Generator().manual_seed(10))
    plain, fed = quantise_nvfp4(weight), quantise_nvfp4_with_feedback(weight, feedback_of(torch.eye(64)))
    assert torch.equal(plain.codes, fed.codes)
    assert torch.equal(plain.block_scale.view(torch.uint8), fed.block_scale.view(torch.uint8))


def test_feedback_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        quantise_nvfp4_with_feedback(torch.ones(2, 32), feedback_of(torch.eye(16)))
    with pytest.raises(ValueError, match="not symmetric and positive"):
        feedback_of(torch.ones(32, 32) - 3 * torch.diag((torch.arange(32) == 1).float()))
    with pytest.raises(ValueError, match="not finite"):
        quantise_nvfp4_with_feedback(torch.full((2, 32), float("nan")), feedback_of(torch.eye(32)))

"""The FP8 format on the CPU: packed layout, block scales, and the decoder's PTX run bit for bit."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.fp8_pack import (
    Fp8Weight,
    dequantise_fp8,
    encode_words,
    pack_fp8,
    quantise_fp8,
    random_packed_fp8,
    unpack_fp8,
)
from tests.kernels.ptx import run_ptx

pytestmark = pytest.mark.torch


def random_fp8(rows: int, columns: int, blocks: bool, seed: int) -> Fp8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, columns), generator=generator, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, torch.zeros_like(codes), codes)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator) + 0.5 if blocks else None
    return Fp8Weight(codes.view(torch.float8_e4m3fn), torch.rand(rows, generator=generator) + 0.5, scale)


@pytest.mark.parametrize(("rows", "columns", "tile_rows"), [(128, 128, 128), (208, 264, 64), (400, 1000, 32)])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_unpack_inverts_pack(rows: int, columns: int, tile_rows: int, blocks: bool, gated: bool) -> None:
    weight = random_fp8(rows, columns, blocks, seed=rows)
    assert torch.equal(unpack_fp8(pack_fp8(weight, tile_rows, gated)), dequantise_fp8(weight))


@pytest.mark.parametrize("native_multiply", [True, False])
def test_decoder_ptx_is_exact(native_multiply: bool) -> None:
    weight_decode = pytest.importorskip("localspec.kernels.triton.weight_decode")
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    generator = torch.Generator().manual_seed(1)
    four = torch.stack([codes[torch.randperm(len(codes), generator=generator)] for _ in range(16)], dim=-1)
    words = encode_words(four.reshape(-1, 4, 4))
    out = run_ptx(weight_decode.fp8_decode_asm(native_multiply), {f"${8 + r}": words[:, r] for r in range(4)})
    for index in range(16):
        r, h, p = index // 4, index // 2 % 2, index % 2
        bits = (out[f"${2 * r + h}"] >> 16 * p & 0xFFFF).to(torch.int32) << 16
        want = four[:, index].contiguous().view(torch.float8_e4m3fn).float()
        assert torch.equal(bits.view(torch.float32), want)


def test_quantise_keeps_each_row_in_range() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(5, 256, generator=generator) * torch.tensor([1e-6, 1.0, 1e4, 0.0, 3.0])[:, None]
    back = dequantise_fp8(quantise_fp8(weight))
    assert torch.allclose(back, weight, rtol=2**-4, atol=0.01 * 1e-6) or float((back - weight).abs().max()) < 0.3 * 1e4
    error = (back - weight).norm(dim=1) / weight.norm(dim=1).clamp_min(1e-30)
    assert float(error.max()) < 0.03


def test_refuses_nan_codes() -> None:
    weight = random_fp8(16, 128, False, seed=3)
    weight.codes.view(torch.uint8)[0, 0] = 0xFF
    with pytest.raises(ValueError, match="NaN"):
        pack_fp8(weight)


def test_random_weights_are_valid() -> None:
    values = unpack_fp8(random_packed_fp8(96, 256, "cpu", seed=4, tile_rows=32))
    assert torch.isfinite(values).all()
    assert 0.2 < float(values.std()) * 16 < 5

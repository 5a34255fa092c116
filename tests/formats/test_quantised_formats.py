"""NVFP4, MXFP4 and FP8 checkpoints, written here value by value from the published number formats."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.formats.checkpoint import FolderCheckpoint, open_checkpoint
from localspec.kernels.fp8_pack import Fp8Weight
from localspec.kernels.nvfp4_pack import Nvfp4Weight
from localspec.kernels.weights import DenseWeight

pytestmark = pytest.mark.torch
N, K = 5, 64
MODULE = "model.layers.0.mlp.up_proj"
NAME = f"{MODULE}.weight"


def _e2m1(code: int) -> float:
    sign = -1.0 if code & 8 else 1.0
    exponent, mantissa = (code >> 1) & 3, code & 1
    return sign * (0.5 * mantissa if exponent == 0 else (1 + 0.5 * mantissa) * 2.0 ** (exponent - 1))


def _e4m3(byte: int) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _random_bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + high)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def _open(folder: Path, tensors: dict[str, torch.Tensor], quantisation: dict[str, Any] | None) -> FolderCheckpoint:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantisation} if quantisation else {}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)


def _nvfp4() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes, block scales (subnormal and largest ones too) and the values times one."""
    codes, scales = _random_bytes(N, K // 2), _random_bytes(N, K // 16, high=0x7F)
    scales[0, 0], scales[0, 1], scales[0, 2] = 0, 1, 0x7E
    values = torch.empty(N, K, dtype=torch.float64)
    for row in range(N):
        for column in range(K):
            byte = int(codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            values[row, column] = _e2m1(code) * _e4m3(int(scales[row, column // 16]))
    return codes, scales.view(torch.float8_e4m3fn), values


def _same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got.double() - expected).abs().max() <= 1e-6 * expected.abs().max()) and got.dtype == torch.float32


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"])
@pytest.mark.parametrize("separate", [False, True])
def test_modelopt_nvfp4(tmp_path: Path, algorithm: str, separate: bool) -> None:
    codes, scales, values = _nvfp4()
    tensors = {
        NAME: codes,
        f"{NAME}_scale": scales,
        f"{NAME}_scale_2": torch.tensor(0.37),
        f"{MODULE}.input_scale": torch.tensor(0.1),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0),
        "plain.weight": torch.ones(2, 2),
    }
    quantisation: dict[str, Any] = {"quant_algo": algorithm}
    if algorithm == "MIXED_PRECISION":
        quantisation["quantized_layers"] = {MODULE: {"quant_algo": "W4A16_NVFP4"}, "lm_head": {"quant_algo": "FP8"}}
    if separate:
        tmp_path.joinpath("hf_quant_config.json").write_text(json.dumps({"quantization": quantisation}))
    checkpoint = _open(tmp_path, tensors, None if separate else {"quant_method": "modelopt", **quantisation})
    weight = checkpoint.weight(NAME)
    assert isinstance(weight, Nvfp4Weight) and weight.shape == (N, K) and checkpoint.has(NAME)
    assert _same(weight.dequantise(), values * float(torch.tensor(0.37)))
    assert isinstance(checkpoint.weight("plain.weight"), DenseWeight)
    checkpoint.finish()


def test_modelopt_awq_multiplies_the_columns(tmp_path: Path) -> None:
    codes, scales, values = _nvfp4()
    columns = torch.rand(K) + 0.5
    tensors = {NAME: codes, f"{NAME}_scale": scales, f"{NAME}_scale_2": torch.tensor(2.0)}
    tensors[f"{MODULE}.pre_quant_scale"] = columns
    checkpoint = _open(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"})
    assert _same(checkpoint.weight(NAME).dequantise(), 2 * values * columns.double())
    checkpoint.finish()


@pytest.mark.parametrize("shape", [(), (1,), (N,), (N, 1)])
def test_fp8_with_one_scale_or_one_a_row(tmp_path: Path, shape: tuple[int, ...]) -> None:
    codes = _random_bytes(N, K)
    codes[(codes & 0x7F) == 0x7F] = 0
    scale = (torch.rand(shape) + 0.1).bfloat16()
    values = torch.tensor([[_e4m3(int(byte)) for byte in row] for row in codes], dtype=torch.float64)
    expected = values * scale.double().reshape(-1, 1)
    tensors = {NAME: codes.view(torch.float8_e4m3fn), f"{NAME}_scale": scale}
    for method, settings in (
        ("modelopt", {"quant_algo": "FP8"}),
        ("compressed-tensors", {"format": "float-quantized"}),
    ):
        checkpoint = _open(tmp_path / method, tensors, {"quant_method": method, **settings})
        weight = checkpoint.weight(NAME)
        assert isinstance(weight, Fp8Weight) and weight.row_scale.shape == (N,)
        assert _same(weight.dequantise(), expected)
        checkpoint.finish()


@pytest.mark.parametrize("method", ["fp8", "modelopt"])
def test_fp8_with_blocks(tmp_path: Path, method: str) -> None:
    rows, columns = 200, 300
    codes = _random_bytes(rows, columns, high=0x7E)
    scale = torch.rand(2, 3) + 0.1
    values = codes.view(torch.float8_e4m3fn).double()
    for row in range(2):
        for column in range(3):
            values[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)] *= float(scale[row, column])
    suffix, stored = ("_scale_inv", scale) if method == "fp8" else ("_scale", scale.view(2, 1, 3, 1))
    settings = {"fp8": {"fmt": "e4m3", "weight_block_size": [128, 128]}, "modelopt": {"quant_algo": "FP8_PB_WO"}}
    tensors = {NAME: codes.view(torch.float8_e4m3fn), f"{NAME}{suffix}": stored}
    checkpoint = _open(tmp_path, tensors, {"quant_method": method, **settings[method]})
    weight = checkpoint.weight(NAME)
    assert isinstance(weight, Fp8Weight) and weight.block_scale is not None
    assert _same(weight.dequantise(), values)
    checkpoint.finish()


def test_compressed_tensors_global_scale_is_a_reciprocal(tmp_path: Path) -> None:
    codes, scales, values = _nvfp4()
    tensors = {
        f"{NAME}_packed": codes,
        f"{NAME}_scale": scales,
        f"{NAME}_global_scale": torch.tensor([2688.0]),
        f"{MODULE}.input_global_scale": torch.tensor([3.0]),
        "plain.weight": torch.ones(2, 2),
    }
    checkpoint = _open(tmp_path, tensors, _compressed("nvfp4-pack-quantized", "float-quantized"))
    assert checkpoint.has(NAME)
    weight = checkpoint.weight(NAME)
    assert isinstance(weight, Nvfp4Weight) and _same(weight.dequantise(), values / 2688.0)
    checkpoint.weight("plain.weight")
    checkpoint.finish()


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_global_scale_without_a_reciprocal_is_refused(scale: float, tmp_path: Path) -> None:
    """Of an infinite one it would be zero, and so would every weight."""
    codes, scales, _ = _nvfp4()
    tensors = {f"{NAME}_packed": codes, f"{NAME}_scale": scales, f"{NAME}_global_scale": torch.tensor([scale])}
    with pytest.raises(ValueError, match="has no reciprocal"):
        _open(tmp_path, tensors, _compressed("nvfp4-pack-quantized")).weight(NAME)


def _compressed(*formats: str, kind: str = "float") -> dict[str, Any]:
    groups = {
        f"group_{index}": {"format": each, "targets": ["Linear"], "weights": {"num_bits": 4, "type": kind}}
        for index, each in enumerate(formats)
    }
    name = formats[0] if len(formats) == 1 else "mixed-precision"
    return {"quant_method": "compressed-tensors", "format": name, "config_groups": groups}


@pytest.mark.parametrize(("low", "high", "kept"), [(110, 128, True), (127, 128, True), (100, 128, False), (0, 6, True)])
def test_mxfp4_becomes_nvfp4_exactly(tmp_path: Path, low: int, high: int, kept: bool) -> None:
    codes, exponents = _random_bytes(N, K // 2), _random_bytes(N, K // 32, low=low, high=high)
    exponents[0, 0], exponents[1, 1] = low, high - 1
    tensors = {f"{NAME}_packed": codes, f"{NAME}_scale": exponents}
    checkpoint = _open(tmp_path, tensors, _compressed("mxfp4-pack-quantized"))
    weight = checkpoint.weight(NAME)
    expected = torch.empty(N, K, dtype=torch.float64)
    for row in range(N):
        for column in range(K):
            byte = int(codes[row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            expected[row, column] = math.ldexp(_e2m1(code), int(exponents[row, column // 32]) - 127)
    assert isinstance(weight, Nvfp4Weight) == kept
    if low:
        assert torch.equal(weight.dequantise().double(), expected)
    else:  # values below the smallest normal float32: equal but for what float32 cannot hold
        assert (weight.dequantise().double() - expected).abs().max() <= 2.0**-149
    checkpoint.finish()


@pytest.mark.parametrize("used", [True, False])
def test_mxfp4_blocks_of_zeros_spread_no_scales(tmp_path: Path, used: bool) -> None:
    codes, exponents = _random_bytes(N, K // 2), _random_bytes(N, K // 32, low=120, high=128)
    codes[2, :16], exponents[2, 0] = 0x80, 0
    if not used:
        codes, exponents = torch.full_like(codes, 0x08), torch.zeros_like(exponents)
    tensors = {f"{NAME}_packed": codes, f"{NAME}_scale": exponents}
    weight = _open(tmp_path, tensors, _compressed("mxfp4-pack-quantized")).weight(NAME)
    assert isinstance(weight, Nvfp4Weight)
    values = weight.dequantise()
    assert (values[2, :32] == 0).all() and bool((values != 0).any()) == used


@pytest.mark.parametrize(
    ("quantisation", "message"),
    [
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "W4A8_AWQ"),
        ({"quant_method": "modelopt", "quantized_layers": {"a": {"quant_algo": "MXFP8"}}}, "MXFP8"),
        (_compressed("pack-quantized"), "pack-quantized"),
        (_compressed("nvfp4-pack-quantized", kind="int"), "'int'"),
        ({**_compressed("dense"), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**_compressed("dense"), "transform_config": {"config_groups": {"u": {}}}}, "rotates"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "64"),
        ({"quant_method": "awq"}, "'awq' is not supported"),
    ],
)
def test_settings_that_cannot_be_honoured_are_named(tmp_path: Path, quantisation: dict[str, Any], message: str) -> None:
    codes, scales, _ = _nvfp4()
    tensors = {NAME: codes, f"{NAME}_scale": scales, f"{NAME}_scale_2": torch.tensor(1.0)}
    tensors[f"{NAME}_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(ValueError, match=message):
        _open(tmp_path, tensors, quantisation).weight(NAME)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{NAME}_scale_2": None}, "scale_2 is missing"),
        ({f"{NAME}_scale": torch.ones(N, 3).to(torch.float8_e4m3fn)}, "do not fit"),
        ({f"{NAME}_scale": (-torch.ones(N, K // 16)).to(torch.float8_e4m3fn)}, "negative"),
        ({f"{NAME}_scale_2": torch.tensor(float("nan"))}, "no finite number"),
        ({f"{NAME}_scale_2": torch.ones(3)}, "3 scales do not fit 5 rows"),
        ({NAME: torch.zeros(N, 7, dtype=torch.uint8)}, "blocks of 16"),
        ({NAME: torch.zeros(N, K)}, "e4m3 is needed"),
        ({f"{MODULE}.svdquant_lora_a": torch.ones(2, 2)}, "low-rank"),
        ({f"{MODULE}.pre_quant_scale": torch.ones(3)}, "3 values for 64 columns"),
        ({f"{MODULE}.pre_quant_scale": torch.full((K,), float("inf"))}, "no finite number"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    codes, scales, _ = _nvfp4()
    tensors = {NAME: codes, f"{NAME}_scale": scales, f"{NAME}_scale_2": torch.tensor(1.0), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        _open(tmp_path, kept, {"quant_method": "modelopt", "quant_algo": "NVFP4"}).weight(NAME)

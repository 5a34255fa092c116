#!/usr/bin/env python3
"""Checkpoints written by the libraries that define the formats, with the values that they themselves read back.

Makes tests/formats/samples/*.safetensors and their config.json; the tests read only those. Needs compressed-tensors and
nvidia-modelopt, which nothing else here does: pip install compressed-tensors nvidia-modelopt. Runs in seconds on a CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SAMPLES = Path(__file__).parent.parent / "tests" / "formats" / "samples"
ROWS, COLUMNS = 20, 160
VALUES = "expected."
"""Before the names of the values that a library reads back."""

Tensors = dict[str, torch.Tensor]


def matrix(seed: int) -> torch.Tensor:
    """Rows of very different size, a column that stands out, a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(ROWS, COLUMNS, generator=generator) * torch.linspace(0.001, 2, ROWS)[:, None]
    values[:, 7] *= 20
    values[5, 32:64] = 0
    return values


def save(name: str, tensors: Tensors, config: dict[str, Any], packages: tuple[str, ...]) -> None:
    folder = SAMPLES / name
    folder.mkdir(parents=True, exist_ok=True)
    made_by = {package: _version(package) for package in packages}
    (folder / "config.json").write_text(json.dumps({**config, "made_by": made_by}, indent=1) + "\n")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    print(f"{name}: {sum(tensor.nbytes for tensor in tensors.values()) / 1e3:.0f} kB by {made_by}")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unpacked wheel"


def compressed_tensors_samples() -> None:
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    def one(preset: str, compressor: Any, values: torch.Tensor) -> tuple[Tensors, torch.Tensor, QuantizationScheme]:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        arguments = scheme.weights
        groups = arguments.group_size or COLUMNS
        shaped = values.view(ROWS, -1, groups)
        least, most = shaped.amin(-1), shaped.amax(-1)
        stored: Tensors = {"weight": values}
        global_scale = None
        if preset.startswith("NVFP4"):
            global_scale = generate_gparam(values.min(), values.max())
            stored["weight_global_scale"] = global_scale
        if arguments.block_structure:
            rows, columns = arguments.block_structure
            padded = torch.nn.functional.pad(values, (0, -COLUMNS % columns, 0, -ROWS % rows))
            blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
            least, most = blocks.amin((1, 3)), blocks.amax((1, 3))
        scale, _ = calculate_qparams(least, most, arguments, global_scale)
        stored["weight_scale"] = scale
        packed = compressor.compress(stored, scheme)
        if global_scale is None:
            return packed, compressor.decompress(dict(packed), scheme)["weight"].float(), scheme
        # Its decompressor computes NVFP4 in bfloat16; the same steps in float32 lose nothing.
        codes = unpack_fp4_from_uint8(packed["weight_packed"], ROWS, COLUMNS, dtype=torch.float32)
        exact_scale = compressor._decompress_scale(packed["weight_scale"], torch.float32)
        return packed, dequantize(codes, exact_scale, None, arguments, torch.float32, global_scale), scheme

    cases = {
        "mlp.up_proj": ("NVFP4", NVFP4PackedCompressor),
        "mlp.down_proj": ("NVFP4A16", NVFP4PackedCompressor),
        "self_attn.q_proj": ("FP8_DYNAMIC", FloatQuantizationCompressor),
        "self_attn.k_proj": ("FP8_BLOCK", FloatQuantizationCompressor),
        "mlp.gate_proj": ("MXFP4", MXFP4PackedCompressor),
    }
    tensors: Tensors = {}
    groups: dict[str, QuantizationScheme] = {}
    for seed, (module, (preset, compressor)) in enumerate(cases.items()):
        stored, expected, scheme = one(preset, compressor, matrix(seed))
        name = f"model.layers.0.{module}"
        tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        tensors[f"{VALUES}{name}.weight"] = expected
        groups[f"group_{seed}"] = scheme.model_copy(update={"targets": [f"re:.*{module}$"]})
    plain = QuantizationConfig(config_groups=groups, format="mixed-precision", ignore=["lm_head"])
    save("compressed_tensors", tensors, {"quantization_config": plain.model_dump(mode="json")}, ("compressed-tensors",))


def modelopt_samples() -> None:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    def nvfp4(values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        quantised, scale, scale_2 = NVFP4QTensor.quantize(values, 16)
        expected = quantised.dequantize(torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
        codes = quantised._quantized_data
        return {"weight": codes, "weight_scale": scale, "weight_scale_2": scale_2.float().squeeze()}, expected

    def fp8(values: torch.Tensor, **how: Any) -> tuple[Tensors, torch.Tensor]:
        quantised, scale = FP8QTensor.quantize(values, **how)
        expected = quantised.dequantize(torch.float32, scale=scale, **how)
        return {"weight": quantised._quantized_data, "weight_scale": scale.float()}, expected

    def awq(values: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        # The library smooths inputs by a vector and the weight by its inverse.
        vector = torch.linspace(0.5, 2, COLUMNS)
        stored, expected = nvfp4(values / vector)
        return {**stored, "pre_quant_scale": vector}, expected * vector

    cases: dict[str, Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]] = {
        "mlp.up_proj": nvfp4,
        "mlp.down_proj": awq,
        "self_attn.q_proj": fp8,
        "self_attn.k_proj": lambda values: fp8(values, axis=0),
    }
    tensors: Tensors = {}
    layers: dict[str, Any] = {}
    algorithms = {"up": "NVFP4", "down": "NVFP4_AWQ", "q": "FP8", "k": "FP8_PER_CHANNEL_PER_TOKEN"}
    for seed, (module, make) in enumerate(cases.items()):
        short = module.split(".")[1].removesuffix("_proj")
        name = f"model.layers.0.{module}"
        stored, expected = make(matrix(10 + seed))
        tensors |= {f"{name}.{part}": tensor for part, tensor in stored.items()}
        tensors[f"{name}.input_scale"] = torch.tensor(0.25)
        tensors[f"{VALUES}{name}.weight"] = expected
        layers[name] = {"quant_algo": algorithms[short]} | ({"group_size": 16} if "NVFP4" in algorithms[short] else {})
    separate = {
        "producer": {"name": "modelopt", "version": _version("nvidia-modelopt")},
        "quantization": {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": None,
            "quantized_layers": layers,
        },
    }
    save("modelopt", tensors, {}, ("nvidia-modelopt",))
    (SAMPLES / "modelopt" / "hf_quant_config.json").write_text(json.dumps(separate, indent=1) + "\n")
    flat = {"quantization_config": convert_hf_quant_config_format(separate)}
    (SAMPLES / "modelopt" / "flat_config.json").write_text(json.dumps(flat, indent=1) + "\n")


if __name__ == "__main__":
    sys.path[:0] = sys.argv[1:]
    compressed_tensors_samples()
    modelopt_samples()

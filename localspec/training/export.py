"""Writes a trained drafter as a folder that our loader and other engines read: config.json and model.safetensors.

In BF16 it is the plain layout of its kind; in NVFP4 the matrices are stored as ModelOpt stores them, which for a
drafter that was trained with rounding loses nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import quantise_nvfp4
from localspec.storage.files import AtomicFile
from localspec.storage.safetensors import TensorItem, write_safetensors
from localspec.training.drafting import TrainableDrafter
from localspec.training.parts import Matrix

Form = Literal["bf16", "nvfp4"]
DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL",
    torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
NVFP4_SETTINGS: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "kv_cache_quant_algo": None,
    "exclude_modules": [],
}


def export(drafter: TrainableDrafter, folder: Path, form: Form = "bf16") -> None:
    """Write the folder. Raises OSError where it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = drafter_tensors(drafter, form)
    write_safetensors(folder / "model.safetensors", [tensor_item(name, tensor) for name, tensor in tensors.items()])
    config = dict(drafter.config)
    if form == "nvfp4":
        config["quantization_config"] = NVFP4_SETTINGS
    with AtomicFile(folder / "config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())


def drafter_tensors(drafter: TrainableDrafter, form: Form) -> dict[str, Tensor]:
    """Stored tensors by name, in host memory."""
    matrices = {name: part for name, part in drafter.module.named_modules() if isinstance(part, Matrix)}
    tensors: dict[str, Tensor] = {}
    for name, parameter in drafter.module.named_parameters():
        part = matrices.get(name.removesuffix(".weight"))
        stored = f"{drafter.prefix}{name}"
        if part is None:
            tensors[stored] = parameter.detach().cpu()
            continue
        part.rounded = False
        value = part.value().detach().cpu()
        if form == "nvfp4" and part.can_round:
            found = quantise_nvfp4(value, "max")
            parts = (found.codes, found.block_scale, found.row_scale[0])
            tensors |= dict(zip((stored, f"{stored}_scale", f"{stored}_scale_2"), parts, strict=True))
        else:
            tensors[stored] = value.to(torch.bfloat16)
    if drafter.vocabulary.ids is not None and drafter.kind == "mtp":
        tensors[f"{drafter.prefix}draft_ids"] = drafter.vocabulary.ids
    elif drafter.vocabulary.ids is not None:
        tensors["d2t"] = drafter.vocabulary.offsets
        tensors["t2d"] = drafter.vocabulary.is_said
    return tensors


def tensor_item(name: str, tensor: Tensor) -> TensorItem:
    """What `write_safetensors` takes."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), flat

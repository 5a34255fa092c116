"""Converts a checked GGUF file into the directory of an installed model. Torch-free (numpy, one tensor at a time).

Blocks of integer codes are kept without loss in the `localspec-blocks` form (`formats.blocks` documents it and reads it
back, `hub.gguf_blocks` makes it); half-precision and float32 tensors stay what they are; every other block format is
written as its exact values, in bfloat16 where that holds them and in float32 else. Knows no network and no catalogue.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localspec.hub import gguf_architectures, tokenizer_gguf
from localspec.hub.gguf import GgufError, GgufFile, GgufTensor
from localspec.hub.gguf_blocks import KEPT_FORMATS, Split
from localspec.hub.gguf_models import HeadOrder, MappedTensor
from localspec.hub.layout import refuse_small_disk, write_json
from localspec.hub.records import HubError
from localspec.storage.files import Buffer, as_bytes
from localspec.storage.safetensors import DTYPE_BYTES, TensorItem, write_safetensors

QUANT_METHOD = "localspec-blocks"
PLAIN_DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16"}
BFLOAT16_TYPES = frozenset({"NVFP4", "MXFP4"})
"""Codes of at most two significant bits times scales of at most four: bfloat16 holds every product exactly."""
WEIGHTS_NAME = "model.safetensors"

Array = npt.NDArray[Any]


def convert_gguf(
    source: Path,
    directory: Path,
    sampling: Mapping[str, float | int | bool],
    on_bytes: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Writes config, tokenizer, generation config and weights into an empty directory.

    `sampling` are defaults for generation_config.json (temperature, top_p, ...); `on_bytes` hears the size of each part
    that was written. Raises HubError when the file is damaged or its architecture, tokenizer or a tensor is not
    supported; nothing is written before all of those were checked.
    """
    try:
        with GgufFile(source) as file:
            _convert_open_file(file, directory, sampling, on_bytes)
    except GgufError as error:
        raise HubError(str(error)) from error


def _convert_open_file(
    file: GgufFile, directory: Path, sampling: Mapping[str, float | int | bool], on_bytes: Callable[[int], None]
) -> None:
    architecture = gguf_architectures.architecture_of(file)
    shape = architecture.read(file)
    mapped = gguf_architectures.map_tensors(file, shape, architecture)
    tokenizer = tokenizer_gguf.read_tokenizer(file.metadata)
    if len(tokenizer.tokens) > shape.vocabulary:
        raise HubError(f"{file.path.name} has {len(tokenizer.tokens)} tokens for {shape.vocabulary} embedding rows")
    plans, methods = _plan_tensors(file, mapped)
    # The exact size is known only now: a format without a compact form of ours grows a lot.
    refuse_small_disk(file.path.name, sum(planned_bytes(item) for item in plans), directory.parent)
    config = architecture.config(shape)
    for role in ("bos", "eos", "pad"):
        config[f"{role}_token_id"] = tokenizer.special_ids.get(role)
    config["quantization_config"] = {
        "quant_method": QUANT_METHOD,
        "tensors": dict(sorted(methods.items())),
    }
    write_json(directory / "config.json", config)
    write_json(directory / "tokenizer.json", tokenizer_gguf.tokenizer_json(tokenizer))
    write_json(
        directory / "tokenizer_config.json", tokenizer_gguf.tokenizer_config_json(tokenizer, shape.context_tokens)
    )
    write_json(directory / "generation_config.json", _generation_config(tokenizer, sampling))
    write_safetensors(directory / WEIGHTS_NAME, [_counted(item, on_bytes) for item in plans], {"format": "pt"})


def _generation_config(
    tokenizer: tokenizer_gguf.GgufTokenizer, sampling: Mapping[str, float | int | bool]
) -> dict[str, Any]:
    ids = {f"{role}_token_id": tokenizer.special_ids.get(role) for role in ("bos", "pad")}
    return {**ids, "eos_token_id": list(tokenizer.eos_ids), **dict(sampling)}


def _plan_tensors(file: GgufFile, mapped: list[MappedTensor]) -> tuple[list[TensorItem], dict[str, str]]:
    plans: list[TensorItem] = []
    methods: dict[str, str] = {}
    for target in mapped:
        tensor = file.tensors[target.gguf_name]
        kind = tensor.type.name
        if kind in KEPT_FORMATS and len(tensor.shape) == 2 and _keeps_blocks(file, target, kind):
            methods[target.name] = KEPT_FORMATS[kind].method
            plans += _plan_blocks(file, tensor, target)
        elif kind in PLAIN_DTYPES and target.change == "none" and not _has_scale(file, target):
            plans.append(_plan_plain(file, tensor, target))
        else:
            plans.append(_plan_dequantised(file, tensor, target))
    return plans, methods


def _keeps_blocks(file: GgufFile, target: MappedTensor, kind: str) -> bool:
    """Whether a quantised matrix needs nothing but other orders of whole blocks."""
    cut = target.columns is not None and target.columns.head_columns % KEPT_FORMATS[kind].block_values
    return target.change == "none" and not cut and not _has_scale(file, target)


def _has_scale(file: GgufFile, target: MappedTensor) -> bool:
    return gguf_architectures.scale_name(target.gguf_name) in file.tensors


def planned_bytes(item: TensorItem) -> int:
    """Bytes that a tensor will take."""
    return DTYPE_BYTES[item[1]] * math.prod(item[2])


def _counted(item: TensorItem, on_bytes: Callable[[int], None]) -> TensorItem:
    name, dtype, shape, source = item

    def load() -> Buffer:
        values = np.ascontiguousarray(source()) if callable(source) else source
        on_bytes(as_bytes(values).nbytes)
        return values

    return name, dtype, shape, load


def _ordered(values: Array, target: MappedTensor) -> Array:
    """Rows and columns in the hub's order. Columns may be values, codes or scales: a head has whole numbers of each."""
    values = values if target.rows is None else values[target.rows]
    return values if target.columns is None else _in_head_order(values, target.columns)


def _in_head_order(values: Array, order: HeadOrder) -> Array:
    return values.reshape(len(values), len(order.heads), -1)[:, order.heads].reshape(len(values), -1)


def _plan_plain(file: GgufFile, tensor: GgufTensor, target: MappedTensor) -> TensorItem:
    def load() -> Array:
        raw = file.blocks(tensor).reshape(*tensor.shape[:-1], -1)
        if len(tensor.shape) == 1:
            raw = raw.reshape(tensor.shape[0], -1)
        return _ordered(raw, target)

    return target.name, PLAIN_DTYPES[tensor.type.name], tensor.shape, load


def _plan_dequantised(file: GgufFile, tensor: GgufTensor, target: MappedTensor) -> TensorItem:
    scale = file.tensors.get(gguf_architectures.scale_name(target.gguf_name))

    def load() -> Array:
        values = file.dequantise(tensor)
        if scale is not None:
            values = values * file.dequantise(scale)[0]
        return _changed(_ordered(values, target), target, file.path.name)

    if tensor.type.name in BFLOAT16_TYPES and scale is None and target.change == "none":
        return target.name, "BF16", tensor.shape, lambda: _upper_halves(load())
    shape = (tensor.shape[0], 1, *tensor.shape[1:]) if target.change == "middle_axis" else tensor.shape
    return target.name, "F32", shape, load


def _upper_halves(values: Array) -> Array:
    """float32 -> bfloat16 of values that it holds exactly.  # any shape f32 -> the same u16"""
    return (np.ascontiguousarray(values, dtype="<f4").view("<u4") >> np.uint32(16)).astype("<u2")


def _changed(values: Array, target: MappedTensor, file_name: str) -> Array:
    if target.change == "minus_one":
        # A damaged file may hold NaN, which is for the engine's checks to find.
        with np.errstate(invalid="ignore"):
            return values - np.float32(1.0)
    if target.change == "log_of_negative":
        if not bool((values < 0).all()):
            raise HubError(f"{file_name}: {target.gguf_name} must be negative throughout")
        return np.log(-values)
    return values.reshape(len(values), 1, -1) if target.change == "middle_axis" else values


def _plan_blocks(file: GgufFile, tensor: GgufTensor, target: MappedTensor) -> list[TensorItem]:
    """The parts of one quantised weight. Each part reads the blocks again: a map costs nothing, memory does."""
    n_rows, n_columns = tensor.shape
    kept = KEPT_FORMATS[tensor.type.name]

    def part(name: str, dtype: str, width: int, split: Split) -> TensorItem:
        def load() -> Array:
            return _ordered(split(file.blocks(tensor)).reshape(n_rows, -1), target)

        return f"{target.name}.{name}", dtype, (n_rows, width), load

    n_scales = n_columns // kept.block_values
    codes = part("q", "U8", n_columns // 2, kept.codes) if kept.packed else part("q", "I8", n_columns, kept.codes)
    parts = [codes, part("scale", kept.scale_dtype, n_scales, kept.scale)]
    if kept.minimum is not None:
        parts.append(part("min", kept.scale_dtype, n_scales, kept.minimum))
    return parts

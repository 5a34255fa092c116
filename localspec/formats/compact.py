"""Re-quantises the matrices of a checkpoint to NVFP4, tensor by tensor, in the layout of NVIDIA ModelOpt.

Knows which tensors of our architectures keep their form: embedding, vision, the small GDN gates, all that is no matrix,
and matrices whose columns are no multiple of 16. Knows no folders, texts or manifests. Memory is bounded by one matrix
in its source form, its result and slabs of rows in float32.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from localspec.formats.blocks import BlockWeight
from localspec.formats.checkpoint import TORCH_DTYPES, FolderCheckpoint
from localspec.kernels.fp8_pack import Fp8Weight, quantise_fp8
from localspec.kernels.nvfp4_feedback import Feedback, quantise_nvfp4_with_feedback
from localspec.kernels.nvfp4_pack import BLOCK, Nvfp4Weight, nvfp4_tensor_scale, quantise_nvfp4
from localspec.kernels.weights import DenseWeight, LogicalWeight
from localspec.storage.files import Buffer
from localspec.storage.safetensors import TensorItem

Form = Literal["kept", "nvfp4", "fp8"]
Method = Literal["mse", "max"]
Guide = Tensor | Feedback | None
"""What is known of a matrix's inputs: importance [K], or all that error feedback needs, or nothing."""
KEPT_PARTS = ("embed_tokens.", "in_proj_a.", "in_proj_b.", "conv1d.", "visual.")
DROPPED_SUFFIXES = (
    ".input_scale", ".input_global_scale", ".pre_quant_scale", ".k_scale", ".v_scale", ".q_scale", ".prob_scale",
)  # fmt: skip
"""Scales of activations and caches, which the new layout has no use for; an AWQ scale is folded into its weight."""
SLAB_VALUES = 1 << 24
SLAB_ROW_MULTIPLE = 128
NVFP4_BITS = 4.5
_WEIGHT_PART = re.compile(r"(.+\.weight)(?:_[a-z0-9_]+|\.(?:q|scale|min))?")
_DTYPE_NAMES = {dtype: name for name, dtype in reversed(TORCH_DTYPES.items())}


@dataclass(frozen=True)
class Stored:
    """One logical tensor of the source. `parts`: stored names; `form`: its number format; `choice`: what to do."""

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    form: str
    bytes: int
    choice: Form

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def planned_bytes(self) -> int:
        """An upper bound but for a few scales."""
        if self.form == "nvfp4":
            return self.bytes
        if self.choice == "nvfp4":
            return int(self.num_values * NVFP4_BITS / 8)
        # Kept blocks become plain values of two bytes.
        return self.num_values if self.choice == "fp8" else max(self.bytes, len(self.shape) // 2 * 2 * self.num_values)


@dataclass(frozen=True)
class Compacted:
    """One logical tensor of the result. `sqnr_db` is None where the values are exactly those of the source."""

    name: str
    form: str
    bytes: int
    sqnr_db: float | None
    items: tuple[TensorItem, ...]


def survey(checkpoint: FolderCheckpoint) -> tuple[Stored, ...]:
    """Every logical tensor of a checkpoint with what compacting does to it.

    Raises ValueError for a damaged one, and for scales that no weight is read with, which would be lost without a word.
    """
    parts: dict[str, list[str]] = {}
    for name in checkpoint.names():
        if not name.endswith(DROPPED_SUFFIXES):
            found = _WEIGHT_PART.fullmatch(name)
            parts.setdefault(found[1] if found else name, []).append(name)
    logical = tuple(_survey_one(checkpoint, name, tuple(stored)) for name, stored in parts.items())
    checkpoint.finish()
    return logical


def _survey_one(checkpoint: FolderCheckpoint, name: str, parts: tuple[str, ...]) -> Stored:
    size = sum(checkpoint.vector(part).nbytes for part in parts)
    if parts == (name,) and checkpoint.vector(name).ndim != 2:
        vector = checkpoint.vector(name)
        return Stored(name, parts, tuple(vector.shape), _dtype_name(vector), size, "kept")
    weight = checkpoint.weight(name)
    return Stored(name, parts, weight.shape, form_of(weight), size, _choice(name, weight))


def _choice(name: str, weight: LogicalWeight) -> Form:
    no_blocks = 0 in weight.shape or weight.shape[1] % BLOCK
    if isinstance(weight, Nvfp4Weight) or no_blocks or any(part in name for part in KEPT_PARTS):
        return "kept"
    return "nvfp4"


def form_of(weight: LogicalWeight) -> str:
    """The number format by a short name."""
    if isinstance(weight, Nvfp4Weight):
        return "nvfp4"
    if isinstance(weight, Fp8Weight):
        return "fp8"
    if isinstance(weight, BlockWeight):
        return weight.method
    return _dtype_name(weight.tensor) if isinstance(weight, DenseWeight) else type(weight).__name__


def compact(
    checkpoint: FolderCheckpoint, stored: Stored, method: Method, guide: Guide, device: torch.device
) -> Compacted:
    """The tensor in its new form, computed on `device`, held in host memory. A guide of feedback must lie there.

    Raises ValueError naming the tensor where it is damaged or holds values that are not finite.
    """
    if len(stored.shape) != 2:
        return _compacted(stored.name, stored.form, {stored.name: checkpoint.vector(stored.name)}, None)
    weight = checkpoint.weight(stored.name)
    if stored.choice == "kept":
        return _kept(stored.name, weight)
    try:
        if stored.choice == "fp8":
            return _fp8(stored.name, weight, device)
        return _nvfp4(stored.name, weight, method, guide, device)
    except ValueError as error:
        raise ValueError(f"{stored.name}: {error}") from None


def _kept(name: str, weight: LogicalWeight) -> Compacted:
    if isinstance(weight, Nvfp4Weight):
        return _compacted(name, "nvfp4", _nvfp4_parts(name, weight), None)
    if isinstance(weight, Fp8Weight):
        scale = weight.row_scale if weight.block_scale is None else weight.block_scale
        if weight.block_scale is None or bool((weight.row_scale == 1).all()):
            return _compacted(name, "fp8", {name: weight.codes, f"{name}_scale": scale}, None)
    if isinstance(weight, DenseWeight):
        return _compacted(name, form_of(weight), {name: weight.tensor}, None)
    error = _ErrorSum()
    plain = torch.empty(weight.shape, dtype=torch.bfloat16)
    for part in _slabs(weight.shape):
        values = rows_of(weight, part).dequantise()
        plain[part] = values.bfloat16()
        error.add(values, plain[part].float())
    return _compacted(name, "bf16", {name: plain}, error.sqnr_db)


def _nvfp4(name: str, weight: LogicalWeight, method: Method, guide: Guide, device: torch.device) -> Compacted:
    rows, columns = weight.shape
    slabs = _slabs(weight.shape)
    amax = torch.stack([rows_of(weight, part).dequantise().abs().amax() for part in slabs]).amax()
    tensor_scale = nvfp4_tensor_scale(amax).to(device)
    importance = guide.to(device) if isinstance(guide, Tensor) else None
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // BLOCK, dtype=torch.float8_e4m3fn)
    error = _ErrorSum()
    for part in slabs:
        values = rows_of(weight, part).dequantise().to(device)
        if isinstance(guide, Feedback):
            found = quantise_nvfp4_with_feedback(values, guide, tensor_scale)
        else:
            found = quantise_nvfp4(values, method, importance, tensor_scale)
        codes[part], scales[part] = found.codes.cpu(), found.block_scale.cpu()
        error.add(values, found.dequantise())
    whole = Nvfp4Weight(codes, scales, tensor_scale.cpu().expand(rows).contiguous())
    return _compacted(name, "nvfp4", _nvfp4_parts(name, whole), error.sqnr_db)


def _fp8(name: str, weight: LogicalWeight, device: torch.device) -> Compacted:
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(weight.shape[0])
    error = _ErrorSum()
    for part in _slabs(weight.shape):
        values = rows_of(weight, part).dequantise().to(device)
        found = quantise_fp8(values)
        codes[part], scales[part] = found.codes.cpu(), found.row_scale.cpu()
        error.add(values, found.dequantise())
    return _compacted(name, "fp8", {name: codes, f"{name}_scale": scales}, error.sqnr_db)


def _nvfp4_parts(name: str, weight: Nvfp4Weight) -> dict[str, Tensor]:
    scales = weight.row_scale
    whole = scales[0].clone() if bool((scales == scales[0]).all()) else scales
    return {name: weight.codes, f"{name}_scale": weight.block_scale, f"{name}_scale_2": whole}


def _compacted(name: str, form: str, tensors: Mapping[str, Tensor], sqnr_db: float | None) -> Compacted:
    items: list[TensorItem] = [
        (part, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), _bytes_of(tensor)) for part, tensor in tensors.items()
    ]
    return Compacted(name, form, sum(tensor.nbytes for tensor in tensors.values()), sqnr_db, tuple(items))


def _bytes_of(tensor: Tensor) -> Buffer:
    values: Buffer = tensor.contiguous().reshape(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return values


def _dtype_name(tensor: Tensor) -> str:
    return _DTYPE_NAMES[tensor.dtype].lower()


def rows_of(weight: LogicalWeight, part: slice) -> LogicalWeight:
    """Rows [begin, end) of a weight without a copy; `begin` must be a multiple of 128 for FP8 in blocks."""
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.tensor[part])
    if isinstance(weight, Fp8Weight):
        grid = slice(part.start // SLAB_ROW_MULTIPLE, -(-part.stop // SLAB_ROW_MULTIPLE))
        blocks = None if weight.block_scale is None else weight.block_scale[grid]
        return Fp8Weight(weight.codes[part], weight.row_scale[part], blocks)
    if isinstance(weight, BlockWeight):
        minimum = None if weight.minimum is None else weight.minimum[part]
        return BlockWeight(weight.method, weight.codes[part], weight.scale[part], minimum)
    return DenseWeight(weight.dequantise()[part])


def _slabs(shape: tuple[int, int]) -> Sequence[slice]:
    rows, columns = shape
    step = max(SLAB_ROW_MULTIPLE, SLAB_VALUES // max(columns, 1) // SLAB_ROW_MULTIPLE * SLAB_ROW_MULTIPLE)
    return [slice(begin, min(begin + step, rows)) for begin in range(0, rows, step)]


class _ErrorSum:
    """Energy of a signal and of its error over parts of a tensor."""

    def __init__(self) -> None:
        self._signal = self._error = 0.0

    def add(self, values: Tensor, approximated: Tensor) -> None:
        self._signal += float(values.double().square().sum())
        self._error += float((approximated - values).double().square().sum())

    @property
    def sqnr_db(self) -> float | None:
        """10 log10(signal / error); None where nothing was lost."""
        return 10 * math.log10(self._signal / self._error) if self._error > 0 and self._signal > 0 else None


def relative_output_error(
    weight: LogicalWeight, importance: Tensor | None, approximate: Callable[[Tensor], Tensor]
) -> float:
    """Energy that an approximation of the rows adds to the output, relative to the output's. importance: [K]."""
    signal = error = 0.0
    for part in _slabs(weight.shape):
        values = rows_of(weight, part).dequantise()
        scale = torch.ones(weight.shape[1]) if importance is None else importance.float()
        signal += float((values.square() * scale).double().sum())
        error += float(((approximate(values) - values).square() * scale).double().sum())
    return error / signal if signal > 0 else 0.0

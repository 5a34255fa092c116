"""Packed weights as named tensors and back, for keeping them on disk; and how a kept file knows that it is outdated.

Knows the three packed forms of the Triton back end. Knows no files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from localspec.kernels.fp8_pack import PackedFp8, pack_fp8, quantise_fp8
from localspec.kernels.nvfp4_pack import PackedNvfp4, pack_small_m, quantise_nvfp4
from localspec.kernels.triton.dense_linear import DenseMatrix
from localspec.kernels.triton.tilings import tile_rows_for
from localspec.kernels.weights import LogicalWeight

PackedForm = PackedNvfp4 | PackedFp8 | DenseMatrix
PROBE_SHAPE = (272, 400)
"""Neither whole tiles nor whole pairs, a multiple of 16 both ways."""


class WeightStore(Protocol):
    """Packed weights by the parts that they are made of."""

    def find(self, parts: Sequence[LogicalWeight], gated: bool) -> PackedForm | None:
        """The packed weight on the device, or None for parts that are not this store's."""
        ...


def describe(packed: PackedForm) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What is no tensor, as plain JSON, and the tensors."""
    if isinstance(packed, DenseMatrix):
        return {"form": "dense", "gated": packed.gated}, {"matrix": packed.matrix}
    form = "nvfp4" if isinstance(packed, PackedNvfp4) else "fp8"
    facts = {"form": form, "shape": list(packed.shape), "tile_rows": packed.tile_rows, "gated": packed.gated}
    tensors = {"data": packed.data, "row_scale": packed.row_scale}
    if isinstance(packed, PackedFp8) and packed.group_scale is not None:
        tensors["group_scale"] = packed.group_scale
    return facts, tensors


def restore(facts: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> PackedForm:
    """Inverse of `describe`. Raises ValueError for parts that do not fit each other or today's tiles."""
    gated = bool(facts["gated"])
    if facts["form"] == "dense":
        return DenseMatrix(tensors["matrix"], gated)
    rows, columns = (int(size) for size in facts["shape"])
    tile_rows = int(facts["tile_rows"])
    if tile_rows != tile_rows_for(rows, columns):
        raise ValueError(f"a weight of {rows} x {columns} was packed in tiles of {tile_rows} rows, which is outdated")
    data, row_scale = tensors["data"], tensors["row_scale"]
    padded_rows = -(-rows // tile_rows) * tile_rows
    found: PackedForm
    if facts["form"] == "nvfp4":
        found = PackedNvfp4(data, row_scale, (rows, columns), tile_rows, gated)
        wanted_bytes = found.tiles * found.pairs * tile_rows * 144
    else:
        found = PackedFp8(data, row_scale, tensors.get("group_scale"), (rows, columns), tile_rows, gated)
        wanted_bytes = found.tiles * found.pairs * tile_rows * 128
    if data.numel() != wanted_bytes or row_scale.shape != (padded_rows,):
        raise ValueError(f"packed bytes do not fit a weight of {rows} x {columns}")
    return found


def layout_probe() -> str:
    """Hash of a small weight in every packed form: another one means that bytes lie in other places now."""
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(PROBE_SHAPE, generator=generator)
    digest = hashlib.sha256()
    for gated in (False, True):
        for packed in (
            pack_small_m(quantise_nvfp4(matrix, "max"), tile_rows_for(*PROBE_SHAPE), gated),
            pack_fp8(quantise_fp8(matrix), tile_rows_for(*PROBE_SHAPE), gated),
        ):
            facts, tensors = describe(packed)
            digest.update(repr(sorted(facts.items())).encode())
            for name, tensor in sorted(tensors.items()):
                digest.update(name.encode())
                digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

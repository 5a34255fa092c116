"""Unpacking to bf16 in the interpreter: the same bits as the float32 meaning rounded once."""

from __future__ import annotations

import tests.helpers.interpreter  # noqa: F401  must come before the kernels

import pytest  # isort: skip
import torch  # isort: skip

from localspec.kernels.fp8_pack import dequantise_fp8, pack_fp8  # isort: skip
from localspec.kernels.nvfp4_pack import dequantise_nvfp4, pack_small_m  # isort: skip
from localspec.kernels.triton.unpack_weights import tiles_of, unpack_bfloat16  # isort: skip
from tests.kernels.test_fp8_pack import random_fp8  # isort: skip
from tests.kernels.test_nvfp4_pack import random_weight  # isort: skip

torch.set_num_threads(1)


@pytest.mark.parametrize(("rows", "columns", "gated"), [(48, 272, False), (32, 528, True)])
def test_whole_weights(rows: int, columns: int, gated: bool) -> None:
    weight = random_weight(rows, columns, seed=rows)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    unpack_bfloat16(pack_small_m(weight, 32, gated), out)
    assert torch.equal(out, dequantise_nvfp4(weight).bfloat16())
    for blocks in (False, True):
        fp8 = random_fp8(rows, columns, blocks, seed=rows)
        assert torch.equal(unpack_bfloat16(pack_fp8(fp8, 32, gated)), dequantise_fp8(fp8).bfloat16()), blocks


@pytest.mark.parametrize("gated", [False, True])
def test_slices(gated: bool) -> None:
    weight = random_weight(160 if gated else 144, 272, seed=1)
    packed = pack_small_m(weight, 32, gated)
    whole = dequantise_nvfp4(weight).bfloat16()
    for first, last in ((0, 2), (2, 5)):
        found = unpack_bfloat16(tiles_of(packed, first, last))
        halves = [half[16 * first : 16 * last] for half in whole.chunk(2)]
        assert torch.equal(found, torch.cat(halves) if gated else whole[32 * first : 32 * last]), first

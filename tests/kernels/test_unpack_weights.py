"""Unpacking to bf16 under Triton's interpreter: the same bits as the float32 meaning rounded once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.torch

# The interpreter is chosen when a kernel is defined, so this runs in a process of its own.
SCRIPT = """
import torch
from localspec.kernels.fp8_pack import Fp8Weight, dequantise_fp8, pack_fp8
from localspec.kernels.nvfp4_pack import dequantise_nvfp4, pack_small_m
from localspec.kernels.triton.unpack_weights import tile_slices, tiles_of, unpack_bfloat16
from tests.kernels.test_fp8_pack import random_fp8
from tests.kernels.test_nvfp4_pack import random_weight

torch.set_num_threads(1)
for rows, columns, gated in ((48, 272, False), (32, 528, True)):
    weight = random_weight(rows, columns, seed=rows)
    out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
    unpack_bfloat16(pack_small_m(weight, 32, gated), out)
    assert torch.equal(out, dequantise_nvfp4(weight).bfloat16()), ("nvfp4", rows)
    for blocks in (False, True):
        weight = random_fp8(rows, columns, blocks, seed=rows)
        got = unpack_bfloat16(pack_fp8(weight, 32, gated))
        assert torch.equal(got, dequantise_fp8(weight).bfloat16()), ("fp8", rows, blocks)
for gated in (False, True):
    weight = random_weight(160 if gated else 144, 272, seed=1)
    packed = pack_small_m(weight, 32, gated)
    whole = dequantise_nvfp4(weight).bfloat16()
    for first, last in ((0, 2), (2, 5)):
        got = unpack_bfloat16(tiles_of(packed, first, last))
        rows = slice(32 * first, 32 * last)
        halves = [half[16 * first : 16 * last] for half in whole.chunk(2)]
        assert torch.equal(got, torch.cat(halves) if gated else whole[rows]), ("slice", gated, first)
print("same bits")
"""


def test_interpreted_kernels_give_the_bits_of_dequantise() -> None:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "same bits", run.stderr[-2000:]


def test_wide_weights_are_cut_at_whole_waves() -> None:
    from localspec.kernels.nvfp4_pack import PackedNvfp4
    from localspec.kernels.triton.unpack_weights import tile_slices

    def slices(rows: int, columns: int) -> list[tuple[int, int]]:
        nothing = torch.empty(0)
        return tile_slices(PackedNvfp4(nothing, nothing, (rows, columns), 128), 132)

    assert slices(34816, 5120) == [(0, 132), (132, 272)]
    assert slices(16672, 5120) == [(0, 131)]
    assert slices(5120, 6144) == [(0, 40)]
    assert slices(248320, 5120)[-1][1] == 1940 and all(last - first <= 140 for first, last in slices(248320, 5120))
    gated = PackedNvfp4(torch.empty(0), torch.empty(0), (34816 + 16, 5120), 128, True)
    assert tile_slices(gated, 132) == [(0, 273)]

"""Unpacking to bf16 under Triton's interpreter: the same bits as the float32 meaning rounded once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.torch

# The interpreter is chosen when a kernel is defined, so this runs in a process of its own.
SCRIPT = """
import torch
from localspec.kernels.fp8_pack import Fp8Weight, dequantise_fp8, pack_fp8
from localspec.kernels.nvfp4_pack import dequantise_nvfp4, pack_small_m
from localspec.kernels.triton.unpack_weights import unpack_bfloat16
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
print("same bits")
"""


def test_interpreted_kernels_give_the_bits_of_dequantise() -> None:
    root = Path(__file__).parent.parent.parent
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)}
    command = [sys.executable, "-c", SCRIPT]
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "same bits", run.stderr[-2000:]

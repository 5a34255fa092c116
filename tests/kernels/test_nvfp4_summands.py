"""A bf16 matrix as a sum of NVFP4 weights: as close to it as bf16 is to float32, whatever its values are."""

from __future__ import annotations

import pytest
import torch

from localspec.kernels.nvfp4_summands import PARTS, nvfp4_summands

pytestmark = pytest.mark.torch


def _lost(matrix: torch.Tensor, found: torch.Tensor) -> float:
    return float((found - matrix).norm() / matrix.norm())


@pytest.mark.parametrize("tails", [1.0, 3.0])
def test_the_sum_is_as_close_as_bf16(tails: float) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(48, 640)
    matrix = matrix.sign() * matrix.abs() ** tails * torch.rand(48, 1)
    parts = nvfp4_summands(matrix)
    assert len(parts) == PARTS
    total = sum((part.dequantise() for part in parts), torch.zeros_like(matrix))
    assert _lost(matrix, total) < _lost(matrix, matrix.to(torch.bfloat16).float())
    assert _lost(matrix, parts[0].dequantise()) > 0.05, "one part alone is far off, or this shows nothing"


def test_zeros_stay_zeros() -> None:
    assert not any(bool(part.dequantise().any()) for part in nvfp4_summands(torch.zeros(3, 32)))

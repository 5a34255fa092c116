"""How wide weights are cut before they are unpacked to bf16. The kernels' bits: interpreted_unpack.py."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.torch


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

"""The weight-stream kernels on a card: exact against float32, the same bits for 1..16 rows, and in overlapping chains.

Outputs and scratch are filled with NaN before each launch, so that what is not written shows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from localspec.kernels.fp8_pack import Fp8Weight, PackedFp8, pack_fp8, random_packed_fp8
from localspec.kernels.nvfp4_pack import PackedNvfp4, pack_small_m, quantise_nvfp4, random_packed
from localspec.kernels.ops import Epilogue, Norm
from localspec.kernels.packed_reference import packed_linear, packed_weight
from localspec.kernels.triton.stream_launch import Fusion, Prepared, StreamWorkspace, stream_linear
from localspec.kernels.triton.tilings import TILE_ROWS, tiling_for
from localspec.kernels.triton.unpack_weights import unpack_bfloat16

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
# float32 sums in another order; a normed operand may round to the neighbouring bf16.
BOUND, NORMED_BOUND = 1e-5, 2e-3


def _nvfp4(rows: int, columns: int, tile_rows: int = 128, gated: bool = False) -> PackedNvfp4:
    return random_packed(rows, columns, DEVICE, rows + columns, tile_rows, gated)


def _quantised(rows: int, columns: int) -> PackedNvfp4:
    weight = torch.randn(rows, columns, device=DEVICE) * torch.linspace(0.01, 3, rows, device=DEVICE)[:, None]
    return pack_small_m(quantise_nvfp4(weight))


def _fp8_blocks(rows: int, columns: int, gated: bool = False) -> PackedFp8:
    codes = torch.randint(0, 256, (rows, columns), device=DEVICE, dtype=torch.uint8)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes).to(torch.uint8)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), device=DEVICE) * 1e-3
    weight = Fp8Weight(codes.view(torch.float8_e4m3fn), torch.rand(rows, device=DEVICE) + 0.5, scale)
    return pack_fp8(weight, gated=gated)


CASES: dict[str, tuple[Callable[[], PackedNvfp4 | PackedFp8], Epilogue, bool]] = {
    "out": (lambda: _nvfp4(5120, 6144), "residual", False),
    "down": (lambda: _nvfp4(5120, 17408), "residual", False),
    "in": (lambda: _nvfp4(16384, 5120), "none", True),
    "gate_up": (lambda: _nvfp4(34816, 5120, gated=True), "silu_mul", True),
    "low tiles": (lambda: _nvfp4(1040, 2048, 64), "residual", True),
    "high tiles": (lambda: _nvfp4(1040, 2048, 256), "none", False),
    "smallest": (lambda: _nvfp4(1, 16), "none", True),
    "odd": (lambda: _quantised(1000, 272), "none", True),
    "long norm": (lambda: _nvfp4(512, 9216), "none", True),
    "fp8 rows": (lambda: random_packed_fp8(5120, 6144, DEVICE, 5), "residual", True),
    "fp8 blocks": (lambda: _fp8_blocks(2048, 1304), "none", False),
    "fp8 blocks gated": (lambda: _fp8_blocks(2048, 1304, gated=True), "silu_mul", True),
}


def _workspace() -> StreamWorkspace:
    return StreamWorkspace.create(DEVICE, 512, 17408)


@pytest.mark.parametrize("name", CASES)
def test_exact_and_row_invariant(name: str) -> None:
    make, epilogue, normed = CASES[name]
    torch.manual_seed(0)
    packed, workspace = make(), _workspace()
    n, k = packed.shape
    columns = n // 2 if packed.gated else n
    x = torch.randn(16, k, device=DEVICE).bfloat16()
    residual = torch.randn(16, columns, device=DEVICE).bfloat16() if epilogue == "residual" else None
    bias = torch.randn(n, device=DEVICE) if epilogue != "silu_mul" else None
    norm = Norm(torch.randn(k, device=DEVICE), 1e-6, True) if normed else None

    def run(rows: Tensor) -> Tensor:
        workspace.partials.fill_(float("nan"))
        workspace.normed.fill_(float("nan"))
        out = torch.full((len(rows), columns), float("nan"), device=DEVICE)
        added = None if residual is None else residual[rows]
        return stream_linear(x[rows], packed, Fusion(norm, epilogue, added, bias), workspace, out)

    everything = torch.arange(16, device=DEVICE)
    full = run(everything)
    wanted = packed_linear(x, packed, norm, epilogue, residual, bias)
    error = float((full - wanted).norm() / wanted.norm())
    assert error < (NORMED_BOUND if normed else BOUND)
    for count in range(1, 17):
        for rows in (everything[:count], torch.randperm(16, device=DEVICE)[:count]):
            assert torch.equal(run(rows), full[rows]), f"{count} rows"
    assert not workspace.tickets.any() and not workspace.ready.any()


@pytest.mark.parametrize(("form", "adds"), [("nvfp4", True), ("fp8", True), ("nvfp4", False)])
def test_prepared_rows_are_those_of_a_norm(form: str, adds: bool) -> None:
    """One kernel leaves its result ready for a norm, the next one norms its sums: near the plain way, rows alone."""
    torch.manual_seed(1)
    make = _nvfp4 if form == "nvfp4" else lambda rows, columns: random_packed_fp8(rows, columns, DEVICE, 5)
    first, second, workspace = make(5120, 6144), make(1000, 5120), _workspace()
    norm = Norm(torch.randn(5120, device=DEVICE), 1e-6, True)
    x = torch.randn(16, 6144, device=DEVICE).bfloat16()
    residual = torch.randn(16, 5120, device=DEVICE).bfloat16()

    def added(rows: Tensor) -> Fusion:
        return Fusion(epilogue="residual", residual=residual[rows]) if adds else Fusion()

    def run(rows: Tensor) -> tuple[Tensor, Tensor]:
        following = Prepared.empty(norm, len(rows), 5120, DEVICE)
        for part in (following.weighted, following.squares, workspace.partials):
            part.fill_(float("nan"))
        stream = torch.full((len(rows), 5120), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        stream_linear(x[rows], first, dataclasses.replace(added(rows), following=following), workspace, stream)
        out = torch.full((len(rows), 1000), float("nan"), device=DEVICE)
        return stream, stream_linear(stream, second, Fusion(prepared=following), workspace, out)

    everything = torch.arange(16, device=DEVICE)
    stream, full = run(everything)
    plain = stream_linear(x, first, added(everything), workspace, torch.empty_like(stream))
    assert torch.equal(stream, plain)
    wanted = packed_linear(stream, second, norm)
    assert float((full - wanted).norm() / wanted.norm()) < 4e-3  # both round their operand to bf16, at another place
    for count in range(1, 17):
        for rows in (everything[:count], torch.randperm(16, device=DEVICE)[:count]):
            assert torch.equal(run(rows)[1], full[rows]), f"{count} rows"
    assert not workspace.tickets.any()


@pytest.mark.parametrize("rows", [1, 5, 8, 16])
def test_overlapping_chain_has_the_bits_of_a_plain_one(rows: int) -> None:
    torch.manual_seed(rows)
    workspace = _workspace()
    packs = [_nvfp4(16384, 5120), _nvfp4(5120, 6144), _nvfp4(34816, 5120, gated=True), _nvfp4(5120, 17408)]
    norm = Norm(torch.rand(5120, device=DEVICE).bfloat16(), 1e-6, True)
    first = torch.randn(rows, 5120, device=DEVICE).bfloat16()

    def chain(space: StreamWorkspace) -> Tensor:
        stream = first.clone()
        wide = torch.full((rows, 16384), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        middle = torch.full((rows, 17408), float("nan"), device=DEVICE, dtype=torch.bfloat16)
        for _ in range(12):
            stream_linear(stream, packs[0], Fusion(norm), space, wide)
            stream_linear(wide[:, :6144], packs[1], Fusion(None, "residual", stream), space, stream)
            stream_linear(stream, packs[2], Fusion(norm, "silu_mul"), space, middle)
            stream_linear(middle, packs[3], Fusion(None, "residual", stream), space, stream)
        return stream

    # A card said to have room for more blocks than a launch gives it gets launches that do not overlap (tilings.py).
    # Blocks, and so bits, are the same; half of the room would be one block for each multiprocessor, and other sums.
    apart = dataclasses.replace(
        workspace, shared_bytes_per_multiprocessor=2 * workspace.shared_bytes_per_multiprocessor
    )
    here, there = (
        tiling_for(TILE_ROWS, True, space.shared_bytes_per_multiprocessor, space.modern) for space in (workspace, apart)
    )
    assert not there.dependent_launch and there.blocks_per_multiprocessor == here.blocks_per_multiprocessor
    wanted = chain(apart)
    assert torch.isfinite(wanted).all()
    for _ in range(10):
        assert torch.equal(chain(workspace), wanted)


@pytest.mark.parametrize("name", ["out", "gate_up", "odd", "low tiles", "fp8 rows", "fp8 blocks gated"])
def test_unpacking_gives_the_bits_of_the_specification(name: str) -> None:
    torch.manual_seed(0)
    packed = CASES[name][0]()
    out = torch.full(packed.shape, float("nan"), device=DEVICE, dtype=torch.bfloat16)
    assert torch.equal(unpack_bfloat16(packed, out), packed_weight(packed).bfloat16())

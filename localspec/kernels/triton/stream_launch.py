"""Checks and launch of the weight-stream kernel, shared by the NVFP4 and FP8 entries.

Knows shapes, strides and the workspace. Knows no bit formats beyond what each entry hands over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from localspec.kernels.fp8_pack import PackedFp8
from localspec.kernels.nvfp4_pack import PackedNvfp4
from localspec.kernels.ops import Epilogue, Norm
from localspec.kernels.triton.elementwise import rms_norm
from localspec.kernels.triton.tilings import BLOCKS_PER_MULTIPROCESSOR, TILE_ROWS, Tiling, tiling_for
from localspec.kernels.triton.weight_decode import (
    FP8_CONSTRAINTS,
    NVFP4_CONSTRAINTS,
    fp8_decode_asm,
    nvfp4_decode_asm,
)
from localspec.kernels.triton.weight_stream import weight_stream_kernel

MAX_ROWS = 16
MAX_FUSED_NORM_COLUMNS = 8192


@dataclass(frozen=True)
class StreamWorkspace:
    """Scratch that all weight-stream launches of one stream share; each kernel leaves `tickets` and `ready` at zero.

    partials: float32; tickets: [tiles] int32; ready: [2] int32; normed: [16, K] bfloat16 for normalised rows;
    modern: sm_90 and later (bf16x2 multiply, dependent launch).
    """

    partials: Tensor
    tickets: Tensor
    ready: Tensor
    normed: Tensor
    multiprocessors: int
    shared_bytes_per_multiprocessor: int
    modern: bool

    @staticmethod
    def create(device: torch.device, max_tiles: int, max_columns: int) -> StreamWorkspace:
        """max_tiles: most tiles of any weight that will be run; max_columns: largest K."""
        properties = torch.cuda.get_device_properties(device)
        tile_rows = properties.multi_processor_count * BLOCKS_PER_MULTIPROCESSOR * TILE_ROWS
        return StreamWorkspace(
            partials=torch.empty(tile_rows * MAX_ROWS, dtype=torch.float32, device=device),
            tickets=torch.zeros(max_tiles, dtype=torch.int32, device=device),
            ready=torch.zeros(2, dtype=torch.int32, device=device),
            normed=torch.empty(MAX_ROWS, max_columns, dtype=torch.bfloat16, device=device),
            multiprocessors=properties.multi_processor_count,
            shared_bytes_per_multiprocessor=properties.shared_memory_per_multiprocessor,
            modern=properties.major >= 9,
        )


@dataclass(frozen=True)
class Prepared:
    """Rows made ready for a norm by the kernel that made them; 1 / rms is left to the matmul that norms them.

    weighted: [R, K] bfloat16, the rows times the norm's weight; squares: [tiles of K, 16] float32, sums of squares of
    the rows themselves.
    """

    norm: Norm
    weighted: Tensor
    squares: Tensor

    @staticmethod
    def empty(norm: Norm, rows: int, columns: int, device: torch.device) -> Prepared:
        """To be filled by `stream_linear`."""
        weighted = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        return Prepared(norm, weighted, torch.empty(-(-columns // TILE_ROWS), MAX_ROWS, device=device))


@dataclass(frozen=True)
class Fusion:
    """What surrounds the matmul: see `Ops.linear` for the meaning of each field.

    prepared: x for its norm, instead of `norm`; following: filled with the result for the norm that it meets next.
    """

    norm: Norm | None = None
    epilogue: Epilogue = "none"
    residual: Tensor | None = None
    bias: Tensor | None = None
    prepared: Prepared | None = None
    following: Prepared | None = None


def stream_linear(
    x: Tensor,
    packed: PackedNvfp4 | PackedFp8,
    fusion: Fusion,
    workspace: StreamWorkspace,
    out: Tensor,
    tiling: Tiling | None = None,
) -> Tensor:
    """x [R <= 16, K] bfloat16, with a norm also float32; out [R, N or N/2] bfloat16 or float32: filled and returned.

    Raises ValueError for shapes, strides or dtypes that the kernel does not read.
    """
    norm, prepared, following = fusion.norm, fusion.prepared, fusion.following
    if prepared is not None:
        x, norm = prepared.weighted, None
    nvfp4 = isinstance(packed, PackedNvfp4)
    group_scale = None if isinstance(packed, PackedNvfp4) else packed.group_scale
    # A long row, or block scales beside 16 rows of sums, would spill: there the norm is a launch of its own.
    if norm is not None and (x.shape[1] > MAX_FUSED_NORM_COLUMNS or group_scale is not None):
        x, norm = rms_norm(x, norm).to(torch.bfloat16), None
    _check(x, packed, norm, fusion, out)
    modern = workspace.modern
    tiling = tiling or tiling_for(packed.tile_rows, nvfp4, workspace.shared_bytes_per_multiprocessor, modern)
    blocks = min(packed.tiles * packed.pairs, workspace.multiprocessors * tiling.blocks_per_multiprocessor)
    row_slots = 8 if x.shape[0] <= 8 else 16
    _check_workspace(packed, workspace, blocks * packed.tile_rows * row_slots)
    residual = out if fusion.residual is None else fusion.residual
    step = 8 if not (out.shape[1] | out.stride(0) | residual.stride(0)) % 8 else 1
    unread = packed.row_scale
    used_norm = norm if prepared is None else prepared.norm
    weight_stream_kernel[(blocks,)](
        packed.data, packed.row_scale, unread if group_scale is None else group_scale,
        unread if fusion.bias is None else fusion.bias, x, out, residual, unread if norm is None else norm.weight,
        unread if prepared is None else prepared.squares, unread if following is None else following.norm.weight,
        out if following is None else following.weighted, unread if following is None else following.squares,
        workspace.normed, workspace.ready, workspace.partials, workspace.tickets,
        x.shape[0], x.shape[1] // 8, out.shape[1] // step, packed.tiles, packed.pairs,
        x.stride(0) // 8, out.stride(0) // step, residual.stride(0) // step,
        0.0 if used_norm is None else used_norm.eps,
        BN=packed.tile_rows, MP=row_slots, DEPTH=tiling.depth, NW=tiling.warps, NVFP4=nvfp4,
        BLOCK_SCALE=group_scale is not None, EPILOGUE=fusion.epilogue, HAS_BIAS=fusion.bias is not None,
        NORM_BLOCK=0 if norm is None else 1 << (x.shape[1] - 1).bit_length(),
        PLUS_ONE=norm is not None and norm.plus_one,
        SQUARES=0 if prepared is None else max(32, triton.next_power_of_2(prepared.squares.shape[0])),
        FOLLOWING=0 if following is None else 1 + following.norm.plus_one, STEP=step,
        WIDE=tiling.wide_results and out.dtype == torch.bfloat16, PDL=tiling.dependent_launch,
        ASM_EVEN=nvfp4_decode_asm(False, modern) if nvfp4 else fp8_decode_asm(modern),
        ASM_ODD=nvfp4_decode_asm(True, modern) if nvfp4 else fp8_decode_asm(modern),
        CONSTRAINTS=NVFP4_CONSTRAINTS if nvfp4 else FP8_CONSTRAINTS,
        num_warps=tiling.warps, maxnreg=tiling.max_registers, enable_fp_fusion=False,
        launch_pdl=tiling.dependent_launch,
    )  # fmt: skip
    return out


def _check(x: Tensor, packed: PackedNvfp4 | PackedFp8, norm: Norm | None, fusion: Fusion, out: Tensor) -> None:
    rows, columns = x.shape
    n, k = packed.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"the small-M kernel takes 1 to {MAX_ROWS} rows, got {rows}")
    if columns != k or k % 8:
        raise ValueError(f"x has {columns} columns, the weight {k}; they must agree and be a multiple of 8")
    if norm is None and x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16, got {x.dtype}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        raise ValueError("rows of x must be contiguous and start at multiples of 16 bytes")
    gated = fusion.epilogue == "silu_mul"
    if gated != packed.gated:
        raise ValueError("silu_mul needs a weight packed as gate and up, and such a weight needs silu_mul")
    if gated and fusion.bias is not None:
        raise ValueError("silu_mul takes no bias")
    expected = (rows, n // 2 if gated else n)
    if tuple(out.shape) != expected or out.stride(1) != 1:
        raise ValueError(f"out must be {expected} with contiguous rows, got {tuple(out.shape)}")
    prepared, following = fusion.prepared, fusion.following
    if following is not None and (gated or packed.tile_rows != TILE_ROWS):
        raise ValueError(f"only a weight without gates in tiles of {TILE_ROWS} rows prepares what follows")
    if prepared is not None and packed.tile_rows != TILE_ROWS:
        raise ValueError(f"only a weight in tiles of {TILE_ROWS} rows takes prepared rows")
    for each, size in ((prepared, (rows, k)), (following, expected)):
        if each is not None and (tuple(each.weighted.shape) != size or len(each.squares) != -(-size[1] // TILE_ROWS)):
            raise ValueError(f"prepared rows must be {size}, got {tuple(each.weighted.shape)}")
    if (fusion.residual is not None) != (fusion.epilogue == "residual"):
        raise ValueError("a residual goes with the epilogue 'residual' and only with it")
    if fusion.residual is not None and (tuple(fusion.residual.shape) != expected or fusion.residual.stride(1) != 1):
        raise ValueError(f"residual must be {expected} with contiguous rows, got {tuple(fusion.residual.shape)}")


def _check_workspace(packed: PackedNvfp4 | PackedFp8, workspace: StreamWorkspace, partial_floats: int) -> None:
    if (
        packed.tiles > workspace.tickets.numel()
        or partial_floats > workspace.partials.numel()
        or packed.shape[1] > workspace.normed.shape[1]
    ):
        raise ValueError(
            f"workspace holds {workspace.tickets.numel()} tiles, {workspace.partials.numel()} partial sums and "
            f"{workspace.normed.shape[1]} columns; this weight needs {packed.tiles}, {partial_floats} and "
            f"{packed.shape[1]}"
        )

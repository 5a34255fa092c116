"""Checks and launch of the weight-stream kernel, shared by the NVFP4 and FP8 entries.

Knows shapes, strides and the workspace. Knows no bit formats beyond what each entry hands over.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.kernels.fp8_pack import PackedFp8
from localspec.kernels.nvfp4_pack import PackedNvfp4
from localspec.kernels.ops import Epilogue, Norm
from localspec.kernels.triton.row_norm import row_norm_kernel
from localspec.kernels.triton.tilings import Tiling, tiling_for
from localspec.kernels.triton.weight_stream import (
    FP8_CONSTRAINTS,
    NVFP4_CONSTRAINTS,
    PREFETCH_ASM,
    fp8_decode_asm,
    nvfp4_decode_asm,
    weight_stream_kernel,
)

MAX_ROWS = 16
MAX_TILE_ROWS_PER_MULTIPROCESSOR = 1024  # tile height times blocks per multiprocessor, over all tilings


@dataclass(frozen=True)
class StreamWorkspace:
    """Scratch that all weight-stream launches of one stream share; each kernel leaves `tickets` at zero.

    partials: float32; tickets: int32, zero; normed: [16, K] bfloat16 for normalised rows; dependent_launch: whether
    kernels overlap their start with the end of the one before (sm_90 and later).
    """

    partials: Tensor
    tickets: Tensor
    normed: Tensor
    multiprocessors: int
    shared_limit_bytes: int
    native_bf16_multiply: bool
    dependent_launch: int
    near_end: Tensor
    poll: bool = False
    ahead_units: int = 0

    @staticmethod
    def create(device: torch.device, max_tiles: int, max_columns: int) -> StreamWorkspace:
        """max_tiles: most tiles of any weight that will be run; max_columns: largest K."""
        properties = torch.cuda.get_device_properties(device)
        tile_rows = properties.multi_processor_count * MAX_TILE_ROWS_PER_MULTIPROCESSOR
        modern = properties.major >= 9
        return StreamWorkspace(
            partials=torch.empty(2 * tile_rows * MAX_ROWS, dtype=torch.float32, device=device),
            tickets=torch.zeros(max_tiles, dtype=torch.int32, device=device),
            normed=torch.empty(MAX_ROWS, max_columns, dtype=torch.bfloat16, device=device),
            multiprocessors=properties.multi_processor_count,
            shared_limit_bytes=properties.shared_memory_per_block_optin,
            native_bf16_multiply=modern,
            dependent_launch=2 if modern else 0,
            near_end=torch.zeros(2, dtype=torch.int32, device=device),
        )


@dataclass(frozen=True)
class Fusion:
    """What surrounds the matmul: see `Ops.linear` for the meaning of each field."""

    norm: Norm | None = None
    epilogue: Epilogue = "none"
    residual: Tensor | None = None
    bias: Tensor | None = None


def normalise_rows(x: Tensor, norm: Norm, workspace: StreamWorkspace) -> Tensor:
    """x [R, K] bfloat16 or float32 -> the first R rows of the workspace's bfloat16 rows."""
    rows, columns = x.shape
    out = workspace.normed[:rows, :columns]
    row_norm_kernel[(rows,)](
        x, norm.weight, out, columns, x.stride(0), out.stride(0), norm.eps,
        BLOCK=2048, PLUS_ONE=norm.plus_one, PDL=bool(workspace.dependent_launch),
        num_warps=4, num_stages=1, enable_fp_fusion=False, launch_pdl=bool(workspace.dependent_launch),
    )  # fmt: skip
    return out


def stream_linear(
    x: Tensor,
    packed: PackedNvfp4 | PackedFp8,
    fusion: Fusion,
    workspace: StreamWorkspace,
    out: Tensor,
    tiling: Tiling | None = None,
    parity: int = 0,
) -> Tensor:
    """x [R <= 16, K] bfloat16, out [R, N or N/2] bfloat16 or float32: filled and returned.

    Raises ValueError for shapes, strides or dtypes that the kernel does not read.
    """
    _check(x, packed, fusion, out)
    if fusion.norm is not None:
        x = normalise_rows(x, fusion.norm, workspace)
    row_slots = 8 if x.shape[0] <= 8 else 16
    tiling = tiling or tiling_for(packed.tile_rows, row_slots, workspace.shared_limit_bytes)
    units = packed.tiles * packed.pairs
    blocks = min(units, workspace.multiprocessors * tiling.blocks_per_multiprocessor)
    if tiling.whole_tiles:
        blocks = packed.tiles
    else:
        _check_workspace(packed, workspace, blocks * packed.tile_rows * row_slots)
    nvfp4 = isinstance(packed, PackedNvfp4)
    group_scale = None if isinstance(packed, PackedNvfp4) else packed.group_scale
    native, dependent = workspace.native_bf16_multiply, workspace.dependent_launch
    residual = out if fusion.residual is None else fusion.residual
    weight_stream_kernel[(blocks,)](
        packed.data, packed.row_scale, packed.row_scale if group_scale is None else group_scale,
        packed.row_scale if fusion.bias is None else fusion.bias,
        x, out, residual, workspace.partials, workspace.tickets,
        workspace.near_end,
        x.shape[0], x.shape[1] // 8, out.shape[1], packed.tiles, packed.pairs,
        x.stride(0) // 8, out.stride(0), residual.stride(0), parity,
        BN=packed.tile_rows, MP=row_slots, DEPTH=tiling.depth, NW=tiling.warps, NVFP4=nvfp4,
        BLOCK_SCALE=group_scale is not None, EPILOGUE=fusion.epilogue, HAS_BIAS=fusion.bias is not None, PDL=int(dependent),
        POLL=workspace.poll, AHEAD=workspace.ahead_units,
        ASM_EVEN=nvfp4_decode_asm(False, native) if nvfp4 else fp8_decode_asm(native),
        ASM_ODD=nvfp4_decode_asm(True, native) if nvfp4 else fp8_decode_asm(native),
        ASM_PREFETCH=PREFETCH_ASM.format(packed.tile_rows * (144 if nvfp4 else 128)),
        CONSTRAINTS=NVFP4_CONSTRAINTS if nvfp4 else FP8_CONSTRAINTS,
        num_warps=tiling.warps, maxnreg=tiling.max_registers, enable_fp_fusion=False, launch_pdl=bool(dependent),
    )  # fmt: skip
    return out


def _check(x: Tensor, packed: PackedNvfp4 | PackedFp8, fusion: Fusion, out: Tensor) -> None:
    rows, columns = x.shape
    n, k = packed.shape
    if not 1 <= rows <= MAX_ROWS:
        raise ValueError(f"the small-M kernel takes 1 to {MAX_ROWS} rows, got {rows}")
    if columns != k or k % 8:
        raise ValueError(f"x has {columns} columns, the weight {k}; they must agree and be a multiple of 8")
    if fusion.norm is None and x.dtype != torch.bfloat16:
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
    if (fusion.residual is not None) != (fusion.epilogue == "residual"):
        raise ValueError("a residual goes with the epilogue 'residual' and only with it")
    if fusion.residual is not None and (tuple(fusion.residual.shape) != expected or fusion.residual.stride(1) != 1):
        raise ValueError(f"residual must be {expected} with contiguous rows, got {tuple(fusion.residual.shape)}")


def _check_workspace(packed: PackedNvfp4 | PackedFp8, workspace: StreamWorkspace, partial_floats: int) -> None:
    if packed.tiles > workspace.tickets.numel() or partial_floats > workspace.partials.numel():
        raise ValueError(
            f"workspace holds {workspace.tickets.numel()} tiles and {workspace.partials.numel()} partial sums; "
            f"this weight needs {packed.tiles} and {partial_floats}"
        )

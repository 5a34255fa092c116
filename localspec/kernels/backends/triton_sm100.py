"""The back end for NVIDIA cards that multiply FP4 (compute capability 10, 12): that of sm_80, and a switch for prompts.

With `fp4_prompts` rows of prompts are quantised as their weights are and multiplied as FP4 (W4A4). That is experimental
and off unless it is asked for: the kernels compile for these cards and were run on none. Steps of up to 16 rows, and
so every token that is drafted or proved, are computed as before. GDN's gates, kept as sums of NVFP4 matrices, meet
rows in FP4 like every other weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localspec.kernels.backends import triton_sm80
from localspec.kernels.compat import triton_version
from localspec.kernels.fp8_pack import PackedFp8
from localspec.kernels.nvfp4_pack import BLOCK, PackedNvfp4
from localspec.kernels.ops import Norm
from localspec.kernels.triton import elementwise
from localspec.kernels.triton.cards import multiprocessors
from localspec.kernels.triton.dense_linear import DenseMatrix
from localspec.kernels.triton.fp4_prompts import PlainNvfp4, fp4_matmul, plain_codes, quantised_rows
from localspec.kernels.triton.unpack_weights import tile_slices

PRIORITY = triton_sm80.PRIORITY + 1
OLDEST_TRITON = {10: (3, 8), 12: (3, 6)}
"""By capability. On 10 products of earlier versions differ from run to run (Triton issues 9871 and 10590)."""


def supports(device: str) -> str | None:
    """Reason why this back end cannot run on `device`, or None."""
    reason = triton_sm80.supports(device)
    if reason is not None:
        return reason
    major = torch.cuda.get_device_capability(torch.device(device))[0]
    if major not in OLDEST_TRITON:
        return f"cards of compute capability 10 and 12 multiply FP4, this one has {major}"
    if triton_version() < OLDEST_TRITON[major]:
        return f"for products in FP4 a card of compute capability {major} needs Triton {OLDEST_TRITON[major]} or later"
    return None


def create(device: str) -> Sm100Ops:
    """The back end on a card."""
    index = torch.device(device).index
    return Sm100Ops(torch.device("cuda", torch.cuda.current_device() if index is None else index))


class Sm100Ops(triton_sm80.TritonOps):
    """Meets `Ops` and `Fp4Prompts`."""

    name = "triton_sm100"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._fp4_prompts = False

    @property
    def fp4_prompts(self) -> bool:
        """Whether rows of prompts are multiplied as FP4."""
        return self._fp4_prompts

    @fp4_prompts.setter
    def fp4_prompts(self, wanted: bool) -> None:
        self._fp4_prompts = wanted
        # What one way has computed is not taken for the other's.
        self.arithmetic = triton_sm80.TritonOps.arithmetic + (", prompts in FP4" if wanted else "")

    def _many_rows(
        self,
        x: Tensor,
        weight: PackedNvfp4 | PackedFp8 | DenseMatrix,
        norm: Norm | None,
        residual: Tensor | None,
        bias: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """As with cuBLAS; a residual is added before the one rounding."""
        if not self.fp4_prompts or not isinstance(weight, PackedNvfp4):
            return super()._many_rows(x, weight, norm, residual, bias, dtype)
        rows = self._operand(x, norm)
        if bias is None and residual is None and (weight.gated or dtype == torch.bfloat16):
            return self._by_slices(rows, weight, tile_slices(weight, multiprocessors(self.device)), dtype)
        out = self._fp4_product(rows, weight, torch.float32)
        for added in (bias, residual):
            if added is not None:
                out += added
        if weight.gated:
            gate, up = out.to(torch.bfloat16).chunk(2, dim=1)
            out = elementwise.gated(up, gate, silu=True)
        return out.to(dtype)

    def _product(self, rows: Tensor, weight: PackedNvfp4 | PackedFp8) -> Tensor:
        """rows [R, K] bf16 -> [R, N] bf16."""
        if not self.fp4_prompts or not isinstance(weight, PackedNvfp4):
            return super()._product(rows, weight)
        return self._fp4_product(rows, weight, torch.bfloat16)

    def _fp4_product(self, rows: Tensor, weight: PackedNvfp4, dtype: torch.dtype) -> Tensor:
        """The same, both sides in FP4; the weight lies unpacked where it would lie as bf16."""
        n, k = weight.shape
        room = self._room(n * k).view(torch.uint8)
        codes, scales = room[: n * k // 2].view(n, k // 2), room[n * k // 2 :][: n * k // BLOCK].view(n, k // BLOCK)
        row_scale = torch.empty(n, dtype=torch.float32, device=self.device)
        plain = plain_codes(weight, PlainNvfp4(codes, scales, row_scale))
        out = torch.empty(rows.shape[0], n, dtype=dtype, device=self.device)
        return fp4_matmul(quantised_rows(rows), plain, out)

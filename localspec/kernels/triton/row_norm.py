"""RMS norm of up to 16 rows, one block a row: the prologue of the weight-stream kernels.

Knows one row at a time, so a row's bits cannot depend on the others. It is a launch of its own because every block of
the matmul would otherwise repeat the normalisation of all of x (27% more instructions a weight); with programmatic
dependent launch the matmul already fills its ring while this one runs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from localspec.kernels.compat import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["K", "x_stride", "out_stride"])
def row_norm_kernel(
    x_ptr, w_ptr, out_ptr, K, x_stride, out_stride, eps,
    BLOCK: tl.constexpr, PLUS_ONE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x [rows, K], w [K] -> out [rows, K]: x * rsqrt(mean(x^2) + eps) * w, float32 inside. Grid: (rows,)."""
    # Small enough (4 warps, few registers) to find a place beside the matmuls before and after it.
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, K, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + offsets, mask=offsets < K, other=0.0).to(tl.float32)
        squares += x * x
    scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    for start in range(0, K, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        mask = offsets < K
        x = tl.load(x_ptr + row * x_stride + offsets, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(w_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        if PLUS_ONE:
            weight = weight + 1.0
        tl.store(out_ptr + row * out_stride + offsets, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)

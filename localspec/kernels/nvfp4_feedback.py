"""NVFP4 with error feedback: what rounding one column loses, the columns after it make up for.

Source: GPTQ (arXiv 2210.17323), in the order of the columns, with block scales chosen anew for each block of 16 from
the weights as they are by then. Knows matrices and second moments; does not know where the moments come from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import (
    BLOCK,
    Nvfp4Weight,
    e2m1_codes,
    e2m1_values,
    nvfp4_tensor_scale,
    quantise_nvfp4,
)

DAMPING = 0.01
"""Share of the mean diagonal that is added to it, so that columns which the text never moved stay solvable."""


@dataclass(frozen=True)
class Feedback:
    """What is known of the inputs of a matrix. importance: [K] mean squares; factor: [K, K] upper triangular U with
    U^T U = (second moments + damping)^-1; both float32 on one device."""

    importance: Tensor
    factor: Tensor


def feedback_of(moments: Tensor) -> Feedback:
    """moments [K, K] float32: the mean of x x^T over the inputs. Raises ValueError for no second moments."""
    damping = DAMPING * moments.diagonal().mean()
    damped = moments + (damping if damping > 0 else 1.0) * torch.eye(len(moments), device=moments.device)
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        factor = torch.linalg.cholesky(inverse, upper=True)
    except RuntimeError:  # the class that torch.linalg raises is a RuntimeError
        raise ValueError("moments are not symmetric and positive; take them from more text") from None
    return Feedback(moments.diagonal().clone(), factor)


def quantise_nvfp4_with_feedback(weight: Tensor, feedback: Feedback, tensor_scale: Tensor | None = None) -> Nvfp4Weight:
    """weight [N, K] float: least squares of the output over the inputs that `feedback` knows, column by column.

    `tensor_scale` as in `quantise_nvfp4`. Raises ValueError for shapes that do not fit or values that are not finite.
    """
    rows, columns = weight.shape
    if columns % BLOCK or feedback.factor.shape != (columns, columns):
        raise ValueError(
            f"feedback over {len(feedback.factor)} columns does not fit a matrix {tuple(weight.shape)} of whole blocks"
        )
    work = weight.to(torch.float32).clone()
    scale = nvfp4_tensor_scale(work.abs().amax()) if tensor_scale is None else tensor_scale
    parts: list[Nvfp4Weight] = []
    for begin in range(0, columns, BLOCK):
        block = slice(begin, begin + BLOCK)
        factor = feedback.factor[block]
        part, errors = _quantise_block(work[:, block], feedback.importance[block], factor[:, block], scale)
        parts.append(part)
        work[:, begin + BLOCK :] -= errors @ factor[:, begin + BLOCK :]
    return Nvfp4Weight(
        codes=torch.cat([part.codes for part in parts], dim=1),
        block_scale=torch.cat([part.block_scale.view(torch.uint8) for part in parts], dim=1).view(torch.float8_e4m3fn),
        row_scale=scale.expand(rows).contiguous(),
    )


def _quantise_block(values: Tensor, importance: Tensor, factor: Tensor, scale: Tensor) -> tuple[Nvfp4Weight, Tensor]:
    """One block of columns [N, 16]: the scales, then each column. Returns it and the errors to feed on [N, 16]."""
    first = quantise_nvfp4(values, "mse", importance, scale)
    block_scale = (first.block_scale.to(torch.float32) * scale)[:, 0]
    work, errors = values.clone(), torch.empty_like(values)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    for column in range(BLOCK):
        code = e2m1_codes(work[:, column] / block_scale)
        codes[:, column] = code
        errors[:, column] = (work[:, column] - e2m1_values(code) * block_scale) / factor[column, column]
        work[:, column + 1 :] -= errors[:, column, None] * factor[column, None, column + 1 :]
    packed = codes.reshape(len(codes), BLOCK // 2, 2)
    return Nvfp4Weight(packed[..., 0] | (packed[..., 1] << 4), first.block_scale, first.row_scale), errors

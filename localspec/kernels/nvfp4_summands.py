"""A matrix as a sum of NVFP4 weights: each holds what those before it left.

For small projections kept in bf16 beside large NVFP4 ones (the two gates of Gated DeltaNet): stacked with those they
cost 1.7 bytes a value and no launch of their own, where a bf16 product costs three. Knows nothing of layers.
"""

from __future__ import annotations

from torch import Tensor

from localspec.kernels.nvfp4_pack import Nvfp4Weight, dequantise_nvfp4, nvfp4_without_values, quantise_nvfp4

PARTS = 3
"""Each brings about 20 dB; three leave less than rounding to bf16 does."""


def nvfp4_summands(matrix: Tensor) -> tuple[Nvfp4Weight, ...]:
    """matrix: [N, K] float32, K a multiple of 16 -> PARTS weights of that shape. Raises ValueError for values that are
    not finite. A matrix without values (on the meta device) gives such weights."""
    if matrix.is_meta:
        return (nvfp4_without_values(*matrix.shape),) * PARTS
    rest, parts = matrix, []
    for _ in range(PARTS):
        parts.append(quantise_nvfp4(rest))
        rest = rest - dequantise_nvfp4(parts[-1])
    return tuple(parts)

"""Random weights of given shapes in memory, for the small instances that tests run."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from localspec.kernels.weights import DenseWeight, LogicalWeight


class RandomCheckpoint:
    """Meets `formats.Checkpoint`: the same shapes and seed give the same weights. Norm weights lie around 1."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], seed: int = 0, device: str | torch.device = "cpu"
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator)
            scaled = 1.0 + 0.2 * values if "norm" in name else values * (1.2 / shape[-1] ** 0.5)
            self.tensors[name] = scaled.to(device)
        self.fingerprint = f"random-{seed}"
        self._read: set[str] = set()

    def names(self) -> tuple[str, ...]:
        """Every tensor."""
        return tuple(self.tensors)

    def has(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self.tensors

    def weight(self, name: str) -> LogicalWeight:
        """The matrix. Raises ValueError if there is none of that name."""
        return DenseWeight(self.vector(name))

    def vector(self, name: str) -> Tensor:
        """The tensor. Raises ValueError if there is none of that name."""
        if name not in self.tensors:
            raise ValueError(f"the checkpoint holds no tensor {name}")
        self._read.add(name)
        return self.tensors[name]

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Raise ValueError naming tensors that were not read."""
        unread = [name for name in self.tensors if name not in self._read and not name.startswith(ignore)]
        if unread:
            raise ValueError(f"the drafter uses {len(unread)} stored tensors nowhere: {', '.join(sorted(unread))}")


def attention_shapes(prefix: str, widths: tuple[int, int, int], output: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the projections under `prefix`. widths: input, query and key width; output: o_proj's rows."""
    source, query, key = widths
    return {
        f"{prefix}q_proj.weight": (query, source),
        f"{prefix}k_proj.weight": (key, source),
        f"{prefix}v_proj.weight": (key, source),
        f"{prefix}o_proj.weight": (output, query),
    }


def mlp_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a gated MLP under `prefix`."""
    return {
        f"{prefix}gate_proj.weight": (inner, hidden),
        f"{prefix}up_proj.weight": (inner, hidden),
        f"{prefix}down_proj.weight": (hidden, inner),
    }

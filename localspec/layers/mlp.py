"""The gated feed-forward part of a layer: down(silu(gate(h)) * up(h)), with its input norm and the residual."""

from __future__ import annotations

from torch import Tensor

from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops
from localspec.kernels.weights import LogicalWeight
from localspec.layers.linear import check_shape


class GatedMlp:
    """Weights under `prefix` ("model.layers.0.mlp."): gate_proj, up_proj, down_proj, without biases."""

    def __init__(self, sizes: tuple[int, int], input_norm: Norm, ops: Ops, checkpoint: Checkpoint, prefix: str) -> None:
        """sizes: hidden and intermediate. Raises ValueError for what is missing or has another shape."""
        hidden, inner = sizes

        def weight(name: str, shape: tuple[int, int]) -> LogicalWeight:
            return check_shape(checkpoint.weight(f"{prefix}{name}.weight"), f"{prefix}{name}.weight", shape)

        self.input_norm = input_norm
        gate_up = [weight("gate_proj", (inner, hidden)), weight("up_proj", (inner, hidden))]
        # Gate and up of different forms cannot share a pass; they are then multiplied apart.
        together = type(gate_up[0]) is type(gate_up[1])
        self.gate_up = [ops.pack(gate_up, gated=True)] if together else [ops.pack([each]) for each in gate_up]
        self.down = ops.pack([weight("down_proj", (hidden, inner))])
        self.read_bytes = sum(each.read_bytes for each in self.gate_up) + self.down.read_bytes

    def forward(self, ops: Ops, x: Tensor, then: Norm | None = None) -> Tensor:
        """Residual stream x [R, D] -> x + mlp(norm(x)) [R, D]. `then`: the norm that the result meets next."""
        if len(self.gate_up) == 1:
            inner = ops.linear(x, self.gate_up[0], norm=self.input_norm, epilogue="silu_mul")
        else:
            gate, up = (ops.linear(x, weight, norm=self.input_norm) for weight in self.gate_up)
            inner = ops.silu_mul(gate, up)
        return ops.linear(inner, self.down, epilogue="residual", residual=x, then=then)

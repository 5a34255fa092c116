"""The Gated DeltaNet mixer of a layer: projections around `ops.gdn`, and the state it keeps for each sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.cache_spec import PlaneSpec, StateSpec
from localspec.core.records import MAX_ROWS
from localspec.core.state import Cache
from localspec.formats import Checkpoint
from localspec.kernels.ops import GdnInputs, GdnState, GdnWeights, Norm, Ops
from localspec.layers.linear import check_shape, load_vector, pack_projections
from localspec.layers.step import LayerStep


@dataclass(frozen=True)
class DeltaNetShape:
    """Sizes that a config settles. `conv_taps` counts the current column."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_taps: int
    norm_eps: float

    @property
    def value_width(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width


class DeltaNet:
    """Mixer of one layer; its states are "gdn.<layer>.<part>" for the parts of `GdnState`."""

    planes: tuple[PlaneSpec, ...] = ()

    def __init__(
        self, shape: DeltaNetShape, layer: int, input_norm: Norm, ops: Ops, checkpoint: Checkpoint, prefix: str
    ) -> None:
        """Reads the weights under `prefix` ("model.layers.0.linear_attn."). Raises ValueError for what is missing."""
        self.input_norm, self.name = input_norm, f"gdn.{layer}"
        heads = shape.num_value_heads
        rows = {"qkv": shape.conv_width, "z": shape.value_width, "a": heads, "b": heads}
        qkv, z, a, b = (
            check_shape(checkpoint.weight(name), name, (count, shape.hidden_size))
            for name, count in ((f"{prefix}in_proj_{part}.weight", count) for part, count in rows.items())
        )
        # Two gates of a few rows should not cost passes of their own.
        gates = (ops.summands(a, beside=z), ops.summands(b, beside=z))
        self.gate_parts = len(gates[0])
        self.inputs = pack_projections(ops, (qkv, z, *gates[0], *gates[1]))
        output = checkpoint.weight(f"{prefix}out_proj.weight")
        self.output = ops.pack(
            [check_shape(output, f"{prefix}out_proj.weight", (shape.hidden_size, shape.value_width))]
        )
        conv = load_vector(ops, checkpoint, f"{prefix}conv1d.weight", (shape.conv_width, 1, shape.conv_taps))
        self.weights = GdnWeights(
            conv=conv.squeeze(1).contiguous(),
            a_log=load_vector(ops, checkpoint, f"{prefix}A_log", (heads,)),
            dt_bias=load_vector(ops, checkpoint, f"{prefix}dt_bias", (heads,)),
            norm=load_vector(ops, checkpoint, f"{prefix}norm.weight", (shape.value_head_dim,)),
            eps=shape.norm_eps,
            num_key_heads=shape.num_key_heads,
            num_value_heads=heads,
            key_head_dim=shape.key_head_dim,
            value_head_dim=shape.value_head_dim,
        )
        self.states = _states(self.name, shape, str(ops.activation_dtype).removeprefix("torch."))
        self.read_bytes = self.inputs.read_bytes + self.output.read_bytes

    def forward(self, ops: Ops, x: Tensor, step: LayerStep, then: Norm | None = None) -> Tensor:
        """x [R, D] -> x + mixed [R, D]; a verify window is recorded, a prefill chunk is committed."""
        joined, sizes = self.inputs(ops, x, self.input_norm), self.inputs.sizes
        gate_width = self.gate_parts * sizes[2]
        qkv, z, *gates = torch.split(joined, [*sizes[:2], gate_width, gate_width], dim=1)
        a, b = (gate.view(len(gate), self.gate_parts, sizes[2]) for gate in gates)
        rows = step.rows
        places = rows.slots, rows.window_starts, rows.window_rows, rows.pending_rows
        inputs = GdnInputs(qkv, z, a, b, rows.kind, *places, rows.slot_rows_bound)
        mixed = ops.gdn(inputs, self.weights, self._state(step.cache))
        return ops.linear(mixed, self.output, epilogue="residual", residual=x, then=then)

    def fold(self, ops: Ops, cache: Cache, pending_rows: Tensor) -> None:
        """Commit the pending rows of every slot. pending_rows: [S] int64."""
        ops.gdn_fold(self._state(cache), pending_rows)

    def _state(self, cache: Cache) -> GdnState:
        parts = (
            cache.states[f"{self.name}.{part}"] for part in ("recurrent", "conv", "ring_k", "ring_u", "ring_decay")
        )
        return GdnState(*parts)


def _states(name: str, shape: DeltaNetShape, activation_dtype: str) -> tuple[StateSpec, ...]:
    heads, ring = shape.num_value_heads, MAX_ROWS
    recurrent = (heads, shape.value_head_dim, shape.key_head_dim)
    return (
        StateSpec(f"{name}.recurrent", recurrent, "float32"),
        # Saved whole although its tail is a record of the last window: after a fold the first columns are what counts.
        StateSpec(f"{name}.conv", (shape.conv_width, shape.conv_taps - 1 + ring), activation_dtype),
        StateSpec(f"{name}.ring_k", (ring, shape.num_key_heads, shape.key_head_dim), "float32", ring_rows=ring),
        StateSpec(f"{name}.ring_u", (ring, heads, shape.value_head_dim), "float32", ring_rows=ring),
        StateSpec(f"{name}.ring_decay", (ring, heads), "float32", ring_rows=ring),
    )

"""Attention with paged keys and values: grouped heads, optional biases, per-head norms and an output gate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localspec.core.cache_spec import PlaneSpec, StateSpec
from localspec.core.state import Cache
from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops, PackedWeight
from localspec.layers.kv_scales import read_kv_scales, with_kv_scales
from localspec.layers.linear import Projections, check_shape, load_projections, load_vector
from localspec.layers.step import LayerStep


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and options that a config settles. `gated`: q_proj gives (query, gate) for each head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool = False
    output_bias: bool = False
    head_norms: bool = False
    gated: bool = False
    norm_eps: float = 1e-6
    norm_plus_one: bool = False


class Attention:
    """Mixer of one layer; its planes are "k.<layer>" and "v.<layer>"."""

    states: tuple[StateSpec, ...] = ()

    def __init__(
        self,
        shape: AttentionShape,
        layer: int,
        input_norm: Norm,
        inv_freq: Tensor,
        ops: Ops,
        checkpoint: Checkpoint,
        prefix: str,
    ) -> None:
        """Reads the weights under `prefix` ("model.layers.0.self_attn."). Raises ValueError for what is missing."""
        self.shape, self.input_norm, self.inv_freq = shape, input_norm, inv_freq
        scales = read_kv_scales(ops, checkpoint, prefix)
        norm_offset = float(shape.norm_plus_one) if shape.head_norms else None
        checkpoint = with_kv_scales(checkpoint, prefix, scales, norm_offset)
        self.score_scale = shape.head_dim**-0.5 * scales.k
        dtype = str(ops.cache_dtype).removeprefix("torch.")
        kv_shape = (shape.num_kv_heads, shape.head_dim)
        self.planes: tuple[PlaneSpec, ...] = (
            PlaneSpec(f"k.{layer}", kv_shape, dtype),
            PlaneSpec(f"v.{layer}", kv_shape, dtype),
        )
        names = tuple(f"{prefix}{part}_proj" for part in ("q", "k", "v"))
        self.qkv: Projections = load_projections(ops, checkpoint, names, shape.bias)
        width = shape.num_heads * shape.head_dim
        kv_width = shape.num_kv_heads * shape.head_dim
        if self.qkv.sizes != (width * (2 if shape.gated else 1), kv_width, kv_width):
            raise ValueError(f"{prefix}q_proj, k_proj, v_proj have {self.qkv.sizes} rows; the heads ask for others")
        output = checkpoint.weight(f"{prefix}o_proj.weight")
        check_shape(output, f"{prefix}o_proj.weight", (shape.hidden_size, width))
        self.output: PackedWeight = ops.pack([output])
        self.output_bias = (
            load_vector(ops, checkpoint, f"{prefix}o_proj.bias", (shape.hidden_size,)) if shape.output_bias else None
        )
        self.q_norm = self._head_norm(ops, checkpoint, f"{prefix}q_norm.weight")
        self.k_norm = self._head_norm(ops, checkpoint, f"{prefix}k_norm.weight")
        self.read_bytes = self.qkv.read_bytes + self.output.read_bytes

    def _head_norm(self, ops: Ops, checkpoint: Checkpoint, name: str) -> Norm | None:
        if not self.shape.head_norms:
            return None
        weight = load_vector(ops, checkpoint, name, (self.shape.head_dim,))
        return Norm(weight, self.shape.norm_eps, self.shape.norm_plus_one)

    def forward(self, ops: Ops, x: Tensor, step: LayerStep) -> Tensor:
        """x [R, D] -> x + attention [R, D]; writes the rows' keys and values first."""
        shape, (k_plane, v_plane) = self.shape, self.planes
        positions = step.rows.positions
        q, gate, k, v = self._heads(ops, self.qkv(ops, x, self.input_norm), positions)
        k_pages, v_pages = step.cache.planes[k_plane.name], step.cache.planes[v_plane.name]
        ops.store_kv(k, k_pages, step.paging, positions)
        ops.store_kv(v, v_pages, step.paging, positions)
        mixed = ops.attention(q, k_pages, v_pages, step.paging, step.key_begin, step.key_end, self.score_scale)
        if gate is not None:
            mixed = ops.sigmoid_mul(mixed, gate)
        return ops.linear(mixed.flatten(1), self.output, epilogue="residual", residual=x, bias=self.output_bias)

    def _heads(self, ops: Ops, joined: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """joined [R, N] -> q [R, H, D] and k [R, Hkv, D] turned to their positions, gate [R, H, D] or None, v as k."""
        num_heads, num_kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        heads = joined.view(joined.shape[0], -1, head_dim)
        v = heads[:, -num_kv_heads:]
        if self.q_norm is None and not self.shape.gated:
            # Without norms queries and keys turn alike, in one call.
            turned = ops.norm_rope(heads[:, :-num_kv_heads], None, positions, self.inv_freq)
            return turned[:, :num_heads], None, turned[:, num_heads:], v
        q, gate = heads[:, : -2 * num_kv_heads], None
        if self.shape.gated:
            q, gate = q.view(-1, num_heads, 2, head_dim).unbind(2)
        q = ops.norm_rope(q, self.q_norm, positions, self.inv_freq)
        k = ops.norm_rope(heads[:, -2 * num_kv_heads : -num_kv_heads], self.k_norm, positions, self.inv_freq)
        return q, gate, k, v

    def fold(self, ops: Ops, cache: Cache, pending_rows: Tensor) -> None:
        """Attention keeps no recurrent state."""

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

    def forward(self, ops: Ops, x: Tensor, step: LayerStep, then: Norm | None = None) -> Tensor:
        """x [R, D] -> x + attention [R, D]; writes the rows' keys and values first."""
        q, gate, k, v = self._heads(self.qkv(ops, x, self.input_norm))
        pages = (step.cache.planes[self.planes[0].name], step.cache.planes[self.planes[1].name])
        paging = step.paging_of(self.planes[0])
        norms = None if self.q_norm is None or self.k_norm is None else (self.q_norm, self.k_norm)
        q = ops.norm_rope_store(q, k, v, norms, self.inv_freq, pages, paging, step.rows.positions)
        mixed = ops.attention(q, *pages, paging, step.key_begin, step.key_end, self.score_scale, gate)
        return ops.linear(
            mixed.flatten(1), self.output, epilogue="residual", residual=x, bias=self.output_bias, then=then
        )

    def _heads(self, joined: Tensor) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """joined [R, N] -> q [R, H, D], gate as q or None, k and v [R, Hkv, D], as they were projected."""
        num_heads, num_kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        heads = joined.view(joined.shape[0], -1, head_dim)
        k, v = heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]
        q = heads[:, : -2 * num_kv_heads]
        if not self.shape.gated:
            return q, None, k, v
        q, gate = q.view(-1, num_heads, 2, head_dim).unbind(2)
        return q, gate, k, v

    def fold(self, ops: Ops, cache: Cache, pending_rows: Tensor) -> None:
        """Attention keeps no recurrent state."""

"""EAGLE-3: one attention layer over (embedding of the next token, fused hiddens of three target layers), as a chain.

Reads both layouts of checkpoints: `speculators` (settings in `transformer_layer_config`, `layers.0.*`) and the original
(flat settings, `midlayer.*`). The draft's vocabulary may be smaller than the target's: `d2t` holds offsets, so draft id
i is target id i + d2t[i]. Trees are not drafted: a hybrid target cannot verify them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from localspec.core.cache_spec import CacheSpec, PlaneSpec
from localspec.core.records import Forward, HiddenNeeds
from localspec.drafters import Drafter, DrafterSetup
from localspec.drafters._chain import ChainDrafter
from localspec.drafters._drawing import Drawer
from localspec.drafters._tiny import RandomCheckpoint, attention_shapes, mlp_shapes
from localspec.formats import Checkpoint
from localspec.formats.checkpoint import read_config
from localspec.kernels.draft_rows import JoinedNorms, TakenRows
from localspec.kernels.ops import Norm, Ops, PackedWeight
from localspec.layers.config import ConfigReader
from localspec.layers.linear import Projections, check_shape, load_projections, load_vector
from localspec.layers.mlp import GatedMlp
from localspec.layers.rope import rotary_frequencies
from localspec.layers.step import LayerStep
from localspec.models import Model

needs_weights = True
MAX_DEPTH = 7
LEGACY_NORMS = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")


@dataclass(frozen=True)
class Eagle3Shape:
    """What config.json says. layer_outputs: target layers whose outputs are fused; window: keys seen, 0 for all.

    norm_before_residual: the residual stream starts from the normed hidden; norm_before_fc: one norm over the joined
    target hiddens; norm_output: the hidden that goes around is taken after the final norm. inv_freq: [rot / 2] float32.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inv_freq: Tensor
    layer_outputs: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool
    tied: bool = False
    window: int = 0


def read_shape(config: Mapping[str, Any], num_target_layers: int, target_hidden_size: int) -> Eagle3Shape:
    """Settings of either layout. Raises ValueError for what is missing or not supported."""
    outer = ConfigReader(config)
    layer = outer.section("transformer_layer_config")
    eagle = outer.section("eagle_config") or outer
    if outer.get("mask_hidden") is not None or outer.get("pard_token") is not None:
        raise ValueError("config.json: EAGLE-3 with parallel drafting is not supported; take a chain checkpoint")
    eagle.expect("use_aux_hidden_state", True)
    inner = layer or outer
    inner.expect("num_hidden_layers", 1)
    inner.expect("hidden_act", "silu")
    inner.expect("attention_bias", False)
    hidden, heads = inner.integer("hidden_size"), inner.integer("num_attention_heads")
    head_dim = inner.integer("head_dim", max(1, hidden // heads))
    windowed = inner.get("layer_types") == ["sliding_attention"]
    return Eagle3Shape(
        hidden_size=hidden,
        target_hidden_size=outer.integer("target_hidden_size", target_hidden_size),
        intermediate_size=inner.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=inner.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=inner.number("rms_norm_eps", 1e-6),
        inv_freq=rotary_frequencies(inner, head_dim),
        layer_outputs=_layer_outputs(eagle, outer, num_target_layers, counts_inputs=layer is not None),
        # Readers of the first layout take true where the key is absent, those of the second false.
        norm_before_residual=outer.flag("norm_before_residual", layer is not None),
        norm_before_fc=eagle.flag("norm_before_fc", False) or outer.flag("norm_before_fc", False),
        norm_output=outer.flag("norm_output", False),
        tied=outer.flag("tie_word_embeddings", False),
        window=inner.integer("sliding_window") if windowed else 0,
    )


def _layer_outputs(eagle: ConfigReader, outer: ConfigReader, num_layers: int, counts_inputs: bool) -> tuple[int, ...]:
    """Target layers in our count (output of layer L). One layout names layer outputs, the other layer inputs."""
    key = "eagle_aux_hidden_state_layer_ids"
    ids = eagle.get(key, outer.get(key))
    if ids is None:
        ids, counts_inputs = [2, num_layers // 2, num_layers - 3], True
    if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
        raise ValueError(f"config.json: {key} must be a list of layer numbers")
    outputs = tuple(each - 1 for each in ids) if counts_inputs else tuple(ids)
    if not all(0 <= each < num_layers for each in outputs):
        raise ValueError(f"config.json: {key} {ids} does not fit a target of {num_layers} layers")
    return outputs


class Eagle3Network:
    """Meets `ChainNetwork`."""

    def __init__(self, shape: Eagle3Shape, model: Model, ops: Ops, checkpoint: Checkpoint) -> None:
        """Raises ValueError for missing or misshapen tensors."""
        self.hidden_size = hidden = shape.hidden_size
        self._shape, self._model, self._ops = shape, model, ops
        at = "midlayer." if any(name.startswith("midlayer.") for name in checkpoint.names()) else "layers.0."

        def norm(name: str, size: int = hidden) -> Norm:
            return Norm(load_vector(ops, checkpoint, f"{name}.weight", (size,)), shape.norm_eps)

        self.source_size = joined = len(shape.layer_outputs) * shape.target_hidden_size
        fc = check_shape(checkpoint.weight("fc.weight"), "fc.weight", (hidden, joined))
        self._fc: PackedWeight = ops.pack([fc])
        self._joined_norm = norm("input_norm", joined) if shape.norm_before_fc else None
        names = [f"fc_norm.{index}" for index in range(len(shape.layer_outputs))]
        names = next((each for each in (names, list(LEGACY_NORMS)) if checkpoint.has(f"{each[0]}.weight")), [])
        self._layer_norms = [norm(name, shape.target_hidden_size) for name in names]
        self._embedding_norm, self._hidden_norm = norm(f"{at}input_layernorm"), norm(f"{at}hidden_norm")
        self._attention = _WideAttention(shape, ops, checkpoint, f"{at}self_attn.")
        sizes = (hidden, shape.intermediate_size)
        self._mlp = GatedMlp(sizes, norm(f"{at}post_attention_layernorm"), ops, checkpoint, f"{at}mlp.")
        self._final_norm = norm("norm")
        self.last_norm: Norm | None = None
        self.joined: JoinedNorms | None = None
        self._table = self._own_embedding(checkpoint)
        self.id_map, self._head = self._own_head(checkpoint)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Keys and values of the one layer."""
        return self._attention.planes

    def source(self, forward: Forward) -> Tensor:
        """The outputs of the target's layers side by side."""
        return torch.cat([forward.layer_outputs[layer] for layer in self._shape.layer_outputs], dim=1)

    def first_hidden(self, source: Tensor) -> Tensor:
        """The outputs normed and fused."""
        if not self._layer_norms:
            return self._ops.linear(source, self._fc, norm=self._joined_norm)
        parts = [part.contiguous() for part in source.chunk(len(self._layer_norms), dim=1)]
        parts = [self._ops.rms_norm(part, norm) for part, norm in zip(parts, self._layer_norms, strict=True)]
        return self._ops.linear(torch.cat(parts, dim=1), self._fc, norm=self._joined_norm)

    def run(self, token_ids: Tensor, hidden: Tensor, step: LayerStep, normed: bool) -> Tensor:
        """See `ChainNetwork.run`."""
        ops = self._ops
        embedding = self._model.embed(token_ids) if self._table is None else ops.embed(token_ids, self._table)
        own = ops.rms_norm(hidden, self._hidden_norm)
        wide = torch.cat([ops.rms_norm(embedding, self._embedding_norm), own], dim=1)
        residual = own if self._shape.norm_before_residual else hidden
        x = self._mlp.forward(ops, self._attention.forward(ops, wide, residual, step))
        return ops.rms_norm(x, self._final_norm) if self._shape.norm_output else x

    def run_taken(self, taken: TakenRows, step: LayerStep) -> Tensor:
        """See `ChainNetwork.run_taken`."""
        return self.run(taken.token_ids, self.first_hidden(taken.sources), step, normed=True)

    def logits(self, hidden: Tensor, normed: bool) -> Tensor:
        """See `ChainNetwork.logits`."""
        norm = None if self._shape.norm_output else self._final_norm
        if self._head is None:
            return self._model.logits(hidden if norm is None else self._ops.rms_norm(hidden, norm))
        return self._ops.linear(hidden, self._head, norm=norm, out_dtype=torch.float32)

    def _own_embedding(self, checkpoint: Checkpoint) -> Tensor | None:
        name, size = "embed_tokens.weight", (self._model.vocab_size, self.hidden_size)
        if checkpoint.has(name):
            table = check_shape(checkpoint.weight(name), name, size).dequantise()
            return table.to(self._ops.device, self._ops.activation_dtype)
        if self.hidden_size != self._model.hidden_size:
            raise ValueError(f"the checkpoint needs {name}: its width {self.hidden_size} is not the target's")
        return None

    def _own_head(self, checkpoint: Checkpoint) -> tuple[Tensor | None, PackedWeight | None]:
        """(target id of each draft id or None, head or None for the target's own)."""
        name = "embed_tokens.weight" if self._shape.tied else "lm_head.weight"
        if not checkpoint.has(name):
            return None, None
        weight = checkpoint.weight(name)
        check_shape(weight, name, (weight.shape[0], self.hidden_size))
        if not checkpoint.has("d2t"):
            check_shape(weight, name, (self._model.vocab_size, self.hidden_size))
            return None, self._ops.pack([weight])
        offsets = checkpoint.vector("d2t")
        if offsets.shape != (weight.shape[0],) or offsets.is_floating_point():
            raise ValueError(f"d2t must hold one whole number for each of the {weight.shape[0]} rows of {name}")
        ids = torch.arange(weight.shape[0]) + offsets.to(torch.int64)
        if not bool(((ids >= 0) & (ids < self._model.vocab_size)).all()):
            raise ValueError(f"d2t leads to ids beyond the target's vocabulary of {self._model.vocab_size}")
        return ids.to(self._ops.device), self._ops.pack([weight])


class _WideAttention:
    """Attention whose input is twice as wide as its output and already normed."""

    def __init__(self, shape: Eagle3Shape, ops: Ops, checkpoint: Checkpoint, prefix: str) -> None:
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        names = tuple(f"{prefix}{part}_proj" for part in ("q", "k", "v"))
        for name, rows in zip(names, (query, key, key), strict=True):
            check_shape(checkpoint.weight(f"{name}.weight"), f"{name}.weight", (rows, 2 * shape.hidden_size))
        self._qkv: Projections = load_projections(ops, checkpoint, names)
        output = check_shape(checkpoint.weight(f"{prefix}o_proj.weight"), f"{prefix}o_proj", (shape.hidden_size, query))
        self._output = ops.pack([output])
        self._shape, self._inv_freq = shape, shape.inv_freq.to(ops.device)
        dtype = str(ops.cache_dtype).removeprefix("torch.")
        kv_shape = (shape.num_kv_heads, shape.head_dim)
        self.planes = (PlaneSpec("k.0", kv_shape, dtype), PlaneSpec("v.0", kv_shape, dtype))
        self._norms: list[Norm | None] = [None, None]
        if checkpoint.has(f"{prefix}q_norm.weight"):
            self._norms = [
                Norm(load_vector(ops, checkpoint, f"{prefix}{part}_norm.weight", (shape.head_dim,)), shape.norm_eps)
                for part in ("q", "k")
            ]

    def forward(self, ops: Ops, wide: Tensor, residual: Tensor, step: LayerStep) -> Tensor:
        """wide [R, 2 D], residual [R, D] -> residual + attention [R, D]; writes the rows' keys and values first."""
        shape, positions = self._shape, step.rows.positions
        heads = self._qkv(ops, wide, None).view(wide.shape[0], -1, shape.head_dim)
        first_v = shape.num_heads + shape.num_kv_heads
        q = ops.norm_rope(heads[:, : shape.num_heads], self._norms[0], positions, self._inv_freq)
        k = ops.norm_rope(heads[:, shape.num_heads : first_v], self._norms[1], positions, self._inv_freq)
        v = heads[:, first_v:]
        k_pages, v_pages = step.cache.planes["k.0"], step.cache.planes["v.0"]
        ops.store_kv(k, k_pages, step.paging, positions)
        ops.store_kv(v, v_pages, step.paging, positions)
        begin = step.key_begin if not shape.window else (positions + 1 - shape.window).clamp(min=0)
        mixed = ops.attention(q, k_pages, v_pages, step.paging, begin, step.key_end, shape.head_dim**-0.5)
        return ops.linear(mixed.flatten(1), self._output, epilogue="residual", residual=residual)


def make(shape: Eagle3Shape, setup: DrafterSetup, checkpoint: Checkpoint, greedy: bool = False) -> Drafter:
    """The drafter from its checkpoint. Raises ValueError naming tensors that are missing, misshapen or left over."""
    if shape.target_hidden_size != setup.model.hidden_size:
        raise ValueError(
            f"eagle3 was made for a target of width {shape.target_hidden_size}, not {setup.model.hidden_size}"
        )
    network = Eagle3Network(shape, setup.model, setup.ops, checkpoint)
    checkpoint.finish(("t2d",))
    return ChainDrafter(
        network=network,
        needs=HiddenNeeds(layer_outputs=shape.layer_outputs),
        cache_spec=CacheSpec("eagle3", checkpoint.fingerprint, network.planes),
        drawer=Drawer(network.id_map, greedy),
        max_depth=MAX_DEPTH,
        num_slots=setup.num_slots,
        ops=setup.ops,
    )


def build(setup: DrafterSetup) -> Drafter:
    """The drafter of a folder. Raises ValueError if it does not fit the target."""
    if setup.checkpoint is None or setup.folder is None:
        raise ValueError("eagle3 needs the folder of an EAGLE-3 checkpoint")
    shape = read_shape(read_config(setup.folder), setup.model.num_layers, setup.model.hidden_size)
    return make(shape, setup, setup.checkpoint)


def tiny_shape(model: Model) -> Eagle3Shape:
    """A small drafter for any target."""
    return Eagle3Shape(
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=60,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-5,
        inv_freq=100.0 ** -torch.arange(0, 1, 1 / 8),
        layer_outputs=(0, model.num_layers // 2, model.num_layers - 1),
        norm_before_residual=True,
        norm_before_fc=False,
        norm_output=False,
    )


def tiny_shapes(shape: Eagle3Shape, draft_vocab_size: int, at: str = "layers.0.") -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors, all but `d2t`, with the layer's prefix of either layout."""
    hidden = shape.hidden_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    joined = len(shape.layer_outputs) * shape.target_hidden_size
    norms = (f"{at}hidden_norm", f"{at}input_layernorm", f"{at}post_attention_layernorm", "norm")
    return {
        "fc.weight": (hidden, joined),
        **{f"{name}.weight": (hidden,) for name in norms},
        **attention_shapes(f"{at}self_attn.", (2 * hidden, query, key), hidden),
        **mlp_shapes(f"{at}mlp.", hidden, shape.intermediate_size),
        "lm_head.weight": (draft_vocab_size, hidden),
        **({"input_norm.weight": (joined,)} if shape.norm_before_fc else {}),
    }


def tiny(setup: DrafterSetup) -> Drafter:
    """A random drafter over every second token of the target."""
    shape = replace(tiny_shape(setup.model), norm_before_residual=False)
    size = setup.model.vocab_size // 2
    checkpoint = RandomCheckpoint(tiny_shapes(shape, size))
    checkpoint.tensors["d2t"] = torch.arange(size)
    return make(shape, setup, checkpoint)

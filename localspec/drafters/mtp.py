"""The multi-token-prediction block that Qwen3.5, 3.6 and 3.8 checkpoints carry as `mtp.*`, run again for each draft.

One gated full-attention layer over (embedding of the next token, hidden after the target's final norm), with keys of
its own. Head and embedding are the target's; `mtp.draft_head.weight` with `mtp.draft_ids` replaces the head for
drafting by fewer rows, because a full head costs more bytes than the block.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from localspec.layers.attention import Attention, AttentionShape
from localspec.layers.config import ConfigReader
from localspec.layers.hybrid import read_hybrid_shape
from localspec.layers.linear import check_shape, load_vector
from localspec.layers.mlp import GatedMlp
from localspec.layers.step import LayerStep
from localspec.models import Model
from localspec.models.qwen3_5 import read_shape

needs_weights = True
MAX_DEPTH = 7
PREFIX = "mtp."


@dataclass(frozen=True)
class MtpShape:
    """Sizes of the block. inv_freq: [rot / 2] float32."""

    attention: AttentionShape
    inv_freq: Tensor
    intermediate_size: int


@dataclass(frozen=True)
class _DraftHead:
    """A head of fewer rows. ids: [n] int64 target id of each row."""

    weight: PackedWeight
    ids: Tensor


class MtpNetwork:
    """Meets `ChainNetwork`: fc(norm(embedding), norm(hidden)) -> layer -> norm."""

    def __init__(self, shape: MtpShape, model: Model, ops: Ops, checkpoint: Checkpoint) -> None:
        """Raises ValueError for missing or misshapen tensors."""
        self.hidden_size = self.source_size = hidden = model.hidden_size
        self._ops, self._model = ops, model

        def norm(name: str) -> Norm:
            weight = load_vector(ops, checkpoint, f"{PREFIX}{name}.weight", (hidden,))
            return Norm(weight, shape.attention.norm_eps, plus_one=True)

        self._embedding_norm, self._hidden_norm = norm("pre_fc_norm_embedding"), norm("pre_fc_norm_hidden")
        self.joined: JoinedNorms | None = JoinedNorms(model.embedding, self._embedding_norm, self._hidden_norm)
        self.last_norm: Norm | None = norm("norm")
        fc = check_shape(checkpoint.weight(f"{PREFIX}fc.weight"), f"{PREFIX}fc.weight", (hidden, 2 * hidden))
        self._fc = ops.pack([fc])
        at = f"{PREFIX}layers.0."
        inv_freq = shape.inv_freq.to(ops.device)
        self._attention = Attention(
            shape.attention, 0, norm("layers.0.input_layernorm"), inv_freq, ops, checkpoint, f"{at}self_attn."
        )
        sizes = (hidden, shape.intermediate_size)
        self._mlp = GatedMlp(sizes, norm("layers.0.post_attention_layernorm"), ops, checkpoint, f"{at}mlp.")
        self._head = _draft_head(model, ops, checkpoint)

    @property
    def planes(self) -> tuple[PlaneSpec, ...]:
        """Keys and values of the one layer."""
        return self._attention.planes

    @property
    def draft_ids(self) -> Tensor | None:
        """Target ids of the trimmed head, None with the target's own head."""
        return None if self._head is None else self._head.ids

    def source(self, forward: Forward) -> Tensor:
        """What feeds the target's head: the hidden after its final norm."""
        return forward.hidden

    def first_hidden(self, source: Tensor) -> Tensor:
        """The same."""
        return source

    def run(self, token_ids: Tensor, hidden: Tensor, step: LayerStep, normed: bool) -> Tensor:
        """See `ChainNetwork.run`; the embedding comes first in the joined input."""
        ops, norms = self._ops, (self._embedding_norm, self._hidden_norm)
        before = None if normed else self.last_norm
        return self._block(ops.joined_norms(token_ids, self._model.embedding, hidden, norms, before), step)

    def run_taken(self, taken: TakenRows, step: LayerStep) -> Tensor:
        """See `ChainNetwork.run_taken`."""
        return self._block(taken.sources, step)

    def _block(self, joined: Tensor, step: LayerStep) -> Tensor:
        """joined [R, 2 D] -> [R, D]."""
        ops = self._ops
        x = ops.linear(joined, self._fc, then=self._attention.input_norm)
        x = self._attention.forward(ops, x, step, then=self._mlp.input_norm)
        return self._mlp.forward(ops, x, then=self.last_norm)

    def logits(self, hidden: Tensor, normed: bool) -> Tensor:
        """See `ChainNetwork.logits`."""
        norm = None if normed else self.last_norm
        if self._head is None:
            return self._model.logits(hidden if norm is None else self._ops.rms_norm(hidden, norm))
        return self._ops.linear(hidden, self._head.weight, norm=norm, out_dtype=torch.float32)


def _draft_head(model: Model, ops: Ops, checkpoint: Checkpoint) -> _DraftHead | None:
    """The trimmed head, if the checkpoint has one. Raises ValueError if ids and rows do not fit the model."""
    head_name, ids_name = f"{PREFIX}draft_head.weight", f"{PREFIX}draft_ids"
    if not checkpoint.has(head_name):
        return None
    ids = checkpoint.vector(ids_name)
    weight = check_shape(checkpoint.weight(head_name), head_name, (ids.shape[0], model.hidden_size))
    if ids.dtype != torch.int64 or ids.ndim != 1 or not bool(((ids >= 0) & (ids < model.vocab_size)).all()):
        raise ValueError(f"{ids_name} must be int64 ids below {model.vocab_size}")
    return _DraftHead(ops.pack([weight]), ids.to(ops.device))


def make(shape: MtpShape, setup: DrafterSetup, checkpoint: Checkpoint, greedy: bool = False) -> Drafter:
    """The drafter from a checkpoint that holds `mtp.*`. Raises ValueError naming what is missing or left over."""
    if not any(name.startswith(PREFIX) for name in checkpoint.names()):
        raise ValueError("the checkpoint holds no mtp.* tensors; take a model whose export kept them")
    network = MtpNetwork(shape, setup.model, setup.ops, checkpoint)
    checkpoint.finish(tuple(name for name in checkpoint.names() if not name.startswith(PREFIX)))
    return ChainDrafter(
        network=network,
        needs=HiddenNeeds(final_norm=True),
        cache_spec=CacheSpec("mtp", checkpoint.fingerprint, network.planes),
        drawer=Drawer(network.draft_ids, greedy),
        max_depth=MAX_DEPTH,
        num_slots=setup.num_slots,
        ops=setup.ops,
    )


def build(setup: DrafterSetup) -> Drafter:
    """The block of the target's own checkpoint. Raises ValueError if it is not there or does not fit."""
    if setup.checkpoint is None or setup.folder is None:
        raise ValueError("mtp needs the checkpoint and the folder of the target model")
    shape = shape_of(read_config(setup.folder))
    if shape.attention.hidden_size != setup.model.hidden_size:
        raise ValueError(
            f"mtp has hidden size {shape.attention.hidden_size}, the target {setup.model.hidden_size}; they must agree"
        )
    return make(shape, setup, setup.checkpoint)


def shape_of(config: Mapping[str, Any]) -> MtpShape:
    """The block has the sizes of the target's full-attention layers. Raises ValueError for an unfit config.json."""
    if config.get("model_type") == "qwen3_5_text":
        reader = ConfigReader(config)
        shape = read_hybrid_shape(reader, reader.flag("tie_word_embeddings", False))
    else:
        shape = read_shape(config)
    return MtpShape(shape.attention, shape.inv_freq, shape.intermediate_size)


def tiny_shapes(shape: MtpShape) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the 15 tensors."""
    attention, hidden = shape.attention, shape.attention.hidden_size
    at = f"{PREFIX}layers.0."
    query, key = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    projections = attention_shapes(f"{at}self_attn.", (hidden, 2 * query, key), hidden)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    layer_norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    return {
        f"{PREFIX}fc.weight": (hidden, 2 * hidden),
        **{f"{PREFIX}{name}.weight": (hidden,) for name in (*norms, *layer_norms)},
        **projections,
        f"{at}self_attn.o_proj.weight": (hidden, query),
        f"{at}self_attn.q_norm.weight": (attention.head_dim,),
        f"{at}self_attn.k_norm.weight": (attention.head_dim,),
        **mlp_shapes(f"{at}mlp.", hidden, shape.intermediate_size),
    }


def tiny_shape(hidden_size: int) -> MtpShape:
    """A block for a target of the given width: grouped heads, partial rotation."""
    attention = AttentionShape(
        hidden_size=hidden_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        head_norms=True,
        gated=True,
        norm_plus_one=True,
    )
    return MtpShape(attention, 100.0 ** -torch.arange(0, 1, 0.25), 56)


def tiny(setup: DrafterSetup) -> Drafter:
    """A random block with the target's own head."""
    shape = tiny_shape(setup.model.hidden_size)
    return make(shape, setup, RandomCheckpoint(tiny_shapes(shape)))

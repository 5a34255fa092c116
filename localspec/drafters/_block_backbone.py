"""The network that DFlash, DFlash2 and DSpark share: a block of mask tokens guessed in one pass.

Every committed token leaves keys and values made from the target's hiddens alone (fc over several layer outputs, then
each layer's own projections), so they never depend on what was drafted. The block's rows are the newest token and
masks behind it; their own keys and values are scratch at the places behind the text, written again by every pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from localspec.core.cache_spec import PlaneSpec
from localspec.core.records import Forward, Rows
from localspec.core.state import Cache, SequenceState
from localspec.drafters import MAX_PASS_ROWS, Depths
from localspec.drafters._block_conv import GroupedConv
from localspec.drafters._block_shape import BlockShape, LayerView
from localspec.drafters._waiting import ALL_SLOTS, Block, WaitingRows
from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops, PackedWeight, Paging
from localspec.layers.linear import check_shape, load_vector
from localspec.models import Model


@dataclass(frozen=True)
class _BlockStep:
    """A pass over the rows of a Block. positions, key_begin, block_end (of the row's own block): [R] int64."""

    paging: Paging
    positions: Tensor
    key_begin: Tensor
    block_end: Tensor
    offsets: Tensor


class _BlockLayer:
    """One layer of the drafter."""

    def __init__(self, shape: BlockShape, index: int, ops: Ops, checkpoint: Checkpoint, prefix: str) -> None:
        self._shape, self._ops, self._index = shape, ops, index
        self._view: LayerView = shape.layers[index]
        at = f"{prefix}layers.{index}."
        hidden, head_dim = shape.hidden_size, shape.head_dim
        query, key = shape.num_heads * head_dim, shape.num_kv_heads * head_dim

        def pack(*parts: tuple[str, tuple[int, int]], gated: bool = False) -> PackedWeight:
            names = [(f"{at}{name}.weight", size) for name, size in parts]
            return ops.pack([check_shape(checkpoint.weight(name), name, size) for name, size in names], gated)

        def norm(name: str, size: int) -> Norm:
            return Norm(load_vector(ops, checkpoint, f"{at}{name}.weight", (size,)), shape.norm_eps)

        self._q = pack(("self_attn.q_proj", (query, hidden)))
        self._kv = pack(("self_attn.k_proj", (key, hidden)), ("self_attn.v_proj", (key, hidden)))
        self._output = pack(("self_attn.o_proj", (hidden, query)))
        self._q_norm, self._k_norm = norm("self_attn.q_norm", head_dim), norm("self_attn.k_norm", head_dim)
        inner = shape.intermediate_size
        self._gate_up = pack(("mlp.gate_proj", (inner, hidden)), ("mlp.up_proj", (inner, hidden)), gated=True)
        self._down = pack(("mlp.down_proj", (hidden, inner)))
        self._input_norm, self._inner_norm = norm("input_layernorm", hidden), norm("post_attention_layernorm", hidden)
        convs = ("attention_conv", "mlp_conv") if shape.conv_taps else ()
        self._convs = [GroupedConv(shape, ops, checkpoint, f"{at}{name}.") for name in convs]
        self._inv_freq = shape.inv_freq.to(ops.device)

    def store_context(self, context: Tensor, paging: Paging, positions: Tensor, cache: Cache) -> None:
        """context [R, D]: what the target's hiddens give; its keys and values are kept at `positions`."""
        self._store(context, paging, positions, cache)

    def forward(self, x: Tensor, step: _BlockStep, cache: Cache) -> Tensor:
        """x [R, D] -> [R, D]."""
        ops = self._ops
        if not self._convs:
            mixed = self._attend(ops.rms_norm(x, self._input_norm), step, cache)
            x = ops.linear(mixed, self._output, epilogue="residual", residual=x)
            inner = ops.linear(x, self._gate_up, norm=self._inner_norm, epilogue="silu_mul")
            return ops.linear(inner, self._down, epilogue="residual", residual=x)
        first, second = self._convs
        y, after = first.before(ops.rms_norm(x, self._input_norm), step.offsets)
        x = x + first.behind(ops.linear(self._attend(y, step, cache), self._output), after, step.offsets)
        y, after = second.before(ops.rms_norm(x, self._inner_norm), step.offsets)
        inner = ops.linear(y, self._gate_up, epilogue="silu_mul")
        return x + second.behind(ops.linear(inner, self._down), after, step.offsets)

    def _store(self, source: Tensor, paging: Paging, positions: Tensor, cache: Cache) -> None:
        shape = self._shape
        heads = self._ops.linear(source, self._kv).view(source.shape[0], -1, shape.head_dim)
        k = self._ops.norm_rope(heads[:, : shape.num_kv_heads], self._k_norm, positions, self._inv_freq)
        self._ops.store_kv(k, cache.planes[f"k.{self._index}"], paging, positions)
        self._ops.store_kv(heads[:, shape.num_kv_heads :], cache.planes[f"v.{self._index}"], paging, positions)

    def _attend(self, x: Tensor, step: _BlockStep, cache: Cache) -> Tensor:
        """x [R, D] normed -> [R, H * head_dim]."""
        shape, positions, window = self._shape, step.positions, self._view.window
        self._store(x, step.paging, positions, cache)
        q = self._ops.linear(x, self._q).view(x.shape[0], -1, shape.head_dim)
        q = self._ops.norm_rope(q, self._q_norm, positions, self._inv_freq)
        begin = torch.maximum(positions + 1 - window, step.key_begin) if window else step.key_begin
        end = positions + 1 if self._view.causal else step.block_end
        if window and not self._view.causal:
            end = torch.minimum(end, positions + window)
        pages = cache.planes[f"k.{self._index}"], cache.planes[f"v.{self._index}"]
        return self._ops.attention(q, *pages, step.paging, begin, end, shape.head_dim**-0.5).flatten(1)


class BlockBackbone:
    """Everything but the way in which tokens are chosen from the block's hiddens."""

    def __init__(self, shape: BlockShape, model: Model, ops: Ops, checkpoint: Checkpoint, num_slots: int) -> None:
        """Raises ValueError for missing or misshapen tensors, or a drafter that does not fit the target."""
        self.shape = shape
        self._model, self._ops = model, ops
        if shape.hidden_size != model.hidden_size or shape.target_hidden_size != model.hidden_size:
            raise ValueError(f"the drafter has width {shape.hidden_size}, its target must have the same, not another")
        if not 0 <= shape.mask_token_id < model.vocab_size:
            raise ValueError(f"mask_token_id {shape.mask_token_id} is no row of the target's embedding")
        prefix = "model." if checkpoint.has("model.fc.weight") else ""
        self.prefix, self.ops = prefix, ops
        width = (shape.hidden_size, len(shape.layer_outputs) * shape.target_hidden_size)
        self._fc = ops.pack([check_shape(checkpoint.weight(f"{prefix}fc.weight"), f"{prefix}fc.weight", width)])
        self._context_norm, self._final_norm = (
            Norm(load_vector(ops, checkpoint, f"{prefix}{name}.weight", (shape.hidden_size,)), shape.norm_eps)
            for name in ("hidden_norm", "norm")
        )
        self._layers = [_BlockLayer(shape, index, ops, checkpoint, prefix) for index in range(len(shape.layers))]
        self.id_map, self._head = _own_head(shape, model, ops, checkpoint)
        self.vocab_size = model.vocab_size
        self.draft_vocab_size = model.vocab_size if self.id_map is None else self.id_map.shape[0]
        # Copies of the target's embedding and head, and a mask of training, are left unread.
        self.shared_names = (f"{prefix}embed_tokens.", "t2d", *(() if self._head else ("lm_head.",)))
        self._waiting = WaitingRows(num_slots, width[1], (ops.device, ops.activation_dtype))
        dtype = str(ops.cache_dtype).removeprefix("torch.")
        kv_shape = (shape.num_kv_heads, shape.head_dim)
        self.planes = tuple(
            PlaneSpec(f"{part}.{index}", kv_shape, dtype) for index in range(len(shape.layers)) for part in ("k", "v")
        )

    @torch.inference_mode()
    def observe(self, rows: Rows, forward: Forward, state: SequenceState, cache: Cache) -> None:
        """Keep keys and values of a prompt's rows; store the committed rows of a verify step until `catch_up`."""
        taps = torch.cat([forward.layer_outputs[layer] for layer in self.shape.layer_outputs], dim=1)
        if rows.kind == "verify":
            self._waiting.store(self._ops, rows, taps, state)
            return
        slots = torch.where(self._waiting.committed(rows, state), rows.slots, -1)
        self._store(taps, Paging.up_to(rows.block_tables, slots, rows.max_position_bound), rows.positions, cache)
        self._waiting.mark_run(rows, state)

    def forget(self, slot: int) -> None:
        """The slot was given to another sequence."""
        self._waiting.forget(slot)

    def catch_up(self, depths: Depths, state: SequenceState, cache: Cache) -> Tensor:
        """Keep keys and values of rows that wait. Returns [S] bool: slots of which nothing waits any more.

        A new sequence that was never observed has nothing that waits.
        """
        taken = self._waiting.take(self._ops, depths, state)
        paging = Paging.up_to(state.block_tables, taken.slots, max(depths.length_bounds, default=1))
        self._store(taken.sources, paging, taken.positions, cache)
        return (self._waiting.caught_up(state) | (state.lengths == 1)) & (state.lengths > 0)

    def _store(self, taps: Tensor, paging: Paging, positions: Tensor, cache: Cache) -> None:
        context = self._ops.rms_norm(self._ops.linear(taps, self._fc), self._context_norm)
        for layer in self._layers:
            layer.store_context(context, paging, positions, cache)

    def block(self, depths: Depths, extra_rows: int) -> Block:
        """Rows for the asked-for drafts of each slot and `extra_rows` more for each slot that has any."""
        limit = self.shape.block_size
        wanted = torch.where(depths.depths > 0, (depths.depths + extra_rows).clamp(max=limit), 0)
        widest = min(depths.max_depth + extra_rows, limit)
        return Block.of(wanted, min(MAX_PASS_ROWS, max(1, len(depths.slots)) * widest))

    def run(self, block: Block, depths: Depths, state: SequenceState, cache: Cache) -> Tensor:
        """[R, D] hiddens after the final norm; each slot's block starts at its newest token."""
        slots = block.slots.clamp(min=0)
        first = (state.lengths[slots] - 1).clamp(min=0)
        newest = state.history[slots, first]
        token_ids = torch.where(block.offsets == 0, newest, self.shape.mask_token_id)
        real = (block.slots >= 0) & (state.lengths[slots] > 0)
        furthest = max(depths.length_bounds, default=1) + self.shape.block_size
        step = _BlockStep(
            paging=Paging.up_to(state.block_tables, torch.where(real, block.slots, -1), furthest),
            positions=first + block.offsets,
            key_begin=self._waiting.valid_from(ALL_SLOTS)[slots],
            block_end=first + block.counts[slots].clamp(min=1),
            offsets=block.offsets,
        )
        x = self._model.embed(token_ids) * self.shape.embedding_scale
        for layer in self._layers:
            x = layer.forward(x, step, cache)
        return self._ops.rms_norm(x, self._final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, D] -> [N, n] float32 over the draft's vocabulary."""
        if self._head is None:
            logits = self._model.logits(hidden)
        else:
            logits = self._ops.linear(hidden, self._head, out_dtype=torch.float32)
        cap = self.shape.softcap
        return cap * torch.tanh(logits / cap) if cap else logits


def _own_head(
    shape: BlockShape, model: Model, ops: Ops, checkpoint: Checkpoint
) -> tuple[Tensor | None, PackedWeight | None]:
    """(target id of each draft id or None, head or None for the target's own).

    A head over the whole vocabulary is a copy of the target's unless the config says that it was trained.
    """
    if not checkpoint.has("lm_head.weight"):
        return None, None
    weight = checkpoint.weight("lm_head.weight")
    check_shape(weight, "lm_head.weight", (weight.shape[0], shape.hidden_size))
    if not checkpoint.has("d2t"):
        check_shape(weight, "lm_head.weight", (model.vocab_size, shape.hidden_size))
        return None, ops.pack([weight]) if shape.own_head else None
    offsets = checkpoint.vector("d2t")
    if offsets.shape != (weight.shape[0],) or offsets.is_floating_point():
        raise ValueError(f"d2t must hold one whole number for each of the {weight.shape[0]} rows of lm_head.weight")
    ids = torch.arange(weight.shape[0]) + offsets.to(torch.int64)
    if not bool(((ids >= 0) & (ids < model.vocab_size)).all()):
        raise ValueError(f"d2t leads to ids beyond the target's vocabulary of {model.vocab_size}")
    return ids.to(ops.device), ops.pack([weight])

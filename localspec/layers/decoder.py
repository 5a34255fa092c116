"""A stack of layers between an embedding and a head: the body that all our architectures share.

Knows no config; a model file builds the layers and hands them over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import Forward, HiddenNeeds, Rows
from localspec.core.state import Cache
from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops, PackedWeight
from localspec.kernels.weights import DenseWeight
from localspec.layers.host_table import place_table
from localspec.layers.linear import check_shape
from localspec.layers.mlp import GatedMlp
from localspec.layers.step import LayerStep, Mixer


@dataclass(frozen=True)
class DecoderLayer:
    """x + mixer(x), then x + mlp(x); each part norms its own input."""

    mixer: Mixer
    mlp: GatedMlp


@dataclass(frozen=True)
class Vocabulary:
    """Embedding and head. table: [V, D] in the activation dtype, see `place_table`; ids from `num_token_ids` up are
    padding rows of the matrices and never tokens."""

    table: Tensor
    head: PackedWeight
    num_token_ids: int


def load_vocabulary(
    ops: Ops, checkpoint: Checkpoint, names: tuple[str, str | None], shape: tuple[int, int], num_token_ids: int
) -> Vocabulary:
    """Read the embedding and the head; a head name of None ties them. Raises ValueError for what does not fit."""
    embedding_name, head_name = names
    weight = check_shape(checkpoint.weight(embedding_name), embedding_name, shape)
    table = place_table(ops, weight)
    if head_name is not None:
        head = check_shape(checkpoint.weight(head_name), head_name, shape)
    else:
        # In float32 the table is the weight's exact meaning, and sharing it saves a second copy.
        head = DenseWeight(table) if table.dtype == torch.float32 and ops.device.type == "cpu" else weight
    return Vocabulary(table, ops.pack([head]), num_token_ids)


@dataclass
class ForwardPass:
    """A pass under way. x: [R, D] after the first `num_done` layers, padding rows of the back end included;
    num_rows: those that were asked for; outputs: of the layers in `needs`, by number."""

    step: LayerStep
    needs: HiddenNeeds
    num_rows: int
    x: Tensor
    num_done: int = 0
    outputs: dict[int, Tensor] = field(default_factory=dict)


class Decoder:
    """Meets `models.Model`."""

    def __init__(
        self,
        ops: Ops,
        layers: Sequence[DecoderLayer],
        final_norm: Norm,
        vocabulary: Vocabulary,
        fingerprint: str,
        max_context_tokens: int,
    ) -> None:
        self.ops, self.layers, self.final_norm, self.vocabulary = ops, tuple(layers), final_norm, vocabulary
        self.vocab_size, self.hidden_size = vocabulary.table.shape
        self.num_layers = len(self.layers)
        self.max_context_tokens = max_context_tokens
        self.cache_spec = CacheSpec(
            owner="target",
            fingerprint=fingerprint,
            planes=tuple(plane for layer in self.layers for plane in layer.mixer.planes),
            states=tuple(state for layer in self.layers for state in layer.mixer.states),
        )
        row_bytes = self.hidden_size * vocabulary.table.element_size()
        layer_bytes = sum(layer.mixer.read_bytes + layer.mlp.read_bytes for layer in self.layers)
        self.read_bytes_per_token = layer_bytes + vocabulary.head.read_bytes + row_bytes

    def forward(self, rows: Rows, cache: Cache, needs: HiddenNeeds) -> Forward:
        """See `models.Model.forward`. Raises ValueError for a layer output that does not exist."""
        forward = self.advance(self.begin(rows, cache, needs), self.num_layers)
        assert forward is not None
        return forward

    def begin(self, rows: Rows, cache: Cache, needs: HiddenNeeds) -> ForwardPass:
        """See `models.Model.begin`. Raises ValueError for a layer output that does not exist."""
        if needs.layer_outputs and not 0 <= min(needs.layer_outputs) <= max(needs.layer_outputs) < self.num_layers:
            raise ValueError(f"layer outputs {needs.layer_outputs} were asked for; there are {self.num_layers} layers")
        num_rows = len(rows.token_ids)
        if self.ops.waits:
            # Padded once here, such a back end need not pad every product of the pass.
            rows = _pad_rows(rows, self.ops.prefill_row_multiple)
        return ForwardPass(LayerStep.of(rows, cache), needs, num_rows, self.embed(rows.token_ids))

    def advance(self, under_way: ForwardPass, num_layers: int) -> Forward | None:
        """See `models.Model.advance`."""
        num_rows, end = under_way.num_rows, min(under_way.num_done + num_layers, self.num_layers)
        x = under_way.x
        # What is left for the next norm lasts until another pass runs, and a prompt's may run between any two layers:
        # there every norm is made where it is used, so that bits do not depend on where the pass was cut.
        prepares = under_way.step.rows.kind == "verify"
        for index in range(under_way.num_done, end):
            layer = self.layers[index]
            then = self.layers[index + 1].mixer.input_norm if prepares and index + 1 < self.num_layers else None
            mixed = layer.mixer.forward(self.ops, x, under_way.step, layer.mlp.input_norm if prepares else None)
            x = layer.mlp.forward(self.ops, mixed, then)
            if index in under_way.needs.layer_outputs:
                under_way.outputs[index] = x[:num_rows]
        under_way.x, under_way.num_done = x, end
        if end < self.num_layers:
            return None
        return Forward(self.ops.rms_norm(x[:num_rows], self.final_norm), under_way.outputs)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> [R, V] float32; padding ids are -inf."""
        logits = self.ops.linear(hidden, self.vocabulary.head, out_dtype=torch.float32)
        if self.vocabulary.num_token_ids < self.vocab_size:
            logits[:, self.vocabulary.num_token_ids :] = float("-inf")
        return logits

    def embed(self, token_ids: Tensor) -> Tensor:
        """[R] -> [R, D] in the activation dtype."""
        return self.ops.embed(token_ids, self.vocabulary.table)

    @property
    def embedding(self) -> Tensor:
        """See `models.Model.embedding`."""
        return self.vocabulary.table

    def fold(self, cache: Cache, pending_rows: Tensor) -> None:
        """See `models.Model.fold`."""
        for layer in self.layers:
            layer.mixer.fold(self.ops, cache, pending_rows)


def _pad_rows(rows: Rows, multiple: int) -> Rows:
    """The rows with padding (slot -1) behind them up to a multiple."""
    missing = -len(rows.token_ids) % multiple
    if not missing:
        return rows
    return replace(
        rows,
        token_ids=pad(rows.token_ids, (0, missing)),
        positions=pad(rows.positions, (0, missing)),
        slots=pad(rows.slots, (0, missing), value=-1),
    )

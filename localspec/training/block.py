"""DFlash and DSpark in training: blocks at random places of the answers, all at once.

A block of rows stands at a place a of the text: the token there and masks behind it. Its rows see what the target's
hiddens give for the places before a, and the block's own rows up to themselves: the blocks are causal, so that a row
means the same whatever depth is asked for. DSpark adds the bias of its Markov head, fed with the true token before, and
a confidence head that learns whether the draft is right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.drafters._block_shape import BlockConfig, read_block_shape
from localspec.drafters.dspark import read_head_shape
from localspec.training.answers import Batch
from localspec.training.block_net import BlockModule, look_back
from localspec.training.drafting import DrafterSizes, DraftVocabulary, Loss, Teacher, soft_loss, start_from_target
from localspec.training.parts import START_DEVIATION, attend, in_heads, initialise, rotate
from localspec.training.target import Hiddens, Target

START_SCALE = 0.25
"""Of the final norm, relative to the target's: less certain than the target at the start."""
ROW_WEIGHT = 0.6
"""Weight of each further position of a block, relative to the one before it: about as often as a draft gets there."""
CONFIDENCE_WEIGHT = 0.1
KNOWN_HEAD = ("vanilla", True)
MEASURED_BLOCKS = 64
"""Places of each sequence that are measured in one pass."""


@dataclass(frozen=True)
class _Places:
    """Blocks of a batch. anchors: [B, A] int64 place of each block's newest token; used: [B, A] bool."""

    anchors: Tensor
    used: Tensor


class TrainableBlock:
    """Meets `TrainableDrafter`, for DFlash and DSpark."""

    prefix = ""

    def __init__(self, config: Mapping[str, Any], target: Target, vocabulary: DraftVocabulary, seed: int) -> None:
        """config: of `block_config`. Raises ValueError if it does not fit or has options not trained here."""
        self.config = dict(config)
        read = BlockConfig(config)
        self.shape = shape = read_block_shape(read, target.num_layers, target.hidden_size)
        head = read_head_shape(read) if read.get("markov_rank") else None
        if shape.conv_taps or any(view.window or not view.causal for view in shape.layers):
            raise ValueError("block drafters are trained with causal blocks, without windows and convolutions")
        if head is not None and (head.markov, head.confidence_with_markov) != KNOWN_HEAD:
            raise ValueError("dspark is trained with a vanilla Markov head, which its confidence head reads")
        self.kind = "dflash" if head is None else "dspark"
        # Row r of a block guesses the token at its own place (1), or the one behind it (0).
        self.first_row = 0 if head is not None and head.sample_from_anchor else 1
        self.vocabulary, self._target = vocabulary, target
        self.layer_outputs = shape.layer_outputs
        self.net = BlockModule(shape, vocabulary, 0 if head is None else head.rank)
        self.module: nn.Module = self.net
        initialise(self.net, seed)
        self.teacher = Teacher(target, vocabulary)
        into = (self.net.lm_head.weight, self.net.norm.weight, self.net.fc.weight)
        start_from_target(target, self.teacher, into, START_SCALE)
        if head is not None:
            # Rows of length one: from smaller ones the head would need most of a training to say anything.
            with torch.no_grad():
                self.net.markov_head.markov_w1.weight.mul_(head.rank**-0.5 / START_DEVIATION)
            nn.init.zeros_(self.net.markov_head.markov_w2.weight)
        self.net.to(target.device)
        self._inv_freq = shape.inv_freq.to(target.device)
        self.blocks_per_sequence = 32

    def hidden(self, tokens: Tensor, taps: Tensor, anchors: Tensor, rows: int) -> Tensor:
        """tokens [B, T], taps [B, T, n * D], anchors [B, A] -> [B, A, rows, D] after the final norm."""
        shape, net = self.shape, self.net
        batch, length = tokens.shape
        context = net.hidden_norm.norm(net.fc.multiply(taps))
        places = torch.arange(length, device=tokens.device)
        offsets = torch.arange(rows, device=tokens.device)
        positions = (anchors[:, :, None] + offsets).flatten(1)  # [B, A * rows]
        newest = tokens.gather(1, anchors)[:, :, None]
        ids = torch.where(offsets == 0, newest, shape.mask_token_id).flatten(1)
        visible = self._visible(anchors, places, offsets)
        x = self._target.embed(ids).to(context.dtype) * shape.embedding_scale
        for layer in (net.layer(index) for index in range(len(net.layers))):
            part = layer.self_attn
            normed = layer.input_layernorm.norm(x)
            joined = torch.cat([context, normed], dim=1)
            all_positions = torch.cat([places.expand(batch, -1), positions], dim=1)
            k = part.k_norm.norm(in_heads(part.k_proj.multiply(joined), shape.head_dim))
            v = in_heads(part.v_proj.multiply(joined), shape.head_dim)
            q = part.q_norm.norm(in_heads(part.q_proj.multiply(normed), shape.head_dim))
            q, k = rotate(q, positions, self._inv_freq), rotate(k, all_positions, self._inv_freq)
            x = x + part.o_proj.multiply(attend(q, k, v, visible))
            x = x + layer.mlp.run(layer.post_attention_layernorm.norm(x))
        return net.norm.norm(x).view(batch, -1, rows, shape.hidden_size)

    @staticmethod
    def _visible(anchors: Tensor, places: Tensor, offsets: Tensor) -> Tensor:
        """[B, A * rows, T + A * rows] bool: the places before the anchor, and rows of the same block up to oneself."""
        batch, count = anchors.shape
        rows = offsets.shape[0]
        before = (places < anchors[:, :, None]).repeat_interleave(rows, dim=1)
        block = torch.arange(count, device=anchors.device).repeat_interleave(rows)
        row = offsets.repeat(count)
        own = (block[:, None] == block) & (row[:, None] >= row)
        return torch.cat([before, own.expand(batch, -1, -1)], dim=2)

    def logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """hidden [..., D] and the token before [...] -> [..., n]."""
        logits = self.net.lm_head.multiply(hidden)
        if self.kind == "dflash":
            return logits
        head = self.net.markov_head
        return logits + head.markov_w2.multiply(head.markov_w1.look_up(previous).to(hidden.dtype))

    def loss(self, batch: Batch, hiddens: Hiddens, generator: torch.Generator) -> Loss:
        """Over blocks at random places of the answers."""
        places = self._draw_places(batch, generator)
        block = self.shape.block_size
        rows = torch.arange(self.first_row, block, device=batch.tokens.device)
        # Place of the guessed token of each row, [B, A, drafts].
        guessed = places.anchors[:, :, None] + rows + (1 - self.first_row)
        inside = (guessed < batch.ends[:, None, None]) & places.used[:, :, None]
        length = batch.tokens.shape[1]
        start = torch.arange(batch.tokens.shape[0], device=guessed.device)[:, None, None] * length
        kept = inside.flatten().nonzero()[:, 0]
        label_rows = (guessed.clamp(max=length - 1) + start).flatten()[kept]
        law = self.teacher.law(batch, hiddens, label_rows)
        tokens = batch.tokens.flatten()
        hidden = self.hidden(batch.tokens, hiddens.taps, places.anchors, block)[:, :, self.first_row :]
        hidden = hidden.flatten(0, 2)[kept]
        logits = self.logits(hidden, tokens[label_rows - 1])
        column = (rows - self.first_row).expand_as(guessed).flatten()[kept]
        weights = self.teacher.weights(tokens[label_rows]) * ROW_WEIGHT**column
        value = soft_loss(logits, law, weights) * (len(rows) / float(sum(ROW_WEIGHT**k for k in range(len(rows)))))
        parts = {"drafts": value.detach()}
        if self.kind == "dspark":
            right = self.teacher.are_said(logits.argmax(dim=1), tokens[label_rows])
            confidence = self._confidence(hidden, tokens[label_rows - 1])
            doubt = functional.binary_cross_entropy_with_logits(confidence, right.float())
            parts["confidence"] = doubt.detach()
            value = value + CONFIDENCE_WEIGHT * doubt
        return Loss(value, parts)

    def _confidence(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [N]; the head reads the hiddens and does not shape them."""
        embedded = self.net.markov_head.markov_w1.look_up(previous)
        seen = torch.cat([hidden.detach().float(), embedded.detach().float()], dim=1)
        projection = self.net.confidence_head.proj
        with torch.autocast(seen.device.type, enabled=False):
            return functional.linear(seen, projection.weight, projection.bias)[:, 0]

    def _draw_places(self, batch: Batch, generator: torch.Generator) -> _Places:
        """Evenly spread over each answer, shifted by chance; the newest token may be any but the last."""
        count = self.blocks_per_sequence
        shift = torch.rand(batch.tokens.shape[0], 1, generator=generator).to(batch.tokens.device)
        room = (batch.ends - 1 - batch.answer_from)[:, None]
        steps = (torch.arange(count, device=room.device) + shift) / count
        anchors = batch.answer_from[:, None] + (steps * room).to(torch.int64)
        used = torch.ones_like(anchors, dtype=torch.bool)
        used[:, 1:] = anchors[:, 1:] != anchors[:, :-1]
        return _Places(anchors.clamp(max=batch.tokens.shape[1] - 1), used & (room > 0))

    def fit_inputs(self, hiddens: Hiddens) -> None:
        """See `TrainableDrafter.fit_inputs`."""
        net, shape, target = self.net, self.shape, self._target
        # The first token of a text gathers attention and is far larger than all others.
        net.fc.fit_inputs(hiddens.taps[:, 1:])
        if net.fc.filled:
            return
        taps = hiddens.taps[:, 1:].flatten(0, 1)
        with torch.no_grad():
            context = net.hidden_norm.norm(net.fc.multiply(taps[taps.abs().sum(dim=1) > 0].float()))
        ids = torch.arange(target.vocab_size) if self.vocabulary.ids is None else self.vocabulary.ids
        mask = torch.tensor([shape.mask_token_id], device=target.device)
        look_back(net, shape, context, target.embed(ids.to(target.device)).float(), target.embed(mask).float())

    @torch.no_grad()
    def matches(self, batch: Batch, hiddens: Hiddens, depth: int) -> Tensor:
        """See `TrainableDrafter.matches`."""
        tokens, length = batch.tokens, batch.tokens.shape[1]
        found = torch.zeros(*tokens.shape, depth, dtype=torch.bool, device=tokens.device)
        drafts = min(depth, self.shape.block_size - self.first_row)
        rows = torch.arange(1, drafts + 1, device=tokens.device)
        # Nothing is drafted inside a prompt, which may be most of the text.
        for begin in range(int(batch.answer_from.min()), length, MEASURED_BLOCKS):
            anchors = torch.arange(begin, min(begin + MEASURED_BLOCKS, length), device=tokens.device)
            anchors = anchors.expand(tokens.shape[0], -1)
            hidden = self.hidden(tokens, hiddens.taps, anchors, drafts + self.first_row)[:, :, self.first_row :]
            places = anchors[:, :, None] + rows
            inside = places < length
            flat = places.clamp(max=length - 1).flatten(1)
            labels, previous = tokens.gather(1, flat), tokens.gather(1, (flat - 1).clamp(min=0))
            said = self.logits(hidden, previous.view_as(places)).argmax(dim=-1)
            right = self.teacher.are_said(said, labels.view_as(places)) & inside
            found[:, begin : begin + anchors.shape[1], :drafts] = right
        return found


@dataclass(frozen=True)
class BlockChoices:
    """What a recipe settles of a block drafter. markov_rank 0: DFlash; sample_from_anchor: of DSpark."""

    num_layers: int
    block_size: int
    mask_token_id: int
    layer_outputs: tuple[int, ...]
    num_target_layers: int
    markov_rank: int = 0
    sample_from_anchor: bool = True


def block_config(sizes: DrafterSizes, choices: BlockChoices, vocabulary: DraftVocabulary) -> dict[str, Any]:
    """config.json in the layout of DFlash, or of DSpark on a Qwen3 backbone."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3DSparkModel" if choices.markov_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": choices.num_layers,
        "num_target_layers": choices.num_target_layers,
        "block_size": choices.block_size,
        "vocab_size": vocabulary.vocab_size,
        "draft_vocab_size": vocabulary.size,
        "has_own_lm_head": True,
        **sizes.as_config(),
        "dflash_config": {
            "mask_token_id": choices.mask_token_id,
            "target_layer_ids": list(choices.layer_outputs),
            "causal": True,
        },
    }
    return config | head_config(choices.markov_rank, choices.sample_from_anchor) if choices.markov_rank else config


def head_config(rank: int, sample_from_anchor: bool) -> dict[str, Any]:
    """What DSpark's config.json has beyond DFlash's."""
    return {
        "markov_rank": rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": sample_from_anchor,
    }

"""The network of a block drafter in training: its parameters under the names of the layout, and how they begin.

A block drafter must first of all learn to read what the target knew at the last place of the text, which its rows see
through attention alone. From random heads that takes hundreds of steps, in which nothing else is learnt; so the first
layer begins with heads that look there and pass on what they see.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from localspec.drafters._block_shape import BlockShape
from localspec.training.drafting import DraftVocabulary
from localspec.training.parts import GatedMlp, Matrix, RmsNorm, ScaledMatrix

LOOKS = ((0.7, 0.34, 0.165, 0.08), (0.49, 0.237, 0.115, 0.056), (0.34, 0.165, 0.08, 0.04))
"""Turns a place, in radians, of the pairs that heads look back with: fast ones tell neighbours apart, slow ones keep
what is far from coming round again. The rows of a block are 1 to 16 places behind what they look for."""
LOOK_TURN = -0.4
"""Of the queries, in radians: the law falls from the first place on and is not flat there."""
LOOK_SCALE = 1.6
"""Of both head norms: sharp enough for most of the weight to lie on one place, flat enough to be learnt away."""
OTHER_SHARE = 0.1
"""Of what the matrices held before."""


class BlockAttention(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden = shape.hidden_size
        self.q_proj, self.k_proj, self.v_proj = Matrix(query, hidden), Matrix(key, hidden), Matrix(key, hidden)
        self.o_proj = Matrix(hidden, query)
        self.q_norm, self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps), RmsNorm(shape.head_dim, shape.norm_eps)


class BlockLayer(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RmsNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = BlockAttention(shape)
        self.mlp = GatedMlp(shape.hidden_size, shape.intermediate_size)


class _MarkovHead(nn.Module):
    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1, self.markov_w2 = Matrix(vocab_size, rank), Matrix(draft_vocab_size, rank)


class _Projection(nn.Module):
    """A plain projection with a bias, which is never rounded."""

    weight: Tensor
    bias: Tensor

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(1, columns)), nn.Parameter(torch.zeros(1))


class _ConfidenceHead(nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.proj = _Projection(columns)


class BlockModule(nn.Module):
    """Parameters under the names of the layout. rank 0: DFlash."""

    def __init__(self, shape: BlockShape, vocabulary: DraftVocabulary, rank: int) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.fc = ScaledMatrix(hidden, len(shape.layer_outputs) * shape.target_hidden_size)
        self.hidden_norm, self.norm = RmsNorm(hidden, shape.norm_eps), RmsNorm(hidden, shape.norm_eps)
        self.layers = nn.ModuleList([BlockLayer(shape) for _ in shape.layers])
        self.lm_head = Matrix(vocabulary.size, hidden)
        if rank:
            self.markov_head = _MarkovHead(vocabulary.vocab_size, vocabulary.size, rank)
            self.confidence_head = _ConfidenceHead(hidden + rank)

    def layer(self, index: int) -> BlockLayer:
        """One of them."""
        return cast(BlockLayer, self.layers[index])


@torch.no_grad()
def look_back(net: BlockModule, shape: BlockShape, context: Tensor, newest: Tensor, mask: Tensor) -> None:
    """Let the first layer begin by copying the newest context to every row.

    context: [N, D] examples of what keys and values are made of; newest: [M, D] and mask: [1, D] embeddings of what can
    stand in a block. Rows and context are told apart by their means, which for these streams are far from zero.
    """
    layer = net.layer(0)
    part, head_dim, half = layer.self_attn, shape.head_dim, shape.inv_freq.shape[0]
    means = torch.stack([context.mean(0), *(layer.input_layernorm.norm(rows).mean(0) for rows in (newest, mask))])
    # Keys of the context point one way and those of the block the other; all queries point one way.
    to_key = torch.linalg.pinv(means) @ means.new_tensor([1.0, -1.0, -1.0])
    to_query = torch.linalg.pinv(means[1:]) @ means.new_tensor([1.0, 1.0])
    for matrix, along, count, turn in (
        (part.k_proj, to_key, shape.num_kv_heads, 0.0),
        (part.q_proj, to_query, shape.num_heads, LOOK_TURN),
    ):
        heads = torch.zeros(count, head_dim, device=along.device)
        for head in range(count):
            # Query heads that share a key look alike.
            look = LOOKS[head * shape.num_kv_heads // count % len(LOOKS)]
            pairs = [int((shape.inv_freq - speed).abs().argmin()) for speed in look]
            heads[head, pairs] = math.cos(turn)
            heads[head, [pair + half for pair in pairs]] = math.sin(turn)
        matrix.weight.mul_(OTHER_SHARE).add_(heads.flatten()[:, None] * along)
    for norm in (part.q_norm, part.k_norm):
        norm.weight.fill_(LOOK_SCALE)
    # Values: the directions in which the context varies most, as many as there is room for; the first head of each
    # group writes them back.
    width = min(shape.num_kv_heads * head_dim, shape.hidden_size)
    directions = torch.linalg.eigh(context.T @ context).eigenvectors.flip(1)[:, :width]
    group = shape.num_heads // shape.num_kv_heads
    columns = torch.arange(width, device=context.device)
    part.v_proj.weight.mul_(OTHER_SHARE)[:width] += directions.T
    part.o_proj.weight[:, columns // head_dim * group * head_dim + columns % head_dim] += directions

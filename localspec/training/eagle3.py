"""EAGLE-3 in training: the chain is unrolled for several steps on its own hiddens, over all starting points at once.

At step k the row that began at i stands at position i + k, reads the token at i + k + 1 and sees the true rows up to i
and its own chain behind them: what the drafter sees when it drafts (see `drafters/_chain.py`). The text is the answer,
so step k is trained as if the drafts before it were right, which is the only case in which it counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from localspec.drafters.eagle3 import Eagle3Shape, read_shape
from localspec.training.answers import Batch
from localspec.training.drafting import (
    DrafterSizes,
    DraftVocabulary,
    Loss,
    Teacher,
    chain_matches,
    soft_loss,
    start_from_target,
)
from localspec.training.parts import GatedMlp, Matrix, RmsNorm, ScaledMatrix, attend, in_heads, initialise, rotate
from localspec.training.target import Hiddens, Target

TRAINED_STEPS = 4
START_SCALE = 0.5
"""Of the final norm, relative to the target's: less certain than the target at the start."""
STEP_WEIGHT = 0.6
"""Weight of each further step of the chain, relative to the one before it: about as often as a chain gets there."""


class _Attention(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        wide = 2 * shape.hidden_size
        self.q_proj, self.k_proj, self.v_proj = Matrix(query, wide), Matrix(key, wide), Matrix(key, wide)
        self.o_proj = Matrix(shape.hidden_size, query)


class _Layer(nn.Module):
    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        hidden, eps = shape.hidden_size, shape.norm_eps
        self.input_layernorm, self.hidden_norm = RmsNorm(hidden, eps), RmsNorm(hidden, eps)
        self.post_attention_layernorm = RmsNorm(hidden, eps)
        self.self_attn = _Attention(shape)
        self.mlp = GatedMlp(hidden, shape.intermediate_size)


class Eagle3Module(nn.Module):
    """Parameters under the names of the layout."""

    def __init__(self, shape: Eagle3Shape, draft_vocab_size: int) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.fc = ScaledMatrix(hidden, len(shape.layer_outputs) * shape.target_hidden_size)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = RmsNorm(hidden, shape.norm_eps)
        self.lm_head = Matrix(draft_vocab_size, hidden)

    @property
    def layer(self) -> _Layer:
        """The only one."""
        return cast(_Layer, self.layers[0])


class TrainableEagle3:
    """Meets `TrainableDrafter`."""

    kind = "eagle3"
    prefix = ""

    def __init__(self, config: Mapping[str, Any], target: Target, vocabulary: DraftVocabulary, seed: int) -> None:
        """config: of `eagle3_config`. The head starts as the target's; everything else from the seed.

        Raises ValueError for a config that does not fit the target.
        """
        self.config = dict(config)
        self.shape = shape = read_shape(config, target.num_layers, target.hidden_size)
        self.vocabulary, self._target = vocabulary, target
        self.layer_outputs = shape.layer_outputs
        self.net = Eagle3Module(shape, vocabulary.size)
        self.module: nn.Module = self.net
        initialise(self.net, seed)
        self.teacher = Teacher(target, vocabulary)
        into = (self.net.lm_head.weight, self.net.norm.weight, self.net.fc.weight)
        start_from_target(target, self.teacher, into, START_SCALE)
        self.net.to(target.device)
        self._inv_freq = shape.inv_freq.to(target.device)

    def unroll(self, tokens: Tensor, taps: Tensor, steps: int) -> list[Tensor]:
        """tokens [B, T], taps [B, T, n * D] -> for each step k [B, T, D]: hidden of the row that began at i."""
        shape, net, layer = self.shape, self.net, self.net.layer
        hidden = net.fc.multiply(taps)
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            following = torch.nn.functional.pad(tokens[:, step + 1 :], (0, min(step + 1, length)))[:, :length]
            embedding = layer.input_layernorm.norm(self._target.embed(following))
            normed = layer.hidden_norm.norm(hidden)
            wide = torch.cat([embedding.to(normed.dtype), normed], dim=-1)
            q, k, v = (
                in_heads(each.multiply(wide), shape.head_dim)
                for each in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            )
            positions = (places + step)[None]
            keys.append(rotate(k, positions, self._inv_freq))
            values.append(v)
            mixed = attend(
                rotate(q, positions, self._inv_freq),
                torch.cat(keys, dim=1),
                torch.cat(values, dim=1),
                None if not step else chain_mask(length, step, tokens.device)[None],
            )
            x = (normed if shape.norm_before_residual else hidden) + layer.self_attn.o_proj.multiply(mixed)
            hidden = x + layer.mlp.run(layer.post_attention_layernorm.norm(x))
            outputs.append(hidden)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., n]."""
        return self.net.lm_head.multiply(self.net.norm.norm(hidden))

    def loss(self, batch: Batch, hiddens: Hiddens, generator: torch.Generator) -> Loss:
        """Mean over the steps, later ones weighing less."""
        del generator
        law = self.teacher.law(batch, hiddens, batch.label_rows)
        weights = self.teacher.weights(batch.labels)
        column = batch.label_rows % batch.tokens.shape[1]
        total = law.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        share, sum_of_shares = 1.0, 0.0
        for step, hidden in enumerate(self.unroll(batch.tokens, hiddens.taps, TRAINED_STEPS)):
            begun = column - step - 2
            rows = hidden.flatten(0, 1)[batch.label_rows - step - 2 - begun.clamp(max=0)]
            loss = soft_loss(self.logits(rows), law, weights * (begun >= 0))
            parts[f"step {step}"] = loss.detach()
            total = total + share * loss
            sum_of_shares += share
            share *= STEP_WEIGHT
        return Loss(total / sum_of_shares, parts)

    def fit_inputs(self, hiddens: Hiddens) -> None:
        """See `TrainableDrafter.fit_inputs`."""
        # The first token of a text gathers attention and is far larger than all others.
        self.net.fc.fit_inputs(hiddens.taps[:, 1:])

    @torch.no_grad()
    def matches(self, batch: Batch, hiddens: Hiddens, depth: int) -> Tensor:
        """See `TrainableDrafter.matches`."""
        return chain_matches(self.teacher, batch.tokens, self.unroll(batch.tokens, hiddens.taps, depth), self.logits)


@dataclass(frozen=True)
class Verifier:
    """The target by name, for engines that find it through its drafter."""

    name: str
    architectures: tuple[str, ...] = ()


def eagle3_config(
    sizes: DrafterSizes, layer_outputs: tuple[int, ...], vocabulary: DraftVocabulary, verifier: Verifier
) -> dict[str, Any]:
    """config.json in the `speculators` layout, whose ids of layers count inputs."""
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": TRAINED_STEPS}],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "draft_vocab_size": vocabulary.size,
        "target_hidden_size": sizes.hidden_size,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": [each + 1 for each in layer_outputs],
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            "model_type": "llama",
            "num_hidden_layers": 1,
            "vocab_size": vocabulary.vocab_size,
            **sizes.as_config(),
        },
    }


def chain_mask(length: int, step: int, device: torch.device) -> Tensor:
    """[T, (step + 1) T] bool: what the rows of a step see: true rows up to their beginning, then their own chain."""
    places = torch.arange(length, device=device)
    own = torch.eye(length, dtype=torch.bool, device=device)
    return torch.cat([places[:, None] >= places, *([own] * step)], dim=1)

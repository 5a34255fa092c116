"""The multi-token-prediction block of Qwen3.5 checkpoints in training, unrolled on its own output like EAGLE-3.

For a hybrid it is the block of its own checkpoint and drafts with the target's head. Dense models can have one too, in
a folder of its own with a config that says its sizes, and with a head of fewer rows (`draft_head`, `draft_ids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.drafters.mtp import PREFIX, MtpShape, shape_of
from localspec.training.answers import Batch
from localspec.training.drafting import DrafterSizes, DraftVocabulary, Loss, Teacher, chain_matches, soft_loss
from localspec.training.eagle3 import START_SCALE, STEP_WEIGHT, TRAINED_STEPS, chain_mask
from localspec.training.hybrid import GatedAttention
from localspec.training.parts import GatedMlp, Matrix, RmsNorm, attend, initialise
from localspec.training.target import Hiddens, Target


class _Layer(nn.Module):
    def __init__(self, shape: MtpShape) -> None:
        super().__init__()
        hidden, eps = shape.attention.hidden_size, shape.attention.norm_eps
        self.input_layernorm = RmsNorm(hidden, eps, plus_one=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps, plus_one=True)
        self.self_attn = GatedAttention(shape.attention)
        self.mlp = GatedMlp(hidden, shape.intermediate_size)


class MtpModule(nn.Module):
    """Parameters under the names behind `mtp.`."""

    def __init__(self, shape: MtpShape, head_rows: int) -> None:
        super().__init__()
        hidden, eps = shape.attention.hidden_size, shape.attention.norm_eps
        if head_rows:
            self.draft_head = Matrix(head_rows, hidden)
        self.fc = Matrix(hidden, 2 * hidden)
        self.pre_fc_norm_embedding = RmsNorm(hidden, eps, plus_one=True)
        self.pre_fc_norm_hidden = RmsNorm(hidden, eps, plus_one=True)
        self.layers = nn.ModuleList([_Layer(shape)])
        self.norm = RmsNorm(hidden, eps, plus_one=True)


class TrainableMtp:
    """Meets `TrainableDrafter`; the embedding is the target's and stays as it is, so does a head of all tokens."""

    kind = "mtp"
    prefix = PREFIX
    layer_outputs: tuple[int, ...] = ()

    def __init__(
        self, config: Mapping[str, Any], target: Target, seed: int, vocabulary: DraftVocabulary | None = None
    ) -> None:
        """config: of a hybrid target, or of `mtp_config`; vocabulary: of a head of its own, None for the target's.

        Raises ValueError if the config describes no such block or does not fit the target.
        """
        # The block is a file of its own beside a config that says how to read it; the target's form is not its form.
        self.config = {key: value for key, value in config.items() if key != "quantization_config"}
        self.shape = shape_of(config)
        self._target = target
        if self.shape.attention.hidden_size != target.hidden_size:
            raise ValueError(
                f"the mtp block has hidden size {self.shape.attention.hidden_size}, the target {target.hidden_size}"
            )
        self.vocabulary = vocabulary or DraftVocabulary(None, target.vocab_size)
        own_head = self.vocabulary.ids is not None
        self.net = MtpModule(self.shape, self.vocabulary.size if own_head else 0)
        self.module: nn.Module = self.net
        initialise(self.net, seed)
        with torch.no_grad():
            hidden = target.hidden_size
            self.net.fc.weight[:, hidden:] += torch.eye(hidden)
            self.net.norm.weight.copy_((START_SCALE if own_head else 1.0) * target.norm_scale() - 1.0)
        self.teacher = Teacher(target, self.vocabulary)
        if own_head:
            with torch.no_grad():
                self.net.draft_head.weight.copy_(target.head_rows(self.teacher.ids))
        self.net.to(target.device)
        self._inv_freq = self.shape.inv_freq.to(target.device)

    def unroll(self, tokens: Tensor, final: Tensor, steps: int) -> list[Tensor]:
        """tokens [B, T], final [B, T, D] -> for each step [B, T, D] after the block's norm, by beginning."""
        net, layer = self.net, cast(_Layer, self.net.layers[0])
        hidden, length = final, tokens.shape[1]
        places = torch.arange(length, device=tokens.device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for step in range(steps):
            following = functional.pad(tokens[:, step + 1 :], (0, min(step + 1, length)))[:, :length]
            embedding = net.pre_fc_norm_embedding.norm(self._target.embed(following))
            normed = net.pre_fc_norm_hidden.norm(hidden)
            x = net.fc.multiply(torch.cat([embedding.to(normed.dtype), normed], dim=-1))
            q, gate, k, v = layer.self_attn.heads(layer.input_layernorm.norm(x), (places + step)[None], self._inv_freq)
            keys.append(k)
            values.append(v)
            visible = chain_mask(length, step, tokens.device)[None] if step else None
            mixed = attend(q, torch.cat(keys, dim=1), torch.cat(values, dim=1), visible)
            x = x + layer.self_attn.finish(mixed, gate)
            x = x + layer.mlp.run(layer.post_attention_layernorm.norm(x))
            hidden = net.norm.norm(x)
            outputs.append(hidden)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., n]."""
        if self.vocabulary.ids is not None:
            return self.net.draft_head.multiply(hidden)
        return functional.linear(hidden, self._target.head_rows(None).to(hidden.dtype))

    def loss(self, batch: Batch, hiddens: Hiddens, generator: torch.Generator) -> Loss:
        """Mean over the steps, later ones weighing less."""
        del generator
        law = self.teacher.law(batch, hiddens, batch.label_rows)
        weights = self.teacher.weights(batch.labels)
        column = batch.label_rows % batch.tokens.shape[1]
        total = law.new_zeros((), dtype=torch.float32)
        parts: dict[str, Tensor] = {}
        shares = [STEP_WEIGHT**step for step in range(TRAINED_STEPS)]
        for step, hidden in enumerate(self.unroll(batch.tokens, hiddens.final, TRAINED_STEPS)):
            begun = column - step - 2
            rows = hidden.flatten(0, 1)[batch.label_rows - step - 2 - begun.clamp(max=0)]
            loss = soft_loss(self.logits(rows), law, weights * (begun >= 0))
            parts[f"step {step}"] = loss.detach()
            total = total + shares[step] * loss
        return Loss(total / sum(shares), parts)

    def fit_inputs(self, hiddens: Hiddens) -> None:
        """The block norms its inputs itself."""

    @torch.no_grad()
    def matches(self, batch: Batch, hiddens: Hiddens, depth: int) -> Tensor:
        """See `TrainableDrafter.matches`."""
        return chain_matches(self.teacher, batch.tokens, self.unroll(batch.tokens, hiddens.final, depth), self.logits)


def mtp_config(sizes: DrafterSizes, vocabulary: DraftVocabulary) -> dict[str, Any]:
    """config.json of a block for a dense target: one full-attention layer of the Qwen3.5 text architecture."""
    made = {**sizes.as_config(), "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta}}
    made["rope_parameters"]["partial_rotary_factor"] = 1.0
    del made["rope_theta"]
    return {
        "architectures": ["Qwen3_5MtpBlock"],
        "model_type": "qwen3_5_text",
        **made,
        "num_hidden_layers": 1,
        "layer_types": ["full_attention"],
        "attn_output_gate": True,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "vocab_size": vocabulary.vocab_size,
        "tie_word_embeddings": True,
    }

"""A target as training sees it: hiddens of whole sequences in batches, and answers written many at a time.

`DenseTarget` is a plain batched form of our dense decoders (llama, qwen2, qwen3), with weights of any stored format
dequantised once. It exists for speed on large batches; the engine's own model is the specification and a test holds
them together. No drafters, no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from localspec.formats import Checkpoint
from localspec.layers.config import ConfigReader
from localspec.layers.rope import rotary_frequencies
from localspec.training.parts import attend, in_heads, rotation, turn

DENSE_TYPES = ("llama", "qwen2", "qwen3")
COLUMNS = 64
"""Of a cache, that a decoding step reads together."""


@dataclass(frozen=True)
class Hiddens:
    """taps: [B, T, n * D] outputs of the asked layers side by side; final: [B, T, D] after the final norm."""

    taps: Tensor
    final: Tensor


class Target(Protocol):
    """What the drafters' training needs of a target."""

    device: torch.device
    dtype: torch.dtype
    hidden_size: int
    num_layers: int
    vocab_size: int

    def hiddens(self, tokens: Tensor, layer_outputs: tuple[int, ...]) -> Hiddens:
        """tokens [B, T] int64, padded at the end."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[...] int64 -> [..., D]."""
        ...

    def head_rows(self, ids: Tensor | None) -> Tensor:
        """[n, D] rows of the head for the ids, or all."""
        ...

    def norm_scale(self) -> Tensor:
        """[D] float32: what the final norm multiplies by."""
        ...


@dataclass(frozen=True)
class DenseSizes:
    """What config.json says. inv_freq: [rot / 2] float32."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    num_token_ids: int
    norm_eps: float
    inv_freq: Tensor


@dataclass(frozen=True)
class _Layer:
    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    inner_norm: Tensor
    gate_up: Tensor
    down: Tensor


def read_sizes(config: Mapping[str, Any]) -> DenseSizes:
    """Raises ValueError for an architecture that this form does not cover, or sizes that are missing."""
    reader = ConfigReader(config)
    if config.get("model_type") not in DENSE_TYPES or config.get("use_sliding_window"):
        raise ValueError(f"batched answers are written by {', '.join(DENSE_TYPES)} without sliding windows only")
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    head_dim = reader.integer("head_dim", max(1, hidden // heads))
    return DenseSizes(
        hidden_size=hidden,
        num_layers=reader.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=reader.integer("vocab_size"),
        num_token_ids=reader.integer("num_token_ids", reader.integer("vocab_size")),
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        inv_freq=rotary_frequencies(reader, head_dim),
    )


class KeyValues:
    """Keys and values of a batch, written in place. planes: [layers, 2, B, Hkv, U, D]."""

    def __init__(self, sizes: DenseSizes, batch: int, length: int, like: tuple[torch.device, torch.dtype]) -> None:
        shape = (sizes.num_layers, 2, batch, sizes.num_kv_heads, length, sizes.head_dim)
        self.planes = torch.zeros(shape, device=like[0], dtype=like[1])

    def keep(self, rows: Tensor, used: int) -> None:
        """Go on with some sequences only. rows: [b] int64; used: columns that hold something."""
        kept = torch.zeros_like(self.planes[:, :, : rows.shape[0]])
        for layer in range(self.planes.shape[0]):
            kept[layer, :, :, :, :used] = self.planes[layer, :, rows, :, :used]
        self.planes = kept


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    found = [each for each in biases if each is not None]
    return torch.cat(found) if found else None


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """[N, g, d], [N, U, d] -> [N, g, U] float32, never rounded on the way."""
    if queries.is_cuda and queries.dtype != torch.float32:
        return torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(queries, keys.transpose(1, 2)).float()


class DenseTarget:
    """Meets `Target`."""

    def __init__(
        self, config: Mapping[str, Any], checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Raises ValueError for an architecture that is not dense or a tensor that is missing."""
        self.sizes = sizes = read_sizes(config)
        self.device, self.dtype = device, dtype
        self.hidden_size, self.num_layers, self.vocab_size = sizes.hidden_size, sizes.num_layers, sizes.vocab_size
        self._inv_freq = sizes.inv_freq.to(device)

        def matrix(*names: str) -> Tensor:
            parts = [checkpoint.weight(f"{name}.weight").dequantise() for name in names]
            return torch.cat(parts).to(device, dtype)

        def vector(name: str) -> Tensor | None:
            return checkpoint.vector(name).to(device, dtype) if checkpoint.has(name) else None

        def norm(name: str) -> Tensor:
            return checkpoint.vector(f"{name}.weight").to(device, torch.float32)

        self.table = matrix("model.embed_tokens")
        tied = not checkpoint.has("lm_head.weight") or bool(config.get("tie_word_embeddings"))
        self.head = self.table if tied else matrix("lm_head")
        self.final_norm = norm("model.norm")
        self.layers: list[_Layer] = []
        for index in range(sizes.num_layers):
            at = f"model.layers.{index}."
            heads = [f"{at}self_attn.{part}_proj" for part in "qkv"]
            biases = [vector(f"{name}.bias") for name in heads]
            self.layers.append(
                _Layer(
                    input_norm=norm(f"{at}input_layernorm"),
                    qkv=matrix(*heads),
                    qkv_bias=_joined(biases),
                    q_norm=vector(f"{at}self_attn.q_norm.weight"),
                    k_norm=vector(f"{at}self_attn.k_norm.weight"),
                    output=matrix(f"{at}self_attn.o_proj"),
                    output_bias=vector(f"{at}self_attn.o_proj.bias"),
                    inner_norm=norm(f"{at}post_attention_layernorm"),
                    gate_up=matrix(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
                    down=matrix(f"{at}mlp.down_proj"),
                )
            )

    def embed(self, ids: Tensor) -> Tensor:
        """See `Target.embed`."""
        return functional.embedding(ids, self.table)

    def head_rows(self, ids: Tensor | None) -> Tensor:
        """See `Target.head_rows`."""
        return self.head if ids is None else self.head[ids]

    def norm_scale(self) -> Tensor:
        """See `Target.norm_scale`."""
        return self.final_norm

    @torch.no_grad()
    def hiddens(self, tokens: Tensor, layer_outputs: tuple[int, ...]) -> Hiddens:
        """See `Target.hiddens`."""
        by = self._rotation(torch.arange(tokens.shape[1], device=self.device)[None])
        x, outputs = self.embed(tokens), {}
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, by)
            x = self._finish(layer, x, attend(q, k, v, None))
            if index in layer_outputs:
                outputs[index] = x
        taps = torch.cat([outputs[index] for index in layer_outputs], dim=-1) if layer_outputs else x[..., :0]
        return Hiddens(taps, self._norm(x, self.final_norm))

    @torch.no_grad()
    def read_prompts(self, tokens: Tensor, first: Tensor, cache: KeyValues, rows: slice) -> Tensor:
        """Prompts padded in front: tokens [b, P], first [b] int64 the column of each first token -> logits [b, V].

        Keys and values go to the columns 0 .. P - 1 of the cache's `rows`.
        """
        columns = torch.arange(tokens.shape[1], device=self.device)
        by = self._rotation((columns - first[:, None]).clamp(min=0))
        # A padding row sees itself, so that no row of the softmax is empty.
        visible = (columns[:, None] >= columns) & (columns >= first[:, None, None])
        visible |= torch.eye(tokens.shape[1], dtype=torch.bool, device=self.device)
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, by)
            for part, heads in enumerate((k, v)):
                cache.planes[index, part, rows, :, : tokens.shape[1]] = heads.transpose(1, 2)
            x = self._finish(layer, x, attend(q, k, v, visible))
        return self._logits(x[:, -1])

    @torch.no_grad()
    def decode(self, tokens: Tensor, column: int, first: Tensor, cache: KeyValues) -> Tensor:
        """One token a sequence: tokens [B], written to `column` of the cache -> logits [B, V] float32."""
        sizes, batch = self.sizes, tokens.shape[0]
        by = self._rotation((column - first)[:, None])
        group = sizes.num_heads // sizes.num_kv_heads
        # Whole groups of columns, so that every row of scores is aligned; what is not written yet is never seen.
        width = min(-(-(column + 1) // COLUMNS) * COLUMNS, cache.planes.shape[4])
        columns = torch.arange(width, device=self.device)
        hidden = ((columns < first[:, None]) | (columns > column))[:, None]
        x = self.embed(tokens)[:, None]
        for index, layer in enumerate(self.layers):
            q, k, v = self._heads(layer, x, by)
            planes = cache.planes[index]
            planes[0, :, :, column], planes[1, :, :, column] = k[:, 0], v[:, 0]
            # The heads of a group stand as rows of one query, so that keys are read once. Plain products: the fused
            # attention of many short sequences with a mask takes five times as long.
            grouped = q[:, 0].reshape(-1, group, sizes.head_dim)
            keys, values = (plane.flatten(0, 1)[:, :width] for plane in planes)
            scores = _scores(grouped, keys).mul_(sizes.head_dim**-0.5).view(batch, -1, width)
            weights = scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).to(self.dtype).view(-1, group, width)
            x = self._finish(layer, x, torch.bmm(weights, values).view(batch, 1, -1))
        return self._logits(x[:, 0])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), (x.shape[-1],), weight, self.sizes.norm_eps).to(self.dtype)

    def _rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return rotation(positions, self._inv_freq, self.dtype)

    def _heads(self, layer: _Layer, x: Tensor, by: tuple[Tensor, Tensor]) -> Sequence[Tensor]:
        """x [B, T, D] -> q [B, T, H, d], k and v [B, T, Hkv, d]."""
        sizes = self.sizes
        joined = functional.linear(self._norm(x, layer.input_norm), layer.qkv, layer.qkv_bias)
        heads = in_heads(joined, sizes.head_dim)
        rotated = sizes.num_heads + sizes.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k, v = torch.split(heads, [sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads], dim=2)
            heads = torch.cat([self._norm(q, layer.q_norm.float()), self._norm(k, layer.k_norm.float()), v], dim=2)
        turned = turn(heads[:, :, :rotated], by)
        return turned[:, :, : sizes.num_heads], turned[:, :, sizes.num_heads :], heads[:, :, rotated:]

    def _finish(self, layer: _Layer, x: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream after attention's output and the MLP. mixed: [B, T, H * d]."""
        x = x + functional.linear(mixed, layer.output, layer.output_bias)
        gate, up = functional.linear(self._norm(x, layer.inner_norm), layer.gate_up).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, layer.down)

    def _logits(self, x: Tensor) -> Tensor:
        logits = functional.linear(self._norm(x, self.final_norm), self.head).float()
        # Rows behind the tokenizer's ids are padding and never tokens.
        logits[..., self.sizes.num_token_ids :] = -torch.inf
        return logits

"""Builder of dense decoders with one kind of attention layer; a model file settles the shape and the names."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops
from localspec.layers.attention import Attention, AttentionShape
from localspec.layers.config import ConfigReader
from localspec.layers.decoder import Decoder, DecoderLayer, load_vocabulary
from localspec.layers.linear import load_vector
from localspec.layers.mlp import GatedMlp
from localspec.layers.rope import rotary_frequencies


@dataclass(frozen=True)
class DenseShape:
    """What a config says of a dense decoder. inv_freq: [rot / 2] float32.

    num_token_ids is our own key: ids that the tokenizer has, where the matrices hold padding rows beyond them.
    """

    attention: AttentionShape
    inv_freq: Tensor
    num_layers: int
    intermediate_size: int
    vocab_size: int
    num_token_ids: int
    max_context_tokens: int
    tied: bool


def read_dense_shape(config: ConfigReader, attention: AttentionShape) -> DenseShape:
    """The settings that all dense architectures name alike; refuses keys that nobody read."""
    config.expect("hidden_act", "silu")
    vocab_size = config.integer("vocab_size")
    shape = DenseShape(
        attention=attention,
        inv_freq=rotary_frequencies(config, attention.head_dim),
        num_layers=config.integer("num_hidden_layers"),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=vocab_size,
        num_token_ids=min(vocab_size, config.integer("num_token_ids", vocab_size)),
        max_context_tokens=config.integer("max_position_embeddings"),
        tied=config.flag("tie_word_embeddings", False),
    )
    config.finish()
    return shape


def build_dense(shape: DenseShape, checkpoint: Checkpoint, ops: Ops) -> Decoder:
    """Load a decoder with Llama's tensor names. Raises ValueError for missing, misshapen or unused tensors."""
    attention = shape.attention
    hidden = attention.hidden_size

    def norm(name: str) -> Norm:
        return Norm(load_vector(ops, checkpoint, name, (hidden,)), attention.norm_eps, attention.norm_plus_one)

    inv_freq = shape.inv_freq.to(ops.device)
    layers: list[DecoderLayer] = []
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}."
        input_norm, inner_norm = (
            norm(f"{prefix}input_layernorm.weight"),
            norm(f"{prefix}post_attention_layernorm.weight"),
        )
        mixer = Attention(attention, index, input_norm, inv_freq, ops, checkpoint, f"{prefix}self_attn.")
        mlp = GatedMlp((hidden, shape.intermediate_size), inner_norm, ops, checkpoint, f"{prefix}mlp.")
        layers.append(DecoderLayer(mixer, mlp))
    names = ("model.embed_tokens.weight", None if shape.tied else "lm_head.weight")
    vocabulary = load_vocabulary(ops, checkpoint, names, (shape.vocab_size, hidden), shape.num_token_ids)
    final_norm = norm("model.norm.weight")
    # Some exports keep a copy of a tied head, and frequencies that older code saved as buffers.
    buffers = tuple(f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in range(shape.num_layers))
    checkpoint.finish((*buffers, *(("lm_head.weight",) if shape.tied else ())))
    return Decoder(ops, layers, final_norm, vocabulary, checkpoint.fingerprint, shape.max_context_tokens)

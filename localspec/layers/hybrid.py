"""Builder of hybrids of Gated DeltaNet and gated attention layers; a model file settles where the settings stand.

Norms multiply by (1 + w), except the one inside Gated DeltaNet. Reads the text part of multimodal checkpoints; the
vision tower and the multi-token-prediction block (which is a drafter's) are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from localspec.formats import Checkpoint
from localspec.kernels.ops import Norm, Ops
from localspec.layers.attention import Attention, AttentionShape
from localspec.layers.config import ConfigReader
from localspec.layers.decoder import Decoder, DecoderLayer, load_vocabulary
from localspec.layers.deltanet import DeltaNet, DeltaNetShape
from localspec.layers.linear import load_vector
from localspec.layers.mlp import GatedMlp
from localspec.layers.rope import rotary_frequencies
from localspec.layers.step import Mixer

PREFIXES = ("model.language_model.", "model.")
OTHER_PARTS = ("model.visual.", "visual.", "mtp.")
NUM_TOKEN_IDS = {248320: 248077}
"""Matrix rows -> ids of the family's vocabulary; the rows beyond are padding."""


@dataclass(frozen=True)
class HybridShape:
    """What a config says. inv_freq: [rot / 2] float32; full_attention: one flag a layer."""

    attention: AttentionShape
    deltanet: DeltaNetShape
    inv_freq: Tensor
    full_attention: tuple[bool, ...]
    intermediate_size: int
    vocab_size: int
    num_token_ids: int
    max_context_tokens: int
    tied: bool


def read_hybrid_shape(reader: ConfigReader, tied: bool) -> HybridShape:
    """Checks every setting of the text part. Raises ValueError by name. `tied`: the head is the embedding."""
    reader.expect("hidden_act", "silu")
    reader.expect("attn_output_gate", True)
    reader.expect("mamba_ssm_dtype", "float32")
    reader.expect("attention_bias", False)
    reader.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "output_gate_type", "partial_rotary_factor")
    hidden, eps = reader.integer("hidden_size"), reader.number("rms_norm_eps", 1e-6)
    heads = reader.integer("num_attention_heads")
    attention = AttentionShape(
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=reader.integer("num_key_value_heads", heads),
        head_dim=reader.integer("head_dim", 256),
        head_norms=True,
        gated=True,
        norm_eps=eps,
        norm_plus_one=True,
    )
    deltanet = DeltaNetShape(
        hidden_size=hidden,
        num_key_heads=reader.integer("linear_num_key_heads", 16),
        num_value_heads=reader.integer("linear_num_value_heads", 32),
        key_head_dim=reader.integer("linear_key_head_dim", 128),
        value_head_dim=reader.integer("linear_value_head_dim", 128),
        conv_taps=reader.integer("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    if deltanet.num_value_heads % deltanet.num_key_heads:
        raise ValueError("config.json: linear_num_value_heads must be a multiple of linear_num_key_heads")
    vocab_size = reader.integer("vocab_size")
    shape = HybridShape(
        attention=attention,
        deltanet=deltanet,
        inv_freq=rotary_frequencies(reader, attention.head_dim, default_fraction=0.25),
        full_attention=_full_attention(reader),
        intermediate_size=reader.integer("intermediate_size"),
        vocab_size=vocab_size,
        num_token_ids=min(vocab_size, reader.integer("num_token_ids", NUM_TOKEN_IDS.get(vocab_size, vocab_size))),
        max_context_tokens=reader.integer("max_position_embeddings"),
        tied=tied,
    )
    reader.finish()
    return shape


def _full_attention(reader: ConfigReader) -> tuple[bool, ...]:
    num_layers, interval = reader.integer("num_hidden_layers"), reader.integer("full_attention_interval", 4)
    derived = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(num_layers)]
    kinds = reader.get("layer_types", derived)
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - {"linear_attention", "full_attention"}:
        raise ValueError(f"config.json: layer_types must name linear_attention or full_attention {num_layers} times")
    return tuple(kind == "full_attention" for kind in kinds)


def build_hybrid(shape: HybridShape, checkpoint: Checkpoint, ops: Ops) -> Decoder:
    """Load the text model. Raises ValueError for missing, misshapen or unused tensors."""
    prefix = next((each for each in PREFIXES if checkpoint.has(f"{each}embed_tokens.weight")), None)
    if prefix is None:
        raise ValueError(f"the checkpoint holds no embed_tokens.weight under {' or '.join(PREFIXES)}")
    hidden, eps = shape.attention.hidden_size, shape.attention.norm_eps

    def norm(name: str) -> Norm:
        return Norm(load_vector(ops, checkpoint, name, (hidden,)), eps, plus_one=True)

    inv_freq = shape.inv_freq.to(ops.device)
    layers: list[DecoderLayer] = []
    for index, full in enumerate(shape.full_attention):
        at = f"{prefix}layers.{index}."
        input_norm, inner_norm = norm(f"{at}input_layernorm.weight"), norm(f"{at}post_attention_layernorm.weight")
        mixer: Mixer
        if full:
            mixer = Attention(shape.attention, index, input_norm, inv_freq, ops, checkpoint, f"{at}self_attn.")
        else:
            mixer = DeltaNet(shape.deltanet, index, input_norm, ops, checkpoint, f"{at}linear_attn.")
        layers.append(
            DecoderLayer(mixer, GatedMlp((hidden, shape.intermediate_size), inner_norm, ops, checkpoint, f"{at}mlp."))
        )
    names = (f"{prefix}embed_tokens.weight", None if shape.tied else "lm_head.weight")
    vocabulary = load_vocabulary(ops, checkpoint, names, (shape.vocab_size, hidden), shape.num_token_ids)
    final_norm = norm(f"{prefix}norm.weight")
    checkpoint.finish((*OTHER_PARTS, *(("lm_head.weight",) if shape.tied else ())))
    return Decoder(ops, layers, final_norm, vocabulary, checkpoint.fingerprint, shape.max_context_tokens)

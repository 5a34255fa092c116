"""Models of full size without weights on the disk: for benchmarks only.

Random weights are made on the device in the form that a compact import would give them, so that memory traffic is real;
what such a model says means nothing, and every figure from it is shown as synthetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from localspec.kernels.nvfp4_pack import BLOCK, Nvfp4Weight
from localspec.kernels.weights import DenseWeight, LogicalWeight

KEPT_IN_BF16 = ("embed_tokens.weight", "in_proj_a.weight", "in_proj_b.weight")

Config = Mapping[str, Any]
DRAFT_HEAD, DRAFT_IDS = "mtp.draft_head.weight", "mtp.draft_ids"


def _hybrid(sizes: tuple[int, int, int], heads: tuple[int, int], gdn_heads: tuple[int, int], tied: bool) -> Config:
    """Qwen3.5's family. sizes: hidden, layers, feed-forward; heads: query, key; gdn_heads: key, value."""
    return {
        "model_type": "qwen3_5",
        "tie_word_embeddings": tied,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_size": sizes[0],
            "intermediate_size": sizes[2],
            "num_hidden_layers": sizes[1],
            "num_attention_heads": heads[0],
            "num_key_value_heads": heads[1],
            "head_dim": 256,
            "linear_num_key_heads": gdn_heads[0],
            "linear_num_value_heads": gdn_heads[1],
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 4,
            "vocab_size": 248320,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
            "attention_bias": False,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        },
    }


def _dense(kind: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], vocab: int, context: int) -> Config:
    """Dense models with tied heads. sizes: hidden, layers, feed-forward; heads: query, key, head size."""
    return {
        "model_type": kind,
        "tie_word_embeddings": True,
        "hidden_size": sizes[0],
        "intermediate_size": sizes[2],
        "num_hidden_layers": sizes[1],
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        **({} if kind == "qwen2" else {"head_dim": heads[2]}),
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 1e6,
    }


QWEN3_5_27B: Config = _hybrid((5120, 64, 17408), (24, 4), (16, 48), tied=False)
"""Shapes of Qwen3.5, 3.6 and 3.8 27B (text part)."""
CONFIGS: Mapping[str, Config] = {
    "qwen3.8-27b": QWEN3_5_27B,
    "qwen3.6-27b": QWEN3_5_27B,
    "qwen3.5-9b": _hybrid((4096, 32, 12288), (16, 4), (16, 32), tied=False),
    "qwen3.5-4b": _hybrid((2560, 32, 9216), (16, 4), (16, 32), tied=True),
    "qwen3.5-2b": _hybrid((2048, 24, 6144), (8, 2), (16, 16), tied=True),
    "qwen3.5-0.8b": _hybrid((1024, 24, 3584), (8, 2), (16, 16), tied=True),
    "qwen2.5-coder-1.5b": _dense("qwen2", (1536, 28, 8960), (12, 2, 128), 151936, 32768),
    "qwen2.5-coder-0.5b": _dense("qwen2", (896, 24, 4864), (14, 2, 64), 151936, 32768),
    "smollm2-135m": _dense("llama", (576, 30, 1536), (9, 3, 64), 49152, 8192),
}
"""What the models of the catalogue look like, for measuring one that is not installed."""


def known_config(model_id: str) -> Config | None:
    """The config of a catalogue model, of whatever export: ids begin with the name of the model that they are of."""
    names = [name for name in CONFIGS if model_id.startswith(name)]
    return CONFIGS[max(names, key=len)] if names else None


def tensor_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the public checkpoints of our architectures have them, MTP block included."""
    text = config.get("text_config", config)
    prefix = "model.language_model." if "text_config" in config else "model."
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for layer in range(text["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        linear = text["model_type"].startswith("qwen3_5") and (layer + 1) % text["full_attention_interval"]
        mixer = _deltanet_shapes(f"{at}linear_attn.", text) if linear else _attention_shapes(f"{at}self_attn.", text)
        shapes |= _block_shapes(at, hidden, inner) | mixer
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    if text.get("mtp_num_hidden_layers"):
        shapes |= _block_shapes("mtp.layers.0.", hidden, inner)
        shapes |= _attention_shapes("mtp.layers.0.self_attn.", text)
        shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            shapes[f"mtp.{name}.weight"] = (hidden,)
    return shapes


class SyntheticCheckpoint:
    """Meets `formats.Checkpoint`: random matrices in NVFP4 (a few stay BF16), made when they are asked for."""

    def __init__(
        self, config: Mapping[str, Any], device: torch.device, seed: int = 0, draft_head_rows: int = 0
    ) -> None:
        """`draft_head_rows` > 0 gives the MTP block a trimmed head of that many rows."""
        self._shapes = tensor_shapes(config)
        if draft_head_rows:
            hidden = config.get("text_config", config)["hidden_size"]
            self._shapes |= {DRAFT_HEAD: (draft_head_rows, hidden), DRAFT_IDS: (draft_head_rows,)}
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)
        self.fingerprint = f"synthetic-{config['model_type']}-{seed}"

    def names(self) -> tuple[str, ...]:
        return tuple(self._shapes)

    def has(self, name: str) -> bool:
        return name in self._shapes

    def weight(self, name: str) -> LogicalWeight:
        rows, columns = self._shape(name)
        if name.endswith(KEPT_IN_BF16) or columns % BLOCK:
            return DenseWeight(self._normal((rows, columns)) * columns**-0.5)
        codes = torch.randint(
            0, 256, (rows, columns // 2), dtype=torch.uint8, device=self._device, generator=self._generator
        )
        # Block scales between 2^4 and 2^6 and a row scale that gives outputs of about the size of their inputs.
        exponent = torch.rand(rows, columns // BLOCK, device=self._device, generator=self._generator) * 2 + 4
        row_scale = torch.full((rows,), columns**-0.5 / 96, device=self._device)
        return Nvfp4Weight(codes, exponent.exp2().to(torch.float8_e4m3fn), row_scale)

    def vector(self, name: str) -> Tensor:
        if name == DRAFT_IDS:
            return torch.arange(self._shape(name)[0], device=self._device)
        values = self._normal(self._shape(name))
        return values * 0.02 if "norm" in name else values * 0.5

    def finish(self, ignore: tuple[str, ...] = ()) -> None:
        """Everything is made on demand, so nothing can be left over."""

    def _shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ValueError(f"{name} is not a tensor of this architecture")
        return self._shapes[name]

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        values = torch.randn(shape, device=self._device, generator=self._generator)
        return values.to(torch.bfloat16)


def _block_shapes(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}input_layernorm.weight": (hidden,),
        f"{at}post_attention_layernorm.weight": (hidden,),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
    }


def _attention_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    head_dim, kind = text.get("head_dim", hidden // heads), text["model_type"]
    query_rows = heads * head_dim * (2 if kind.startswith("qwen3_5") else 1)
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}q_proj.weight": (query_rows, hidden),
        f"{at}k_proj.weight": (kv_heads * head_dim, hidden),
        f"{at}v_proj.weight": (kv_heads * head_dim, hidden),
        f"{at}o_proj.weight": (hidden, heads * head_dim),
    }
    if kind == "qwen2":
        shapes |= {f"{at}{n}_proj.bias": shapes[f"{at}{n}_proj.weight"][:1] for n in "qkv"}
    if kind.startswith("qwen3"):
        shapes[f"{at}q_norm.weight"] = shapes[f"{at}k_norm.weight"] = (head_dim,)
    return shapes


def _deltanet_shapes(at: str, text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    value_width = heads * text["linear_value_head_dim"]
    conv_width = 2 * text["linear_num_key_heads"] * text["linear_key_head_dim"] + value_width
    return {
        f"{at}in_proj_qkv.weight": (conv_width, hidden),
        f"{at}in_proj_z.weight": (value_width, hidden),
        f"{at}in_proj_a.weight": (heads, hidden),
        f"{at}in_proj_b.weight": (heads, hidden),
        f"{at}conv1d.weight": (conv_width, 1, text["linear_conv_kernel_dim"]),
        f"{at}A_log": (heads,),
        f"{at}dt_bias": (heads,),
        f"{at}norm.weight": (text["linear_value_head_dim"],),
        f"{at}out_proj.weight": (hidden, value_width),
    }

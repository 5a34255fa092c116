"""Small random block drafters for any target, for the conformance tests."""

from __future__ import annotations

import torch

from localspec.drafters._block_shape import BlockShape, LayerView
from localspec.drafters._tiny import attention_shapes, mlp_shapes
from localspec.models import Model


def tiny_block_shape(model: Model, conv_taps: int = 0, block_size: int = 6) -> BlockShape:
    """A windowed causal layer and a full one, over the outputs of the target's first and last layers."""
    return BlockShape(
        hidden_size=model.hidden_size,
        target_hidden_size=model.hidden_size,
        intermediate_size=44,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        inv_freq=100.0 ** -torch.arange(0, 1, 1 / 8),
        layers=(LayerView(window=9, causal=True), LayerView()),
        layer_outputs=(0, model.num_layers - 1),
        block_size=block_size,
        mask_token_id=model.vocab_size - 1,
        conv_taps=conv_taps,
        conv_group_size=4,
    )


def tiny_block_names(shape: BlockShape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the backbone's tensors."""
    hidden, head_dim = shape.hidden_size, shape.head_dim
    query, key = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    names: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(shape.layer_outputs) * shape.target_hidden_size),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(len(shape.layers)):
        at = f"layers.{index}."
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
        norms |= {"self_attn.q_norm": head_dim, "self_attn.k_norm": head_dim}
        names |= {f"{at}{name}.weight": (size,) for name, size in norms.items()}
        names |= attention_shapes(f"{at}self_attn.", (hidden, query, key), hidden)
        names |= mlp_shapes(f"{at}mlp.", hidden, shape.intermediate_size)
        for conv in ("attention_conv", "mlp_conv") if shape.conv_taps else ():
            names[f"{at}{conv}.base_kernel"] = (2, shape.conv_taps, hidden)
            groups = hidden // shape.conv_group_size
            names[f"{at}{conv}.kernel_projection.weight"] = (2 * shape.conv_taps * groups, hidden)
    return names

"""Settings of block drafters, read from the several forms in which their config.json comes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from localspec.layers.config import ConfigReader
from localspec.layers.rope import rotary_frequencies

NEUTRAL = {"attention_sink_bias": False, "attention_value_scale": 1.0, "output_multiplier": 1.0}
"""Settings that some checkpoints have and that are not computed here, with the value that changes nothing."""
MAX_BLOCK_ROWS = 16


@dataclass(frozen=True)
class LayerView:
    """What a row of the block sees. window: keys (0: all of them); causal: nothing behind itself in the block."""

    window: int = 0
    causal: bool = False


@dataclass(frozen=True)
class BlockShape:
    """Sizes and options. layer_outputs: target layers whose outputs are joined; inv_freq: [rot / 2] float32.

    conv_taps 0: no convolution. own_head: the checkpoint's full head differs from the target's.
    """

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    inv_freq: Tensor
    layers: tuple[LayerView, ...]
    layer_outputs: tuple[int, ...]
    block_size: int
    mask_token_id: int
    embedding_scale: float = 1.0
    softcap: float = 0.0
    own_head: bool = False
    conv_taps: int = 0
    conv_group_size: int = 1


class BlockConfig:
    """config.json in any of its forms: keys at the top, under `dflash_config`, or prefixed with `dspark_`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.outer = ConfigReader(config)
        self.inner = self.outer.section("transformer_layer_config") or self.outer
        self._places = [self.outer.section("dflash_config") or ConfigReader({}), self.outer]

    def get(self, key: str, default: Any = None) -> Any:
        """The first value found under that name."""
        for place in self._places:
            for name in (key, f"dspark_{key}"):
                value = place.get(name)
                if value is not None:
                    return value
        return default

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number from 0 up. Raises ValueError if it is missing without a default or something else."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"config.json: {key} is {value!r}; a whole number is needed")
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number from 0 up. Raises ValueError otherwise."""
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
            raise ValueError(f"config.json: {key} is {value!r}; a number is needed")
        return float(value)


def read_block_shape(config: BlockConfig, num_target_layers: int, target_hidden_size: int) -> BlockShape:
    """Raises ValueError for what is missing, not supported, or does not fit a target of so many layers."""
    inner = config.inner
    inner.expect("hidden_act", "silu")
    inner.expect("attention_bias", False)
    for key, neutral in NEUTRAL.items():
        if config.get(key, neutral) not in (neutral, False):
            raise ValueError(f"config.json: {key} = {config.get(key)!r} is not supported")
    hidden, heads = inner.integer("hidden_size"), inner.integer("num_attention_heads")
    head_dim = inner.integer("head_dim", max(1, hidden // heads))
    num_layers = inner.integer("num_hidden_layers")
    block_size = config.integer("block_size", 7 if config.get("markov_rank") else None)
    if not 1 <= block_size <= MAX_BLOCK_ROWS or num_layers > num_target_layers:
        raise ValueError(f"config.json: block_size {block_size} or num_hidden_layers {num_layers} is out of range")
    taps = config.integer("conv_kernel_size", 0)
    group = config.integer("conv_group_size", 1)
    if taps and (not group or hidden % group):
        raise ValueError(f"config.json: conv_group_size {group} does not divide hidden_size {hidden}")
    return BlockShape(
        hidden_size=hidden,
        target_hidden_size=config.integer("target_hidden_size", target_hidden_size),
        intermediate_size=inner.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=inner.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=inner.number("rms_norm_eps", 1e-6),
        inv_freq=rotary_frequencies(inner, head_dim),
        layers=_layer_views(config, num_layers),
        layer_outputs=_layer_outputs(config, num_layers, num_target_layers),
        block_size=block_size,
        mask_token_id=config.integer("mask_token_id"),
        embedding_scale=config.number("input_embedding_scale", 1.0),
        softcap=config.number("final_logit_softcapping", 0.0),
        own_head=bool(config.get("has_own_lm_head", False)),
        conv_taps=taps,
        conv_group_size=group,
    )


def _layer_views(config: BlockConfig, num_layers: int) -> tuple[LayerView, ...]:
    """Windows and causality of the layers.

    `is_causal` decides before `causal`; without both, windowed layers are causal and full ones are not, unless the
    config has no `layer_types`: then nothing is causal and `use_swa` puts every layer under the window.
    """
    said = config.get("is_causal", config.get("causal"))
    kinds = config.inner.get("layer_types", config.get("layer_types"))
    window = config.get("swa_window_size", config.inner.get("sliding_window")) or 0
    if kinds is None:
        view = LayerView(window if config.get("use_swa") else 0, bool(said))
        return (view,) * num_layers
    known = {"full_attention", "sliding_attention"}
    if not isinstance(kinds, list) or len(kinds) != num_layers or set(kinds) - known:
        raise ValueError(f"config.json: layer_types must name {' or '.join(sorted(known))} {num_layers} times")
    if "sliding_attention" in kinds and not (isinstance(window, int) and window > 0):
        raise ValueError("config.json: sliding_attention needs sliding_window")
    windowed_causal = not config.get("sliding_window_non_causal", False) if said is None else bool(said)
    return tuple(
        LayerView(window, windowed_causal) if kind == "sliding_attention" else LayerView(0, bool(said))
        for kind in kinds
    )


def _layer_outputs(config: BlockConfig, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """`target_layer_ids` are layer outputs; `aux_hidden_state_layer_ids` of the other layout count layer inputs."""
    ids = config.get("target_layer_ids")
    if ids is None:
        ids = config.get("aux_hidden_state_layer_ids")
        if isinstance(ids, list) and all(isinstance(each, int) for each in ids):
            ids = [each - 1 for each in ids]
    if ids is None and num_layers == 1:
        ids = [num_target_layers // 2]
    if ids is None:
        # Evenly from output 1 to output L - 3.
        ids = [round(1 + place * (num_target_layers - 4) / (num_layers - 1)) for place in range(num_layers)]
    fits = isinstance(ids, list) and bool(ids) and all(isinstance(each, int) for each in ids)
    if not fits or not all(0 <= each < num_target_layers for each in ids):
        raise ValueError(f"config.json: target_layer_ids {ids} do not fit a target of {num_target_layers} layers")
    return tuple(ids)

"""Random tiny checkpoints, caches and rows for tests of models, layers and whatever stands on them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from localspec.core.cache_spec import CacheSpec
from localspec.core.records import HiddenNeeds, Rows
from localspec.core.state import Cache
from localspec.formats.checkpoint import open_checkpoint, read_config
from localspec.kernels.backends.reference import ReferenceOps
from localspec.kernels.ops import Ops
from localspec.models import Model, architecture

PAGE_TOKENS = 64


def reference_ops() -> ReferenceOps:
    return ReferenceOps(torch.device("cpu"))


def random_checkpoint(model_type: str, seed: int, folder: Path, config: dict[str, Any] | None = None) -> Path:
    """Write config.json and model.safetensors of a random model; norms, A_log and dt_bias are random too."""
    config = architecture(model_type).tiny_config() if config is None else config
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: _random(name, shape, generator)
        for name, shape in tensor_shapes(config, config.get("text_config", config)).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith(".bias"):
        return 0.3 * values
    if "norm" in name:
        return 0.5 + torch.rand(shape, generator=generator)
    if name.endswith(("A_log", "dt_bias")):
        return 0.7 * values
    if "embed" in name:
        return values
    return values * (1.2 / shape[-1] ** 0.5)


def tensor_shapes(config: dict[str, Any], text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as the public checkpoints of these architectures have them."""
    nested = "text_config" in config
    prefix = "model.language_model." if nested else "model."
    hidden, inner, vocab = text["hidden_size"], text["intermediate_size"], text["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {f"{prefix}embed_tokens.weight": (vocab, hidden)}
    for layer in range(text["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        shapes[f"{at}input_layernorm.weight"] = shapes[f"{at}post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{at}mlp.gate_proj.weight"] = shapes[f"{at}mlp.up_proj.weight"] = (inner, hidden)
        shapes[f"{at}mlp.down_proj.weight"] = (hidden, inner)
        if text["model_type"].startswith("qwen3_5") and (layer + 1) % text["full_attention_interval"]:
            shapes |= _deltanet_shapes(f"{at}linear_attn.", text)
        else:
            shapes |= _attention_shapes(f"{at}self_attn.", text)
    shapes[f"{prefix}norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def _attention_shapes(at: str, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kv_heads = text["hidden_size"], text["num_attention_heads"], text["num_key_value_heads"]
    head_dim = text.get("head_dim", hidden // heads)
    kind = text["model_type"]
    rows = {"q": heads * head_dim * (2 if kind.startswith("qwen3_5") else 1), "k": kv_heads * head_dim}
    rows["v"] = rows["k"]
    shapes: dict[str, tuple[int, ...]] = {f"{at}{part}_proj.weight": (size, hidden) for part, size in rows.items()}
    shapes[f"{at}o_proj.weight"] = (hidden, heads * head_dim)
    if kind == "qwen2" or text.get("attention_bias"):
        shapes |= {f"{at}{part}_proj.bias": (size,) for part, size in rows.items()}
    if text.get("attention_bias"):
        shapes[f"{at}o_proj.bias"] = (hidden,)
    if kind.startswith("qwen3"):
        shapes[f"{at}q_norm.weight"] = shapes[f"{at}k_norm.weight"] = (head_dim,)
    return shapes


def _deltanet_shapes(at: str, text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
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


def load_model(folder: Path, ops: Ops | None = None) -> Model:
    """The model of a folder on the reference back end (or another)."""
    config = read_config(folder)
    return architecture(config["model_type"]).load(config, open_checkpoint(folder), ops or reference_ops())


def make_cache(spec: CacheSpec, num_pages: int, num_slots: int) -> Cache:
    """Zero-filled buffers on the CPU; page 0 belongs to nobody."""
    planes = {
        plane.name: torch.zeros(num_pages, PAGE_TOKENS, *plane.shape, dtype=getattr(torch, plane.dtype))
        for plane in spec.planes
    }
    states = {
        state.name: torch.zeros(num_slots, *state.shape, dtype=getattr(torch, state.dtype)) for state in spec.states
    }
    return Cache(planes, states)


def make_rows(
    kind: str,
    windows: dict[int, tuple[int, list[int]]],
    block_tables: Tensor,
    pending: Tensor | None = None,
    padding: tuple[int, int] = (0, 0),
) -> Rows:
    """Rows of a step. windows: slot -> (first position, token ids), in the order of the rows.

    padding: rows of slot -1 before and after the real ones. Their token ids and positions are junk on purpose.
    """
    num_slots = block_tables.shape[0]
    before, after = padding
    token_ids, positions, slots = [-1] * before, [7] * before, [-1] * before
    starts, counts, lengths = [0] * num_slots, [0] * num_slots, [0] * num_slots
    for slot, (first, ids) in windows.items():
        starts[slot], counts[slot], lengths[slot] = len(token_ids), len(ids), first + 1
        token_ids += ids
        positions += range(first, first + len(ids))
        slots += [slot] * len(ids)
    token_ids, positions, slots = token_ids + [-1] * after, positions + [3] * after, slots + [-1] * after
    as_tensor = torch.tensor
    return Rows(
        kind=kind,  # type: ignore[arg-type]
        token_ids=as_tensor(token_ids),
        positions=as_tensor(positions),
        slots=as_tensor(slots),
        block_tables=block_tables,
        lengths=as_tensor(lengths),
        window_starts=as_tensor(starts),
        window_rows=as_tensor(counts),
        pending_rows=torch.zeros(num_slots, dtype=torch.int64) if pending is None else pending,
        max_position_bound=max(positions),
        slot_rows_bound=max(counts),
    )


@dataclass
class Driver:
    """Feeds token ids to a model and keeps what a runner would: block tables, pending rows, lengths in the cache."""

    model: Model
    num_slots: int = 4
    pages_per_slot: int = 10
    scattered: bool = False
    needs: HiddenNeeds = field(default_factory=HiddenNeeds)

    def __post_init__(self) -> None:
        num_pages = 1 + self.num_slots * self.pages_per_slot
        self.cache = make_cache(self.model.cache_spec, num_pages, self.num_slots)
        order = torch.arange(1, num_pages, dtype=torch.int32)
        if self.scattered:
            order = order[torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(5))]
        self.block_tables = order.view(self.num_slots, self.pages_per_slot).contiguous()
        self.lengths = [0] * self.num_slots
        self.pending = torch.zeros(self.num_slots, dtype=torch.int64)

    def prefill(self, slot: int, ids: list[int], chunk: int = 256, padding: tuple[int, int] = (0, 0)) -> Tensor:
        """Feed `ids` in chunks and return their logits [len, V]."""
        found = []
        for start in range(0, len(ids), chunk):
            part = ids[start : start + chunk]
            rows = make_rows(
                "prefill", {slot: (self.lengths[slot], part)}, self.block_tables, self.pending.clone(), padding
            )
            hidden = self.model.forward(rows, self.cache, self.needs).hidden
            found.append(self.model.logits(hidden[padding[0] : padding[0] + len(part)]))
            self.pending[slot] = 0
            self.lengths[slot] += len(part)
        return torch.cat(found)

    def verify(
        self, windows: dict[int, list[int]], committed: dict[int, int] | None = None, padding: tuple[int, int] = (0, 0)
    ) -> dict[int, Tensor]:
        """One verify step; `committed` rows of each slot (default all) are kept. Returns logits of each slot's rows."""
        placed = {slot: (self.lengths[slot], ids) for slot, ids in windows.items()}
        rows = make_rows("verify", placed, self.block_tables, self.pending.clone(), padding)
        logits = self.model.logits(self.model.forward(rows, self.cache, self.needs).hidden)
        out = {}
        for slot, ids in windows.items():
            start = int(rows.window_starts[slot])
            out[slot] = logits[start : start + len(ids)]
            kept = len(ids) if committed is None else committed[slot]
            self.pending[slot] = kept
            self.lengths[slot] += kept
        return out

    def fold(self) -> None:
        self.model.fold(self.cache, self.pending)
        self.pending.zero_()

"""A trainable form of the Qwen3.5 hybrids: Gated DeltaNet in chunks, gated attention, norms that multiply by (1 + w).

Used to make small models of that architecture and to train MTP blocks for them. The sequential formulas stand in
`kernels/reference_gdn.py`; the chunked ones follow Gated DeltaNet (arXiv 2412.06464). Parameters carry the names of
the public checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from localspec.formats import Checkpoint
from localspec.layers.attention import AttentionShape
from localspec.layers.deltanet import DeltaNetShape
from localspec.layers.hybrid import HybridShape
from localspec.models.qwen3_5 import read_shape
from localspec.storage.files import AtomicFile
from localspec.storage.safetensors import write_safetensors
from localspec.training.export import tensor_item
from localspec.training.parts import GatedMlp, Matrix, RmsNorm, attend, in_heads, initialise, rotate
from localspec.training.target import Hiddens

PREFIX = "model.language_model."
CHUNK = 64
L2_EPS = 1e-6


class GatedAttention(nn.Module):
    """Full attention with per-head norms and an output gate."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden = shape.hidden_size
        self.q_proj, self.k_proj, self.v_proj = Matrix(2 * query, hidden), Matrix(key, hidden), Matrix(key, hidden)
        self.o_proj = Matrix(hidden, query)
        self.q_norm = RmsNorm(shape.head_dim, shape.norm_eps, plus_one=True)
        self.k_norm = RmsNorm(shape.head_dim, shape.norm_eps, plus_one=True)

    def heads(self, x: Tensor, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [B, T, D] -> q and gate [B, T, H, d], k and v [B, T, Hkv, d]."""
        head_dim = self.shape.head_dim
        q, gate = in_heads(self.q_proj.multiply(x), 2 * head_dim).chunk(2, dim=-1)
        k, v = (in_heads(each.multiply(x), head_dim) for each in (self.k_proj, self.v_proj))
        q, k = self.q_norm.norm(q), self.k_norm.norm(k)
        return rotate(q, positions, inv_freq), gate, rotate(k, positions, inv_freq), v

    def finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        """mixed [B, T, H * d], gate [B, T, H, d] -> [B, T, D]."""
        return self.o_proj.multiply(mixed * gate.flatten(2).sigmoid())


class _Convolution(nn.Module):
    weight: Tensor

    def __init__(self, width: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width, 1, taps))


class DeltaNet(nn.Module):
    """The recurrent mixer."""

    def __init__(self, shape: DeltaNetShape) -> None:
        super().__init__()
        self.shape = shape
        heads, hidden = shape.num_value_heads, shape.hidden_size
        self.in_proj_qkv, self.in_proj_z = Matrix(shape.conv_width, hidden), Matrix(shape.value_width, hidden)
        self.in_proj_a, self.in_proj_b = Matrix(heads, hidden), Matrix(heads, hidden)
        self.conv1d = _Convolution(shape.conv_width, shape.conv_taps)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(heads)), nn.Parameter(torch.zeros(heads))
        self.norm = RmsNorm(shape.value_head_dim, shape.norm_eps)
        self.out_proj = Matrix(hidden, shape.value_width)

    def mix(self, x: Tensor) -> Tensor:
        """x [B, T, D] normed, T a multiple of CHUNK -> [B, T, D]."""
        shape = self.shape
        qkv = self.in_proj_qkv.multiply(x).transpose(1, 2)
        kernel = self.conv1d.weight.to(qkv.dtype)
        padded = functional.pad(qkv, (shape.conv_taps - 1, 0))
        mixed = functional.silu(functional.conv1d(padded, kernel, groups=shape.conv_width)).transpose(1, 2).float()
        key = shape.num_key_heads * shape.key_head_dim
        q, k, v = torch.split(mixed, [key, key, shape.value_width], dim=-1)
        repeats = shape.num_value_heads // shape.num_key_heads
        q, k = (_normed(each, shape.key_head_dim).repeat_interleave(repeats, dim=2) for each in (q, k))
        beta = self.in_proj_b.multiply(x).float().sigmoid()
        decay = -self.A_log.exp() * functional.softplus(self.in_proj_a.multiply(x).float() + self.dt_bias)
        with torch.autocast(x.device.type, enabled=False):
            v = in_heads(v, shape.value_head_dim)
            out = gated_delta(q * shape.key_head_dim**-0.5, k, v, beta, decay)
        z = in_heads(self.in_proj_z.multiply(x), shape.value_head_dim).float()
        gated = self.norm.norm(out) * functional.silu(z)
        return self.out_proj.multiply(gated.flatten(2).to(x.dtype))


def _normed(x: Tensor, head_dim: int) -> Tensor:
    heads = in_heads(x, head_dim)
    return heads * torch.rsqrt(heads.square().sum(dim=-1, keepdim=True) + L2_EPS)


def gated_delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """The recurrence in chunks: within one, a triangular system; between them, the state.

    q, k [B, T, H, K], v [B, T, H, V], beta and decay (logarithm) [B, T, H], float32, T a multiple of CHUNK
    -> [B, T, H, V].
    """
    q, k, v, beta, decay = (_in_chunks(each) for each in (q, k, v, beta, decay))  # [B, H, N, C, ...]
    summed = decay.cumsum(dim=-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    span = (summed[..., :, None] - summed[..., None, :]).masked_fill(~lower, -torch.inf).exp()
    weighted = k * beta[..., None]
    system = (weighted @ k.transpose(-1, -2) * span).tril(-1)
    system = system + torch.eye(CHUNK, device=q.device)
    sides = torch.cat([v * beta[..., None], weighted * summed.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    updates, reads = torch.split(solved, [v.shape[-1], k.shape[-1]], dim=-1)
    inside = q @ k.transpose(-1, -2) * span
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    for chunk in range(q.shape[2]):
        grown, end = summed[:, :, chunk], summed[:, :, chunk, -1:]
        new = updates[:, :, chunk] - reads[:, :, chunk] @ state
        outputs.append((q[:, :, chunk] * grown.exp()[..., None]) @ state + inside[:, :, chunk] @ new)
        left = k[:, :, chunk] * (end - grown).exp()[..., None]
        state = state * end.exp()[..., None] + left.transpose(-1, -2) @ new
    return torch.stack(outputs, dim=2).flatten(2, 3).transpose(1, 2)


def _in_chunks(x: Tensor) -> Tensor:
    """[B, T, H, ...] -> [B, H, T / CHUNK, CHUNK, ...]."""
    x = x.transpose(1, 2)
    return x.reshape(*x.shape[:2], -1, CHUNK, *x.shape[3:])


class _Layer(nn.Module):
    def __init__(self, shape: HybridShape, full: bool) -> None:
        super().__init__()
        hidden, eps = shape.attention.hidden_size, shape.attention.norm_eps
        self.full = full
        self.input_layernorm = RmsNorm(hidden, eps, plus_one=True)
        self.post_attention_layernorm = RmsNorm(hidden, eps, plus_one=True)
        if full:
            self.self_attn = GatedAttention(shape.attention)
        else:
            self.linear_attn = DeltaNet(shape.deltanet)
        self.mlp = GatedMlp(hidden, shape.intermediate_size)

    def run(self, x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
        normed = self.input_layernorm.norm(x)
        if self.full:
            q, gate, k, v = self.self_attn.heads(normed, positions, inv_freq)
            x = x + self.self_attn.finish(attend(q, k, v, None), gate)
        else:
            x = x + self.linear_attn.mix(normed)
        return x + self.mlp.run(self.post_attention_layernorm.norm(x))


class HybridModule(nn.Module):
    """The text model with a head that is its embedding, or one of its own."""

    def __init__(self, shape: HybridShape) -> None:
        super().__init__()
        hidden = shape.attention.hidden_size
        self.shape = shape
        self.embed_tokens = Matrix(shape.vocab_size, hidden)
        self.layers = nn.ModuleList([_Layer(shape, full) for full in shape.full_attention])
        self.norm = RmsNorm(hidden, shape.attention.norm_eps, plus_one=True)
        if not shape.tied:
            self.lm_head = Matrix(shape.vocab_size, hidden)

    @property
    def head(self) -> Matrix:
        """The head's matrix."""
        return self.embed_tokens if self.shape.tied else self.lm_head

    def run(self, tokens: Tensor, layer_outputs: tuple[int, ...] = ()) -> Hiddens:
        """tokens [B, T] -> hiddens [B, T, ...]; padded inside to whole chunks."""
        length = tokens.shape[1]
        tokens = functional.pad(tokens, (0, -length % CHUNK))
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        inv_freq = self.shape.inv_freq.to(tokens.device)
        x, outputs = self.embed_tokens.look_up(tokens), {}
        for index, layer in enumerate(cast(Sequence[_Layer], self.layers)):
            x = layer.run(x, positions, inv_freq)
            outputs[index] = x[:, :length]
        taps = torch.cat([outputs[index] for index in layer_outputs], dim=-1) if layer_outputs else x[:, :length, :0]
        return Hiddens(taps, self.norm.norm(x[:, :length]))


class HybridTarget:
    """Meets `target.Target`."""

    def __init__(self, module: HybridModule, device: torch.device, dtype: torch.dtype) -> None:
        self.module = module.to(device)
        self.device, self.dtype = device, dtype
        self.hidden_size, self.vocab_size = module.shape.attention.hidden_size, module.shape.vocab_size
        self.num_layers = len(module.shape.full_attention)

    @torch.no_grad()
    def hiddens(self, tokens: Tensor, layer_outputs: tuple[int, ...]) -> Hiddens:
        """See `Target.hiddens`."""
        found = self.module.run(tokens, layer_outputs)
        return Hiddens(found.taps.to(self.dtype), found.final.to(self.dtype))

    @torch.no_grad()
    def embed(self, ids: Tensor) -> Tensor:
        """See `Target.embed`."""
        return self.module.embed_tokens.look_up(ids).to(self.dtype)

    @torch.no_grad()
    def head_rows(self, ids: Tensor | None) -> Tensor:
        """See `Target.head_rows`."""
        rows = self.module.head.weight.detach()
        return (rows if ids is None else rows[ids]).to(self.dtype)

    @torch.no_grad()
    def norm_scale(self) -> Tensor:
        """See `Target.norm_scale`."""
        return self.module.norm.weight.float() + 1.0

    @torch.no_grad()
    def go_on(self, tokens: Tensor, count: int) -> Tensor:
        """tokens [B, T] of equal length -> [B, T + count] greedily, reading the whole text again for each token."""
        head = self.head_rows(None)
        for _ in range(count):
            final = self.module.run(tokens).final[:, -1].to(self.dtype)
            tokens = torch.cat([tokens, functional.linear(final, head).argmax(dim=-1)[:, None]], dim=1)
        return tokens


def new_hybrid(config: Mapping[str, Any], seed: int) -> HybridModule:
    """A model to be trained. Raises ValueError for a config that does not describe one."""
    module = HybridModule(read_shape(config))
    initialise(module, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for part in module.modules():
        if isinstance(part, DeltaNet):
            heads = part.A_log.shape[0]
            with torch.no_grad():
                part.A_log.copy_((1 + 15 * torch.rand(heads, generator=generator)).log())
                # Time constants spread from 10 to 1,000 tokens, through the inverse of softplus.
                times = torch.exp(torch.rand(heads, generator=generator) * 4.6 - 6.9)
                part.dt_bias.copy_(times + torch.log(-torch.expm1(-times)))
                part.conv1d.weight.copy_(torch.rand(part.conv1d.weight.shape, generator=generator) - 0.5)
    return module


def load_hybrid(config: Mapping[str, Any], checkpoint: Checkpoint) -> HybridModule:
    """The model of a checkpoint, weights dequantised. Raises ValueError for what is missing or does not fit."""
    module = HybridModule(read_shape(config))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            stored = name if name.startswith("lm_head") else f"{PREFIX}{name}"
            found = checkpoint.weight(stored).dequantise() if parameter.ndim == 2 else checkpoint.vector(stored)
            if found.shape != parameter.shape:
                wanted = tuple(parameter.shape)
                raise ValueError(f"{stored} has shape {tuple(found.shape)}, the config asks for {wanted}")
            parameter.copy_(found)
    return module


def save_hybrid(module: HybridModule, config: Mapping[str, Any], folder: Path, more: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors in BF16, with `more` tensors (an MTP block) beside the model's."""
    folder.mkdir(parents=True, exist_ok=True)
    exact = ("A_log", "dt_bias")
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        value = parameter.detach().cpu()
        stored = name if name.startswith("lm_head") else f"{PREFIX}{name}"
        tensors[stored] = value.float() if name.endswith(exact) else value.to(torch.bfloat16)
    items = [tensor_item(name, tensor) for name, tensor in {**tensors, **more}.items()]
    write_safetensors(folder / "model.safetensors", items)
    with AtomicFile(folder / "config.json") as file:
        file.write((json.dumps(config, indent=2) + "\n").encode())

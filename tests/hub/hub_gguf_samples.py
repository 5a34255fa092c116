"""Small GGUF models with random weights, written by the `gguf` package, for the tests of conversion and pulling."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from localspec.hub.gguf import TENSOR_TYPES

Q = gguf.GGMLQuantizationType
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
MERGES = ["Ġ t", "h e", "Ġt he", "1 2", "e Ì"]


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


@dataclass(frozen=True)
class SampleModel:
    """Sizes and formats of a written model."""

    architecture: str = "llama"
    pre: str = "smollm"
    hidden: int = 64
    intermediate: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    n_layers: int = 2
    tied: bool = True
    weight_type: Q = Q.Q4_1
    embedding_type: Q = Q.Q8_0
    leave_out: frozenset[str] = frozenset()
    extra_metadata: dict[str, object] = field(default_factory=dict)
    extra_tensors: dict[str, np.ndarray] = field(default_factory=dict)
    """Float32 tensors beside those of the architecture."""
    raw_tensors: dict[str, tuple[np.ndarray, Q]] = field(default_factory=dict)
    """Blocks, as they are stored, in place of those of a tensor."""
    n_unused_tokens: int = 3


def vocabulary(model: SampleModel) -> tuple[list[str], list[int]]:
    tokens = SPECIALS + byte_alphabet() + [m.replace(" ", "") for m in MERGES] + ["<tool_call>"]
    kinds = [3] * len(SPECIALS) + [1] * (256 + len(MERGES)) + [4]
    tokens += [f"[PAD{i}]" for i in range(model.n_unused_tokens)]
    return tokens, kinds + [5] * model.n_unused_tokens


def write_model(path: Path, model: SampleModel, seed: int = 0) -> dict[str, np.ndarray]:
    """Writes the file and returns each GGUF tensor's float32 values as the `gguf` package reads them back."""
    rng = np.random.default_rng(seed)
    tokens, kinds = vocabulary(model)
    head = model.hidden // model.n_heads
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(tokens), model.hidden)}
    shapes["output_norm.weight"] = (model.hidden,)
    if not model.tied:
        shapes["output.weight"] = (len(tokens), model.hidden)
    for layer in range(model.n_layers):
        b = f"blk.{layer}."
        shapes |= {b + "attn_norm.weight": (model.hidden,), b + "ffn_norm.weight": (model.hidden,)}
        shapes |= {b + "attn_q.weight": (model.hidden, model.hidden), b + "attn_output.weight": (model.hidden,) * 2}
        kv = model.n_kv_heads * head
        shapes |= {b + "attn_k.weight": (kv, model.hidden), b + "attn_v.weight": (kv, model.hidden)}
        if model.architecture == "qwen2":
            shapes |= {b + "attn_q.bias": (model.hidden,), b + "attn_k.bias": (kv,), b + "attn_v.bias": (kv,)}
        if model.architecture == "qwen3":
            shapes |= {b + "attn_q_norm.weight": (head,), b + "attn_k_norm.weight": (head,)}
        shapes |= {b + "ffn_gate.weight": (model.intermediate, model.hidden)}
        shapes |= {b + "ffn_up.weight": (model.intermediate, model.hidden)}
        shapes |= {b + "ffn_down.weight": (model.hidden, model.intermediate)}
    writer = gguf.GGUFWriter(path, model.architecture)
    _write_metadata(writer, model, tokens, kinds)
    values = {}
    for name, shape in shapes.items():
        if name in model.leave_out:
            continue
        if name in model.raw_tensors:
            raw, raw_kind = model.raw_tensors[name]
            writer.add_tensor(name, raw, raw_dtype=raw_kind)
            continue
        dense = (rng.normal(size=shape) * 0.1 + ("norm" in name)).astype(np.float32)
        kind = model.embedding_type if name == "token_embd.weight" else model.weight_type if len(shape) == 2 else Q.F32
        data = gguf.quants.quantize(dense, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
        values[name] = gguf.quants.dequantize(data, kind) if kind != Q.F32 else dense
    for name, extra in model.extra_tensors.items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return values


def _write_metadata(writer: gguf.GGUFWriter, model: SampleModel, tokens: list[str], kinds: list[int]) -> None:
    writer.add_block_count(model.n_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(model.hidden)
    writer.add_feed_forward_length(model.intermediate)
    writer.add_head_count(model.n_heads)
    writer.add_head_count_kv(model.n_kv_heads)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(model.pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    for key, value in model.extra_metadata.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, int(str(value)))


def random_blocks(type_id: int, n_blocks: int, seed: int) -> np.ndarray:
    """Random bytes with finite 16-bit floats wherever the format has one, so that comparisons mean something."""
    kind = TENSOR_TYPES[type_id]
    rng = np.random.default_rng(seed)
    raw = rng.integers(0, 256, size=(n_blocks, kind.block_bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2]}
    for at in {**halves, "Q6_K": [208], "F16": [0]}.get(kind.name, []):
        scales = rng.normal(size=(n_blocks, 1)).astype(np.float16)
        raw[:, at : at + 2] = scales.view(np.uint8)
    if kind.name == "MXFP4":
        raw[:, 0] %= 250  # larger exponents overflow float32 in both
    return raw

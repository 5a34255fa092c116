"""GGUF to our layout: exact weights, row order, config, tokenizer; and files that must be refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_gguf_samples import Q, SampleModel, random_blocks, vocabulary, write_model
from safetensors.numpy import load_file

from localspec.hub import layout
from localspec.hub.convert import convert_gguf
from localspec.hub.gguf import TENSOR_TYPES
from localspec.hub.gguf_blocks import KEPT_FORMATS
from localspec.hub.gguf_models import rope_row_order
from localspec.hub.records import HubError
from localspec.hub.tokenizer_gguf import read_tokenizer

HUB_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip


def hub_name(gguf_name: str) -> str:
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{HUB_NAMES[parts[2]]}.{parts[3]}"
    return f"{HUB_NAMES[parts[0]]}.{parts[1]}"


def convert(tmp_path: Path, model: SampleModel, seed: int = 0) -> tuple[Path, dict[str, np.ndarray]]:
    values = write_model(tmp_path / "m.gguf", model, seed)
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf(tmp_path / "m.gguf", out, {"temperature": 0.5})
    return out, values


def read(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / name).read_text())


def interleave(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """The reorder that converters to GGUF apply to q and k rows of `llama`."""
    split = rows.reshape(n_heads, 2, rows.shape[0] // n_heads // 2, *rows.shape[1:])
    return split.swapaxes(1, 2).reshape(rows.shape)


@pytest.mark.parametrize(("n_rows", "n_heads"), [(64, 4), (24, 3), (2, 1), (192, 3)])
def test_row_order_undoes_the_interleaving(n_rows: int, n_heads: int) -> None:
    rows = np.arange(n_rows * 5).reshape(n_rows, 5)
    np.testing.assert_array_equal(interleave(rows, n_heads)[rope_row_order(n_rows, n_heads)], rows)


@pytest.mark.torch
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "weight_type", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.F16, Q.BF16, Q.F32], ids=lambda q: q.name
)
def test_weights_are_exact(tmp_path: Path, architecture: str, weight_type: Q) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    from localspec.formats.blocks import METHODS, dequantise, methods_by_name

    pre = {"llama": "smollm", "qwen2": "qwen2", "qwen3": "qwen2"}[architecture]
    model = SampleModel(architecture=architecture, pre=pre, weight_type=weight_type, tied=False)
    out, values = convert(tmp_path, model)
    tensors = load_torch(out / "model.safetensors")
    methods = methods_by_name(read(out, "config.json")["quantization_config"])
    for gguf_name, expected in values.items():
        name = hub_name(gguf_name)
        ours = dequantise(tensors, name) if name in methods else tensors[name].float()
        if architecture == "llama" and ("attn_q" in gguf_name or "attn_k" in gguf_name) and ours.ndim == 2:
            n_heads = model.n_heads if "attn_q" in gguf_name else model.n_kv_heads
            ours = torch.from_numpy(interleave(ours.numpy(), n_heads))
        assert torch.equal(ours, torch.from_numpy(expected)), name
    n_stored = len(tensors) - sum(2 if METHODS[m].affine else 1 for m in methods.values())
    assert n_stored == len(values)


@pytest.mark.torch
@pytest.mark.parametrize("type_name", ["NVFP4", "MXFP4"])
def test_four_bit_floats_become_bfloat16_exactly(tmp_path: Path, type_name: str) -> None:
    """Random blocks in place of a written matrix's: every code and scale comes back as the reference reads it."""
    import gguf
    import torch
    from safetensors.torch import load_file as load_torch

    type_id = next(i for i, kind in TENSOR_TYPES.items() if kind.name == type_name)
    kind = gguf.GGMLQuantizationType(type_id)
    block_values, _ = gguf.GGML_QUANT_SIZES[kind]
    raw = random_blocks(type_id, 96 * 64 // block_values, seed=3).reshape(96, -1)
    blocks = {"blk.0.ffn_up.weight": (raw, kind)}
    out, _ = convert(tmp_path, SampleModel(weight_type=Q.F32, raw_tensors=blocks))
    ours = load_torch(out / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    assert ours.dtype == torch.bfloat16
    expected = gguf.quants.dequantize(raw, kind)
    assert len(np.unique(expected)) > 100
    np.testing.assert_array_equal(ours.float().numpy(), expected)


@pytest.mark.torch
@pytest.mark.parametrize("weight_type", [Q.Q4_1, Q.F32, Q.BF16], ids=lambda q: q.name)
def test_a_factor_of_a_whole_tensor_is_multiplied_in(tmp_path: Path, weight_type: Q) -> None:
    """As NVFP4 weights have it; a factor of the inputs beside it means nothing without quantised inputs."""
    from safetensors.torch import load_file as load_torch

    scales = {"blk.1.ffn_up.scale": np.full(1, 0.5, np.float32), "blk.1.ffn_up.input_scale": np.ones(1, np.float32)}
    out, values = convert(tmp_path, SampleModel(weight_type=weight_type, extra_tensors=scales))
    tensors = load_torch(out / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(tensors[name].numpy(), values["blk.1.ffn_up.weight"] * 0.5)
    assert not any("scale" in each and name in each for each in tensors)


@pytest.mark.torch
@pytest.mark.parametrize("type_name", sorted(KEPT_FORMATS))
def test_kept_formats_lose_nothing(type_name: str) -> None:
    """Random blocks, split and read back, against the reference dequantiser of the GGUF type."""
    import gguf
    import torch

    from localspec.formats.blocks import METHODS, dequantise, weight

    type_id = next(i for i, kind in TENSOR_TYPES.items() if kind.name == type_name)
    raw, kept = random_blocks(type_id, n_blocks=21 * 3, seed=type_id), KEPT_FORMATS[type_name]
    dtypes = {"F16": np.float16, "F32": np.float32}
    parts = {"w.q": kept.codes(raw).reshape(21, -1), "w.scale": kept.scale(raw)}
    if kept.minimum is not None:
        parts["w.min"] = kept.minimum(raw)
    for name in ("w.scale", "w.min"):
        if name in parts:
            parts[name] = np.ascontiguousarray(parts[name]).view(dtypes[kept.scale_dtype]).reshape(21, -1)
    if not kept.packed:
        parts["w.q"] = parts["w.q"].view(np.int8)
    tensors = {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}
    expected = gguf.quants.dequantize(raw.reshape(21, -1), gguf.GGMLQuantizationType(type_id))
    np.testing.assert_array_equal(dequantise(tensors, "w").numpy(), expected)
    config = {"quant_method": "localspec-blocks", "tensors": {"w": kept.method}}
    assert weight(tensors, "w", config).shape == expected.shape
    assert METHODS[kept.method].block_values == kept.block_values


def test_kept_blocks_are_as_small_as_in_the_file(tmp_path: Path) -> None:
    out, _ = convert(tmp_path, SampleModel(weight_type=Q.Q4_1))
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[f"{name}.q"].dtype == np.uint8 and tensors[f"{name}.q"].shape == (96, 32)
    assert tensors[f"{name}.scale"].dtype == np.float16 and tensors[f"{name}.scale"].shape == (96, 2)
    assert tensors[f"{name}.min"].shape == (96, 2)
    assert tensors["model.embed_tokens.weight.q"].dtype == np.int8
    assert oct((out / "model.safetensors").stat().st_mode & 0o777) == "0o600"


@pytest.mark.torch
@pytest.mark.parametrize(("architecture", "pre"), [("llama", "smollm"), ("qwen2", "qwen2"), ("qwen3", "qwen2")])
def test_config_is_understood_by_transformers(tmp_path: Path, architecture: str, pre: str) -> None:
    from transformers import AutoConfig

    out, _ = convert(tmp_path, SampleModel(architecture=architecture, pre=pre))
    document = read(out, "config.json")
    config = AutoConfig.for_model(**{k: v for k, v in document.items() if k != "quantization_config"})
    assert config.model_type == architecture
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (64, 96, 2)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.rope_parameters["rope_theta"] == 100_000.0
    assert document["rms_norm_eps"] == 1e-5
    assert document["tie_word_embeddings"] is True
    written = set(config.to_dict())
    assert set(document) - {"quantization_config"} <= written


def test_generation_config_has_all_end_tokens_and_the_sampling_defaults(tmp_path: Path) -> None:
    out, _ = convert(tmp_path, SampleModel())
    document = read(out, "generation_config.json")
    assert document == {"bos_token_id": 1, "pad_token_id": 2, "eos_token_id": [2, 0], "temperature": 0.5}


def test_tokenizer_config(tmp_path: Path) -> None:
    out, _ = convert(tmp_path, SampleModel())
    document = read(out, "tokenizer_config.json")
    assert document["chat_template"].startswith("{% for m in messages %}")
    assert (document["bos_token"], document["eos_token"], document["unk_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert document["added_tokens_decoder"]["1"]["special"] is True


def tokenizer_of(out: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(out / "tokenizer.json"))


def test_smollm_splits_digits_before_merging(tmp_path: Path) -> None:
    """Other converters drop the split and would use the merge '1 2'."""
    out, _ = convert(tmp_path, SampleModel(pre="smollm"))
    assert tokenizer_of(out).encode("the 1212").tokens == ["t", "he", "Ġ", "1", "2", "1", "2"]


def test_qwen2_splits_digits_by_its_pattern(tmp_path: Path) -> None:
    out, _ = convert(tmp_path, SampleModel(architecture="qwen2", pre="qwen2"))
    assert tokenizer_of(out).encode("in the 12").tokens == ["i", "n", "Ġthe", "Ġ", "1", "2"]


def test_qwen2_normalises_to_nfc_and_smollm_does_not(tmp_path: Path) -> None:
    composed, decomposed = "\u00e9", "e\u0301"
    out, _ = convert(tmp_path, SampleModel(architecture="qwen2", pre="qwen2"))
    qwen = tokenizer_of(out)
    assert qwen.encode(decomposed).ids == qwen.encode(composed).ids
    (tmp_path / "2").mkdir()
    out, _ = convert(tmp_path / "2", SampleModel(pre="smollm"))
    smollm = tokenizer_of(out)
    assert smollm.encode(decomposed).ids != smollm.encode(composed).ids


@pytest.mark.parametrize(("architecture", "pre"), [("llama", "smollm"), ("qwen2", "qwen2")])
def test_special_tokens_are_whole_and_text_comes_back(tmp_path: Path, architecture: str, pre: str) -> None:
    model = SampleModel(architecture=architecture, pre=pre)
    out, _ = convert(tmp_path, model)
    tokenizer, (tokens, _kinds) = tokenizer_of(out), vocabulary(model)
    encoding = tokenizer.encode("<|im_start|>the<tool_call>")
    assert encoding.ids == [1, *[tokens.index(t) for t in ("t", "he")], tokens.index("<tool_call>")]
    assert tokenizer.decode(encoding.ids) == "the<tool_call>"  # control tokens are special, user-defined ones are text
    for text in ("  the\t\n\n x", "zwj \U0001f469\u200d\U0001f4bb!", "a\u00a0b 12345 ...", "", "\u4f60\u597d"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def llama3_divisors(head: int, theta: float, factor: float) -> np.ndarray:
    """As the configuration of Llama 3.1 scales its frequencies, frequency by frequency."""
    found = []
    for at in range(0, head, 2):
        wavelength = 2 * np.pi * theta ** (at / head)
        if wavelength < 8192 / 4:
            found.append(1.0)
        elif wavelength > 8192:
            found.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.torch
def test_llama_3_states_its_rope_by_a_tensor(tmp_path: Path) -> None:
    from localspec.layers.config import ConfigReader
    from localspec.layers.rope import rotary_frequencies

    divisors = llama3_divisors(32, 100_000.0, 8.0)
    assert len(set(divisors.round(4))) == 3  # short, long and a blended one
    model = SampleModel(pre="llama-bpe", n_heads=2, n_kv_heads=1, extra_tensors={"rope_freqs.weight": divisors})
    out, _ = convert(tmp_path, model)
    config = read(out, "config.json")
    assert config["rope_parameters"]["rope_type"] == "llama3" and config["rope_parameters"]["factor"] == 8.0
    plain = 100_000.0 ** -(np.arange(0, 32, 2) / 32)
    ours = rotary_frequencies(ConfigReader(config), 32).numpy()
    np.testing.assert_allclose(ours, plain / divisors, rtol=1e-5)
    assert tokenizer_of(out).encode("1212").tokens == ["12", "1", "2"]  # at most three digits a piece
    assert read(out, "tokenizer.json")["model"]["ignore_merges"] is True
    wrong = SampleModel(n_heads=2, n_kv_heads=1, extra_tensors={"rope_freqs.weight": divisors[::-1].copy()})
    (tmp_path / "2").mkdir()
    with pytest.raises(HubError, match="not the scaling of Llama 3"):
        convert(tmp_path / "2", wrong)


def test_unused_rows_are_not_tokens(tmp_path: Path) -> None:
    model = SampleModel(n_unused_tokens=5)
    out, _ = convert(tmp_path, model)
    assert tokenizer_of(out).get_vocab_size() == len(vocabulary(model)[0]) - 5
    assert read(out, "config.json")["vocab_size"] == len(vocabulary(model)[0])


REFUSED = {
    "architecture": (
        SampleModel(architecture="falcon"),
        "architecture 'falcon'; GGUF import supports llama, qwen2, qwen3, qwen35",
    ),
    "pre-tokenizer": (SampleModel(pre="deepseek-r1"), "'deepseek-r1' is not known; supported are llama-bpe, qwen2"),
    "missing tensor": (SampleModel(leave_out=frozenset({"blk.1.ffn_up.weight"})), "no tensor 'blk.1.ffn_up.weight'"),
    "no embedding": (SampleModel(leave_out=frozenset({"token_embd.weight"})), "no token embedding"),
    "rope scaling": (SampleModel(extra_metadata={"llama.rope.scaling.type": "yarn"}), "rope scaling 'yarn'"),
    "odd heads": (SampleModel(extra_metadata={"llama.attention.key_length": 999}), "4 heads of 999"),
    "part": (SampleModel(extra_metadata={"split.count": 3}), "one of 3 parts; join them first"),
    "scale": (
        SampleModel(extra_tensors={"blk.0.ffn_up.scale": np.ones(2, np.float32)}),
        r"blk\.0\.ffn_up\.scale has shape \(2,\), one number is needed",
    ),
    "head size": (SampleModel(extra_metadata={"llama.attention.key_length": 32}), "attn_q.weight has shape"),
}


@pytest.mark.parametrize(("model", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_unsupported_files_are_refused_before_anything_is_written(
    tmp_path: Path, model: SampleModel, message: str
) -> None:
    write_model(tmp_path / "m.gguf", model)
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", {})
    assert list((tmp_path / "out").iterdir()) == []


def test_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", SampleModel(architecture="qwen2", pre="qwen2"))
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match=r"unknown tensor 'blk\.0\.ffn_xx\.weight'"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", {})


def test_a_merge_that_makes_no_token_is_refused() -> None:
    """The tokenizer could not be built from it, which would be found out when the model is loaded."""
    metadata: dict[str, Any] = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
    metadata |= {"tokenizer.ggml.tokens": ("a", "b", "ab", "c"), "tokenizer.ggml.token_type": (1, 1, 1, 5)}
    assert read_tokenizer({**metadata, "tokenizer.ggml.merges": ("a b",)}).merges == (("a", "b"),)
    for merge in ("a ab", "b a", "x b", "c a"):
        with pytest.raises(HubError, match="makes no token of the vocabulary"):
            read_tokenizer({**metadata, "tokenizer.ggml.merges": ("a b", merge)})


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", SampleModel())
    raw = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(raw[:-100])
    (tmp_path / "out").mkdir()
    with pytest.raises(HubError, match="does not lie inside the file"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", {})


def test_disk_that_the_converted_model_does_not_fit_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf", SampleModel())
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(layout, "free_bytes", lambda directory: layout.RESERVE_BYTES + 50_000)
    with pytest.raises(HubError, match="GB are free") as caught:
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", {})
    assert caught.value.exit_code == 3 and list((tmp_path / "out").iterdir()) == []

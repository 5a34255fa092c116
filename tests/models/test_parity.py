"""Every architecture against the transformers implementation, in float32, on random tiny models, layer by layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from localspec.core.records import HiddenNeeds
from localspec.models import architecture, architectures
from tests.helpers.models import Driver, load_model, make_rows, random_checkpoint

pytestmark = pytest.mark.torch
LENGTH = 150


def _theirs(folder: Path) -> Any:
    import transformers

    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    kind = text["model_type"]
    # `num_token_ids` is ours; the tied flag of a multimodal config is the outer one.
    settings = {key: value for key, value in text.items() if key not in ("model_type", "num_token_ids")}
    settings["tie_word_embeddings"] = config.get("tie_word_embeddings", False)
    their_config = transformers.AutoConfig.for_model(kind, **settings)
    model = transformers.AutoModelForCausalLM.from_config(their_config, attn_implementation="eager")
    weights = load_file(folder / "model.safetensors")
    weights = {name.replace("model.language_model.", "model."): value for name, value in weights.items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    if settings["tie_word_embeddings"]:
        model.tie_weights()
    return model.float().eval()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", architectures())
def test_hiddens_and_logits_equal_transformers(name: str, seed: int, tmp_path: Path) -> None:
    folder = random_checkpoint(name, seed, tmp_path)
    ours, theirs = load_model(folder), _theirs(folder)
    ids = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids]), output_hidden_states=True)
    driver = Driver(ours)
    layers = tuple(range(ours.num_layers))
    rows = make_rows("prefill", {0: (0, ids)}, driver.block_tables)
    got = ours.forward(rows, driver.cache, HiddenNeeds(True, layers))
    # Their last entry is after the final norm.
    for layer in layers[:-1]:
        assert _relative(got.layer_outputs[layer], expected.hidden_states[layer + 1][0]) < 1e-4, f"layer {layer}"
    assert _relative(got.hidden, expected.hidden_states[-1][0]) < 1e-4
    config = architecture(name).tiny_config()
    tokens = config.get("text_config", config).get("num_token_ids", ours.vocab_size)
    logits = ours.logits(got.hidden)
    assert _relative(logits[:, :tokens], expected.logits[0, :, :tokens]) < 1e-4
    assert (logits[:, tokens:] == float("-inf")).all()


def _relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def test_text_only_names_of_the_hybrid_load_alike(tmp_path: Path) -> None:
    config = architecture("qwen3_5").tiny_config()
    nested = load_model(random_checkpoint("qwen3_5", 4, tmp_path / "nested", config))
    flat_config = {**config["text_config"], "model_type": "qwen3_5", "tie_word_embeddings": False}
    weights = load_file(tmp_path / "nested" / "model.safetensors")
    flat = tmp_path / "flat"
    flat.mkdir()
    (flat / "config.json").write_text(json.dumps(flat_config))
    from safetensors.torch import save_file

    extra = {"mtp.norm.weight": torch.ones(64), "model.visual.merger.norm.weight": torch.ones(4)}
    save_file({**{k.replace("language_model.", ""): v for k, v in weights.items()}, **extra}, flat / "a.safetensors")
    ids = list(range(40))
    assert torch.equal(Driver(load_model(flat)).prefill(0, ids), Driver(nested).prefill(0, ids))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    import transformers
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from localspec.layers.config import ConfigReader
    from localspec.layers.rope import rotary_frequencies

    their_config = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=dict(rope))
    expected = LlamaRotaryEmbedding(their_config).inv_freq
    assert torch.equal(rotary_frequencies(ConfigReader({"rope_parameters": rope}), 128), expected)
    flat = {"rope_theta": rope["rope_theta"]}
    if rope["rope_type"] != "default":
        scaling = {key: value for key, value in rope.items() if key not in ("rope_type", "rope_theta")}
        flat["rope_scaling"] = {"type": rope["rope_type"], **scaling}
    assert torch.equal(rotary_frequencies(ConfigReader(flat), 128), expected)

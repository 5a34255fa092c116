"""The demo model's real weights: equal to transformers on the same dequantised weights, bit-equal to itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.formats.checkpoint import open_checkpoint
from localspec.models import Model
from tests.helpers.models import Driver, load_model

pytestmark = [pytest.mark.torch, pytest.mark.demo]
PROMPTS = (
    "The capital of France is",
    "def reverse(text: str) -> str:\n    return",
    "List the first ten prime numbers:",
    "Once upon a time, in a small village by the sea,",
    "SELECT name, count(*) FROM orders WHERE",
    "Die Hauptstadt von Deutschland ist",
    "Q: What is 17 + 25?\nA:",
    "The mitochondria is",
    "import numpy as np\n\nx = np.",
    "To make a good cup of coffee, you need",
    "{\"name\": \"Alice\", \"age\": 30, \"city\":",
    "In 1969, astronauts",
    "# Installation\n\n```bash\npip install",
    "Dear Sir or Madam,\n\nI am writing to",
    "The derivative of x squared is",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
    "Water boils at",
    "for (int i = 0; i < n; i++) {",
    "Shakespeare wrote",
)  # fmt: skip
CONTINUED_TOKENS = 8


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> Model:
    return load_model(demo_folder)


@pytest.fixture(scope="module")
def prompts(demo_folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]


@pytest.fixture(scope="module")
def theirs(demo_folder: Path) -> Any:
    import transformers

    config = json.loads((demo_folder / "config.json").read_text())
    config.pop("quantization_config")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    checkpoint = open_checkpoint(demo_folder)
    weights = {
        name: checkpoint.weight(name).dequantise() if tensor.ndim == 2 else checkpoint.vector(name)
        for name, tensor in model.state_dict().items()
        if checkpoint.has(name)
    }
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


def test_logits_and_greedy_continuations_equal_transformers(
    model: Model, theirs: Any, prompts: list[list[int]]
) -> None:
    for text, ids in zip(PROMPTS, prompts, strict=True):
        driver = Driver(model, num_slots=1)
        logits = driver.prefill(0, ids)
        tokens = [int(logits[-1].argmax())]
        while len(tokens) < CONTINUED_TOKENS:
            tokens.append(int(driver.verify({0: tokens[-1:]})[0][-1].argmax()))
        with torch.no_grad():
            expected = theirs(torch.tensor([ids + tokens])).logits[0]
        error = (logits - expected[: len(ids)]).abs().max() / expected.abs().max()
        assert error < 1e-4, f"{text!r}: {error}"
        assert expected[len(ids) - 1 : -1].argmax(-1).tolist() == tokens, text


def test_windows_and_chunks_keep_the_bits(model: Model, prompts: list[list[int]]) -> None:
    ids = [token for prompt in prompts for token in prompt]
    ids = (ids * 2)[:290]
    whole = Driver(model, num_slots=1).prefill(0, ids)
    driver = Driver(model, num_slots=2, scattered=True)
    assert torch.equal(driver.prefill(1, ids[:250], 64, padding=(1, 2)), whole[:250])
    at = 250
    for width, kept in ((1, 1), (16, 5), (3, 2), (5, 5), (8, 1), (13, 13)):
        window = ids[at : at + kept] + [7] * (width - kept)
        assert torch.equal(driver.verify({1: window}, {1: kept})[1][:kept], whole[at : at + kept]), width
        at += kept

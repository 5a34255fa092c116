"""The demo model's real weights are bit-equal to themselves; tests/engine/test_demo_model.py has the comparison."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

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


@pytest.fixture(scope="module")
def model(demo_folder: Path) -> Model:
    return load_model(demo_folder)


@pytest.fixture(scope="module")
def prompts(demo_folder: Path) -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS]


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

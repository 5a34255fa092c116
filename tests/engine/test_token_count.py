"""Rows of the head beyond the tokenizer's ids are never sampled, whatever the config says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.api.types import Sampling
from localspec.core.records import MAX_SLOTS
from localspec.drafters import DrafterSetup, drafter_module
from localspec.engine.build import load_model
from localspec.engine.token_count import token_count, with_token_count
from localspec.models import architecture, architectures
from tests.helpers.engine import make_request, run, token_engine
from tests.helpers.models import random_checkpoint

pytestmark = pytest.mark.torch


def _write(folder: Path, vocab: Any, added: Any = (), decoder: Any = None) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder or {}}))
    return folder


@pytest.mark.parametrize(
    ("vocab", "added", "decoder", "count"),
    [
        ({"a": 0, "b": 4}, [], {}, 5),
        ({"a": 0}, [{"id": 7}, {"id": "9"}, 3], {}, 8),
        ({"a": 0}, [{"id": 7}], {"11": {}, "x": {}, "-3": {}, "9" * 40: {}}, 12),
        ([["a", 0.1], ["b", 0.2]], [], {}, 2),
        ({}, [{"id": 7}], {}, None),
        (None, [], {"5": {}}, None),
        ({"a": True, "b": -1, "c": 1.5}, [], {}, None),
    ],
)
def test_ids_are_counted(tmp_path: Path, vocab: Any, added: Any, decoder: Any, count: int | None) -> None:
    assert token_count(_write(tmp_path, vocab, added, decoder)) == count


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 50_000, '{"model": 3}'])
def test_a_damaged_tokenizer_counts_nothing(tmp_path: Path, text: str) -> None:
    assert token_count(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(text)
    assert token_count(tmp_path) is None and with_token_count({"vocab_size": 9}, tmp_path) == {"vocab_size": 9}


def test_the_config_has_the_last_word_and_counts_only_shrink(tmp_path: Path) -> None:
    _write(tmp_path, {"a": 99})
    assert with_token_count({"vocab_size": 128}, tmp_path) == {"vocab_size": 128, "num_token_ids": 100}
    assert with_token_count({"vocab_size": 100}, tmp_path) == {"vocab_size": 100}
    said = {"vocab_size": 128, "num_token_ids": 120}
    assert with_token_count(said, tmp_path) == said
    nested = {"text_config": {"vocab_size": 128}, "x": 1}
    assert with_token_count(nested, tmp_path)["text_config"] == {"vocab_size": 128, "num_token_ids": 100}
    assert "num_token_ids" not in nested["text_config"]


def test_a_token_that_ends_answers_stays(tmp_path: Path) -> None:
    _write(tmp_path, {"a": 9})
    assert with_token_count({"vocab_size": 128, "eos_token_id": [3, 50]}, tmp_path)["num_token_ids"] == 51
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [60, "x", -1]}')
    assert with_token_count({"vocab_size": 128, "eos_token_id": 50}, tmp_path)["num_token_ids"] == 61
    nested = with_token_count({"text_config": {"vocab_size": 128, "eos_token_id": 70}}, tmp_path)
    assert nested["text_config"]["num_token_ids"] == 71


@pytest.mark.parametrize("name", architectures())
def test_padding_rows_are_never_sampled(name: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(architecture(name).tiny_config()))
    text = config.get("text_config", config)
    text.pop("num_token_ids", None)
    folder = random_checkpoint(name, 5, tmp_path / name, config)
    _write(folder, {f"t{index}": index for index in range(23)})
    model, ops, checkpoint = load_model(folder, "cpu")
    checkpoint.close()
    logits = model.logits(torch.randn(3, model.hidden_size))
    assert logits[:, 23:].isneginf().all() and logits[:, :23].isfinite().all()
    setup = DrafterSetup(ops=ops, model=model, num_slots=MAX_SLOTS, context_limit_tokens=256)
    with token_engine(model, ops, 256, {"mtp": drafter_module("mtp").tiny(setup)}) as parts:
        # So hot that every row has its chance.
        hot = Sampling(temperature=50.0)
        found = run(
            parts,
            [make_request([1, 2, 3], max_tokens=60, sampling=hot, seed=s, drafter="mtp", depth=3) for s in range(3)],
        )
    ids = {token for each in found for token in each.token_ids}
    assert len(ids) > 12 and max(ids) < 23

"""How many token ids a model's tokenizer has: rows of the head beyond them are padding and never sampled.

Checkpoints pad their vocabulary to a round number of rows; what those rows say was never trained. Reads files as
hostile: what cannot be counted changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 256 << 20
KEY = "num_token_ids"


def with_token_count(config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config of a model with `num_token_ids`, unless it says so itself or the tokenizer does not tell."""
    nested = isinstance(config.get("text_config"), dict)
    text: Mapping[str, Any] = config["text_config"] if nested else config
    count = None if KEY in text else token_count(folder)
    if count is not None:
        # A token that ends answers counts even where the tokenizer's files forgot it.
        ends = (text, config, _object(folder / "generation_config.json"))
        count = max([count, *(1 + number for each in ends for number in _listed(each.get("eos_token_id")))])
    vocab = text.get("vocab_size")
    if count is None or type(vocab) is not int or count >= vocab:
        return dict(config)
    return {**config, "text_config": {**text, KEY: count}} if nested else {**config, KEY: count}


def token_count(folder: Path) -> int | None:
    """One more than the highest id of tokenizer.json and tokenizer_config.json; None where they name none."""
    tokenizer, settings = _object(folder / "tokenizer.json"), _object(folder / "tokenizer_config.json")
    model, added, decoder = tokenizer.get("model"), tokenizer.get("added_tokens"), settings.get("added_tokens_decoder")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: list[int] = []
    if isinstance(vocab, dict):
        ids += _natural(vocab.values())
    elif isinstance(vocab, list):
        ids += [len(vocab) - 1]
    if not ids:
        return None
    if isinstance(added, list):
        ids += _natural(entry.get("id") for entry in added if isinstance(entry, dict))
    if isinstance(decoder, dict):
        ids += _natural(int(key) for key in decoder if isinstance(key, str) and key.isdecimal() and len(key) < 12)
    return max(ids) + 1


def _listed(value: Any) -> list[int]:
    return _natural(value if isinstance(value, list) else [value])


def _natural(values: Iterable[Any]) -> list[int]:
    return [value for value in values if type(value) is int and value >= 0]


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}

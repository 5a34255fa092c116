"""A tiny random model with a byte-level tokenizer, thinking and tool markers and a chat template: whole in text."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from localspec.models import architecture
from tests.helpers.models import random_checkpoint

SPECIAL = ("<|end|>",)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
MERGES = ("{ \"", "\" :", "\" ,", "t r", "tr u", "tru e", "a b", "1 2", "] }", "} }", "Ġ Ġ", ": Ġ")  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[a]{% if enable_thinking | default(true) %}<think>{% endif %}{% endif %}"
    '{# <tool_call> {"name": ..., "arguments": ...} #}'
)


def byte_tokenizer() -> Tokenizer:
    """Every byte, a few merges, `<|end|>` (special) and the markers of thoughts and calls (not special)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in MERGES)]
    vocab = {piece: index for index, piece in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKERS])
    return tokenizer


def tiny_text_model(model_type: str, seed: int, folder: Path) -> Path:
    """Write a model folder that an engine can load."""
    tokenizer = byte_tokenizer()
    config = json.loads(json.dumps(architecture(model_type).tiny_config()))
    # More rows than tokens, as real checkpoints have them.
    text = config.get("text_config", config)
    text["vocab_size"] = tokenizer.get_vocab_size() + 27
    if "num_token_ids" in text:
        text["num_token_ids"] = tokenizer.get_vocab_size()
    random_checkpoint(model_type, seed, folder, config)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|end|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder

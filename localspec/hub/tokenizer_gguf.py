"""Builds tokenizer.json and tokenizer_config.json from GGUF metadata, exactly as the metadata declares it.

Knows byte-level BPE (`tokenizer.ggml.model = gpt2`) with the pre-tokenizers in `PRE_TOKENIZERS`. Declared parts that
other converters are known to lose are kept: the split of digits (`smollm`) and the NFC normaliser (`qwen2`). Any other
model or pre-tokenizer is refused by name, because a guess would give silently different token ids. Torch-free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from localspec.hub.gguf import Value
from localspec.hub.records import HubError

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
MAX_TEMPLATE_CHARACTERS = 200_000

# Names that end a turn in the chat formats of the supported families, beside the declared end-of-sequence token.
_END_OF_TURN = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")

_QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN35_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _sequence(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def _split(pattern: str) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class PreTokenizer:
    """Normaliser and splitter of one `tokenizer.ggml.pre` value, as `tokenizers` JSON."""

    normalizer: Json | None
    splitter: Json
    ignores_merges: bool = False
    """Whether a piece that is a token as a whole is taken as it is."""


PRE_TOKENIZERS: Mapping[str, PreTokenizer] = MappingProxyType(
    {
        "smollm": PreTokenizer(
            None, _sequence({"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True))
        ),
        "qwen2": PreTokenizer({"type": "NFC"}, _sequence(_split(_QWEN2_PATTERN), _byte_level(use_regex=False))),
        "qwen35": PreTokenizer({"type": "NFC"}, _sequence(_split(_QWEN35_PATTERN), _byte_level(use_regex=False))),
        "llama-bpe": PreTokenizer(
            None, _sequence(_split(_LLAMA3_PATTERN), _byte_level(use_regex=False)), ignores_merges=True
        ),
    }
)


ADDS_BOS = frozenset({"llama-bpe"})
"""Pre-tokenizers whose texts begin with the bos token where the metadata says nothing."""


@dataclass(frozen=True)
class GgufTokenizer:
    """What the metadata says, checked: texts of all ids, their kinds, merges and special ids."""

    tokens: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[tuple[str, str], ...]
    pre_tokenizer: PreTokenizer
    special_ids: Mapping[str, int]
    """Of bos, eos, unk, pad: those that are declared."""
    add_bos: bool
    chat_template: str | None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer: the declared one first, then the family's other end markers."""
        declared = [self.special_ids[role] for role in ("eos", "eot") if role in self.special_ids]
        markers = [i for i, kind in enumerate(self.kinds) if kind == CONTROL and self.tokens[i] in _END_OF_TURN]
        return tuple(dict.fromkeys(declared + markers))


def read_tokenizer(metadata: Mapping[str, Value]) -> GgufTokenizer:
    """Checks the tokenizer part of GGUF metadata. Raises HubError naming the key that is missing or not supported."""
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2":
        raise HubError(f"tokenizer.ggml.model is {model!r}; byte-level BPE ('gpt2') can be converted")
    if not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise HubError(f"the pre-tokenizer {pre!r} is not known; supported are {', '.join(sorted(PRE_TOKENIZERS))}")
    tokens = _texts(metadata, "tokenizer.ggml.tokens")
    kinds = _numbers(metadata, "tokenizer.ggml.token_type")
    if len(kinds) != len(tokens) or not tokens:
        raise HubError(f"tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} tokens")
    if len({t for t, kind in zip(tokens, kinds, strict=True) if kind != UNUSED}) != sum(k != UNUSED for k in kinds):
        raise HubError("tokenizer.ggml.tokens holds the same token twice")
    special_ids = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("eot", "eot"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is None:
            continue
        if type(token_id) is not int or not 0 <= token_id < len(tokens):
            raise HubError(f"tokenizer.ggml.{key}_token_id is {token_id!r}, outside the vocabulary")
        special_ids[role] = token_id
    template = metadata.get("tokenizer.chat_template")
    if template is not None and (not isinstance(template, str) or len(template) > MAX_TEMPLATE_CHARACTERS):
        raise HubError("tokenizer.chat_template is not a text of a reasonable size")
    return GgufTokenizer(
        tokens=tokens,
        kinds=kinds,
        merges=_merges(metadata, frozenset(t for t, k in zip(tokens, kinds, strict=True) if k != UNUSED)),
        pre_tokenizer=PRE_TOKENIZERS[pre],
        special_ids=MappingProxyType(special_ids),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre in ADDS_BOS) is True and "bos" in special_ids,
        chat_template=template,
    )


def _merges(metadata: Mapping[str, Value], tokens: frozenset[str]) -> tuple[tuple[str, str], ...]:
    """Pairs whose parts and result are tokens: with any other the tokenizer could not be built when it is needed."""
    merges = tuple(_merge(line) for line in _texts(metadata, "tokenizer.ggml.merges"))
    for left, right in merges:
        if not tokens >= {left, right, left + right}:
            raise HubError(
                f"tokenizer.ggml.merges joins {left!r} and {right!r}, which makes no token of the vocabulary"
            )
    return merges


def _texts(metadata: Mapping[str, Value], key: str) -> tuple[str, ...]:
    values = metadata.get(key)
    if not isinstance(values, tuple) or not all(isinstance(v, str) for v in values):
        raise HubError(f"{key} is missing or no list of texts")
    return tuple(str(v) for v in values)


def _numbers(metadata: Mapping[str, Value], key: str) -> tuple[int, ...]:
    values = metadata.get(key)
    if not isinstance(values, tuple) or not all(type(v) is int for v in values):
        raise HubError(f"{key} is missing or no list of whole numbers")
    return tuple(int(v) for v in values)


def _merge(line: str) -> tuple[str, str]:
    """A merge is two pieces with one space between; the pieces of a byte-level vocabulary hold no space."""
    left, space, right = line.partition(" ")
    if not (left and space and right) or " " in right:
        raise HubError(f"tokenizer.ggml.merges has the malformed line {line!r}")
    return left, right


def added_tokens(tokenizer: GgufTokenizer) -> list[Json]:
    """The `added_tokens` list of tokenizer.json: tokens that are matched as a whole before any splitting."""
    return [
        {
            "id": token_id,
            "content": tokenizer.tokens[token_id],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == CONTROL,
        }
        for token_id, kind in enumerate(tokenizer.kinds)
        if kind in (CONTROL, USER_DEFINED)
    ]


def tokenizer_json(tokenizer: GgufTokenizer) -> Json:
    """The `tokenizers` document. Control tokens become special added tokens, user-defined ones plain added tokens,
    unused padding rows are left out."""
    vocabulary = {
        text: token_id
        for token_id, (text, kind) in enumerate(zip(tokenizer.tokens, tokenizer.kinds, strict=True))
        if kind != UNUSED
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens(tokenizer),
        "normalizer": tokenizer.pre_tokenizer.normalizer,
        "pre_tokenizer": tokenizer.pre_tokenizer.splitter,
        "post_processor": _post_processor(tokenizer),
        "decoder": _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": tokenizer.pre_tokenizer.ignores_merges,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in tokenizer.merges],
        },
    }


def _post_processor(tokenizer: GgufTokenizer) -> Json | None:
    if not tokenizer.add_bos:
        return None
    bos_id = tokenizer.special_ids["bos"]
    bos = tokenizer.tokens[bos_id]
    first, second = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, first],
        "pair": [{"SpecialToken": {"id": bos, "type_id": 0}}, first, second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def tokenizer_config_json(tokenizer: GgufTokenizer, context_tokens: int) -> Json:
    """tokenizer_config.json: special tokens by role, the chat template, the list of added tokens."""
    document: Json = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": tokenizer.add_bos,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context_tokens,
        "added_tokens_decoder": {str(entry.pop("id")): entry for entry in added_tokens(tokenizer)},
    }
    for role in ("bos", "eos", "unk", "pad"):
        token_id = tokenizer.special_ids.get(role)
        document[f"{role}_token"] = None if token_id is None else tokenizer.tokens[token_id]
    if tokenizer.chat_template is not None:
        document["chat_template"] = tokenizer.chat_template
    return document

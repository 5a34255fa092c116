"""What two vocabularies have in common: tokens that spell the same bytes (token-level intersection, arXiv 2502.05202).

Reads tokenizer.json of both sides as untrusted input. Knows nothing of models or drafting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_TOKENIZER_BYTES = 256 << 20
MAX_TOKEN_ID = 1 << 24
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class VocabularyMap:
    """draft_to_target: [Vd] int64, -1 where the target has no such token; target_to_draft: [V] int64, every entry a
    draft id: the same token, or the draft token that spells its end, so that the draft reads on from there.

    shared_tokens: how many draft tokens have a counterpart.
    """

    draft_to_target: Tensor
    target_to_draft: Tensor
    shared_tokens: int


def read_spellings(folder: Path) -> dict[int, bytes]:
    """Id -> bytes of every token of a folder's tokenizer.json; control tokens spell their name after a zero byte.

    Raises ValueError if the file is missing, too large or not understood.
    """
    path = folder / "tokenizer.json"
    try:
        if path.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ValueError(f"{path} is larger than {MAX_TOKENIZER_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
        vocabulary, added = found["model"]["vocab"], found.get("added_tokens") or []
        pairs = vocabulary.items() if isinstance(vocabulary, Mapping) else ((t[0], i) for i, t in enumerate(vocabulary))
        byte_level = _is_byte_level(found)
        spellings = {_checked(number): _spell(text, byte_level) for text, number in pairs}
        for token in added:
            text = token["content"].encode()
            spellings[_checked(token["id"])] = b"\0" + text if token.get("special") else text
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; both sides of a draft pair need it") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError, IndexError):
        raise ValueError(f"{path} is no tokenizer that can be compared") from None
    return spellings


def compare(draft: Mapping[int, bytes], target: Mapping[int, bytes], sizes: tuple[int, int]) -> VocabularyMap | None:
    """The map between two vocabularies; None if every shared id spells the same (no mapping is needed).

    sizes: rows of the draft's and the target's head. Raises ValueError if they have nothing in common.
    """
    draft = {number: text for number, text in draft.items() if number < sizes[0]}
    target = {number: text for number, text in target.items() if number < sizes[1]}
    if sizes[0] <= sizes[1] and all(target.get(number) == text for number, text in draft.items()):
        return None
    draft_ids, target_ids = _ids(draft), _ids(target)
    to_target = torch.full((sizes[0],), -1, dtype=torch.int64)
    for number, text in draft.items():
        to_target[number] = target_ids.get(text, -1)
    shared = int((to_target >= 0).sum())
    if not shared:
        raise ValueError("the draft's vocabulary has no token in common with the target's")
    to_draft = torch.zeros(sizes[1], dtype=torch.int64)
    for number, text in target.items():
        to_draft[number] = _nearest(text, draft_ids)
    return VocabularyMap(to_target, to_draft, shared)


def _nearest(text: bytes, ids: Mapping[bytes, int]) -> int:
    """The token itself, or else the one that spells the longest end of it, or else 0."""
    if text[:1] == b"\0":
        return ids.get(text, 0)
    return next((ids[text[start:]] for start in range(len(text)) if text[start:] in ids), 0)


def _ids(spellings: Mapping[int, bytes]) -> dict[bytes, int]:
    """Bytes -> lowest id; empty spellings are left out."""
    found: dict[bytes, int] = {}
    for number in sorted(spellings):
        if spellings[number]:
            found.setdefault(spellings[number], number)
    return found


def _checked(number: Any) -> int:
    if not isinstance(number, int) or not 0 <= number < MAX_TOKEN_ID:
        raise KeyError(number)
    return number


def _is_byte_level(found: Mapping[str, Any]) -> bool:
    """Whether tokens are written in the printable alphabet for bytes."""
    parts = [found.get("decoder") or {}, found.get("pre_tokenizer") or {}]
    nested = [part for each in parts for key in ("decoders", "pretokenizers") for part in each.get(key) or ()]
    return any(part.get("type") == "ByteLevel" for part in (*parts, *nested))


def _spell(text: str, byte_level: bool) -> bytes:
    """The bytes that a token stands for, in either way of writing them."""
    if byte_level:
        if all(letter in _LETTER_BYTES for letter in text):
            return bytes(_LETTER_BYTES[letter] for letter in text)
        return text.encode()
    match = _BYTE_TOKEN.fullmatch(text)
    return bytes([int(match[1], 16)]) if match else text.replace("\u2581", " ").encode()


def _letter_bytes() -> dict[str, int]:
    """Letter -> byte: printable Latin-1 stands for itself, the other bytes for the letters from U+0100 on, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + index): byte for index, byte in enumerate(rest)}


_LETTER_BYTES = _letter_bytes()

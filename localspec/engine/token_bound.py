"""How few tokens a text can have, told from its length alone. Knows the rules of tokenizer.json; tokenises nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NFC_CHARS = 4
"""Most characters that canonical composition makes one of (Unicode's longest canonical decomposition)."""
_DROPS_NOTHING = frozenset(("ByteLevel", "Digits", "Sequence", "Split"))
_CONTINUATION_BYTES = range(0x80, 0xC0)


@dataclass(frozen=True)
class TokenBound:
    """`most_chars` is what one token can stand for, None where nothing is known; `dropped` become no token at all."""

    most_chars: int | None
    dropped: str = ""

    def least_tokens(self, text: str) -> int:
        """Tokens that the text has at least; 0 where nothing is known."""
        if self.most_chars is None:
            return 0
        return -(-(len(text) - sum(map(text.count, self.dropped))) // self.most_chars)


def token_bound(rules: dict[str, Any]) -> TokenBound:
    """Bound for byte-level vocabularies under rules that neither drop nor shorten text; none for others."""
    model, added = rules.get("model"), rules.get("added_tokens") or []
    splitters, normalizers = _parts(rules.get("pre_tokenizer")), _parts(rules.get("normalizer"))
    splitter_types = {part.get("type") for part in splitters}
    normalizer_types = {part.get("type") for part in normalizers} - {"Sequence"}
    if not isinstance(model, dict) or model.get("type") != "BPE" or "ByteLevel" not in splitter_types:
        return TokenBound(None)
    if not splitter_types <= _DROPS_NOTHING or any(part.get("behavior") == "Removed" for part in splitters):
        return TokenBound(None)
    # Spaces beside an added token may be swallowed by it, as many as there are.
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if swallows or not normalizer_types <= {"NFC"} or rules.get("truncation"):
        return TokenBound(None)
    vocab, names = model.get("vocab") or {}, _byte_names()
    # With these there, every character beyond ASCII has some token; small vocabularies lack other bytes.
    if not all(names[byte] in vocab for byte in _CONTINUATION_BYTES):
        return TokenBound(None)
    longest = max(map(len, (*vocab, *(token["content"] for token in added))))
    dropped = "".join(chr(byte) for byte in range(128) if names[byte] not in vocab)
    return TokenBound(longest * (_NFC_CHARS if normalizer_types else 1), dropped)


def _byte_names() -> list[str]:
    """The characters under which byte-level vocabularies list the 256 bytes.

    Printable Latin-1 characters stand for themselves; the others get the characters from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _parts(rule: Any) -> list[dict[str, Any]]:
    """A rule and the rules inside it."""
    if not isinstance(rule, dict):
        return []
    inner = [*(rule.get("pretokenizers") or ()), *(rule.get("normalizers") or ())]
    return [rule, *(part for item in inner for part in _parts(item))]

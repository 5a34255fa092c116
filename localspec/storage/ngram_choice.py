"""Which of several records speaks for a context, and what it says.

Knows bytes of records and the tokens of a context; does not know where records come from. Torn bytes give wrong tokens
and nothing worse.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from localspec.storage.ngram_format import (
    CONTINUATION_TOKENS,
    FULL_SHARE,
    MAX_TOKEN,
    RECORD_HEAD,
    TAG_TOKENS,
    context_tag,
)

_TOKEN_PARTS = struct.Struct("<" + "HB" * CONTINUATION_TOKENS)


@dataclass(frozen=True)
class Continuation:
    """What followed a context in the table's text."""

    tokens: tuple[int, ...]
    """1 to 14 token ids."""
    match_tokens: int
    """How much of the context is known to agree: the table's order, 12 or 16."""
    count: int
    """Occurrences in which the first of the tokens came next."""
    share: float
    """Of the occurrences that agree as far, 0 to 1."""
    source: int
    """Number of the source the tokens are from."""


def best_continuation(records: Sequence[bytes], context: Sequence[int], order: int) -> Continuation:
    """Of at least one record of the context's order - 1 tokens and its last one: the longest agreement speaks, in it
    the next token that was seen most. Of equals the later record is taken."""
    tag12, tag16 = (context_tag(context, tokens) for tokens in TAG_TOKENS)
    level = 0
    paths: list[_Path] = []
    total = 0.0
    for record in records:
        _, _, last_length, source_share, record_tag12, record_tag16, count = RECORD_HEAD.unpack_from(record)
        match = order
        if tag16 and record_tag16 == tag16:
            match = TAG_TOKENS[1]
        elif tag12 and record_tag12 == tag12:
            match = TAG_TOKENS[0]
        if match < level:
            continue
        if match > level:
            level, paths, total = match, [], 0.0
        begin = RECORD_HEAD.size
        paths.append(_Path(record[begin : begin + 3 * (last_length >> 24)], count, source_share & MAX_TOKEN))
        total += count * FULL_SHARE / max(1, source_share >> 24)
    chosen, support = _most_frequent(paths)
    numbers = _TOKEN_PARTS.unpack(chosen.packed.ljust(_TOKEN_PARTS.size, b"\0"))
    tokens = tuple([low | high << 16 for low, high in zip(numbers[0::2], numbers[1::2], strict=True)])
    return Continuation(
        tokens[: len(chosen.packed) // 3], level, support, min(1.0, support / max(total, 1.0)), chosen.source
    )


class _Path(NamedTuple):
    packed: bytes
    """3 bytes a token."""
    weight: int
    source: int


def _most_frequent(paths: list[_Path]) -> tuple[_Path, int]:
    """Follow the heaviest token while paths differ; returns the path and the weight of its first token."""
    support = sum(path.weight for path in paths)
    step = 0
    while len(paths) > 1 and any(path.packed != paths[0].packed for path in paths):
        weights: dict[bytes, int] = {}
        for path in paths:
            token = path.packed[step : step + 3]
            weights[token] = weights.get(token, 0) + path.weight
        # Later runs come later: of equals the newer one is taken.
        heaviest = max(reversed(weights), key=weights.__getitem__)
        paths = [path for path in paths if path.packed[step : step + 3] == heaviest]
        if step == 0:
            support = weights[heaviest]
        step += 3
    return paths[-1], support
